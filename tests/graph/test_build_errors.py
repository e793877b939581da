"""What tracing refuses, at the line of the program."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock.graph import (
    Advantages,
    GraphError,
    Metrics,
    Rewards,
    broadcast,
    load,
    node,
    program,
    trace,
)

PROGRAMS = Path(__file__).with_name("programs_for_tests.py")
TYPES = "penstock.graph.types"


def program_of(name: str) -> Any:
    return load(f"{PROGRAMS}:{name}")


def line(mark: str) -> str:
    """ "file:line" of the line that ends with `# mark`."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{1 + next(i for i, text in enumerate(lines) if text.endswith(f'# {mark}'))}"


def fails(make: Callable[[], object], *words: str, mark: str | None = None) -> None:
    """Raises a GraphError that holds all the words, at the marked line."""
    with pytest.raises(GraphError) as raised:
        make()
    for word in words:
        assert word in str(raised.value)
    if mark is not None:
        assert raised.value.faults[0].where == line(mark)


class Answers:
    maker = "mine:open_answers"
    pool = "shelf"


class Model:
    maker = "mine:make_model"
    pool = "gpu"


@node(pool="scorer")
def judge(answers: Answers) -> Rewards:
    raise NotImplementedError


@node(pool="scorer")
def both(rewards: Rewards) -> tuple[Rewards, Advantages]:
    raise NotImplementedError


class Pair(NamedTuple):
    reward: Rewards
    advantage: Advantages


@node(pool="scorer")
def pair(rewards: Rewards) -> tuple[Pair, Metrics]:
    raise NotImplementedError


@node(pool="trainer", clock="update")
def learn(model: Model, rewards: Rewards, extra: Rewards | None = None, *, rate: float = 0.1) -> tuple[Model, Metrics]:
    raise NotImplementedError


@node(pool="scorer")
def mean(rewards: Rewards) -> Metrics:
    raise NotImplementedError


def failing(body: Callable[[Any, Any], Any], *words: str, mark: str | None = None) -> None:
    @program
    def faulty(model: Model, answers: Answers) -> Any:
        return body(model, answers)

    fails(lambda: trace(faulty), *words, mark=mark)


def test_expressions_with_handles_say_to_make_a_node() -> None:
    def product(model: Any, answers: Any) -> Any:
        rewards = judge(answers)
        return learn(model, rewards - 0.01 * rewards)  # an expression

    words = ("<the program's value judge>", "an expression with it", "put the expression in a function with @node")
    failing(product, *words, mark="an expression")
    uses: tuple[Callable[[Any], Any], ...] = (
        lambda x: x + 1,
        lambda x: 1 + x,
        lambda x: -x,
        lambda x: x > 0,
        lambda x: x == x,
        lambda x: x[0],
        lambda x: len(x),
        lambda x: list(x),
        lambda x: bool(x),
        lambda x: float(x),
        lambda x: x(1),
        lambda x: 1 in x,
        lambda x: x.lengths(),
    )
    for use in uses:
        failing(lambda model, answers: use(answers), "the program's value answers", "needed  a node")  # noqa: B023


def test_one_output_is_not_unpacked() -> None:
    def body(model: Any, answers: Any) -> Any:
        first, _ = judge(answers)  # unpacked
        return learn(model, first)

    failing(body, "an expression with it (iter)", mark="unpacked")


def test_inputs_are_checked_at_the_call() -> None:
    call: Any = learn
    ask: Any = judge
    failing(lambda m, a: call(m), "learn: input 'rewards'", "given   nothing", "a value of type Rewards")
    failing(lambda m, a: call(m, 3), "learn: input 'rewards'", "given   3", "a value of type Rewards of this program")
    failing(lambda m, a: ask(a, a), "judge: inputs", "2 positional values", "1 (answers)")
    failing(lambda m, a: ask(a, answers=a), "judge: input 'answers'", "two values")
    failing(lambda m, a: call(m, ask(a), rat=0.2), "learn: option 'rat'", "nearest: rate")
    failing(lambda m, a: call(m, ask(a), rate=ask(a)), "learn: option 'rate'", "needed  a constant")
    failing(lambda m, a: call(m, ask(a), rate={1, 2}), "learn: option 'rate'", "given   {1, 2} (set)")
    failing(lambda m, a: call(m, ask(a), rate=float("nan")), "given   nan", "needed  a finite number")
    failing(lambda m, a: call(m, ask(a), rate={"path": "x"}), "learn: option 'rate'", "(dict)")
    failing(lambda m, a: call(m, ask(a), rate=lambda: 1), "learn: option 'rate'", "<lambda>\n    needed  a number")
    failing(lambda m, a: call(m, ask(a), rate=ask), "learn: option 'rate'", ":judge\n    needed  a number")
    failing(lambda m, a: call(m, ask(a), rate=partial(abs)), "learn: option 'rate'", "needed  a number")
    inside: Any = partial(call, rate=judge)
    made: Any = lambda: 1  # noqa: E731
    failing(lambda m, a: broadcast(m, every=inside), "option 'every': option 'rate'", "needed  a number")
    failing(lambda m, a: broadcast(m, every=made), "option 'every'", "`def NAME(…)` at the top of a module")
    failing(lambda m, a: broadcast(3), "broadcast", "given   3")


