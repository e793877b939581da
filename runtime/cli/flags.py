"""The flags that are no program's own, each with its help. A program's keyword arguments come beside them."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Literal, TypeVar

import tyro

from penstock.graph.errors import nearest
from penstock.runtime.cli.tracing import CommandError
from penstock.runtime.control.run_config import RunOptions

F = TypeVar("F")

NEW = "new"
"""What --model is for an untrained model."""
POLICY_MAKERS = (
    "penstock.nodes.policy:make_policy",
    "penstock.nodes.policy:make_reference",
    "penstock.nodes.reward_model:make_preference_model",
)
"""Who makes language models of `--model`."""

LEAST: Mapping[str, int] = {
    "updates": 0,
    "batch": 1,
    "max_tokens": 1,
    "seed": 0,
    "generators": 1,
    "eval_groups": 0,
    "slots": 1,
    "checkpoint_every": 0,
    "delta": 0,
    "retries": 0,
    "drops": 1,
    "failures": 1,
    "width": 0,
}
"""The least that a flag may be, where it is no matter of the graph or the plan, which say so themselves."""
MOST = {"seed": 2**63 - 1}
"""The most."""
SECONDS = ("deadline", "startup_deadline")
"""Flags that are more than no time, and less than for ever."""


def check_numbers(flags: object) -> None:
    """Raises ValueError with all numbers of a verb's flags that cannot be meant; `check` tells them with all other
    faults."""
    numbers = ("max_tokens",) if isinstance(flags, CheckFlags) else (*LEAST, *SECONDS)
    given = {name: value for name, value in vars(flags).items() if name in numbers and value is not None}
    needed = {name: what for name, value in given.items() if (what := _needed(name, value))}
    if needed:
        said = (f"--{name.replace('_', '-')}: given {given[name]}, needed {what}" for name, what in needed.items())
        raise ValueError("\n".join(said))


def _needed(name: str, value: float) -> str:
    """What is needed of a number that cannot be meant; "" if it can."""
    if name in SECONDS:
        return "" if 0 < value < math.inf else "more than 0 seconds, and a finite number"
    if value < LEAST[name]:
        return f"at least {LEAST[name]}"
    return f"at most {MOST[name]}" if value > MOST.get(name, math.inf) else ""


def unknown_flags(words: Sequence[str], names: Iterable[str], command: str) -> str:
    """What to say of words that look like flags and are none of a command's; "" if there are none.

    `names` are those of its fields. tyro tells of a wrong flag only after other faults, and knows no likeness to
    --help.
    """
    known = {f"--{name.replace('_', '-')}" for name in names} | {"--help"}
    given = [word.partition("=")[0].replace("_", "-") for word in words if re.match(r"--?[A-Za-z]", word)]
    # tyro takes "--no-" before a flag that is on by itself, and knows which these are.
    strange = [word for word in given if word != "-h" and word.replace("--no-", "--", 1) not in known]
    said = (f"given {word}, needed a flag of `{command}`{nearest('--' + word.lstrip('-'), known)}" for word in strange)
    return "\n".join(said)


def read_flags(cls: type[F], verb: str, argv: Sequence[str], description: str) -> F:
    """The flags of a verb without a PROGRAM. Leaves the command with help or a usage error; raises CommandError for
    words that are no flags."""
    command = f"penstock {verb}"
    if said := unknown_flags(argv, [field.name.rstrip("_") for field in fields(cls)], command):  # type: ignore[arg-type]
        raise CommandError(said, 2)
    config = (tyro.conf.FlagCreatePairsOff,)
    return tyro.cli(cls, prog=command, description=description, args=argv, config=config)


def _text(metavar: str, hint: str = "") -> object:
    """A flag that takes a text. `hint` says what the empty default means."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {hint})" if hint else "")


