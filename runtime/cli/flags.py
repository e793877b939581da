"""The verbs' flags, each with its help. A program's keyword arguments are added to them.

The flags of `run` derive from `RunOptions`; this file adds only those about the command, not about the run.
"""

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, fields
from functools import partial
from io import StringIO
from itertools import islice, takewhile
from shutil import get_terminal_size
from textwrap import wrap
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from msgspec import Meta

from penstock.graph.errors import ELSEWHERE_CALLED, called_here, nearest
from penstock.runtime.cli.tracing import CommandError, usage_errors
from penstock.runtime.cluster.capabilities import GeneratorPrecision
from penstock.runtime.control.run_config import (
    Count,
    OnResume,
    Positive,
    RunOptions,
    Seconds,
    Seed,
    Shown,
    annotation,
    annotations,
    check_limits,
)

F = TypeVar("F")
# Name, annotation and default of a field, for `make_dataclass`.
Field = tuple[str, Any, Any]

# The words of --on for runs whose files are on other machines: here only their flags and their graph are checked.
ELSEWHERE = ("kubernetes",)
# The value of --model for an untrained model, and of --plan to plan nothing.
NEW, NO_PLAN = "new", "none"
HELP = frozenset({"-h", "--help"})
MARKERS = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)
AS_PROGRAM = Shown("{int8,fp8}", "as the program says")


# Returns the options of nodes by name, each with the names of its nodes; called for an unknown flag.
NodeOptions = Callable[[], Mapping[str, str]]


def nearest_flag(name: str, known: Iterable[str], options: NodeOptions | None, dashes: str = "--") -> str:
    """A suggestion for an unknown flag, as the end of a sentence: our flag for another library's name, perhaps with
    groups (`critic.optim.lr`); else an option of a node; else the nearest flags."""
    flags, of_nodes = {flag.replace("_", "-") for flag in known}, options() if options else {}
    *groups, word = name.replace("-", "_").split(".")
    ours = word if word in of_nodes else ELSEWHERE_CALLED.get(word, word)
    meant = [f"{groups[0]}_{ours}", ours] if groups else [ours] if ours != word else []
    if here := next((flag for flag in (each.replace("_", "-") for each in meant) if flag in flags), ""):
        return called_here(word, f"{dashes}{here}")
    if ours in of_nodes:
        return f"; it is an option of {of_nodes[ours]}, for the program to give: docs/write-an-algorithm.md"
    return nearest(f"{dashes}{word.replace('_', '-')}", {f"{dashes}{flag}" for flag in flags})