def told(body: Callable[[Any, Any], Any], **options: Any) -> list[tuple[str, str]]:
    """What `trace` says is wrong with a program, and what it was given."""

    @program
    def faulty(model: Model, answers: Answers, *, rate: float = 0.1, other: float = 0.1) -> Any:
        return body(model, answers)

    with pytest.raises(GraphError) as raised:
        trace(faulty, options, batch=0)
    return [(fault.what, fault.given) for fault in raised.value.faults]


def test_options_that_are_left_out_are_told_with_all_that_check_finds() -> None:
    def body(model: Any, answers: Any) -> Any:
        call: Any = learn
        broadcast(model, lag=-1)
        call(model, judge(answers), rat=0.2, rate={1})  # first
        return call(model, judge(answers), speed=judge(answers))

    assert told(body) == [
        ("batch", "0"),
        ("broadcast: output 'out'", "broadcast (Weights), which no node reads and faulty does not return"),
        ("broadcast: lag", "-1"),
        ("learn: option 'rat'", "0.2"),
        ("learn: option 'rate'", "{1} (set)"),
        ("learn: output 'out'", "learn (Model), which no node reads and faulty does not return"),
        ("learn: option 'speed'", "<the program's value judge_3>"),
        ("learn_2 updates a value", f"'model', which learn ({line('first')}) updates too"),
    ]


def test_a_call_that_cannot_be_gone_on_from_is_told_after_the_options_before_it() -> None:
    def body(model: Any, answers: Any) -> Any:
        call: Any = learn
        return call(call(model, judge(answers), rat=0.2), speed=1)

    assert told(body) == [
        ("learn: option 'rat'", "0.2"),
        ("learn: option 'speed'", "1"),
        ("learn: input 'rewards'", "nothing"),
    ]


def test_all_options_of_a_program_that_cannot_be_written_down_are_told() -> None:
    given = [("faulty: option 'other'", "{1} (set)"), ("faulty: option 'rate'", "nan")]
    assert told(lambda m, a: learn(m, judge(a)), rate=float("nan"), other={1}) == given


def test_results_name_arguments() -> None:
    failing(lambda m, a: None, "faulty: its result", "given   None", "a dict or dataclass of them")
    failing(lambda m, a: (m, a), "faulty: its result", "a dict or dataclass")
    failing(lambda m, a: {"modle": m}, "'modle', which is no argument", "nearest: model")
    failing(lambda m, a: {"model": 3}, "faulty: its result 'model'", "given   3")


def test_values_of_another_program_are_refused() -> None:
    kept: list[Any] = []

    @program
    def first(model: Model, answers: Answers) -> Model:
        kept.append(answers)
        return learn(model, judge(answers))

    trace(first)
    failing(lambda m, a: learn(m, judge(kept[0])), "judge: input 'answers'", "a value of another program")
    fails(lambda: judge(kept[0]), "judge", "a value of a program that has been traced")


def test_options_of_a_trace_are_checked() -> None:
    aipo = program_of("aipo")
    fails(lambda: trace(aipo, {"sample": 3}), "aipo: option 'sample'", "given   3", "the nearest: samples")
    fails(lambda: trace(aipo.fn), "trace", "a function with @program")


def test_a_programs_signature_is_checked() -> None:
    @program
    def defaulted(model: Model, answers: Answers, samples: int = 8) -> Model:
        return learn(model, judge(answers))

    @program
    def starred(model: Model, *answers: Answers) -> Model:
        return learn(model, judge(answers[0]))

    @program
    def texted(model: "Model | int", answers: Answers) -> Any:
        return learn(model, judge(answers))  # type: ignore[arg-type]

    fails(lambda: trace(defaulted), "argument 'samples'", "the default 8", "options stand after `*`")
    fails(lambda: trace(starred), "argument 'answers'", "variadic positional")
    fails(lambda: trace(texted), "argument 'model'", "needed  a class")


def test_broadcast_works_in_programs_only() -> None:
    fails(lambda: broadcast(object()), "a call outside of a program")


def test_a_program_is_still_its_function() -> None:
    @program
    def plain(model: Any, answers: Any, *, extra: int = 1) -> Any:
        return {"model": model, "answers": answers, "extra": extra}

    assert plain(1, 2, extra=3) == {"model": 1, "answers": 2, "extra": 3}
