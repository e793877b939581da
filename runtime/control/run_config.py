"""A run's options, and its configuration as its folder has it: options, graphs and plan.

`RunOptions` is the only place of an option's name, type, limits, default and help. These derive from it:

- the flags of `penstock run` and, for fields with `OnResume`, those of `penstock resume` (`cli/flags.py`);
- `config.json`, whose `flags` are these fields; a value outside its limits is refused there, too;
- `Setup`: each rank has all options. Nodes see those that are also fields of `Context` (`NODE_OPTIONS`);
- the scheduler's `Rules`, which have some of these fields.

A default that `Context` or `Rules` has, too, is written there, since these do not know a run's options.
"""

import json
import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from penstock import __version__
from penstock.graph.context import Context, Origin
from penstock.graph.engines import OURS, EngineName
from penstock.graph.ir import Graph
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
AboveZero = Annotated[float, Meta(gt=0)]
Seconds = AboveZero
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
    "Updates in total; a larger number continues a finished run. With a lag, the result differs from that of one "
    "longer run: the next groups are all sampled with the last version."
)
MESH_ON_RESUME = OnResume("Another mesh for pools, such as trainer=fsdp4; the checkpoint is resharded to it.")
RESTARTS_ON_RESUME = OnResume("How often the run, from now on, restarts by itself when it loses a process.")
TRACK_ON_RESUME = OnResume("Trackers from now on; each continues its run, and a new one gets all updates.")


@dataclass(frozen=True)
class TrainingOptions:
    """Options of updates and of which groups they take"""

    subject = "training"

    updates: Annotated[Count, UPDATES_ON_RESUME] = Context.updates
    """Updates of the policy in total."""
    batch: Positive = Context.batch
    """Fresh prompt groups per update."""
    lr_warmup: Annotated[Count | None, Shown("UPDATES", "0; of sft 20")] = Context.lr_warmup
    """Updates over which the learning rate of each model rises linearly."""
    lr_decay: Annotated[Decay, Shown("{constant,linear,cosine}", "constant; of sft cosine")] = ""
    """How the learning rate falls to 0 from the end of the warm-up to that of the run: linearly, or along half a
    cosine."""
    seed: Seed = Context.seed
    """Seed of all random numbers: two runs with one seed draw the same numbers."""
    versions: Literal["free", "pinned"] = Rules.versions
    """pinned: the groups of update u use exactly version u - lag, so that a run at any lag can be repeated bit for bit.
    free: they use the newest version that is there."""
    order: Literal["strict", "ready"] = Rules.order
    """strict: an update takes the next groups in order, so that short responses are not learnt first. ready: it takes
    groups that are finished, as long as the lag still holds for all others."""


@dataclass(frozen=True)
class ModelOptions:
    """Options of the model"""

    subject = "model"

    model: Annotated[str, Shown("DIR", "a small base model, built once and cached")] = Context.model
    """A directory in Hugging Face's format, a name of the Hub, or "new": a small untrained model."""
    lora: Count = Context.lora
    """Rank of LoRA adapters. Each policy trains and sends its adapters only. 0: none, unless --model is a directory of
    adapters."""
    lora_alpha: Annotated[AboveZero | None, Shown("ALPHA", "twice the rank")] = Context.lora_alpha
    """The output of an adapter is multiplied by ALPHA / rank."""
    lora_targets: Annotated[tuple[str, ...], Shown("NAME …", "all linear layers")] = Context.lora_targets
    """Linear layers with adapters, such as q_proj v_proj."""
    replay_routing: bool = Context.replay_routing
    """For a mixture of experts: generators record the experts of each token, and policies use these instead of their
    router's choice."""


