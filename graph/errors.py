"""Faults of a program: their form, their codes, and where in the user's file they are.

A `Fault` says what is wrong, what was given, what is needed and where it was written. Its `code` is one of `CODES`,
a stable word that tests and tools match on; the texts may change. `check` returns faults, everything else raises them
in a `GraphError`. The documentation's page of check's errors is generated from the table in this file.
"""

import difflib
import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType
from typing import NamedTuple


class Code(NamedTuple):
    """What a code means: the `section` of the table, the cause, and the cure."""

    section: str
    cause: str
    cure: str


def _read(table: str) -> dict[str, Code]:
    codes: dict[str, Code] = {}
    section = ""
    for line in table.strip().splitlines():
        if line.startswith("# "):
            section = line[2:]
        else:
            code, cause, cure = (cell.strip() for cell in line.split("|"))
            codes[code] = Code(section, cause, cure)
    return codes


CODES = _read("""
# Edges and types
wrong-type             | The type of the value is not that of the input. | Call the node that makes the needed type.
unknown-input          | An edge begins at a name that the graph lacks. | Write it again by `show --format json`.
unknown-output         | An edge begins at an output that the node lacks. | Use one of those that the message lists.
duplicate-name         | Two calls, arguments or values have one name. | Give each a name of its own.
not-a-value            | An input is no value of this program. | Pass an argument or what a node returned, no constant.
missing-input          | A call leaves out a required input. | Pass a value of the type that the message names.
input-given-twice      | An input is given by place and by keyword. | Give it once.
too-many-inputs        | A call has more positional values than inputs. | Pass options by keyword.
not-a-list             | A single value is given where the input is a list. | Write `[value]`.
unused-output          | No node reads an output, and it is not returned. | Read it, return it, or remove the call.
unused-argument        | No node reads an argument of the program. | Use it or remove it.
bad-annotation         | An annotation is missing or is not a class. | Annotate with a class, such as `Rollouts`.
unresolved-annotation  | An annotation names a type that is missing at run time. | Import it outside of `TYPE_CHECKING`.
# Clocks and pools
unknown-clock          | A clock is neither "group" nor "update". | Use one of the two.
slower-input           | A per-group node reads what is made once per update. | Use `broadcast` or `.per_update`.
no-group-input         | A per-group node has no per-group input. | Pass one, or write `node.per_update(…)`.
no-input               | A per-update node has no input. | Pass what it waits for, such as the rewards.
no-update              | No node fires per update, so that a run has no end. | Add an update, or `accuracy(rewards)`.
other-pool             | A node reads a carried value of another pool. | Write `.on("pool")`, or read it by `broadcast`.
every-per-group        | `.every(k)` is written on a per-group node. | Write `node.per_update.every(k)`.
every-skips-groups     | A node with `.every(k)` reads values of each group. | Let a per-update node gather them.
reader-too-often       | A node reads each update what another makes each k-th. | Give the reader the same `.every(k)`.
# Carried values
cycle-without-lag      | Feedback does not pass through a broadcast. | Write `broadcast(value, lag=k)`.
changing-input         | A per-group node reads a value that updates change. | Write `broadcast(value, lag=k)`.
update-cycle           | Updates wait for each other's next values. | Pass the next value of one to the other.
updated-twice          | Two nodes update one carried value. | Pass the first one's result to the second.
not-carried            | A source or an output is used as a carried value. | Use an argument that the program returns.
no-next-value          | A carried argument is not returned. | Return it: itself, if it never changes.
two-results            | A carried value has two results. | Return one next value for each.
other-argument         | An argument is returned as another one's next value. | Copy it by a node, such as `refresh`.
shared-result          | One output is the next value of two arguments. | Make two outputs.
result-per-group       | A next value is made per group or by a construct. | Make it by a per-update node.
bad-result             | The program does not return carried values. | Return a value, or a dict or dataclass of them.
unknown-result         | The program returns a value for an unknown argument. | Use the names of its arguments.
no-maker               | An argument has no type, or one without `maker`. | Annotate it, as in `prompts: Prompts`.
evaluation-mismatch    | The evaluation reads a value that the program lacks. | Write `evaluate.of(policy="solver")`.
# Numbers and options
bad-lag                | `lag` is missing, negative or no whole number. | Write `broadcast(policy, lag=k)`.
bad-every              | `every` is no positive whole number. | Correct it.
weights-too-seldom     | `every` is larger than `lag` + 1. | Reduce `every` or increase `lag`.
bad-samples            | `samples` is no positive whole number. | Correct it.
bad-batch              | `batch` is no positive whole number. | Correct it.
bad-count              | `epochs` or `minibatches` is no positive whole number. | Correct it.
indivisible-batch      | `minibatches` does not divide the batch. | Choose a divisor.
unknown-option         | A call has an option that nothing takes. | Use one of the nearest names.
missing-option         | An option without a default is left out. | Give it.
field-without-default  | A field of a `@carried` class has no first value. | Give it a default, or write `make`.
ambiguous-option       | Both nodes of `alternate` have the option. | Give the answering one its own by `.given`.
value-as-option        | A value of the program is passed as an option. | Pass it by position.
not-constant           | An option is no constant, function or node. | Pass numbers, texts, lists or dicts of them.
local-function         | A lambda, or what a function defines, is used. | Define it at the top of a module.
partial-by-place       | A `partial` has positional arguments. | Bind by keyword.
wrong-option-type      | An option is not what its annotation says. | Pass what the message says is needed.
out-of-range           | An option is outside its range. | Correct it.
value-while-tracing    | Arithmetic, `if` or an attribute is used on a value. | Put the expression into a node.
reserved-flag          | A program's option has the name of a flag. | Rename the option.
# Constructs
outside-program        | A construct or value is used in plain code. | Call it in a function with `@program`.
not-a-program          | `trace` is given a plain function. | Write `@program` above it.
not-a-node             | `alternate` is given a plain function. | Write `@node` above it.
unknown-construct      | A graph has a construct that the language lacks. | Write it again by `show --format json`.
bad-construct          | A construct has wrong inputs, outputs, clock or lag. | Write it again by `show --format json`.
bad-name               | A name is no plain word. | Use letters, digits and `_`.
no-predicate           | `keep` has no function to decide by. | Pass `when=`.
delay-of-frozen        | `delay` of a value that never changes. | Read it directly.
delay-of-model         | `delay` of a model, of which it would keep copies. | Use `broadcast`, or delay a small value.
delay-beside-filter    | A filter and a delay are in one program. | Remove one of them.
delay-of-every         | `delay` of a value that is made each k-th update. | Remove `.every(k)`.
delay-per-update       | A per-update node reads a delayed value. | Read the value directly.
unbounded-turns        | `turns` is missing or no positive whole number. | Write `turns=k`.
turns-per-update       | A per-update node takes turns. | Use a per-group node.
turns-with-state       | A node that takes turns passes a state on. | Use a stream, or no state.
turn-outside-alternate | An input reads the turn before, without turns. | Write `alternate(…)`.
speaker-inputs         | The speaking node lacks `conversation` and `replies`. | Add both, with the default None.
answer-inputs          | The answering node has more required inputs. | Bind them by `.given(name=…)`.
no-output              | A node that takes turns returns nothing. | Let it return what the other reads.
no-weights-input       | `.of` on a node without a single input of weights. | Use it on such a node, such as `generate`.
# What nodes and losses need
unmet-requirement      | A check of `@requires` refuses the call. | Read what the message says is needed.
too-few-samples        | A group-relative node gets one sample per prompt. | Increase `samples`.
too-many-samples       | The greedy baseline has several samples. | Write `samples=1` there.
missing-behaviour      | A loss needs μ, and the data has none. | Use samples of a generator, or another loss.
missing-reference      | A loss or `kl` needs a reference. | Pass `reference_logprobs(…)` as `reference`.
missing-proximal       | A loss needs π_old. | Pass `policy_logprobs(…)` as `proximal`.
missing-rollouts       | `by=` is given without rollouts. | Pass the rollouts.
two-learning-rates     | Both `lr` and `rate` are given. | Give one.
unbound-schedule       | A schedule lacks arguments. | Bind them with `functools.partial`.
duplicate-term         | Two loss terms have one name. | Give `name=`.
unscored-sampling      | Samples are truncated or greedy, and scored later. | Sample from the whole vocabulary.
unknown-model          | The weights' maker does not say its model. | Write `@opens(spec)` above the maker.
other-tokenizer        | A reader's model has another vocabulary. | Use models of one tokenizer.
prompt-too-long        | A prompt leaves no room for a response. | Shorten it, or reduce `--max-tokens`.
no-sandbox             | The sandbox does not work on this host. | Install bubblewrap, or allow running without it.
# Loading
nothing-to-load        | A path names no file, module or function. | Correct it; the nearest names follow.
missing-module         | A module is not installed, or not in this folder. | Install it, or run in its folder.
bad-parameter          | A parameter is variadic or positional only. | Use plain parameters, and options after `*`.
input-with-default     | An input of a node or program has a default. | Put options after `*`.
state-not-returned     | A node with `init` does not return its state first. | Return `tuple[State, Output]`.
stream-with-list       | A node with a stream has an input that is a list. | Use an input for each value.
not-a-graph            | A file holds no graph. | Write it again with `show --format json`.
unknown-node           | A duration is given for a name that is no node. | Use one of the nearest names.
missing-duration       | A node has no duration. | Give one for each node.
""")
"""The codes of all faults of tracing, checking and loading. One line each: code, cause, cure."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `code` is one of `CODES`; `where` is "file:line" of the call, "" for a graph that no file wrote."""

    code: str
    what: str
    given: str
    needed: str
    where: str = ""

    def __str__(self) -> str:
        # With the code, by which the page of errors has the cause and the cure.
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.what} [{self.code}]\n    given   {self.given}\n    needed  {self.needed}"


