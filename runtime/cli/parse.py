"""Parse a command line into a program's keyword arguments and a verb's flags, with tyro.

tyro prints help, and usage errors that are not known before; it leaves with SystemExit 0 and 2.
"""

import dataclasses
import json
import re
import sys
import tomllib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args, get_origin

import tyro

from penstock.graph.errors import Fault, GraphError, nearest
from penstock.graph.imports import path_of
from penstock.graph.interface import REQUIRED
from penstock.graph.node import NodeDef
from penstock.graph.program import Flag, Program
from penstock.runtime.cli.flags import (
    EXAMPLES,
    HELP,
    MARKERS,
    NO_PLAN,
    VERBS,
    MachineFlags,
    NodeOptions,
    Planning,
    as_typed,
    fitting_help,
    nearest_flag,
    readable,
    unknown_flags,
    with_help,
    with_plan,
    wrong_values,
)
from penstock.runtime.cli.tracing import CommandError, usage_errors
from penstock.runtime.control.run_config import annotations, check_limits
from penstock.runtime.record.errors import visible

if TYPE_CHECKING:
    from penstock.runtime.plan.run_plan import RunPlan


class Parsed(NamedTuple):
    """The program's options and the verb's flags. `typed` has the words of each flag that the user gives, on the
    command line or by --config, by the name of its field. `plan` is the plan of --plan."""

    options: dict[str, Any]
    flags: Any
    typed: dict[str, list[str]]
    plan: "RunPlan | None"


def parse(program: Program[..., Any], verb: str, name: str, argv: Sequence[str]) -> Parsed:
    """Parse the words after PROGRAM, which the user calls `name`.

    Raises CommandError for words, a config file or a plan that cannot be understood or contradict each other, and
    GraphError for options with the name of a flag of the verb. For `check`, clashes with flags of `run` are faults (see
    `clashes`), so these options keep their defaults here.
    """
    defaults = _verb_defaults(program, verb)
    taken = clashes(program, "run" if verb == "check" else verb)
    if taken and verb != "check":
        raise GraphError(*taken.values())
    own = [_Own(flag) for flag in program.flags if flag.name not in taken]
    options = dataclasses.make_dataclass(program.name, [option.field for option in own], kw_only=True, frozen=True)
    options.__doc__ = f"Keyword arguments of {program.path}"
    own_box = [("program", options, dataclasses.field())]
    # Several boxes in the help, but one namespace of flags: a user need not know whose flag it is.
    if HELP.intersection(argv):
        line = with_help(type(defaults), defaults, own_box)
    else:
        form = readable(type(defaults))
        line = dataclasses.make_dataclass("line", [*own_box, (verb, form, form(**vars(defaults)))], kw_only=True)
    known = dataclasses.asdict(defaults) | {o.flag.name: o.flag.default for o in own}
    of_nodes = partial(_node_options, program)
    if said := unknown_flags(argv, known, f"penstock {verb} {name}", of_nodes):
        behind = "\nOptions of sbatch stand behind a --: --submit -- --nodes 4" if "--submit" in argv else ""
        raise CommandError(f"{said}{behind}")
    hints = {name: kind for name, kind, _ in (option.field for option in own)} | annotations(type(defaults))
    config = _config_argv(argv, known, hints, of_nodes)
    argv = _spread(argv, known)
    if said := wrong_values(argv, hints):
        raise CommandError(said)
    typed = _typed([*config, *argv], known)
    plan = _plan_of(typed) if isinstance(defaults, MachineFlags) else None
    # With --on, the agents themselves say what their hosts have: leave out the plan's file of hosts.
    left_out = {"cluster"} if "on" in typed else set()
    planned = [word for key, words in plan.words.items() if key not in left_out for word in words] if plan else []
    summary = program.doc.partition("\nArgs:")[0].strip() or program.name
    try:
        with fitting_help():
            parsed: Any = tyro.cli(
                line,
                prog=f"penstock {verb} {name}",
                description=f"{summary}\n\nExamples:\n  {EXAMPLES[verb].format(name)}",
                args=[*planned, *config, *argv],
                config=MARKERS,
            )
    except SystemExit as leaving:
        # tyro may complain about words that the user has not typed: show where they come from.
        for file, words in (("plan", planned), ("config file", config)):
            if leaving.code and words:
                print(visible(f"The {file} stands for: {' '.join(words)}"), file=sys.stderr)
        raise
    given, flags = parsed.program, getattr(parsed, verb)
    if plan:
        if contrary := plan.contrary({key: value for key, value in vars(flags).items() if key in typed}):
            raise CommandError("\n".join(map(str, contrary)))
        flags = with_plan(flags, plan.options)
    with usage_errors():
        check_limits(flags)
    if isinstance(flags, Planning) and flags.cluster:
        _tell_other_lengths(program, name, flags, typed)
    return Parsed({o.flag.name: o.value(getattr(given, o.flag.name)) for o in own}, flags, typed, plan)