@dataclass(frozen=True)
class RunFlags:
    """Flags of every program"""

    updates: int = 100
    """Updates of the policy, all in all."""
    batch: int = 32
    """Fresh prompt groups per update."""
    max_tokens: int = 16
    """Longest response, in tokens."""
    seed: int = 0
    """Seed of everything random: two runs of one seed draw the same numbers."""
    model: Annotated[str, _text("DIR", "a small base model, built once and cached")] = ""
    """A Llama-family model directory in Hugging Face's format; "new" is a small untrained one."""
    data: Annotated[str, _text("FILE", "arithmetic, made up as needed")] = ""
    """Problems: "arithmetic[:DIGITS]", or a JSONL file with the fields of GSM8K."""
    eval_data: Annotated[str, _text("FILE", "problems of --data that training never sees")] = ""
    """Problems to measure accuracy on."""
    eval_groups: int = 500
    """Held-out problems that accuracy is measured on, before and after; 0 leaves that out."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of the model that computes; master weights are float32."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto takes a GPU if there is one."""
    generators: int = 1
    """Replicas of the generator."""
    mesh: Annotated[tuple[str, ...], tyro.conf.arg(metavar="POOL=MESH …", help_behavior_hint="")] = ()
    """Ranks of a pool's replicas, such as trainer=fsdp2xtp2 generator=tp2; one each by default. Axes: dp copies of the
    model, fsdp shards of each tensor, tp shares of each layer, pp pipeline stages."""
    slots: int = 256
    """Responses that a generator decodes at once."""
    checkpoint_every: int = 0
    """Updates between two checkpoints; 0 makes one every two minutes. The end and Ctrl-C always make one."""
    versions: Literal["free", "pinned"] = "free"
    """pinned: the groups of update u use exactly version u - lag, so that any lag is repeatable to the bit."""
    proof: Literal["full", "sampled", "off"] = "full"
    """How much of each weight sync is proved to have arrived as it was sent: all tensors, one in eight, none."""
    wire: Annotated[
        Literal["", "bfloat16", "int8", "fp8", "fp8_block"],
        tyro.conf.arg(metavar="FORMAT", help_behavior_hint="(default: the run's dtype)"),
    ] = ""
    """Format in which weights travel: bfloat16; int8 or fp8 with a scale per row; fp8_block, a scale per 128 × 128."""
    delta: int = 0
    """Between hosts, send what changed since the last sync, and everything at least each DELTA-th time; 0 always sends
    everything. Losing nothing, it pays on links slower than a few GB/s."""
    transport: Literal["auto", "messages", "shm", "cuda_ipc"] = "auto"
    """How weights travel: auto takes what all ranks can; shm writes into shared memory and cuda_ipc into a GPU's, both
    on one host; messages go everywhere, over TCP."""
    offload: Literal["auto", "on", "off"] = "off"
    """Between updates, optimizer moments and master weights lie on the host and generators take their cache anew for
    each batch: auto where trainer and generator take turns with a GPU, on wherever they are."""
    retries: int = 0
    """How often a group that failed is tried again; not at a node with state, or one that fires per update, whose
    failure ends the run."""
    on_failure: Literal["stop", "replace"] = "stop"
    """What follows when a group fails for good: stop the run, or count it as failed and take another. At a node with
    state, or one that fires per update, the run stops."""
    drops: int = 16
    """Batches of groups that filters may drop for each update under way before the run is stopped."""
    failures: int = 4
    """Batches of failures, each try counted, for each update under way before the run is stopped."""
    deadline: float = 600.0
    """Seconds that any piece of work may take before the run is stopped and the culprit named."""
    startup_deadline: float = 120.0
    """Seconds for all processes to start."""
    cluster: Annotated[str, _text("FILE", "this machine")] = ""
    """Hosts with their cores and devices, in TOML: docs/cluster-file.md has examples and all keys."""
    out: Annotated[str, _text("DIR", "runs/PROGRAM-DATE-TIME")] = ""
    """The run folder: new or empty."""
    config: Annotated[str, _text("FILE", "none")] = ""
    """Flags from a TOML file; those on the command line win."""
    in_process: bool = False
    """Everything in one process and one thread, for a debugger: breakpoint() in a node stops there."""
    tensorboard: bool = False
    """Insist on TensorBoard files; they are written anyway where the package is installed."""
    plain: bool = False
    """Plain lines instead of the live display."""
    json: bool = False
    """The last line of output is the summary as JSON."""

    def control(self, model: str) -> RunOptions:
        """What the controller and the workers need of these, with a model directory ("" or "new": untrained)."""
        shared = {field.name: getattr(self, field.name) for field in fields(RunOptions)}
        return RunOptions(**{**shared, "model": "" if model == NEW else model})