@dataclass(frozen=True)
class DataOptions:
    """Options of prompts and evaluation"""

    subject = "data"

    data: Annotated[str, Shown("FILE", "arithmetic, generated as needed")] = Context.data
    """Prompts: "arithmetic[:DIGITS]"; a JSONL or parquet file; a directory of such files; or a data set of the Hugging
    Face Hub, OWNER/NAME[:CONFIG][@REVISION]."""
    data_split: Annotated[str, Shown("SPLIT", "train, or the only one")] = Context.data_split
    """Split of a directory or data set."""
    eval_data: Annotated[str, Shown("FILE", "rows of --data that are kept from training")] = Context.eval_data
    """Problems to measure accuracy on."""
    eval_split: Annotated[str, Shown("SPLIT", "that of --data, or the only one of --eval-data")] = Context.eval_split
    """Split to measure accuracy on."""
    held_out: Annotated[
        Count | None, Shown("COUNT", "a tenth of them, at most 500, without --eval-data or --eval-split")
    ] = Context.held_out
    """Prompts of --data that training never sees, to measure accuracy on. 0: it sees all."""
    prompt_field: Annotated[str, Shown("FIELD", "question; for pairs, prompt")] = Context.prompt_field
    """Field of a row with the prompt: a text or chat messages."""
    answer_field: Annotated[str, Shown("FIELD", "answer")] = Context.answer_field
    """Field of a row with the reference answer or the demonstration; "none" if rows have neither."""
    row: Annotated[str, Shown("MODULE:NAME", "none")] = Context.row
    """A function that takes a row as a dict and returns a dict with prompt and answer (for pairs: prompt, chosen,
    rejected), or None to skip the row."""
    system: Annotated[str, Shown("TEXT", "none")] = Context.system
    """System message before each prompt of --data, for models with a chat template."""
    chat_template_kwargs: Annotated[tuple[str, ...], Shown("NAME=VALUE …", "none")] = Context.chat_template_kwargs
    """Variables of the model's chat template, such as enable_thinking=false. A VALUE is JSON, or else a text."""
    eval_groups: Count = 500
    """Held-out problems on which accuracy is measured before and after training; 0: not measured."""


@dataclass(frozen=True)
class GenerationOptions:
    """Options of responses and of generators"""

    subject = "generation"

    max_tokens: Positive = Context.max_tokens
    """Most tokens of a response."""
    max_prompt: Positive = Context.max_prompt
    """Most tokens of a prompt, or of a conversation before its last turn; each slot of a generator has room for it."""
    segment: Count = Context.segment
    """Tokens after which a response pauses; its group continues on any generator with room, perhaps with newer weights.
    0: never."""
    slots: Positive = Context.slots
    """Responses that a generator decodes at the same time."""
    engine: EngineName = OURS
    """Inference engine of generators, unless the program names one: penstock, which can repeat a run bit for bit; or
    vllm, which you install, also for a separate interpreter (docs/engines.md)."""
    generator_precision: Annotated[GeneratorPrecision, Shown("{int8,fp8}", "as the program says")] = ""
    """Format in which generators compute, unless the program's broadcast names one: int8 on CPUs, faster with VNNI
    but slower without, fp8 on GPUs. Weights are sent in it, too."""
    mismatch_limit: Annotated[AboveZero | None, Shown("NATS", "0.001 in float32, 0.02 in float16, 0.1 in bfloat16")] = (
        Context.mismatch_limit
    )
    """With vllm: largest mean difference between its log-probabilities and the trainer's at equal weights. It is
    measured after each weight sync; above it the run stops."""


@dataclass(frozen=True)
class ComputeOptions:
    """Options of how models compute and what they keep in memory"""

    subject = "compute"

    device: str = "auto"
    """cpu, cuda or cuda:N; auto: a GPU if there is one."""
    dtype: Dtype = "float32"
    """Number format in which models compute; master weights are float32."""
    deterministic: bool = False
    """Use deterministic algorithms of PyTorch only; an operation without one fails. GPUs need it for equal bits, and
    are slower; CPUs do not."""
    invariant: bool = Context.invariant
    """Make the log-probabilities that generators record equal the trainer's bit for bit, for any batch and number of
    threads. On CPUs, with a C compiler; slower."""
    recompute: Annotated[
        Recompute, Shown("{auto,none,layer}", "auto"), OnResume("What the backward pass recomputes.")
    ] = "auto"
    """Activation checkpointing. none: keep all activations; layer: keep the inputs of layers and recompute the rest,
    with equal bits. auto: the faster one that fits a GPU of a known kind; none on a CPU."""
    micro_tokens: Annotated[Count, OnResume("Most tokens of a micro-batch.")] = Context.micro_tokens
    """Most tokens of a micro-batch, padding included. 0: as many as fit a GPU of a known kind; a good number on a
    CPU."""
    logit_elements: Count = Context.logit_elements
    """Most logits in memory at the same time. 0: a good number for the device."""
    optimizer_state: OptimizerState = "auto"
    """Where AdamW's moments are kept. device: on the GPU; host: in host memory, from which a step fetches some at a
    time, with equal bits. auto: host if nothing else fits a GPU of a known kind."""
    offload: Offload = "off"
    """Keep optimizer moments and master weights in host memory between updates, and allocate the generator's cache for
    each batch. auto: if trainer and generator take turns on a GPU; on: always."""