def _tell_other_lengths(program: Program[..., Any], name: str, flags: Planning, typed: Collection[str]) -> None:
    """Print a note with the values that a plan is for, if runs of the program have other defaults."""
    planned = vars(flags)
    keys = [key for key in _not_planned(program) if key not in {*typed, "model"}]
    if others := [key for key in keys if planned[key] != program.defaults[key]]:
        here, there = (
            " ".join(f"--{key.replace('_', '-')} {as_typed(values[key])}" for key in others)
            for values in (planned, program.defaults)
        )
        print(visible(f"note: planned for {here}; runs of {name} have {there} by default"), file=sys.stderr)


def _spread(argv: Sequence[str], known: Mapping[str, Any], place: str = "") -> list[str]:
    """The words, where a range of generators (2..8) becomes two flags if both are known. Raises CommandError, whose
    message begins with `place`, for a range that is none."""
    if "first_generators" not in known:
        return list(argv)
    found: list[str] = []
    for before, word in pairwise(["", *argv]):
        spread = re.fullmatch(r"(--generators=)?(.*)\.\.(.*)", word)
        if spread and (spread[1] or before == "--generators"):
            prefix, first, most = spread.groups(default="")
            if not (first.isdecimal() and most.isdecimal() and 1 <= int(first) <= int(most)):
                needed = "a range from at least 1 to as many or more, such as 2..8"
                raise CommandError(f"{place}--generators: given {first + '..' + most!r}, needed {needed}")
            found += [f"{prefix}{most}", f"--first-generators={first}"]
        else:
            found.append(word)
    return found


def _typed(words: Sequence[str], known: Mapping[str, Any]) -> dict[str, list[str]]:
    """The words of each flag, including the flag itself, by the name of its field. If a flag is given twice, the last
    one counts."""
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            name = word.partition("=")[0].removeprefix("--").replace("-", "_")
            own = found[name if name in known else name.removeprefix("no_")] = []
        if found:
            own.append(word)
    return found


def _plan_of(typed: Mapping[str, Sequence[str]]) -> "RunPlan | None":
    """Read the plan that --plan names; None if there is none."""
    words = typed.get("plan", ())
    file = words[0].partition("=")[2] or (words[1] if len(words) > 1 else "") if words else ""
    if file in ("", NO_PLAN):
        return None
    # Imports numpy and the cost model, which other command lines do not need.
    from penstock.runtime.plan.roles import PlanError
    from penstock.runtime.plan.run_plan import RunPlan

    try:
        return RunPlan.read(Path(file))
    except PlanError as error:
        raise CommandError(str(error)) from None


def clashes(program: Program[..., Any], verb: str) -> dict[str, Fault]:
    """The program's options with the name of a flag of the verb, each with its fault."""
    # On one command line, a name can have only one meaning.
    names = {field.name for field in dataclasses.fields(VERBS[verb])}
    return {
        flag.name: Fault(
            "reserved-flag",
            f"{program.name}: option {flag.name!r}",
            f"the name of a flag of `penstock {verb}`, --{flag.name.replace('_', '-')}",
            "another name for the program's option",
            program.where,
        )
        for flag in program.flags
        if flag.name in names
    }


def verb_help(verb: str, programs: Mapping[str, str]) -> None:
    """Print the help of `penstock VERB --help`, without a program."""
    width = max(map(len, programs), default=0)
    names = "".join(f"\n  {name:<{width}}  {summary}" for name, summary in programs.items())
    description = (
        f"PROGRAM is package.module:function, path/to/file.py[:function], or built in:{names}\n\n"
        f"Its keyword arguments are flags too: `penstock {verb} PROGRAM --help` shows them.\n\n"
        f"Examples:\n  {EXAMPLES[verb].format(next(iter(programs), 'PROGRAM'))}"
    )
    flags: Any = with_help(VERBS[verb])
    with fitting_help():
        tyro.cli(flags, prog=f"penstock {verb} PROGRAM", description=description, args=["--help"], config=MARKERS)


def _verb_defaults(program: Program[..., Any], verb: str) -> Any:
    """The verb's flags with the program's own defaults for them."""
    flags = VERBS[verb]()
    known = {field.name for cls in VERBS.values() for field in dataclasses.fields(cls)}
    for key in program.defaults.keys() - known:
        raise CommandError(f"{program.where}: defaults: there is no flag {key!r}{nearest(key, known)}")
    fitting = {field.name for field in dataclasses.fields(flags)} & program.defaults.keys()
    if isinstance(flags, Planning):
        fitting -= set(_not_planned(program))
    return dataclasses.replace(flags, **{key: program.defaults[key] for key in fitting})


def _not_planned(program: Program[..., Any]) -> list[str]:
    """The program's defaults that do not apply to a plan: it has its own model and lengths, not those of a demo."""
    own = {field.name for field in dataclasses.fields(Planning)}
    return [key for key in program.defaults if key in own]


