"""A plan as a run reads it: what `penstock plan … --out FILE` writes, and `run --plan` and `check --plan` read. Pure
except for `RunPlan.read`.

`run_plan` turns the planner's result into places on the cluster's hosts and the options that the plan decides.

A plan *decides* its `options`: a flag of the user may repeat such an option, but not contradict it (`contrary`). Its
`words` are the words of the command line with which it was made; they go before the user's own. All other flags are the
user's. `RunPlan.lacks` says why a run cannot follow the plan: another program or model, or other machines. Lacks are
`Fault`s, with codes of docs/check-errors.md. `RunPlan.on` is the plan on the present machines, whose hosts may have
other names, and `RunPlan.graphs` are the graphs of such a run.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec
from pydantic import TypeAdapter

from penstock.graph.check import check
from penstock.graph.errors import Fault
from penstock.graph.ir import PRECISIONS, Graph
from penstock.graph.protocols import num_ranks
from penstock.runtime.cluster.capabilities import SHARED_LAG
from penstock.runtime.cluster.cluster import Cluster, ClusterError, Host, check_common_network
from penstock.runtime.cluster.gpus import alike
from penstock.runtime.cluster.placement import Plan, PoolLayout, place_as, spelled
from penstock.runtime.control.run_config import RunOptions
from penstock.runtime.plan.infeasible import HOST_MEMORY
from penstock.runtime.plan.model_shape import Shape
from penstock.runtime.plan.planner import Planned
from penstock.runtime.plan.roles import PlanError, Roles, roles_of
from penstock.runtime.plan.search import Allocation, Solution
from penstock.runtime.plan.train_cost import recomputation
from penstock.runtime.record.typed_json import parse_json

# The key of this part in a plan's JSON.
KEY = "run"
# The options that every plan decides; some plans decide others, too.
DECIDED = (
    "batch",
    "max_tokens",
    "device",
    "dtype",
    "generators",
    "mesh",
    "slots",
    "micro_tokens",
    "recompute",
    "optimizer_state",
    "offload",
)


@dataclass(frozen=True)
class RunPlan:
    """program, model: the program's import path, and the model's shape.
    roles: the graph's facts on which the plan depends, as JSON.
    options: the options of a run that the plan decides, by name. words: the words of the command line with which it was
        made, by flag: the program's own flags as typed, its model's directory, the file of its cluster.
    lag: the lag of a run; None: the program's. It is smaller where pools share GPUs and take turns.
    source: the value of `--cluster`.
    host_bytes: for each host, the bytes of its memory that AdamW's moments take.
    """

    program: str
    model: Shape
    roles: Mapping[str, Any]
    options: Mapping[str, Any]
    words: Mapping[str, Sequence[str]]
    lag: int | None
    source: str
    cluster: Cluster
    plan: Plan
    host_bytes: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        plain = {
            name: getattr(self, name)
            for name in ("program", "roles", "options", "words", "lag", "source", "host_bytes")
        }
        cluster = self.cluster.model_dump(mode="json")
        return {"format": 1, **plain, "model": asdict(self.model), "cluster": cluster, "plan": self.plan.to_json()}

    @staticmethod
    def from_json(data: Any) -> "RunPlan":
        """The inverse of `to_json`. Raises ValueError, KeyError, TypeError or AttributeError for other data."""
        if data.get("format") != 1:
            raise ValueError(f"format {data.get('format')!r}")
        options = msgspec.convert(data["options"], dict[str, Any])
        RunOptions.from_json(options)
        if lacking := [name for name in DECIDED if name not in options]:
            raise ValueError(f"options without {', '.join(lacking)}")
        return RunPlan(
            program=msgspec.convert(data["program"], str),
            model=TypeAdapter(Shape).validate_python(data["model"]),
            roles=msgspec.convert(data["roles"], dict[str, Any]),
            options=options,
            words=msgspec.convert(data["words"], dict[str, list[str]]),
            lag=msgspec.convert(data["lag"], int | None),
            source=msgspec.convert(data["source"], str),
            cluster=Cluster.model_validate(data["cluster"]),
            plan=Plan.from_json(data["plan"]),
            host_bytes=msgspec.convert(data["host_bytes"], dict[str, float]),
        )

    @staticmethod
    def read(path: Path) -> "RunPlan":
        """Read a plan file. Raises PlanError for a file that `penstock plan … --out` did not write."""
        try:
            return RunPlan.from_json(parse_json(path.read_bytes(), str(path))[KEY])
        except OSError as error:
            given = f"a file that cannot be read ({error.strerror})"
        except (KeyError, TypeError, AttributeError):
            given = "JSON without what a run needs of a plan"
        except ValueError as error:
            given = f"something else ({' '.join(str(error).split()):.200})"
        needed = "what `penstock plan PROGRAM … --out FILE` writes"
        raise PlanError(str(Fault("plan-file", f"--plan {path}", given, needed)))

    def contrary(self, typed: Mapping[str, Any]) -> list[Fault]:
        """Faults for flags that contradict the plan. `typed` are the values of the flags that the user gave."""
        return [
            Fault(
                "plan-flag",
                f"--{name.replace('_', '-')} beside a plan",
                _said(value),
                f"{_said(self.options[name])}, as planned, or to leave it out",
            )
            for name, value in typed.items()
            if name in self.options and _plain(value) != _plain(self.options[name])
        ]

    def graphs(self, graphs: Sequence[Graph]) -> tuple[Graph, ...]:
        """The graphs of a run of this plan, with a lag no larger than the plan's."""
        return tuple(graphs) if self.lag is None else tuple(at_lag(graph, self.lag) for graph in graphs)

    def lacks(self, graphs: Sequence[Graph], model: Shape | None, here: Cluster) -> list[Fault]:
        """Why a run of `graphs` (the first is trained), with a model of this shape (None: unknown), on the machines
        `here`, cannot follow this plan."""
        return [*self._other_program(graphs), *self._other_model(model), *self._other_machines(here)]

    def _other_program(self, graphs: Sequence[Graph]) -> Iterator[Fault]:
        graph = graphs[0]
        try:
            roles = roles_facts(roles_of(graph))
        except PlanError as error:
            yield Fault("plan-program", f"--plan for {self.program}", str(error), "the program that was planned")
            return
        for name, planned in self.roles.items():
            if name == "lag" and roles.get(name) == self.lag:
                continue
            if roles.get(name) != planned:
                given = f"{name} {_said(roles.get(name))} of {graph.name}"
                yield Fault("plan-program", f"--plan for {self.program}", given, f"{_said(planned)}, as planned")
        held = {name for pool in self.plan.pools for name in pool.holds}
        if missing := [name for name in _names(graphs) if name not in held]:
            given = f"{', '.join(missing)}, which the plan has nowhere"
            yield Fault("plan-program", f"--plan for {self.program}", given, "a plan of this program as it is now")

    def _other_model(self, model: Shape | None) -> Iterator[Fault]:
        if model is None:
            needed = f"--model DIR, of the shape of {self.model.name}"
            yield Fault("plan-model", "the model", "a small one, which is built where none is given", needed)
            return
        # Adapters are among the options, and a run checks the context itself.
        names = [each.name for each in fields(Shape) if each.name not in ("name", "lora", "context")]
        if others := [name for name in names if getattr(model, name) != getattr(self.model, name)]:
            given = ", ".join(f"{name} {getattr(model, name)}" for name in others)
            needed = ", ".join(f"{name} {getattr(self.model, name)}" for name in others)
            yield Fault("plan-model", f"the model {model.name}", given, f"{needed}, as {self.model.name} has")

    def _hosts(self, here: Cluster) -> dict[str, Host] | None:
        """The machine of each host of the plan, by name; if no machine has a name of the plan, by number. None if there
        are too few machines, or only some of the names."""
        used = self._used()
        names = {host.name: host for host in here.hosts}
        if used <= names.keys():
            return {name: names[name] for name in used}
        numbers = {host.name: number for number, host in enumerate(self.cluster.hosts)}
        if used & names.keys() or any(numbers[name] >= len(here.hosts) for name in used):
            return None
        return {name: here.hosts[numbers[name]] for name in used}

    @property
    def num_hosts(self) -> int:
        """How many machines it takes if they have other names: the hosts of its cluster up to the last one with a
        rank."""
        used = self._used()
        return max(number for number, host in enumerate(self.cluster.hosts, 1) if host.name in used)

    def _used(self) -> set[str]:
        return {rank.host for replica in self.plan.replicas for rank in replica.ranks}

    def _other_machines(self, here: Cluster) -> Iterator[Fault]:
        """How the machines differ from the planned ones, as far as the plan uses them."""
        hosts = self._hosts(here)
        if hosts is None:
            given = ", ".join(host.name for host in here.hosts)
            used = [host.name for host in self.cluster.hosts if host.name in self._used()]
            needed = f"the {len(used)} of the plan for {self.source}: {', '.join(used)}"
            yield Fault("plan-hosts", "the hosts", f"{len(here.hosts)}: {given}", needed)
            return
        for planned in self.cluster.hosts:
            if (host := hosts.get(planned.name)) is None:
                continue
            what = f"host {host.name}" + (f", {planned.name} of the plan" if host.name != planned.name else "")
            ranks = [rank for replica in self.plan.replicas for rank in replica.ranks if rank.host == planned.name]
            devices = list(dict.fromkeys(rank.device for rank in ranks if rank.device != "cpu"))
            if lacking := [device for device in devices if device not in host.accelerators]:
                given = f"{len(host.accelerators)} CUDA devices, without {', '.join(lacking)}"
                yield Fault("plan-devices", what, given, f"the {len(devices)} of the plan")
            elif devices and not _alike(planned, self.cluster, host, here):
                given, needed = (_gpus(each, of) for each, of in ((host, here), (planned, self.cluster)))
                yield Fault("plan-gpus", what, f"GPUs of kind {given}", f"{needed}, as planned")
            # A cluster that is given as a word does not say cores: its hosts have one for each GPU.
            if host.cores < planned.cores:
                yield Fault("plan-cores", what, f"{host.cores} cores", f"at least the {planned.cores} planned for")
            moments, memory = self.host_bytes.get(planned.name, 0.0), here.memory_gib(host)
            if memory is not None and moments > memory * 2**30:
                given = f"{memory * 2**30 / 1e9:.1f} GB of memory of its own"
                yield Fault(HOST_MEMORY, what, given, f"{moments / 1e9:.1f} GB for AdamW's moments, which lie there")
            if planned.address and host.address and planned.address != host.address:
                yield Fault("plan-address", what, f"address {host.address}", f"{planned.address}, as planned")
        for replica in self.plan.replicas:
            try:
                own = dict.fromkeys(hosts[rank.host].name for rank in replica.ranks)
                check_common_network([here.host(name) for name in own], replica.name)
            except ClusterError as error:
                yield Fault("plan-address", replica.name, str(error), "hosts that reach each other")

    def on(self, graphs: Sequence[Graph], here: Cluster) -> Plan:
        """The plan with the host names of `here`, and without nodes that these graphs lack, such as an evaluation.
        `lacks` must be empty."""
        hosts, names = self._hosts(here), set(_names(graphs))
        assert hosts is not None
        pools = [
            replace(
                pool,
                holds=tuple(name for name in pool.holds if name in names),
                replicas=tuple(
                    replace(r, ranks=tuple(replace(rank, host=hosts[rank.host].name) for rank in r.ranks))
                    for r in pool.replicas
                ),
            )
            for pool in self.plan.pools
        ]
        return Plan(tuple(pool for pool in pools if pool.holds))