@dataclass(frozen=True)
class PlacementOptions:
    """Options of replicas and their meshes"""

    subject = "placement"

    generators: Positive = 1
    """Replicas of the generator; with --lost-replica replace also a range, such as 2..8."""
    first_generators: Count = 0
    """Replicas of the generator with which the run starts; the others join when the agents of their hosts do. 0: all.
    `--generators 2..8` means `--generators 8 --first-generators 2`."""
    mesh: Annotated[tuple[str, ...], Shown("POOL=MESH …"), MESH_ON_RESUME] = ()
    """Mesh of ranks of each replica, such as trainer=fsdp2xtp2 generator=tp2; by default one rank. Axes: dp (copies of
    the model), fsdp (shards of each tensor), ep (experts), tp (parts of each layer), pp (pipeline stages)."""
    tp_over_hosts: bool = False
    """Allow the axis tp of a replica to cross hosts. Its ranks synchronise in every layer, which is slow over a
    network."""


@dataclass(frozen=True)
class WeightSyncOptions:
    """Options of how weights are sent to generators"""

    subject = "weight_sync"

    wire: Annotated[Wire, Shown("FORMAT", "the run's dtype")] = ""
    """Format of weights on the wire, unless their broadcast has a precision: bfloat16; int8 or fp8 with a scale per
    row; fp8_block with a scale per 128 × 128."""
    transport: Transport = "auto"
    """How weights are sent. shm: shared memory of one host; cuda_ipc: GPU memory of one host; nccl: between GPUs on any
    hosts; messages: host memory and TCP, works everywhere. auto: the fastest that all ranks can use."""
    delta: Count = 0
    """Between hosts, send only changed elements, and all elements at least at each DELTA-th sync. It is lossless, and
    faster on links below a few GB/s. 0: always send all."""
    proof: Literal["full", "sampled", "off"] = "full"
    """Tensors of each weight sync whose digest is compared at sender and receiver: full (all), sampled (one in eight),
    off (none)."""


@dataclass(frozen=True)
class FailureOptions:
    """Options of what happens on a failure"""

    subject = "failure"

    retries: Count = Rules.retries
    """How often a failed group is tried again. A node with state, or one that fires per update, is not: its failure
    stops the run."""
    on_failure: Literal["stop", "replace"] = Rules.on_failure
    """When a group has failed for good. stop: stop the run; replace: count it as failed and take another. A failure of
    a node with state, or of one that fires per update, always stops the run."""
    lost_replica: Literal["stop", "replace"] = Rules.lost_replica
    """When a replica of a generator or scorer dies. stop: stop the run; replace: start its groups again on other
    replicas, and start it again if its agent is alive (docs/hosts.md)."""
    restarts: Annotated[Count, RESTARTS_ON_RESUME] = 0
    """How often a run that loses a process it needs, such as a rank of the trainer, restarts by itself from its last
    checkpoint. It does not restart after an error of a node."""
    drops: Positive = Rules.drops
    """Batches of groups that filters may drop for each update under way; then the run stops."""
    failures: Positive = Rules.failures
    """Batches of failed tries for each update under way; then the run stops."""
    deadline: Seconds = 600.0
    """Seconds that any piece of work may take; then the run stops and names it."""
    startup_deadline: Seconds = 300.0
    """Seconds for all processes to start and to load their models."""
    grace: Annotated[Seconds, OnResume("Seconds from a request to stop to the end of all processes.")] = GRACE_S
    """Seconds from a request to stop (Ctrl-C; SIGTERM or SIGUSR1 before a preemption) to the end of all processes. A
    checkpoint is made if there is time. Take some seconds less than the cluster manager gives."""


@dataclass(frozen=True)
class CheckpointOptions:
    """Options of checkpoints"""

    subject = "checkpoint"

    checkpoint_every: Count = 0
    """Updates between two checkpoints. 0: every 30 seconds, or less often, so that they take at most 5 % of the time.
    The end of a run and Ctrl-C always make one."""
    keep: Annotated[Count, OnResume("How many of the newest checkpoints to keep; 0: all.")] = 2
    """How many of the newest checkpoints to keep; 0: all."""
    keep_best: Annotated[str, Shown("METRIC", "none"), OnResume("Also keep the best checkpoint by this metric.")] = ""
    """Also keep the checkpoint with the highest value of a metric, such as reward_mean; NAME:min keeps the lowest."""