@dataclass(frozen=True)
class ShowFlags:
    """Flags of show"""

    format: Literal["text", "mermaid", "svg", "json"] = "text"
    """text reads like the program; json loads back equal."""
    evaluation: bool = False
    """The program's evaluation instead of the program."""
    json: bool = False
    """The same as --format json."""
    out: Annotated[str, _text("FILE", "standard output")] = ""
    """Where to write."""
    config: Annotated[str, _text("FILE", "none")] = ""
    """Flags from a TOML file; those on the command line win."""


@dataclass(frozen=True)
class CheckFlags:
    """Flags of check"""

    batch: int = 32
    """Prompt groups per update that the program is to run with."""
    max_tokens: int = 16
    """Longest response that it is to run with, in tokens."""
    model: Annotated[str, _text("DIR", "a small base model")] = ""
    """Model directory that it is to run with."""
    data: Annotated[str, _text("FILE", "arithmetic")] = ""
    """Problems that it is to run with."""
    eval_data: Annotated[str, _text("FILE", "problems of --data that training never sees")] = ""
    """Problems that it is to be measured on."""
    config: Annotated[str, _text("FILE", "none")] = ""
    """Flags from a TOML file; those on the command line win."""
    json: bool = False
    """The faults as JSON."""


@dataclass(frozen=True)
class Planning:
    """Flags of what is planned for"""

    cluster: Annotated[str, _text("SPEC", "needed for a plan")] = ""
    """Hosts x GPUs x kind, such as 32x8xH100, several joined by "+"; or a TOML file; or "this", the machine whose
    GPUs `penstock doctor --measure` has measured."""
    model: Annotated[str, _text("NAME", "needed for a plan")] = ""
    """A shape such as llama-8b, llama-70b, qwen3-0.6b, or a model directory with its config.json."""
    lengths: Annotated[str, _text("MEAN,SIGMA|FILE|RUN", "1000,0.7, or less where --max-tokens is below 4,000")] = ""
    """How long responses are, in tokens: a lognormal, a file with a length per line, or a finished run's folder."""
    max_tokens: int = 4096
    """Tokens at which a response is cut."""
    prompt_tokens: int = 128
    """Tokens of a prompt."""
    environment_s: float = 1.0
    """Seconds in which an environment answers one turn of a conversation, whose lengths are of all its turns."""
    kept: Annotated[
        float | None, tyro.conf.arg(metavar="SHARE", help_behavior_hint="(default: 0.7 where the program has a filter)")
    ] = None
    """Share of the groups that the program's filters (keep) leave, all of them together; others take their places."""
    micro_tokens: int = 16384
    """Most tokens of a micro-batch; never fewer than the longest sequence."""
    slots: int = 256
    """Most responses that a generator decodes at once."""
    mesh: Annotated[tuple[str, ...], tyro.conf.arg(metavar="POOL=MESH …", help_behavior_hint="")] = ()
    """Meshes that are given, such as trainer=fsdp16xtp2 generator=tp8; the others are searched."""
    time_limit: float = 120.0
    """Seconds after which the search ends with the best that it has, and how much better a plan may be at most."""


@dataclass(frozen=True)
class DrawingFlags:
    """Flags of how a schedule is shown"""

    width: int = 0
    """Columns of the drawing; 0 for the terminal's."""
    svg: Annotated[str, _text("FILE", "none")] = ""
    """Draw the schedule into an SVG file; of a pool the first 8 replicas."""
    html: Annotated[str, _text("FILE", "none")] = ""
    """The same as a page to zoom in, which needs no network."""
    trace: Annotated[str, _text("FILE", "none")] = ""
    """Write the schedule as a Chrome trace, for https://ui.perfetto.dev."""
    json: bool = False
    """The result as one JSON object."""


