"""A run's options, and its configuration as its folder has it: options, graphs and plan.

`RunOptions` is the only place of an option's name, type, limits, default and help. These derive from it:

- the flags of `penstock run` and, for fields with `OnResume`, those of `penstock resume` (`cli/flags.py`);
- `config.json`, whose `flags` are these fields; a value outside its limits is refused there, too;
- `Setup`: each rank has all options. Nodes see those that are also fields of `Context` (`NODE_OPTIONS`);
- the scheduler's `Rules`, which have some of these fields.

A default that `Context` or `Rules` has, too, is written there, since these do not know a run's options.
"""

import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from penstock import __version__
from penstock.graph.engines import OURS, EngineName
from penstock.graph.ir import Graph
from penstock.graph.types import Context, Origin
from penstock.runtime.cluster.capabilities import (
    Dtype,
    GeneratorPrecision,
    Offload,
    OptimizerState,
    Recompute,
    Transport,
    Wire,
)
from penstock.runtime.cluster.cluster import Cluster
from penstock.runtime.cluster.placement import Plan, Replica, model_hosts, place, read_meshes, why_no_turns
from penstock.runtime.control.rank_setup import RankSetup
from penstock.runtime.control.signals import GRACE_S
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.record.trackers import Name as TrackerName
from penstock.runtime.record.typed_json import ConfigFile
from penstock.runtime.schedule.compile import Channel, Rules, Tables
from penstock.runtime.schedule.scheduler import Scheduler
from penstock.runtime.schedule.transitions import holders_of_past

A = TypeVar("A")

# The prefix of the names of the evaluation graph's nodes and sources.
EVALUATION = "evaluate."

# The pool for which a range of replicas may be asked for.
GENERATOR = "generator"

# No count is larger, and tensors can hold it.
MOST = 2**53
Count = Annotated[int, Meta(ge=0, le=MOST)]
Positive = Annotated[int, Meta(ge=1, le=MOST)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(gt=0)]
Decay = Literal["", "constant", "linear", "cosine"]


@dataclass(frozen=True)
class Shown:
    """How help shows an option: `metavar` for its value, and what an empty default means, in words."""

    metavar: str
    default: str = ""


@dataclass(frozen=True)
class OnResume:
    """A resume may change the option. `help` is its help in `penstock resume --help`."""

    help: str


UPDATES_ON_RESUME = OnResume(
    "Updates all in all; more than the run was to have goes on with a finished one. With a lag, that is not what a "
    "longer run would have been: the next groups are sampled with the last version, none with older ones."
)
MESH_ON_RESUME = OnResume(
    "Another mesh for pools, such as trainer=fsdp4; their ranks take over the parts of those that were."
)
RESTARTS_ON_RESUME = OnResume("How often it goes on by itself from now on where a process is lost.")
TRACK_ON_RESUME = OnResume("Trackers from now on; each goes on with its run, and one that is new gets all updates.")