class _Own:
    """One of the program's keyword arguments, as a field that tyro can parse."""

    def __init__(self, flag: Flag) -> None:
        self.flag = flag
        self.is_function = callable(flag.default) and flag.default is not REQUIRED
        is_path = flag.is_path or flag.is_paths
        self.is_json = not self.is_function and not is_path and not _is_readable(flag.annotation)

    @property
    def field(self) -> tuple[str, Any, Any]:
        """Name, annotation and default, for `make_dataclass`."""
        flag, annotation, default = self.flag, self.flag.annotation, self.flag.default
        metavar = hint = None
        if self.is_function:
            annotation, default, metavar = str, path_of(default), "MODULE:NAME"
        elif flag.is_path:
            annotation, metavar, hint = str, "PATH", "(default: none)" if default is None else None
            default = default if default is REQUIRED else str(default or "")
        elif flag.is_paths:
            annotation, metavar = tuple[str, ...], "PATH …"
            default = default if default is REQUIRED else tuple(map(str, default))
        elif self.is_json:
            annotation, metavar = str, "JSON"
            default = default if default is REQUIRED else json.dumps(default)
        argument = tyro.conf.arg(help=flag.help or None, metavar=metavar, help_behavior_hint=hint)
        described = Annotated[annotation, argument]  # type: ignore[valid-type]
        if default is REQUIRED:
            return flag.name, described, dataclasses.field()
        if isinstance(default, list):  # a dataclass allows no list as default, and tyro warns about a tuple
            return flag.name, described, dataclasses.field(default_factory=lambda: default)
        return flag.name, described, dataclasses.field(default=default)

    def value(self, given: Any) -> Any:
        if self.is_function:
            return {"path": given}
        if self.flag.is_path:
            return str(given) or None
        if not self.is_json:
            return list(given) if isinstance(given, tuple) else given
        try:
            return json.loads(given)
        except ValueError:
            return given


def _is_readable(annotation: Any) -> bool:
    """True if tyro can parse a value of this annotation from words."""
    if annotation in (int, float, str, bool, type(None)):
        return True
    origin = get_origin(annotation)
    if origin is Annotated:
        return _is_readable(get_args(annotation)[0])
    arguments = [a for a in get_args(annotation) if a is not Ellipsis]
    if origin is None or not arguments:
        return False
    return str(origin) == "typing.Literal" or (origin is not dict and all(map(_is_readable, arguments)))


def _node_options(program: Program[..., Any]) -> dict[str, str]:
    """The options of the nodes in the namespace of the program's file, by name, each with the names of its nodes."""
    found: dict[str, list[str]] = {}
    for value in program.fn.__globals__.values():
        # A node that cannot be read is reported where it is called. Annotations are code, which may raise anything.
        with suppress(Exception):
            for option in value.interface.options if isinstance(value, NodeDef) else ():
                found.setdefault(option, []).append(value.__name__)
    return {option: " and ".join(dict.fromkeys(names)) for option, names in found.items()}


def _config_argv(
    argv: Sequence[str], known: Mapping[str, Any], hints: Mapping[str, Any], of_nodes: NodeOptions
) -> list[str]:
    """The words of the file of `--config FILE`, if it is among the words. `known` are the flags with their defaults,
    `hints` their annotations; `of_nodes` returns the options of nodes."""
    file = ""
    for word, following in pairwise([*argv, ""]):
        if word == "--config":
            file = following
        elif word.startswith("--config="):
            file = word.partition("=")[2]
    if not file:
        return []
    try:
        table = tomllib.loads(Path(file).read_text())
    except OSError as error:
        raise CommandError(f"--config {file}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CommandError(f"--config {file}: given something that is not TOML: {error}") from None
    words: list[str] = []
    for key, value in table.items():
        name = key.replace("-", "_")
        if isinstance(value, dict):
            raise CommandError(f"--config {file}: {key!r} is a table, needed a value (flags are not grouped)")
        if name == "config":
            needed = "the keys of that file in this one: a config file names no other one"
            raise CommandError(f"--config {file}: given config = {value!r}, needed {needed}")
        if name not in known:
            others = known.keys() - {"config"}
            raise CommandError(f"--config {file}: unknown key {key!r}{nearest_flag(key, others, of_nodes, '')}")
        words += _words(name.replace("_", "-"), value, known[name])
    place = f"--config {file}: "
    words = _spread(words, known, place)
    if said := wrong_values(words, hints, place):
        raise CommandError(said)
    return words


def _words(flag: str, value: Any, default: Any) -> list[str]:
    if not (isinstance(value, bool) and isinstance(default, bool)):
        values = value if isinstance(value, list) else [value]
        return [f"--{flag}", *(json.dumps(each) if isinstance(each, bool) else str(each) for each in values)]
    # A switch at its default has no word in tyro.
    return [] if value == default else [f"--{flag}" if value else f"--no-{flag}"]