def unknown_flags(
    words: Sequence[str],
    names: Iterable[str],
    command: str,
    options: NodeOptions | None = None,
    about: str = "",
    fixed: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The error for words that look like flags but are not flags of a command; "" if there are none.

    `names` are the names of its fields, `options` returns those of a program's nodes. `about` says more of the command,
    `fixed` of single flags of other commands, by name.
    tyro reports an unknown flag only after other errors, and does not suggest --help.
    """
    # tyro treats "_" and "-" as equal, and so does this.
    known = {name.replace("_", "-") for name in names} | {"help"}
    given, flag = list[str](), ""
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            flag = word
        # Flags of other libraries have groups, as in data.train_batch_size=64; a DIR or a value may look the same.
        elif options is None or not re.match(r"[A-Za-z]\w*(\.\w+)+=", word) or re.fullmatch("-[^=]+", flag):
            continue
        given.append(word.partition("=")[0].replace("_", "-"))
    # tyro accepts "--no-" before a flag that is on by default, and checks that itself.
    flags = {f"--{name}" for name in known}
    strange = [word for word in given if word != "-h" and word.replace("--no-", "--", 1) not in flags]
    said = list[str]()
    for word in strange:
        name = word.lstrip("-").replace("-", "_")
        why = fixed.get(name, "")
        # One with a single dash may be a flag of this command.
        if not why and word.startswith("--") and name in {field.name for field in fields(RunFlags)}:
            why = ", which `penstock run` has"
        near = "" if why else nearest_flag(word.lstrip("-"), known, options)
        said.append(f"given {word}{why}, needed a flag of `{command}`{about}{near}")
    return "\n".join(said)


def wrong_values(words: Sequence[str], hints: Mapping[str, Any], source: str = "") -> str:
    """The message about words that are no values of their flags, one line for each; "" if there are none.

    `hints` has the annotation of each flag, and `source` is where the words are written. tyro speaks of such words as
    Python does.
    """
    said = list[str]()
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        hint = hints.get(flag.removeprefix("--").replace("-", "_")) if flag.startswith("--") else None
        needed, takes, several = _values_of(hint)
        # The words up to the next flag. A negative number is none.
        behind = takewhile(lambda each: not re.match(r"--?[A-Za-z]|--$", each), words[place + 1 :])
        given = [value] if equals else list(behind if several else islice(behind, 1))
        wrong = [repr(each) for each in given if not takes(each)]
        if needed and not several and not given:
            wrong = ["no value"]
        said += (f"{source}{flag}: given {each}, needed {needed}" for each in wrong)
    return "\n".join(said)


def _values_of(hint: Any) -> tuple[str, Callable[[str], bool], bool]:
    """What a value of a flag must be, in words; whether a word is one; and whether the flag takes several. Any word is
    one, and needed is "", for a flag without values, or with values of different kinds."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    kinds = [kind for kind in get_args(hint) if kind not in (NoneType, Ellipsis)]
    if get_origin(hint) is Literal:
        choices = [str(choice) for choice in kinds]
        return f"one of {', '.join(filter(None, choices))}", choices.__contains__, False
    if len(kinds) == 1:
        needed, takes, several = _values_of(kinds[0])
        if get_origin(hint) not in (Union, UnionType):
            return needed, takes, True
        # tyro reads this word as no value.
        return needed, lambda word: takes(word) or word == "None", several
    if hint in (int, float):
        return "a whole number" if hint is int else "a number", partial(_is_number, hint), False
    return "one" * (hint is str), lambda _: True, False


def _is_number(kind: type[int] | type[float], word: str) -> bool:
    try:
        kind(word)
    except ValueError:
        return False
    return True


def read_flags(
    cls: type[F], verb: str, argv: Sequence[str], about: str = "", fixed: Mapping[str, str] = MappingProxyType({})
) -> F:
    """Parse the flags of a verb without a PROGRAM, whose help is the docstring of `cls`. Raises SystemExit after help
    or a usage error, CommandError for unknown flags (`about` and `fixed` as in `unknown_flags`) and for values outside
    of their limits.
    """
    command = f"penstock {verb}"
    names = [field.name.rstrip("_") for field in fields(cls)]  # type: ignore[arg-type]
    said = unknown_flags(argv, names, command, about=about, fixed=fixed)
    if said := said or wrong_values(argv, annotations(cls)):
        raise CommandError(said)
    with fitting_help():
        form: Any = with_help(cls) if HELP.intersection(argv) else readable(cls)
        flags: F = tyro.cli(form, prog=command, description=inspect.getdoc(cls), args=argv, config=MARKERS)
    with usage_errors():
        check_limits(flags)
    return flags


def fitting(text: str) -> str:
    """The text wrapped to the width of the terminal, between words, and in a list under the second column. Commands and
    tables keep their lines."""
    width, lines = max(40, get_terminal_size().columns), list[str]()
    for line in text.splitlines():
        if len(line) <= width or line.startswith("  penstock ") or set(line) & set("│╭╰"):
            lines.append(line)
            continue
        first = re.match(r" +(\S+ )+ +|", line)
        column = " " * (first.end() if first else 0)
        lines += wrap(line, width, subsequent_indent=column, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


@contextmanager
def fitting_help() -> Iterator[None]:
    """Apply `fitting` to tyro's output in the body: tyro wraps only the text in its boxes."""

    class Help(StringIO):
        # tyro reads these to decide whether it can show colours and box lines.
        isatty, encoding = sys.stdout.isatty, sys.stdout.encoding

    held = Help()
    try:
        with redirect_stdout(held):
            yield
    finally:
        if held.getvalue():
            sys.stdout.write(f"{fitting(held.getvalue())}\n")


def readable(cls: type[F]) -> type[F]:
    """The class of flags with `Shown` translated for tyro."""
    found: list[Field] = []
    for name, hint in annotations(cls).items():
        if shown := annotation(cls, name, Shown):
            field = cls.__dataclass_fields__[name]  # type: ignore[attr-defined]
            found.append((name, Annotated[hint, _argument(shown)], field))
    return _extended(cls, found)


def with_help(cls: type[F], defaults: F | None = None, boxes: Sequence[Field] = ()) -> type:
    """A class for tyro's help about the flags, with the boxes before theirs. A flag's box is the `subject` of the class
    that declares it; flags without one are shown in the first box, beside --help."""
    docstrings, direct, found = _docstrings(cls), list[Field](), dict[str, list[Field]]()
    for field in fields(cls):  # type: ignore[arg-type]
        name, hint = field.name, annotations(cls)[field.name]
        if (shown := annotation(cls, name, Shown)) or name in docstrings:
            hint = Annotated[hint, _argument(shown, docstrings.get(name))]
        default = field.default if defaults is None else getattr(defaults, name)
        # A class may declare a flag again.
        first = next(base for base in reversed(cls.__mro__) if name in vars(base).get("__annotations__", ()))
        box = found.setdefault(vars(first)["subject"], []) if "subject" in vars(first) else direct
        box.append((name, hint, dataclasses.field(default=default)))
    made = partial(dataclasses.make_dataclass, kw_only=True, namespace={"__doc__": ""})
    named = [(subject, made(subject, flags), dataclasses.field()) for subject, flags in found.items()]
    return made(cls.__name__, [*direct, *boxes, *named])


def _docstrings(cls: type) -> dict[str, str]:
    """The docstrings of a dataclass's fields, each as one line: tyro itself keeps the line breaks of the source."""
    import docstring_parser

    bases = [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)]
    found = [each for base in bases for each in docstring_parser.parse_from_object(base).params]
    return {each.arg_name: " ".join((each.description or "").split()) for each in found}


def as_typed(value: object) -> str:
    """An option's value as it is typed."""
    words = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return words or "none"


def with_changes(cls: type[F]) -> type[F]:
    """The class of flags plus the options that a resume may change; None if one is not given."""
    found: list[Field] = []
    for name, hint in get_type_hints(RunOptions).items():
        if change := annotation(RunOptions, name, OnResume):
            shown = annotation(RunOptions, name, Shown) or Shown(hint.__name__.upper())
            argument = _argument(dataclasses.replace(shown, default="as it was"), change.help)
            limits = annotation(RunOptions, name, Meta)
            found.append((name, Annotated[hint | None, limits, argument], dataclasses.field(default=None)))
    return _extended(cls, found)


def with_plan(flags: F, decided: Mapping[str, Any]) -> F:
    """The flags with the options that a plan has decided, given as in its JSON."""
    own = {name: value for name, value in decided.items() if hasattr(flags, name)}
    as_flags = {name: tuple(value) if isinstance(value, list) else value for name, value in own.items()}
    made: F = dataclasses.replace(flags, **as_flags)  # type: ignore[type-var]
    return made


def changes(flags: object) -> dict[str, Any]:
    """The options that are given to a resume."""
    names = {field.name for field in fields(RunOptions)}
    return {name: value for name, value in vars(flags).items() if name in names and value is not None}


def _argument(shown: Shown | None, help: str | None = None) -> object:
    if shown is None:
        return tyro.conf.arg(help=help)
    hint = f"(default: {shown.default})" if shown.default else ""
    return tyro.conf.arg(metavar=shown.metavar, help=help, help_behavior_hint=hint)


def _extended(cls: type[F], found: Sequence[Field]) -> type[F]:
    made = dataclasses.make_dataclass(cls.__name__, found, bases=(cls,), frozen=True)
    # The docstring is the title of the group of flags in the help.
    made.__doc__ = cls.__doc__
    return made


@dataclass(frozen=True)
class FolderFlags:
    """Flags of every verb that takes the folder of a run"""

    dir: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
    """The run folder."""


@dataclass(frozen=True, kw_only=True)
class OutputFlags:
    """Flags of every verb with a result"""

    json: bool = False
    """Print the result as one JSON object, after all other output."""


@dataclass(frozen=True, kw_only=True)
class ProgramFlags(OutputFlags):
    """Flags of every verb that takes a PROGRAM"""

    config: Annotated[str, Shown("FILE", "none")] = ""
    """A TOML file with flags; those on the command line take precedence."""


@dataclass(frozen=True, kw_only=True)
class StartFlags(OutputFlags):
    """Flags of every verb that starts a run"""

    in_process: bool = False
    """Run in one process and one thread, for a debugger: breakpoint() in a node works."""
    plain: bool = False
    """Print plain lines instead of the live display."""


@dataclass(frozen=True, kw_only=True)
class MachineFlags:
    """Flags of every verb that places a run"""

    subject = "placement"

    cluster: Annotated[str, Shown("FILE", "this machine")] = ""
    """A TOML file of hosts with their cores and devices (docs/cluster-file.md)."""
    plan: Annotated[str, Shown("FILE", "made for the GPUs of the run")] = ""
    """Run exactly the plan that `penstock plan … --out FILE` wrote; "none": without a plan."""


@dataclass(frozen=True, kw_only=True)
class AgentsFlags(StartFlags):
    """Flags of every verb that starts a run on several hosts"""

    subject = "agents"

    on: Annotated[
        Literal["", "agents", "kubernetes", "ray", "slurm"], Shown("{agents,kubernetes,ray,slurm}", "this machine")
    ] = ""
    """Who starts the run's agents, one per host. agents: you, by `penstock agent --ticket RUN/ticket.json`; slurm: srun
    on the nodes of this allocation (docs/slurm.md); ray: the Ray cluster of RAY_ADDRESS or of this machine
    (docs/ray.md); kubernetes: a JobSet that `penstock run` creates and that holds the whole run
    (docs/kubernetes.md)."""
    agents: Annotated[Positive | None, Shown("N", "one per node")] = None
    """With --on: number of agents of the run."""
    bind: Annotated[str, Shown("HOST:PORT", "loopback, any port")] = ""
    """With --on: where agents reach this machine, as a host name or IP address and the first of two ports."""
    ticket_keys: Annotated[str, Shown("FILE", "new ones")] = ""
    """With --on: a file with the ticket's keys, so that one ticket serves all starts of a job."""
    place: Annotated[tuple[str, ...], Shown("POOL=AGENTS …", "the generator on all agents but the first")] = ()
    """With --on: numbers of the agents of each pool, such as trainer=0-1 generator=2,3."""


@dataclass(frozen=True, kw_only=True)
class SubmitFlags:
    """Flags of a run that is handed to a cluster manager"""

    subject = "cluster_manager"

    submit: bool = False
    """With --on slurm: submit the run as a batch job, and follow it. Options of sbatch come after a --, such as --nodes
    4 --gpus-per-node 8, or --array 0-4 for one run per seed."""
    dry_run: bool = False
    """Only print what would be submitted: with --on slurm --submit the batch script; with --on kubernetes the manifests
    for `kubectl apply -f -`, which hold a secret."""
    image: Annotated[str, Shown("IMAGE", "none")] = ""
    """With --on kubernetes: the container image, with penstock and the program in it."""
    claim: Annotated[str, Shown("NAME", "none")] = ""
    """With --on kubernetes: the PersistentVolumeClaim that all Pods mount as /runs, for the run folder."""
    namespace: Annotated[str, Shown("NAME", "that of kubectl's context")] = ""
    """With --on kubernetes: the namespace."""
    env_secret: Annotated[str, Shown("NAME", "none")] = ""
    """With --on kubernetes: a Secret whose keys become environment variables of all Pods, such as HF_TOKEN."""
    gpus_per_agent: Count = 0
    """With --on kubernetes: GPUs (nvidia.com/gpu) of each agent's Pod."""
    cpus_per_agent: Positive = 2
    """With --on kubernetes: CPUs of each agent's Pod."""
    memory_per_agent: Annotated[str, Shown("QUANTITY")] = "8Gi"
    """With --on kubernetes: memory of each agent's Pod, its /dev/shm included."""


@dataclass(frozen=True)
class RunFlags(SubmitFlags, AgentsFlags, MachineFlags, ProgramFlags, RunOptions):
    """Flags of every program"""

    out: Annotated[str, Shown("DIR", "runs/PROGRAM-DATE-TIME")] = ""
    """The run folder: new or empty."""
    resume: Literal["never", "auto"] = "never"
    """auto: continue the run in --out from its last checkpoint, if this command line has started one there. So one
    command serves the first start of a job and all restarts."""

    def options(self, model: str) -> RunOptions:
        """Only the run's options, with a model directory ("" or "new": untrained)."""
        shared = {field.name: getattr(self, field.name) for field in fields(RunOptions)}
        return RunOptions(**{**shared, "model": "" if model == NEW else model})


@dataclass(frozen=True)
class ShowFlags(ProgramFlags):
    """Flags of show"""

    format: Literal["text", "mermaid", "svg", "json"] = "text"
    """Format of the output: text reads like the program; json can be loaded back."""
    evaluation: bool = False
    """Show the program's evaluation instead of the program."""
    out: Annotated[str, Shown("FILE", "standard output")] = ""
    """The file to write."""


@dataclass(frozen=True)
class CheckFlags(RunFlags):
    """Flags of check, which are those of a run"""

    # A plain int: `check` reports an invalid number of groups among the faults.
    batch: int = RunOptions.batch
    """Fresh prompt groups per update."""


@dataclass(frozen=True)
class Planning:
    """Flags of what to plan for"""

    subject = "planning"

    cluster: Annotated[str, Shown("SPEC", "needed for a plan")] = ""
    """Hosts x GPUs x kind, such as 32x8xH100, or 8xH100 for one host, several joined by "+"; a TOML file; or "this":
    this machine, as `penstock doctor --measure` has measured it."""
    model: Annotated[str, Shown("NAME", "needed for a plan")] = ""
    """A shape such as llama-8b or qwen3-0.6b, a model directory with its config.json, or a name of the Hub."""
    lengths: Annotated[str, Shown("MEAN,SIGMA|FILE|RUN", "1000,0.7, or less where --max-tokens is below 4,000")] = ""
    """Lengths of responses in tokens: mean and sigma of a lognormal, a file with a length per line, or the folder of a
    finished run."""
    max_tokens: Positive = 4096
    """Tokens at which a response is cut."""
    max_prompt: Positive = RunOptions.max_prompt
    """Tokens of the longest prompt, or conversation before its last turn; slots and micro-batches have room for it."""
    prompt_tokens: Count = 128
    """Mean tokens of a prompt."""
    environment_s: Annotated[
        float | None, Meta(ge=0, le=1e9), Shown("SECONDS", "1 where the program has an environment")
    ] = None
    """Seconds that an environment takes for one turn of a conversation. (--lengths are of all turns together.)"""
    kept: Annotated[float | None, Shown("SHARE", "0.7 where the program has a filter")] = None
    """Share of the groups that all filters (keep) of the program let through; the others are replaced."""
    micro_tokens: Positive = 16384
    """Most tokens of a micro-batch; never fewer than the longest sequence."""
    slots: Positive = RunOptions.slots
    """Most responses that a generator decodes at the same time."""
    calibrate: Annotated[str, Shown("RUN", "none")] = ""
    """The folder of a finished run on GPUs of this cluster, to which the cost model is fitted."""
    generator_precision: Annotated[GeneratorPrecision, AS_PROGRAM] = RunOptions.generator_precision
    """Format in which generators compute, unless the program's broadcast names one."""
    lora: Count = RunOptions.lora
    """Rank of LoRA adapters, which the policy trains and sends instead of its weights; 0: none."""
    lora_targets: Annotated[tuple[str, ...], Shown("NAME …", "all linear layers")] = RunOptions.lora_targets
    """Linear layers with adapters, such as q_proj v_proj."""
    mesh: Annotated[tuple[str, ...], Shown("POOL=MESH …")] = ()
    """Fixed meshes, such as trainer=fsdp16xtp2 generator=tp8; the others are searched."""
    time_limit: Seconds = 120.0
    """Seconds after which the search ends. It then returns its best plan, and a bound on how much better one can be. A
    first plan takes a second or two in any case."""


@dataclass(frozen=True)
class DrawingFlags(OutputFlags):
    """Flags of how a schedule is shown"""

    subject = "drawing"

    width: Count = 0
    """Columns of the drawing; 0 for the terminal's."""
    svg: Annotated[str, Shown("FILE", "none")] = ""
    """Draw the schedule as SVG, with the first 8 replicas of each pool."""
    html: Annotated[str, Shown("FILE", "none")] = ""
    """Draw it as an HTML page that can be zoomed and needs no network."""
    trace: Annotated[str, Shown("FILE", "none")] = ""
    """Write the schedule as a Chrome trace, for https://ui.perfetto.dev."""


@dataclass(frozen=True)
class SimulateFlags(DrawingFlags, ProgramFlags, Planning):
    """Flags of simulate"""

    plan: Annotated[str, Shown("FILE", "none")] = ""
    """Simulate the plan that `penstock plan … --out FILE` wrote. With --cluster and --model a plan is made; with
    neither, --duration gives the seconds."""
    updates: Positive = 20
    """Updates to simulate."""
    batch: Annotated[Positive | None, Shown("INT", "8, or 256 with --cluster")] = None
    """Fresh prompt groups per update."""
    generators: Positive = RunOptions.generators
    """Replicas of the generator; a plan has its own."""
    versions: Literal["free", "pinned"] = RunOptions.versions
    """Versions that groups may use: see `penstock run`."""
    order: Literal["strict", "ready"] = RunOptions.order
    """Groups that an update takes: the next ones in order, or finished ones while the lag still holds for all
    others."""
    duration: Annotated[tuple[str, ...], Shown("NODE=S[~SIGMA] …")] = ()
    """Seconds of each firing of a node, such as generate=0.05; generate=0.05~0.5 draws them from a lognormal with this
    mean and sigma. publish, wire and swap are the parts of a weight sync. A generator decodes as many groups at once as
    fit its --slots. The default of a fake node is its option ms. With a plan, models and syncs take their planned
    seconds, and other nodes 0 by default."""
    segment: Annotated[tuple[str, ...], Shown("NODE=S …")] = ()
    """Seconds after which a firing of a node pauses, such as generate=2; it continues on any replica with room.
    Default: never."""
    drop: Annotated[tuple[str, ...], Shown("NODE=SHARE …")] = ()
    """Share of the groups that a filter drops, such as keep=0.3. Default: none."""
    again: Annotated[tuple[str, ...], Shown("NODE=SHARE …")] = ()
    """Share of the turns after which the answering node asks for another turn, such as answer=0.5. Default: all, up to
    the bound."""
    seed: Seed = RunOptions.seed
    """Seed of all draws: lengths of responses, seconds with a sigma, dropped groups, further turns."""


@dataclass(frozen=True)
class PlanFlags(ProgramFlags, Planning):
    """Flags of plan"""

    batch: Positive = 256
    """Prompt groups per update."""
    out: Annotated[str, Shown("FILE", "none")] = ""
    """Also write the plan to a file, for `penstock run PROGRAM --plan FILE`."""


@dataclass(frozen=True)
class AgentFlags:
    """Join the controller of a run on another machine, and start the processes it asks for here.

    `penstock run … --on agents --agents N` writes RUN/ticket.json, readable by you only, for all of its agents, and
    waits for them. Start one on each host, in any way, also with torchrun:
      penstock agent --ticket RUN/ticket.json
      torchrun --standalone -m penstock.agent --ticket RUN/ticket.json

    `penstock run … --cluster FILE` with a host whose agent is "external" writes a join file for that host into
    RUN/keys, readable by you only, and waits. Take it there over a channel you trust (scp), and start the agent: by
    hand, or as srun, a container or a batch job would. Weights travel unencrypted: the hosts need a trusted network.
    docs/cluster-file.md has a cluster file of two hosts, and all of its keys.

    Example:
      penstock agent b.json --folder /scratch/run"""

    join: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="JOIN_FILE", help_behavior_hint="")] = ""
    """The join file of this host, with the controller's address and the keys."""
    ticket: Annotated[str, Shown("FILE", "none")] = ""
    """The ticket of a run, instead of a join file; waits until the file exists."""
    address: Annotated[str, Shown("HOST", "that of the route to the launcher")] = ""
    """With a ticket: the address at which other hosts reach this one."""
    folder: Annotated[str, Shown("DIR", "as on the controller's host")] = ""
    """The run folder as this machine sees it, or a folder of this machine for logs and its part of checkpoints, which
    is made if needed."""
    grace: Annotated[Seconds | None, Shown("SECONDS", "the run's --grace")] = None
    """Seconds from SIGTERM or SIGUSR1 (which cluster managers send before a preemption) to the end of this agent. Its
    ranks work until then."""
    wait: Annotated[Seconds, Shown("SECONDS")] = 300.0
    """With a ticket: seconds to wait for the file, and then for its launcher."""
    requeue: bool = False
    """Exit with status 75 instead of 0 or 1 after such a signal, or if launcher or controller are gone, for a cluster
    manager that then starts an agent on another host."""


# The verbs that take a PROGRAM.
VERBS = {"run": RunFlags, "show": ShowFlags, "check": CheckFlags, "simulate": SimulateFlags, "plan": PlanFlags}

EXAMPLES = {
    "run": "penstock run {0} --lag 2 --updates 50" + "\n  penstock run {0} --in-process --updates 3 --plain",
    "show": "penstock show {0}\n  penstock show {0} --format svg --out graph.svg",
    "check": "penstock check {0} --batch 16",
    "plan": "penstock plan {0} --cluster 32x8xH100 --model llama-70b --batch 256 --lengths 1000,0.7",
    "simulate": "penstock simulate {0} --lag 2 --duration generate=0.05 score=0.005 --svg schedule.svg"
    + "\n  penstock simulate {0} --lag 2 --cluster 32x8xH100 --model llama-70b --html schedule.html"
    + "\n  penstock simulate --from runs/{0}-20250304-050607 --lag 2 --generators 3",
}