def run_plan(
    found: Planned,
    graphs: Sequence[Graph],
    cluster: Cluster,
    *,
    program: str,
    source: str,
    max_tokens: int,
    words: Mapping[str, Sequence[str]],
    max_prompt: int = RunOptions.max_prompt,
    tp_over_hosts: bool = False,
) -> RunPlan:
    """Make the plan of a run of `graphs`, the first of which was planned. Raises PlanError for features that no run can
    have, and ClusterError for what the placement refuses."""
    if found.lacks:
        raise PlanError("\n".join(map(str, found.lacks)))
    best, generator = found.best, found.best.generating.generator
    layouts = pool_layouts(found.roles, best, cluster)
    over = tp_over_hosts or best.tp_over_hosts
    plan = place_as(graphs, cluster, layouts, slots=generator.slots, tp_over_hosts=over)
    options: dict[str, Any] = {
        "batch": found.work.prompts,
        "max_tokens": max_tokens,
        "max_prompt": max_prompt,
        "device": "cuda",
        "dtype": {"fp32": "float32"}.get(generator.precision, "bfloat16"),
        **({"generator_precision": generator.precision} if generator.precision in PRECISIONS else {}),
        "generators": best.generating.replicas,
        "mesh": [f"{pool}={spelled(each.mesh)}" for pool, each in layouts.items() if num_ranks(each.mesh) > 1],
        "slots": generator.slots,
        "micro_tokens": best.training.trainer.micro_tokens,
        "recompute": recomputation(best.training.trainer),
        "optimizer_state": "host" if best.training.trainer.host_state else "device",
        "offload": "on" if best.offloads else "off",
        **({"tp_over_hosts": True} if best.tp_over_hosts else {}),
        **({"lora": lora.rank, "lora_targets": list(lora.targets)} if (lora := found.work.shape.lora) else {}),
    }
    lag = SHARED_LAG if best.split.shared and found.lag > SHARED_LAG and not found.pins.overlaps else None
    facts = roles_facts(found.roles)
    made = RunPlan(program, found.work.shape, facts, options, words, lag, source, cluster, plan, best.host_bytes)
    # Weights that are sent only every few updates may be older than this lag.
    if faults := [fault for graph in made.graphs(graphs) for fault in check(graph)]:
        raise PlanError("\n".join(map(str, faults)))
    return made


