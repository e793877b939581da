"""What a run is, as its folder's `config.json` says it: flags, graphs, plan, and how they become contexts and rules."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import msgspec

from penstock import __version__
from penstock.graph.ir import Graph
from penstock.graph.types import Context, Origin
from penstock.runtime.cluster.placement import Plan, Replica, why_no_turns
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.record.typed_json import ConfigFile
from penstock.runtime.schedule.compile import Channel, Rules, compile_tables

EVALUATION = "evaluate."
"""What the names of the evaluation graph's nodes and sources begin with."""


@dataclass(frozen=True)
class RunOptions:
    """The numbers of a run that are no program's own."""

    updates: int = 100
    batch: int = 32
    max_tokens: int = 16
    seed: int = 0
    model: str = ""
    data: str = ""
    eval_data: str = ""
    eval_groups: int = 500
    dtype: str = "float32"
    device: str = "cpu"
    generators: int = 1
    mesh: tuple[str, ...] = ()
    slots: int = 64
    checkpoint_every: int = 0
    deadline: float = 600.0
    startup_deadline: float = 120.0
    versions: Literal["free", "pinned"] = "free"
    retries: int = 0
    on_failure: Literal["stop", "replace"] = "stop"
    drops: int = 16
    failures: int = 4
    tensorboard: bool = False
    proof: Literal["full", "sampled", "off"] = "full"
    wire: Literal["", "bfloat16", "int8", "fp8", "fp8_block"] = ""
    delta: int = 0
    transport: Literal["auto", "messages", "shm", "cuda_ipc"] = "auto"
    offload: Literal["auto", "on", "off"] = "off"


def _flags(data: Any) -> RunOptions:
    """Raises ValueError for flags of another type, or that this version does not know."""
    read: RunOptions = msgspec.convert(data, RunOptions)
    if unknown := sorted(data.keys() - asdict(read).keys()):
        raise ValueError(f"unknown flags {', '.join(unknown)}")
    return read


@dataclass(frozen=True)
class RunConfig:
    """A run: the graph to train, the graph to evaluate with (None: no evaluation), the plan and the flags."""

    graph: Graph
    evaluation: Graph | None
    plan: Plan
    flags: RunOptions
    run: str

    @property
    def graphs(self) -> tuple[Graph, ...]:
        return (self.graph,) if self.evaluation is None else (self.graph, self.evaluation)

    @property
    def offload(self) -> Literal["auto", "on", "off"]:
        """Does what is not needed between updates leave the device? "auto" only where others can use its memory."""
        asked = self.flags.offload
        return "off" if asked == "auto" and why_no_turns(self.graph, self.plan) else asked

    def to_json(self) -> dict[str, Any]:
        return {
            "format": 1,
            "run": self.run,
            "flags": asdict(self.flags),
            "graph": self.graph.to_json(),
            "evaluation": None if self.evaluation is None else self.evaluation.to_json(),
            "plan": self.plan.to_json(),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "RunConfig":
        """Raises ValueError for what `to_json` did not make."""
        if data.get("format") != 1:
            raise ValueError(f"run: given format {data.get('format')!r}, needed 1")
        evaluation = data["evaluation"]
        return RunConfig(
            graph=Graph.from_json(data["graph"]),
            evaluation=None if evaluation is None else Graph.from_json(evaluation),
            plan=Plan.from_json(data["plan"]),
            flags=_flags(data["flags"]),
            run=msgspec.convert(data["run"], str),
        )

    def write(self, folder: RunFolder, asked: Mapping[str, Any]) -> None:
        """Into the run folder: `config.json` (with `asked`, what the user typed), `graph.json` and `plan.json`."""
        data = self.to_json()
        folder.write_json("graph.json", {"graph": data.pop("graph"), "evaluation": data.pop("evaluation")})
        folder.write_json("plan.json", data.pop("plan"))
        folder.write_json("config.json", {**data, "asked": dict(asked)})

    @staticmethod
    def load(folder: RunFolder) -> "RunConfig":
        """What `write` wrote. Raises RecordError for a folder that this version of Penstock cannot read."""
        graphs, plan = folder.read_json("graph.json", dict[str, Any]), folder.read_json("plan.json")
        data = folder.read_json("config.json", ConfigFile)
        try:
            config = RunConfig.from_json({**data, **graphs, "plan": plan})
            for graph in config.graphs:
                compile_tables(graph, config.plan)
            return config
        except (ValueError, TypeError, KeyError) as error:
            asked = data.get("asked", {})
            by = f", written by penstock {asked['penstock']}" if "penstock" in asked else ""
            given = f"{folder.path}: given a run folder of another format{by} ({error})"
            needed = f"needed one that penstock {__version__} reads, or a newer penstock to read it"
            raise RecordError(f"{given}; {needed}") from error

    def channels(self) -> dict[str, Channel]:
        """The ways of weights of all graphs: those of the same carried value to the same pool are one."""
        return {name: c for graph in self.graphs for name, c in compile_tables(graph, self.plan).channels.items()}

    def rules(self, start: int) -> Rules:
        f = self.flags
        return Rules(f.batch, f.updates, start, f.versions, f.retries, f.on_failure, f.drops, f.failures)

    def evaluation_rules(self, version: int) -> Rules:
        """One update's worth of held-out groups, on the policy as it is."""
        return Rules(self.flags.eval_groups, version + 1, version)

    def contexts(self, replica: Replica, index: int) -> dict[str, Context]:
        """A context for each node and argument that a replica's pool holds, on the device and threads of a rank."""
        f, rank = self.flags, replica.ranks[index]
        base = Context(device=rank.device, threads=rank.threads, mesh=replica.mesh, rank=index)
        holds = next(p.holds for p in self.plan.pools if replica in p.replicas)
        return {name: context_of(name, self.graphs, f, base) for name in holds}


def context_of(name: str, graphs: Sequence[Graph], flags: RunOptions, place: Context) -> Context:
    """What a node or an argument is made with, in a run of `graphs`, the one to train and any to evaluate with, where
    `place` says on which device and mesh."""
    held_out = name.startswith(EVALUATION)
    graph = graphs[-1] if held_out else graphs[0]
    weights = {}
    for item in graph[name].inputs if name in graph else ():
        if item.ref.node in graph and graph[item.ref.node].construct == "broadcast":
            carried = graph[item.ref.node].inputs[0].ref.node
            # Of one name in two graphs there is one value, which is made as the first of them says.
            made = next((a for g in graphs for a in g.carried if a.name == carried), None)
            if made is not None:
                weights[item.name] = Origin(made.maker, context_of(carried, graphs, flags, Context()))
    return replace(
        place,
        node=name,
        seed=flags.seed,
        model=flags.model,
        data=flags.eval_data or flags.data if held_out else flags.data,
        dtype=flags.dtype,
        max_tokens=flags.max_tokens,
        batch=flags.batch,
        updates=flags.updates,
        slots=flags.slots,
        split="evaluate" if held_out else "train",
        options=dict(graph.options),
        weights=weights,
    )