@dataclass(frozen=True)
class RunOptions:
    """The options of a run that do not belong to its program. A field's docstring is its help."""

    updates: Annotated[Count, UPDATES_ON_RESUME] = Context.updates
    """Updates of the policy, all in all."""
    batch: Positive = Context.batch
    """Fresh prompt groups per update."""
    lr_warmup: Annotated[Count, Shown("UPDATES", "0; of sft 20")] = Context.lr_warmup
    """Updates over which the learning rate of each model rises, in a line, to its highest."""
    lr_decay: Annotated[Decay, Shown("{constant,linear,cosine}", "constant; of sft cosine")] = ""
    """How it falls, to 0 at the run's end: in a line, or along half a cosine."""
    max_tokens: Positive = Context.max_tokens
    """Longest response, in tokens."""
    max_prompt: Positive = Context.max_prompt
    """Longest prompt, or conversation before its last turn, in tokens; each slot of a generator has room for it."""
    segment: Count = Context.segment
    """Tokens after which a response pauses, and its group goes on where a generator has room, perhaps with newer
    weights; 0 is never."""
    seed: Seed = Context.seed
    """Seed of everything random: two runs of one seed draw the same numbers."""
    model: Annotated[str, Shown("DIR", "a small base model, built once and cached")] = Context.model
    """A model: a directory in Hugging Face's format, or a name of its Hub; "new" is a small untrained one."""
    data: Annotated[str, Shown("FILE", "arithmetic, made up as needed")] = Context.data
    """Prompts: "arithmetic[:DIGITS]"; a JSONL or parquet file; a directory of such files; or a data set of the Hugging
    Face Hub, OWNER/NAME[:CONFIG][@REVISION]."""
    data_split: Annotated[str, Shown("SPLIT", "train, or the only one")] = Context.data_split
    """Split of a directory or data set."""
    eval_data: Annotated[str, Shown("FILE", "problems of --data that training never sees")] = Context.eval_data
    """Problems to measure accuracy on."""
    eval_split: Annotated[str, Shown("SPLIT", "that of --data, or the only one of --eval-data")] = Context.eval_split
    """Split to measure accuracy on."""
    prompt_field: Annotated[str, Shown("FIELD", "question; of pairs prompt")] = Context.prompt_field
    """Field of a row that is the prompt: a text, or chat messages."""
    answer_field: Annotated[str, Shown("FIELD", "answer")] = Context.answer_field
    """Field of a row that is the reference answer or demonstrated response; "none" for rows without."""
    row: Annotated[str, Shown("MODULE:NAME", "none")] = Context.row
    """A function from a row, as a dict, to a dict with prompt and answer (of pairs: prompt, chosen, rejected), or None
    to leave it out."""
    system: Annotated[str, Shown("TEXT", "none")] = Context.system
    """System message before each prompt of --data, for models with a chat template."""
    eval_groups: Count = 500
    """Held-out problems that accuracy is measured on, before and after; 0 leaves that out."""
    dtype: Dtype = "float32"
    """Number format of the model that computes; master weights are float32."""
    lora: Count = Context.lora
    """Rank of low-rank adapters (LoRA): every policy trains and sends only these, and its other weights stay as they
    are; 0 is none. A directory of adapters as --model has them anyway."""
    lora_alpha: Annotated[float, Meta(ge=0), Shown("ALPHA", "twice the rank")] = Context.lora_alpha
    """What adapters add is multiplied by ALPHA / rank."""
    lora_targets: Annotated[tuple[str, ...], Shown("NAME …", "all linear maps of a layer")] = Context.lora_targets
    """Linear maps that get adapters, such as q_proj v_proj."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU if there is one."""
    generators: Positive = 1
    """Replicas of the generator; with --lost-replica replace perhaps a range, such as 2..8."""
    first_generators: Count = 0
    """Replicas of the generator with which the run begins; the others join when the agents of their hosts come. 0 is
    all. `--generators 2..8` stands for `--generators 8 --first-generators 2`."""
    mesh: Annotated[tuple[str, ...], Shown("POOL=MESH …"), MESH_ON_RESUME] = ()
    """Ranks of a pool's replicas, such as trainer=fsdp2xtp2 generator=tp2; one each by default. Axes: dp copies of the
    model, fsdp shards of each tensor, ep shares of the experts, tp shares of each layer, pp pipeline stages."""
    tp_over_hosts: bool = False
    """Let the axis tp of a replica on several hosts cross them. Its ranks wait for each other in every layer, which
    networks are slow for."""
    slots: Positive = Context.slots
    """Responses that a generator decodes at once."""
    engine: EngineName = OURS
    """What generators decode with, where a program does not say: our own engine, with which runs are repeatable to the
    bit; or vllm, which you install, perhaps for an interpreter of the pool's own (docs/engines.md)."""
    mismatch_limit: Annotated[
        float, Meta(ge=0), Shown("NATS", "0.001 in float32, 0.02 in float16, 0.1 in bfloat16")
    ] = Context.mismatch_limit
    """With vllm, the largest mean difference between its log-probabilities and the trainer's at equal weights, measured
    after a weight sync; beyond it the run stops."""
    checkpoint_every: Count = 0
    """Updates between two checkpoints; 0 makes one every 30 seconds, or less often, so that they cost at most 5 % of
    the time. The end and Ctrl-C always make one."""
    keep: Annotated[Count, OnResume("Complete checkpoints that stay, the newest ones; 0 keeps all.")] = 2
    """Complete checkpoints that stay, the newest ones; 0 keeps all."""
    keep_best: Annotated[str, Shown("METRIC", "none"), OnResume("Also keep the best checkpoint by this metric.")] = ""
    """Also keep the checkpoint with the highest value of a metric of its last row, such as reward_mean; NAME:min, with
    the lowest."""
    versions: Literal["free", "pinned"] = Rules.versions
    """pinned: the groups of update u use exactly version u - lag, so that any lag is repeatable to the bit."""
    order: Literal["strict", "ready"] = Rules.order
    """ready: an update takes the groups that are finished, as long as the lag holds for all others; strict: the next
    ones in order, so that what is learnt first does not depend on the length of responses."""
    proof: Literal["full", "sampled", "off"] = "full"
    """How much of each weight sync is verified to have arrived as it was sent: all tensors, one in eight, none."""
    wire: Annotated[Wire, Shown("FORMAT", "the run's dtype")] = ""
    """Format in which weights travel, except those with a precision of their own: bfloat16; int8 or fp8 with a scale
    per row; fp8_block, a scale per 128 × 128."""
    generator_precision: Annotated[GeneratorPrecision, Shown("{int8,fp8}", "as the program says")] = ""
    """What generators compute in, where the program's broadcast does not say: int8 on CPUs, fp8 on GPUs. Weights travel
    in it, too."""
    delta: Count = 0
    """Between hosts, send what changed since the last sync, and everything at least each DELTA-th time; 0 always sends
    everything. It is lossless, and pays on links slower than a few GB/s."""
    transport: Transport = "auto"
    """How weights travel: auto takes the first that all ranks can; shm writes into shared memory and cuda_ipc into a
    GPU's, both on one host; nccl goes between GPUs anywhere; messages go everywhere, through the host and over TCP."""
    offload: Offload = "off"
    """Between updates, optimizer moments and master weights move to the host, and generators release their cache after
    each batch: auto if trainer and generator take turns with a GPU, on in any case."""
    recompute: Annotated[
        Recompute, Shown("{auto,none,layer}", "auto"), OnResume("Whether the backward pass computes layers again.")
    ] = "auto"
    """What an update keeps for its backward pass: all (none), or the inputs of layers, which it computes again (layer;
    equal bits); auto takes the faster one that a GPU of a known kind has memory for, and none on a CPU."""
    micro_tokens: Annotated[Count, OnResume("Most tokens of a micro-batch.")] = Context.micro_tokens
    """Most tokens of a micro-batch, padding included; 0 takes what a GPU of a known kind has memory for, or suits a
    CPU."""
    logit_elements: Count = Context.logit_elements
    """Most logits that are kept at once; 0 takes what suits the device."""
    deterministic: bool = False
    """Use only deterministic operations of PyTorch; an operation that has no deterministic form fails. A GPU needs it
    for equal bits, and is slower; a CPU does not need it."""
    invariant: bool = Context.invariant
    """Log-probabilities that generators record are those of the trainer to the bit, whatever the batch and the threads;
    on CPUs, with a C compiler. Slower."""
    optimizer_state: OptimizerState = "auto"
    """Where AdamW's moments lie: on the GPU; or on the host, from where a step fetches some at a time. auto takes the
    host if nothing else fits a GPU of a known kind. The bits are the same."""
    replay_routing: bool = Context.replay_routing
    """For a mixture of experts: generators record the experts of each token, and policies send the token through the
    same ones, whatever their routers choose by then."""
    retries: Count = Rules.retries
    """How often a group that failed is tried again; not at a node with state, or one that fires per update, whose
    failure ends the run."""
    on_failure: Literal["stop", "replace"] = Rules.on_failure
    """What follows when a group fails for good: stop the run, or count it as failed and take another. At a node with
    state, or one that fires per update, the run stops."""
    lost_replica: Literal["stop", "replace"] = Rules.lost_replica
    """What follows when a replica of a generator or scorer dies: stop the run; or begin its groups again on others, and
    start it again where its agent lives (docs/hosts.md)."""
    restarts: Annotated[Count, RESTARTS_ON_RESUME] = 0
    """How often a run goes on by itself from its last checkpoint after it has lost a process that it needs, such as a
    trainer's rank. A run that fails by an error of a node does not."""
    drops: Positive = Rules.drops
    """Batches of groups that filters may drop for each update under way before the run is stopped."""
    failures: Positive = Rules.failures
    """Batches of failures, each try counted, for each update under way before the run is stopped."""
    deadline: Seconds = 600.0
    """Seconds that any piece of work may take before the run is stopped and the culprit named."""
    startup_deadline: Seconds = 120.0
    """Seconds for all processes to start."""
    grace: Annotated[Seconds, OnResume("Seconds from a wish to stop to the end of everything.")] = GRACE_S
    """Seconds from a wish to stop (Ctrl-C; SIGTERM or SIGUSR1 of a cluster manager that takes the machine away) to the
    end of everything, with a checkpoint if one can be made. Choose some seconds less than the manager gives."""
    save_samples: Annotated[Count, OnResume("Prompt groups of each update that samples.jsonl keeps.")] = 1
    """Prompt groups of each update that samples.jsonl keeps, with texts and rewards, for you to read; 0 is none."""
    track: Annotated[tuple[TrackerName, ...], Shown("TRACKER …", "none"), TRACK_ON_RESUME] = ()
    """Trackers that get the metrics, the configuration and the report: tensorboard, wandb, trackio, mlflow; each as
    its own client is configured."""
    track_project: Annotated[str, Shown("NAME", "what the client's environment says, or penstock")] = ""
    """Project, or experiment, of the run in its trackers."""

    @staticmethod
    def from_json(data: Any) -> "RunOptions":
        """Read options. Raises ValueError for a wrong type, a value outside its limits, or an unknown option."""
        read: RunOptions = msgspec.convert(data, RunOptions)
        if unknown := sorted(data.keys() - asdict(read).keys()):
            raise ValueError(f"unknown flags {', '.join(unknown)}")
        return read