def at_lag(graph: Graph, lag: int) -> Graph:
    """The graph with weights that are at most `lag` updates old."""
    sent = {node.name: node.lag for node in graph.nodes if node.construct == "broadcast" and (node.lag or 0) > lag}
    # Change the program's option `lag`, too.
    said = ((name, lag if name == "lag" and value in sent.values() else value) for name, value in graph.options)
    return graph.at_lag(lag, sent.keys()).replace(options=tuple(said))


def pool_layouts(roles: Roles, best: Solution, cluster: Cluster) -> dict[str, PoolLayout]:
    """The places of the ranks of each pool with a model: the GPUs of a host in their order, the trainer's first."""
    taken = Counter[str]()
    split, trainer, generating = best.split, best.training.trainer, best.generating
    hosts = split.hosts()
    assert hosts is not None

    def places(allocation: Allocation, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
        each = min(allocation.gpus, allocation.nodes.each)
        own = [(name, device) for name in names for device in cluster.host(name).accelerators[taken[name] :][:each]]
        taken.update(dict.fromkeys(names, each))
        return tuple(own)

    trains = places(split.trainer, hosts[0])
    decodes = places(split.generator, hosts[1]) if split.generator else trains
    found_layouts = {roles.trainer: PoolLayout(trainer.mesh.axes, (trains,))}
    # Pools without dedicated GPUs have the trainer's layout, on its GPUs.
    found_layouts |= dict.fromkeys(roles.beside, found_layouts[roles.trainer])
    size = generating.generator.mesh.ranks
    replicas = tuple(decodes[first : first + size] for first in range(0, len(decodes), size))
    found_layouts[roles.generator] = PoolLayout(generating.generator.mesh.axes, replicas)
    for each, reading, names in zip(split.dedicated, best.readings, hosts[2:], strict=True):
        layout = PoolLayout(reading.trainer.mesh.axes, (places(each, names),))
        found_layouts |= dict.fromkeys(each.pools, layout)
    return found_layouts


def roles_facts(roles: Roles) -> dict[str, Any]:
    """The facts of a graph on which a plan depends, as JSON."""
    data: dict[str, Any] = TypeAdapter(Roles).dump_python(roles, mode="json")
    return data


def _names(graphs: Sequence[Graph]) -> list[str]:
    """The names of the arguments and of the nodes that fire."""
    named = (
        [argument.name for argument in graph.arguments] + [node.name for node in graph.nodes if node.fires]
        for graph in graphs
    )
    return list(dict.fromkeys(name for names in named for name in names))


def _plain(value: Any) -> Any:
    """The value as it is in JSON: a list for a tuple."""
    return list(value) if isinstance(value, tuple) else value


def _said(fact: object) -> str:
    return str(fact) if isinstance(fact, int | float | str) else msgspec.json.encode(fact).decode()


def _alike(planned: Host, of: Cluster, host: Host, here: Cluster) -> bool:
    """True if the GPUs are of the planned kind. Kinds that a cluster file describes are compared by `alike`."""
    # A cluster file need not say the kind for a run.
    if not host.gpu:
        return True
    if not {planned.gpu, host.gpu} & (of.gpus.keys() | here.gpus.keys()):
        return planned.gpu == host.gpu
    one, other = of.gpu_of(planned), here.gpu_of(host)
    return one is not None and other is not None and alike(one, other)


def _gpus(host: Host, of: Cluster) -> str:
    """The kind of a host's GPUs, with their memory if the cluster file describes the kind."""
    gpu = of.gpu_of(host) if host.gpu in of.gpus else None
    return host.gpu + (f" with {gpu.memory_gib:g} GiB" if gpu else "")