@dataclass(frozen=True)
class SimulateFlags(DrawingFlags, Planning):
    """Flags of simulate"""

    plan: Annotated[str, _text("FILE", "none")] = ""
    """A plan to simulate, as `penstock plan --json` printed it. With --cluster and --model one is made. With neither,
    seconds are as given."""
    updates: int = 20
    """Updates to simulate."""
    batch: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: 8, or 256 with --cluster)")
    ] = None
    """Fresh prompt groups per update."""
    generators: int = 1
    """Replicas of the generator; a plan has its own."""
    versions: Literal["free", "pinned"] = "free"
    """Which versions groups may use."""
    duration: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NODE=S[~SIGMA] …", help_behavior_hint="")] = ()
    """Seconds of each node's firing, such as generate=0.05; generate=0.05~0.5 draws them from a lognormal with that
    mean and sigma. publish, wire and swap are the parts of a weight sync. A fake node has its option ms by default. In
    a plan, models and syncs have theirs, and other nodes take no time by default."""
    drop: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NODE=SHARE …", help_behavior_hint="")] = ()
    """Share of the groups that a filter drops, such as keep=0.3; none by default."""
    again: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NODE=SHARE …", help_behavior_hint="")] = ()
    """Share of the turns after which the node that answers asks for another one, such as answer=0.5; by default all,
    up to the bound."""
    seed: int = 0
    """Seed of the lengths of responses."""
    config: Annotated[str, _text("FILE", "none")] = ""
    """Flags from a TOML file; those on the command line win."""


@dataclass(frozen=True)
class RecordedFlags(DrawingFlags):
    """Flags of simulate --from"""

    from_: Annotated[str, tyro.conf.arg(name="from", metavar="RUN", help_behavior_hint="(required)")] = ""
    """The folder of a finished or interrupted run, whose durations are taken."""
    lag: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: the run's)")] = None
    """Updates that weights may be old, of the broadcasts that have the largest lag."""
    generators: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: the run's)")] = None
    """Replicas of the generator."""
    slots: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: the run's)")] = None
    """Responses that a generator has room for at once."""
    versions: Annotated[Literal["free", "pinned"] | None, tyro.conf.arg(help_behavior_hint="(default: the run's)")] = (
        None
    )
    """Which versions groups may use."""
    updates: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: as many as the run has done)")
    ] = None
    """Updates to simulate."""
    duration: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NODE=S[~SIGMA] …", help_behavior_hint="")] = ()
    """Seconds of a node's firing in place of the run's, such as score=0.01; publish, wire and swap are the parts of a
    weight sync."""


@dataclass(frozen=True)
class PlanFlags(Planning):
    """Flags of plan"""

    batch: int = 256
    """Prompt groups per update."""
    config: Annotated[str, _text("FILE", "none")] = ""
    """Flags from a TOML file; those on the command line win."""
    json: bool = False
    """The plan as one JSON object; memory in bytes."""


VERBS = {"run": RunFlags, "show": ShowFlags, "check": CheckFlags, "simulate": SimulateFlags, "plan": PlanFlags}
"""The verbs that take a PROGRAM."""

EXAMPLES = {
    "run": "penstock run {0} --lag 2 --updates 50" + "\n  penstock run {0} --in-process --updates 3 --plain",
    "show": "penstock show {0}\n  penstock show {0} --format svg --out graph.svg",
    "check": "penstock check {0} --batch 16",
    "plan": "penstock plan {0} --cluster 32x8xH100 --model llama-70b --batch 256 --lengths 1000,0.7",
    "simulate": "penstock simulate {0} --lag 2 --duration generate=0.05 score=0.005 --svg schedule.svg"
    + "\n  penstock simulate {0} --lag 2 --cluster 32x8xH100 --model llama-70b --html schedule.html"
    + "\n  penstock simulate --from runs/{0}-20250304-050607 --lag 2 --generators 3",
}