# Options whose form in a `Context` comes from the plan: a rank's device and mesh.
PLACE = ("device", "mesh")
# Options that nodes see unchanged.
NODE_OPTIONS = tuple(f.name for f in fields(Context) if f.name in RunOptions.__annotations__ and f.name not in PLACE)


# For all fields at once: a class has a hundred, and a command asks for each more than once.
@lru_cache(8)
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def annotation(cls: type, name: str, kind: type[A]) -> A | None:
    """The annotation of a dataclass's field of type `kind`: its `Meta` (limits), `Shown` or `OnResume`; None if none.

    That of `Positive | None` belongs to the first type of the union."""
    waiting = [_hints(cls)[name]]
    while waiting:
        parts = get_args(waiting.pop())
        for part in parts:
            if isinstance(part, kind):
                return part
        waiting += parts
    return None


def check_limits(options: object) -> None:
    """Raise ValueError with all values of a dataclass that are outside the limits (`Meta`) of their fields."""
    wrong = []
    for name, value in vars(options).items():
        limits = annotation(type(options), name, Meta)
        if limits is not None and value is not None and (needed := _needed(value, limits)):
            wrong.append(f"--{name.replace('_', '-')}: given {value}, needed {needed}")
    if wrong:
        raise ValueError("\n".join(wrong))