@dataclass(frozen=True)
class TrackingOptions:
    """Options of samples and trackers"""

    subject = "tracking"

    save_samples: Annotated[Count, OnResume("Prompt groups of each update to write to samples.jsonl.")] = 1
    """Prompt groups of each update to write to samples.jsonl, with texts and rewards; 0: none."""
    track: Annotated[tuple[TrackerName, ...], Shown("TRACKER …", "none"), TRACK_ON_RESUME] = ()
    """Trackers that get metrics, configuration and report: tensorboard, wandb, trackio, mlflow. Each is configured as
    usual for its client."""
    track_project: Annotated[str, Shown("NAME", "that of the client's environment, or penstock")] = ""
    """Project (or experiment) of the run in its trackers."""


# A dataclass has the fields of its last base first.
@dataclass(frozen=True)
class RunOptions(
    TrackingOptions,
    CheckpointOptions,
    FailureOptions,
    WeightSyncOptions,
    PlacementOptions,
    ComputeOptions,
    GenerationOptions,
    DataOptions,
    ModelOptions,
    TrainingOptions,
):
    """The options of a run that do not belong to its program. A field's docstring is its help, and the `subject` of its
    class the box of its flag in the help."""

    @staticmethod
    def from_json(data: Any) -> "RunOptions":
        """Read options. Raises ValueError for a wrong type, a value outside its limits, or an unknown option."""
        read: RunOptions = msgspec.convert(as_written_now(data), RunOptions)
        if unknown := sorted(data.keys() - asdict(read).keys()):
            raise ValueError(f"unknown flags {', '.join(unknown)}")
        return read


def as_written_now(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options in JSON, as this version writes them: an earlier one wrote 0 where one of these two was not given, and
    those that it did not have had their defaults."""
    older = {name: None for name in ("lora_alpha", "mismatch_limit") if options.get(name) == 0}
    return {**json.loads(json.dumps(asdict(RunOptions()))), **options, **older}


# Options whose form in a `Context` comes from the plan: a rank's device and mesh.
PLACE = ("device", "mesh")
# Options that nodes see unchanged.
NODE_OPTIONS = tuple(f.name for f in fields(Context) if hasattr(RunOptions, f.name) and f.name not in PLACE)


# For all fields at once: a class has a hundred, and a command asks for each more than once.
annotations: Callable[[type], dict[str, Any]] = lru_cache(8)(partial(get_type_hints, include_extras=True))
"""The annotations of a dataclass's fields by name, `Annotated` ones whole."""


def annotation(cls: type, name: str, kind: type[A]) -> A | None:
    """The annotation of a dataclass's field of type `kind`: its `Meta` (limits), `Shown` or `OnResume`; None if none.

    That of `Positive | None` belongs to the first type of the union."""
    waiting = [annotations(cls)[name]]
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
    if limits.gt is not None:  # it must also be finite, for which msgspec has no limit
        return "" if limits.gt < value < math.inf else f"a finite number above {limits.gt}"
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
        if options.first_generators > options.generators:
            given = f"--first-generators: given {options.first_generators}"
            raise ValueError(f"{given}; needed at most --generators, {options.generators}")
        if options.first_generators and not config.may_be_late:
            given = f"--first-generators: given {options.first_generators} of {options.generators}"
            raise ValueError(f"{given}; needed --lost-replica replace, and generators that can be lost (docs/hosts.md)")
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
        """The number of versions of weights that a sender keeps: the newest, which the scheduler sends to each replica
        before it has the next one published."""
        if not self.elastic:
            return 1
        # Groups of the current update and of all that are under way may restart, with the versions that they had.
        return 2 + max(Tables(graph, self.plan).max_lag for graph in self.graphs)

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
                weights[item.name] = Origin(made.maker, context, graph[item.ref.node].precision, flags.wire)
    seen = {option: getattr(flags, option) for option in NODE_OPTIONS}
    own = replace(place, **seen, node=name, options=dict(graph.options), weights=weights)
    return own.evaluation() if held_out else own