class GraphError(ValueError):
    """The user's program, path or graph cannot work; `faults` says why."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__("\n".join(map(str, faults)))
        self.faults = faults


def fault(code: str, what: str, given: str, needed: str, where: str | None = None) -> GraphError:
    """A `GraphError` of one fault, at the user's line unless `where` is given."""
    return GraphError(Fault(code, what, given, needed, caller() if where is None else where))


_LIBRARY = (f"{__package__}.", "penstock.nodes.")


def caller() -> str:
    """ "file:line" of the program that is being traced: the innermost frame outside this package and the nodes."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith(_LIBRARY) and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def defined(function: object) -> str:
    """ "file:line" of a function's definition; "" if it was not written in Python."""
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, CodeType) else ""


def nearest(name: str, names: Iterable[str]) -> str:
    """The names to choose from, the most similar first, as the end of a sentence."""
    known = sorted(set(names))

    def likeness(other: str) -> float:
        # The sorted letters count, too: most slips are two letters that changed places.
        pairs = ((name, other), (sorted(name), sorted(other)))
        return sum(difflib.SequenceMatcher(None, one, two).ratio() for one, two in pairs)

    if close := difflib.get_close_matches(name, known, n=3, cutoff=0.5):
        return f"; the nearest: {', '.join(sorted(close, key=likeness, reverse=True))}"
    return f"; there are: {', '.join(known[:12])}{', …' if len(known) > 12 else ''}" if known else ""