def _needed(value: float, limits: Meta) -> str:
    """What a number outside its limits must be; "" if it is within them."""
    if limits.gt is not None:  # seconds must also be finite, for which msgspec has no limit
        return "" if value > limits.gt and value < math.inf else "more than 0 seconds, and a finite number"
    if limits.ge is not None and not value >= limits.ge:  # `not >=`, so that NaN fails, too
        return f"at least {limits.ge}"
    return f"at most {limits.le}" if limits.le is not None and value > limits.le else ""


def choose_device(name: str, graphs: Sequence[Graph], cluster: Cluster) -> str:
    """The device that a flag names; "auto" is "cuda" if all hosts of pools with a model have GPUs, whatever this
    machine has. Raises ValueError for an unknown name."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ValueError(f"--device: given {name!r}, needed auto, cpu, cuda or cuda:N")
    if name != "auto":
        return name
    return "cuda" if all(host.accelerators for host in model_hosts(graphs, cluster)) else "cpu"


def plan_for(graphs: Sequence[Graph], cluster: Cluster, options: RunOptions) -> Plan:
    """The plan that the options make for graphs. Raises ClusterError for pools or devices that the cluster lacks."""
    return place(
        graphs,
        cluster,
        generators=options.generators,
        slots=options.slots,
        device=options.device,
        meshes=read_meshes(options.mesh),
        tp_over_hosts=options.tp_over_hosts,
    )


@dataclass(frozen=True)
class RunConfig:
    """A run: the graph to train, the graph to evaluate with (None: no evaluation), the plan and the flags."""

    graph: Graph
    evaluation: Graph | None
    plan: Plan
    flags: RunOptions
    run: str

    @staticmethod
    def make(
        graph: Graph, evaluation: Graph | None, cluster: Cluster, options: RunOptions, plan: Plan | None = None
    ) -> "RunConfig":
        """A new run of graphs on a cluster, with `plan` or the plan that its options make. Raises ClusterError for
        pools or devices that the cluster lacks, and ValueError for an unknown device."""
        graphs = [graph] if evaluation is None else [graph, evaluation]
        # Choose it once, here: ranks could choose differently.
        options = replace(options, device=choose_device(options.device, graphs, cluster))
        if options.recompute == "auto" and options.device == "cpu":
            options = replace(options, recompute="none")
        plan = plan or plan_for(graphs, cluster, options)
        config = RunConfig(graph, evaluation, plan, options, secrets.token_hex(6))
        if options.first_generators and not config.may_be_late:
            given = f"--first-generators: given {options.first_generators} of {options.generators}"
            raise ValueError(f"{given}; needed --lost-replica replace, and generators that can be lost (docs/hosts.md)")
        if options.first_generators > options.generators:
            given = f"--first-generators: given {options.first_generators}"
            raise ValueError(f"{given}; needed at most --generators, {options.generators}")
        return config

    @property
    def graphs(self) -> tuple[Graph, ...]:
        return (self.graph,) if self.evaluation is None else (self.graph, self.evaluation)

    # Cached: the controller asks at each turn while processes start, and a run may have a thousand replicas.
    @cached_property
    def elastic(self) -> frozenset[str]:
        """The replicas that may be lost and come back while the run goes on."""
        if self.flags.lost_replica == "stop":
            return frozenset()
        tables = [Tables(graph, self.plan) for graph in self.graphs]
        pools = [p for p in self.plan.pools if not any(own.fixed_pools[p.name] for own in tables)]
        return frozenset(replica.name for pool in pools for replica in pool.replicas)

    @cached_property
    def may_be_late(self) -> frozenset[str]:
        """The replicas that may be missing when the run begins, if enough others of their pool are there."""
        if not self.flags.first_generators:
            return frozenset()
        return self.elastic & {r.name for pool in self.plan.pools if pool.name == GENERATOR for r in pool.replicas}

    def holding(self, cut: Mapping[str, Any] | None) -> frozenset[str]:
        """The replicas whose values in a checkpoint a resumed run needs and cannot make again."""
        if cut is None or not self.may_be_late:
            return frozenset()
        return frozenset(holders_of_past(Scheduler(Tables(self.graph, self.plan), self.rules(cut["update"]), cut)))

    @property
    def kept_versions(self) -> int:
        """The number of versions of weights that a sender keeps."""
        # Groups of the current update and of all that are under way may restart, with the versions that they had.
        return 2 + max(Tables(graph, self.plan).max_lag for graph in self.graphs) * bool(self.elastic)

    def modules(self) -> tuple[str, ...]:
        """Modules of this package, and of torch, that ranks need for the makers and nodes of this run, sorted.

        User modules are not among them: each rank imports them itself, since an import may have side effects.
        """
        # torch shards a model over ranks with these; importing them takes half a second. For a trained value it also
        # imports its compiler, which takes as long again.
        cut = {pool.name for pool in self.plan.pools for replica in pool.replicas if len(replica.ranks) > 1}
        torch = {"torch.distributed.fsdp", "torch.distributed.tensor.parallel"} if cut else set()
        if any(argument.pool in cut for graph in self.graphs for argument in graph.carried):
            torch.add("torch._dynamo")
        paths = [argument.maker for graph in self.graphs for argument in graph.arguments]
        paths += [node.op for graph in self.graphs for node in graph.nodes if node.construct == "call"]
        return tuple(sorted(torch | {path.partition(":")[0] for path in paths if path.startswith("penstock.")}))

    @property
    def offload(self) -> Offload:
        """The effective option: "auto" means "off" unless trainer and generator take turns with a device."""
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
        """Read what `to_json` made. Raises ValueError for anything else."""
        if data.get("format") != 1:
            raise ValueError(f"run: given format {data.get('format')!r}, needed 1")
        graph, evaluation = Graph.from_json(data["graph"]), data["evaluation"]
        # In an earlier version `max_prompt` was an option of the program.
        older = {name: value for name, value in graph.options if name == "max_prompt" and value}
        return RunConfig(
            graph=graph,
            evaluation=None if evaluation is None else Graph.from_json(evaluation),
            plan=Plan.from_json(data["plan"]),
            flags=RunOptions.from_json({**older, **data["flags"]}),
            run=msgspec.convert(data["run"], str),
        )

    def write(self, folder: RunFolder, asked: Mapping[str, Any]) -> None:
        """Write `config.json` (with `asked`, what the user typed), `graph.json` and `plan.json` into the run folder."""
        data = self.to_json()
        folder.write_json("graph.json", {"graph": data.pop("graph"), "evaluation": data.pop("evaluation")})
        folder.write_json("plan.json", data.pop("plan"))
        folder.write_json("config.json", {**data, "asked": dict(asked)})

    @staticmethod
    def load(folder: RunFolder) -> "RunConfig":
        """Read what `write` wrote. Raises RecordError for a folder that this version of Penstock cannot read."""
        graphs, plan = folder.read_json("graph.json", dict[str, Any]), folder.read_json("plan.json")
        data = folder.read_json("config.json", ConfigFile)
        try:
            config = RunConfig.from_json({**data, **graphs, "plan": plan})
            for graph in config.graphs:
                Tables(graph, config.plan)
            return config
        except (ValueError, TypeError, KeyError) as error:
            asked = data.get("asked", {})
            by = f", written by penstock {asked['penstock']}" if "penstock" in asked else ""
            given = f"{folder.path}: given a run folder of another format{by} ({error})"
            needed = f"needed one that penstock {__version__} reads, or a newer penstock to read it"
            raise RecordError(f"{given}; {needed}") from error

    def channels(self) -> dict[str, Channel]:
        """The weight channels of all graphs, by name. All weights of one carried value to one pool share a channel."""
        return {name: c for graph in self.graphs for name, c in Tables(graph, self.plan).channels.items()}

    def rules(self, start: int) -> Rules:
        options = vars(self.flags)
        shared = {field.name: options[field.name] for field in fields(Rules) if field.name in options}
        return Rules(**shared, start=start, end=self.flags.updates)

    def setup(
        self, replica: Replica, index: int, folder: Path, restore: Path | None, patience: float = RankSetup.patience
    ) -> RankSetup:
        """The setup of rank `index` of a replica, with a context for each node and argument that its pool holds."""
        rank = replica.ranks[index]
        here = sum(other.host == rank.host for other in replica.ranks)
        place = Context(device=rank.device, threads=rank.threads, mesh=replica.mesh, rank=index, host_ranks=here)
        holds = next(p.holds for p in self.plan.pools if replica in p.replicas)
        contexts = {name: context_of(name, self.graphs, self.flags, place) for name in holds}
        return RankSetup(
            self.graphs,
            self.plan,
            replica.name,
            index,
            contexts,
            folder,
            restore,
            self.offload,
            patience,
            self.run,
            self.elastic,
            self.flags.batch,
            self.flags.save_samples,
        )


def context_of(name: str, graphs: Sequence[Graph], flags: RunOptions, place: Context) -> Context:
    """The context of a node or an argument, in a run of `graphs`: the one to train, and perhaps one to evaluate with.
    `place` has the device and mesh."""
    held_out = name.startswith(EVALUATION)
    graph = graphs[-1] if held_out else graphs[0]
    weights = {}
    for item in graph[name].inputs if name in graph else ():
        if item.ref.node in graph and graph[item.ref.node].construct == "broadcast":
            carried = graph[item.ref.node].inputs[0].ref.node
            # A carried value that both graphs name is made once, as the first graph says.
            made = next((a for g in graphs for a in g.carried if a.name == carried), None)
            if made is not None:
                context = context_of(carried, graphs, flags, Context())
                weights[item.name] = Origin(made.maker, context, graph[item.ref.node].precision)
    seen = {option: getattr(flags, option) for option in NODE_OPTIONS}
    own = replace(place, **seen, node=name, options=dict(graph.options), weights=weights)
    return own.evaluation() if held_out else own
