"""The graph that tracing makes of a program, and what it refuses, at the line of the program."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from penstock.graph import (
    Advantages,
    Context,
    Graph,
    GraphError,
    Metrics,
    Policy,
    Prompts,
    Rewards,
    Rollouts,
    Weights,
    alternate,
    broadcast,
    check,
    delay,
    keep,
    load,
    node,
    program,
    trace,
)
from penstock.graph.interface import REQUIRED
from penstock.graph.ir import Output, Ref
from penstock.graph.node import Dropped, Filter
from penstock.graph.types import FrozenModel, Replies
from tests.graph.programs_for_tests import Engine as Slots

PROGRAMS = Path(__file__).with_name("programs_for_tests.py")


TYPES = "penstock.graph.types"


def program_of(name: str) -> Any:
    return load(f"{PROGRAMS}:{name}")


def line(mark: str) -> str:
    """Return "file:line" of the line that ends with `# mark`."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{1 + next(i for i, text in enumerate(lines) if text.endswith(f'# {mark}'))}"


def fails(make: Callable[[], object], code: str, *words: str, mark: str | None = None) -> None:
    """Assert that `make` raises a GraphError with all the words, whose first fault has the code and the marked line."""
    with pytest.raises(GraphError) as raised:
        make()
    assert raised.value.faults[0].code == code
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
def judge(answers: Answers) -> Rewards: ...
@node(pool="scorer")
def both(rewards: Rewards) -> tuple[Rewards, Advantages]: ...


class Pair(NamedTuple):
    reward: Rewards
    advantage: Advantages


@node(pool="scorer")
def pair(rewards: Rewards) -> tuple[Pair, Metrics]: ...
@node(pool="trainer", clock="update")
def learn(
    model: Model, rewards: Rewards, extra: Rewards | None = None, *, rate: float = 0.1
) -> tuple[Model, Metrics]: ...
@node(pool="scorer")
def mean(rewards: Rewards) -> Metrics: ...


def test_a_dataclass_result_carries_its_fields() -> None:
    @dataclass
    class State:
        first: Model
        second: Model

    @program
    def two(first: Model, second: Model, answers: Answers) -> State:
        rewards = judge(answers)
        return State(second=learn(second, rewards), first=learn(first, rewards))

    assert trace(two).results == (("first", Ref("learn_2")), ("second", Ref("learn")))


def test_metrics_are_no_output_and_several_outputs_have_names() -> None:
    @program
    def many(model: Model, answers: Answers) -> Model:
        rewards, _ = both(judge(answers))
        two = pair(rewards)
        assert isinstance(two, Pair)
        mean(two.reward)
        return learn(model, two.reward)

    graph = trace(many)
    assert [o.name for o in graph["both"].outputs] == ["0", "1"]
    assert [o.name for o in graph["pair"].outputs] == ["reward", "advantage"]
    assert graph["mean"].outputs == ()
    assert graph["learn"].outputs == (Output("out", f"{__name__}:Model"),)
    assert graph["pair"].inputs[0].ref == Ref("both", "0")
    assert graph["learn"].inputs[1].ref == Ref("pair", "reward")


def test_a_state_is_no_input_and_a_stream_keeps_none() -> None:
    class Tally: ...

    def start(context: Context, *, decay: float) -> Tally:
        return Tally()

    @node(init=start)
    def smooth(tally: Tally, rewards: Rewards, *, decay: float = 0.5) -> tuple[Tally, Rewards]: ...

    @program
    def stateful(model: Model, answers: Answers) -> Model:
        return learn(model, smooth(judge(answers)))

    found = trace(stateful)["smooth"]
    assert found.stateful
    assert [i.name for i in found.inputs] == ["rewards"]
    assert [o.type for o in found.outputs] == [f"{TYPES}:Rewards"]
    assert not trace(program_of("aipo"))["generate"].stateful


def test_types_of_arguments_come_from_their_readers_if_not_annotated() -> None:
    @program
    def bare(policy, prompts):  # type: ignore[no-untyped-def]
        rollouts = program_of("generate")(prompts, broadcast(policy))
        return program_of("aipo_update")(policy, rollouts, program_of("group_advantage")(program_of("score")(rollouts)))

    @program
    def watch(policy, prompts):  # type: ignore[no-untyped-def]
        program_of("accuracy")(program_of("score")(program_of("generate")(prompts, broadcast(policy))))
        return policy

    for traced in (trace(bare), trace(watch)):
        assert [a.type for a in traced.arguments] == [f"{TYPES}:Policy", f"{TYPES}:Prompts"]
        assert [a.pool for a in traced.arguments] == ["trainer", "generator"]


def test_a_carried_value_that_nobody_reads_or_changes_is_left_out() -> None:
    graph = trace(program_of("anchored"), {"kl": 0.0})
    assert [a.name for a in graph.arguments] == ["policy", "prompts"]
    assert dict(graph.results) == {"policy": Ref("aipo_update")}
    assert [i.name for i in graph["aipo_update"].inputs] == ["policy", "rollouts", "advantage"]


def test_a_prefix_goes_before_nodes_and_sources_but_not_before_carried_values() -> None:
    graph = trace(program_of("evaluate"), prefix="evaluate.")
    assert [a.name for a in graph.arguments] == ["policy", "evaluate.prompts"]
    assert [n.name for n in graph.nodes] == [f"evaluate.{n}" for n in ("broadcast", "generate", "score", "accuracy")]
    assert graph["evaluate.generate"].inputs[0].ref == Ref("evaluate.prompts")
    assert graph["evaluate.broadcast"].inputs[0].ref == Ref("policy")


def test_loops_and_branches_over_constants_unroll() -> None:
    @program
    def unrolled(model: Model, answers: Answers, *, rounds: int = 3, double: bool = False) -> Model:
        rewards = judge(answers)
        for _ in range(rounds):
            model = learn(model, rewards)
        if double:
            model = learn(model, rewards)
        return model

    graph = trace(unrolled)
    assert [n.name for n in graph.nodes] == ["judge", "learn", "learn_2", "learn_3"]
    assert graph["learn_3"].inputs[0].ref == Ref("learn_2")
    assert graph.results == (("model", Ref("learn_3")),)
    assert len(trace(unrolled, {"rounds": 1, "double": True}).nodes) == 3


def test_plain_functions_and_programs_are_sub_graphs() -> None:
    def rewarded(answers: Answers) -> Rewards:
        return judge(answers)

    @program
    def inner(model: Model, answers: Answers) -> Model:
        return learn(model, rewarded(answers))

    @program
    def outer(model: Model, answers: Answers) -> Model:
        return inner(inner(model, answers), answers)

    assert [n.name for n in trace(outer).nodes] == ["judge", "learn", "judge_2", "learn_2"]


def test_a_node_may_have_an_arguments_name() -> None:
    @program
    def clash(model: Model, judge: Answers) -> Model:
        return learn(model, globals()["judge"](judge))

    assert [n.name for n in trace(clash).nodes] == ["judge_2", "learn"]


def test_inputs_may_be_passed_by_name_and_optional_ones_left_out() -> None:
    @program
    def named(model: Model, answers: Answers) -> Model:
        rewards = judge(answers=answers)
        return learn(learn(rewards=rewards, model=model, extra=rewards), rewards, None)

    graph = trace(named)
    assert [i.name for i in graph["learn"].inputs] == ["model", "rewards", "extra"]
    assert [i.name for i in graph["learn_2"].inputs] == ["model", "rewards"]


def test_options_are_json_and_functions_become_paths() -> None:
    @node
    def rich(answers: Answers, *, table: Any, by: Any, kind: Any) -> Rewards: ...

    @program
    def options(model: Model, answers: Answers, *, by: Any = both) -> Model:
        return learn(model, rich(answers, table={"a": (1, 2.5, None, True)}, by=by, kind=Answers))

    graph = trace(options)
    assert graph["rich"].option("table") == {"a": [1, 2.5, None, True]}
    assert graph["rich"].option("by") == {"path": f"{__name__}:both"}
    assert graph["rich"].option("kind") == {"path": f"{__name__}:Answers"}
    assert graph.options == (("by", {"path": f"{__name__}:both"}),)


def test_a_trace_leaves_nothing_behind_when_the_program_raises() -> None:
    @program
    def broken(model: Model, answers: Answers) -> Model:
        judge(answers)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trace(broken)
    assert both.fn is not None
    assert len(trace(program_of("aipo")).nodes) == 5


def test_flags_without_annotation_or_default() -> None:
    @program
    def bare(model: Model, answers: Answers, *, must, rate=0.5, maybe=None):  # type: ignore[no-untyped-def]
        return learn(model, judge(answers))

    assert [(f.annotation, f.default) for f in bare.flags] == [(Any, REQUIRED), (float, 0.5), (Any, None)]
    fails(lambda: trace(bare), "missing-option", "bare: option 'must'", "given   nothing")
    assert dict(trace(bare, {"must": 1}).options) == {"must": 1, "rate": 0.5, "maybe": None}


@node(clock="update")
def summed(rollouts: Rollouts, hints: Rewards | None = None, rewards: Sequence[Rewards] = ()) -> Rewards:
    """Return the sum of all rewards."""
    return sum(rewards, Rewards(0.0))


@node(clock="update")
def told(rewards: Rewards) -> Metrics:
    return {}


def test_a_list_of_values_is_an_input_for_each_and_one_parameter() -> None:
    @program
    def several(policy: Policy, rollouts: Rollouts, one: Rewards, two: Rewards) -> Policy:
        told(summed(rollouts, rewards=[two, one, two]))
        told(summed(rollouts))
        return policy

    graph = trace(several)
    assert [(i.name, i.ref.node) for i in graph["summed"].inputs] == [
        ("rollouts", "rollouts"),
        *((f"rewards[{place}]", name) for place, name in enumerate(("two", "one", "two"))),
    ]
    assert "summed(rollouts, rewards=[two, one, two])" in str(graph)
    assert Graph.from_json(json.loads(json.dumps(graph.to_json()))) == graph
    twelve = {f"rewards[{place}]": Rewards(10.0**place) for place in range(12)}
    assert list(summed.interface.gathered({"rollouts": None, **twelve})["rewards"]) == [*twelve.values()]
    assert summed.interface.gathered({"rollouts": None})["rewards"] == ()


def test_what_is_no_list_of_such_values_is_refused() -> None:
    @program
    def alone(policy: Policy, rollouts: Rollouts, one: Rewards) -> Policy:
        told(summed(rollouts, rewards=one))  # type: ignore[arg-type]
        return policy

    @program
    def mistyped(policy: Policy, rollouts: Rollouts, one: Rewards) -> Policy:
        told(summed(rollouts, rewards=[one, rollouts]))  # type: ignore[list-item]
        return policy

    with pytest.raises(GraphError, match=r"summed: input 'rewards' \[not-a-list\]\n"):
        trace(alone)
    faults = [(f.what, f.given) for f in check(trace(mistyped)) if "input" in f.what]
    assert faults == [("summed: input 'rewards[1]'", "Rollouts (from rollouts)")]


def failing(body: Callable[[Any, Any], Any], code: str, *words: str, mark: str | None = None) -> None:
    @program
    def faulty(model: Model, answers: Answers) -> Any:
        return body(model, answers)

    fails(lambda: trace(faulty), code, *words, mark=mark)


def test_expressions_with_handles_say_to_make_a_node() -> None:
    def product(model: Any, answers: Any) -> Any:
        rewards = judge(answers)
        return learn(model, rewards - 0.01 * rewards)  # an expression

    words = ("<the program's value judge>", "an expression with it", "put the expression in a function with @node")
    failing(product, "value-while-tracing", *words, mark="an expression")
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
        lambda x: f"{x:.3f}",
        lambda x: torch.clamp(x, max=1.0),
        lambda x: torch.stack([x, x]),
        lambda x: torch.stack((x, x)),
        lambda x: torch.cat(tensors=(torch.ones(2), x)),
        lambda x: torch.ones(3, 3)[x, 0],
        lambda x: torch.ones(3, 3)[0, [x]],
        lambda x: torch.ones(3)[x:],
        lambda x: torch.nn.functional.relu(input=x),
        lambda x: np.clip(x, 0, 1),
    )
    for use in uses:
        failing(lambda model, answers: use(answers), "value-while-tracing", "the program's value answers")  # noqa: B023


def test_one_output_is_not_unpacked() -> None:
    def body(model: Any, answers: Any) -> Any:
        first, _ = judge(answers)  # unpacked
        return learn(model, first)

    failing(body, "value-while-tracing", "an expression with it (iter)", mark="unpacked")


def test_a_library_that_is_given_a_value_is_passed_over_for_the_line_that_gave_it() -> None:
    rectify: Any = torch.nn.functional.relu

    def body(model: Any, answers: Any) -> Any:
        return learn(model, rectify(judge(answers)))  # rectified

    failing(body, "value-while-tracing", "a function of PyTorch with it (relu)", mark="rectified")


def test_inputs_are_checked_at_the_call() -> None:
    call: Any = learn
    ask: Any = judge
    failing(lambda m, a: call(m), "missing-input", "learn: input 'rewards'", "given   nothing")
    failing(lambda m, a: call(m, 3), "not-a-value", "learn: input 'rewards'", "given   3")
    failing(lambda m, a: ask(a, a), "too-many-inputs", "judge: inputs", "2 positional values", "1 (answers)")
    failing(lambda m, a: ask(a, answers=a), "input-given-twice", "judge: input 'answers'")
    failing(lambda m, a: call(m, ask(a), rat=0.2), "unknown-option", "learn: option 'rat'", "nearest: rate")
    failing(lambda m, a: call(m, ask(a), rate=ask(a)), "value-as-option", "learn: option 'rate'")
    failing(lambda m, a: call(m, ask(a), rate={1, 2}), "not-constant", "learn: option 'rate'", "given   {1, 2} (set)")
    failing(lambda m, a: call(m, ask(a), rate=float("nan")), "not-constant", "given   nan")
    failing(lambda m, a: call(m, ask(a), rate={"path": "x"}), "not-constant", "learn: option 'rate'", "(dict)")
    failing(
        lambda m, a: call(m, ask(a), rate=lambda: 1),
        "wrong-option-type",
        "learn: option 'rate'",
        "<lambda>\n    needed  a number",
    )
    failing(
        lambda m, a: call(m, ask(a), rate=ask),
        "wrong-option-type",
        "learn: option 'rate'",
        ":judge\n    needed  a number",
    )
    failing(lambda m, a: call(m, ask(a), rate=partial(abs)), "wrong-option-type", "learn: option 'rate'")
    inside: Any = partial(call, rate=judge)
    made: Any = lambda: 1  # noqa: E731
    failing(lambda m, a: broadcast(m, every=inside), "wrong-option-type", "option 'every': option 'rate'")
    failing(lambda m, a: broadcast(m, every=made), "local-function", "option 'every'")
    failing(lambda m, a: broadcast(3), "not-a-value", "broadcast", "given   3")


def refusals(body: Callable[[Any, Any], Any], **options: Any) -> list[tuple[str, str]]:
    """Return what `trace` refuses in a program, and what it was given."""

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

    assert refusals(body) == [
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

    assert refusals(body) == [
        ("learn: option 'rat'", "0.2"),
        ("learn: option 'speed'", "1"),
        ("learn: input 'rewards'", "nothing"),
    ]


def test_all_options_of_a_program_that_cannot_be_written_down_are_told() -> None:
    given = [("faulty: option 'other'", "{1} (set)"), ("faulty: option 'rate'", "nan")]
    assert refusals(lambda m, a: learn(m, judge(a)), rate=float("nan"), other={1}) == given


def test_results_name_arguments() -> None:
    failing(lambda m, a: None, "bad-result", "faulty: its result", "given   None")
    failing(lambda m, a: (m, a), "bad-result", "faulty: its result")
    failing(lambda m, a: {"modle": m}, "unknown-result", "'modle', which is no argument", "nearest: model")
    failing(lambda m, a: {"model": 3}, "bad-result", "faulty: its result 'model'", "given   3")


def test_values_of_another_program_are_refused() -> None:
    kept: list[Any] = []

    @program
    def first(model: Model, answers: Answers) -> Model:
        kept.append(answers)
        return learn(model, judge(answers))

    trace(first)
    failing(
        lambda m, a: learn(m, judge(kept[0])), "not-a-value", "judge: input 'answers'", "a value of another program"
    )
    fails(lambda: judge(kept[0]), "outside-program", "judge")


def test_calls_of_constructs_are_checked() -> None:
    # Strict types would refuse these calls.
    send: Any = broadcast
    old: Any = delay
    some: Any = keep
    turns: Any = alternate
    options = "1 (value); options are passed by keyword (lag, every, precision)"
    failing(lambda m, a: send(m, 2), "too-many-inputs", "broadcast: inputs", "2 positional values", options)
    failing(lambda m, a: old(m, 2), "too-many-inputs", "delay: inputs", "2 positional values", "keyword (lag)")
    failing(lambda m, a: send(m, lagg=2), "unknown-option", "broadcast: option 'lagg'", "given   2", "nearest: lag")
    failing(lambda m, a: send(lag=2), "missing-input", "broadcast: input 'value'", "given   nothing")
    failing(lambda m, a: old(m, value=m), "input-given-twice", "delay: input 'value'")
    failing(lambda m, a: some(a, whn=len), "unknown-option", "keep: option 'whn'", "nearest: when")
    failing(lambda m, a: turns(), "missing-input", "alternate: input 'speak'", "needed  all of speak, answer")
    failing(lambda m, a: turns(judge), "missing-input", "alternate: input 'answer'")


def test_options_of_a_trace_are_checked() -> None:
    aipo = program_of("aipo")
    fails(
        lambda: trace(aipo, {"sample": 3}),
        "unknown-option",
        "aipo: option 'sample'",
        "given   3",
        "the nearest: samples",
    )
    fails(lambda: trace(aipo.fn), "not-a-program", "trace")


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

    @program
    def unordered(model: Model, answers: Answers, *, kinds: Any = frozenset({"sum"})) -> Model:
        return learn(model, judge(answers))

    fails(lambda: unordered.flags, "not-constant", "unordered: option 'kinds'", "(frozenset)", Path(__file__).name)
    fails(lambda: trace(defaulted), "input-with-default", "argument 'samples'", "the default 8")
    fails(lambda: trace(starred), "bad-parameter", "argument 'answers'", "variadic positional")
    fails(lambda: trace(texted), "bad-annotation", "argument 'model'")


def test_broadcast_works_in_programs_only() -> None:
    fails(lambda: broadcast(object()), "outside-program")


def test_a_program_is_still_its_function() -> None:
    @program
    def plain(model: Any, answers: Any, *, extra: int = 1) -> Any:
        return {"model": model, "answers": answers, "extra": extra}

    assert plain(1, 2, extra=3) == {"model": 1, "answers": 2, "extra": 3}


def open_slots(context: Context, **options: Any) -> Slots:
    return Slots(1)


@node(pool="generator", init=open_slots)
def speak(
    slots: Slots,
    prompts: Prompts,
    behaviour: Weights,
    conversation: Rollouts | None = None,
    replies: Replies | None = None,
    *,
    samples: int = 4,
    heat: float = 1.0,
) -> tuple[Slots, Rollouts]: ...
@node(pool="shop", init=open_slots)
def serve(
    slots: Slots,
    rollouts: Rollouts,
    persona: Prompts,
    behaviour: Weights,
    earlier: Replies | None = None,
    *,
    patience: int = 2,
    heat: float = 1.0,
) -> tuple[Slots, Replies]: ...
@node(pool="scorer")
def judge_it(rollouts: Rollouts, replies: Replies, *, weight: float = 1.0) -> Rewards: ...
@node(pool="scorer")
def compare(first: Rollouts, second: Rollouts) -> Rewards: ...
@node(pool="trainer", clock="update")
def teach(policy: Policy, rollouts: Rollouts, rewards: Rewards) -> Policy: ...


@program
def shop(policy: Policy, model: FrozenModel, prompts: Prompts, personas: Prompts) -> dict[str, object]:
    server = serve.given(persona=personas, heat=0.5).of(model)
    said, replies = alternate(
        speak, server, prompts, broadcast(policy, lag=1), turns=3, samples=2, patience=5, heat=0.9
    )
    return {"policy": teach(policy, said, judge_it.given(weight=0.5)(said, replies)), "model": model}


def faults(asked: Callable[..., Any]) -> list[str]:
    """Return the faults of a program with this call."""

    @program
    def made(policy: Policy, model: FrozenModel, prompts: Prompts) -> dict[str, object]:
        said = asked(policy, model, prompts)
        return {"policy": teach(policy, said, judge_it(said, said)), "model": model}

    try:
        found = check(trace(made))
    except GraphError as error:
        found = list(error.faults)
    return [str(fault) for fault in found]


def test_what_answers_has_inputs_and_options_of_its_own() -> None:
    graph = trace(shop)
    assert check(graph, batch=4) == []
    answer, said = graph["serve"], graph["speak"]
    own = {item.name: (item.ref, item.back) for item in answer.inputs}
    assert own == {
        "rollouts": (Ref("speak"), False),
        "persona": (Ref("personas"), False),
        "behaviour": (Ref("broadcast"), False),
        "earlier": (Ref("serve"), True),
    }
    assert (answer.option("heat"), said.option("heat"), answer.option("patience")) == (0.5, 0.9, 5)
    assert answer.answers
    assert not said.answers
    assert graph["judge_it"].option("weight") == 0.5
    assert Graph.from_json(graph.to_json()) == graph


def test_the_printed_call_says_what_the_one_that_answers_is_given() -> None:
    lines = [line.partition("#")[0] for line in str(trace(shop)).splitlines()]
    printed = " ".join(" ".join(lines).split())
    assert "alternate(speak, serve.given(persona=personas, behaviour=behaviour, heat=0.5)," in printed
    assert "patience=5" in printed


def test_of_a_value_that_never_changes_no_lag_is_asked_and_one_broadcast_serves_all() -> None:
    @program
    def twice(policy: Policy, model: FrozenModel, prompts: Prompts) -> dict[str, object]:
        said, again = speak.of(model)(prompts, samples=1), speak.of(model)(prompts)
        return {"policy": teach(policy, said, compare(said, again)), "model": model}

    graph = trace(twice)
    assert [(n.name, n.lag) for n in graph.nodes if n.construct == "broadcast"] == [("broadcast", 0)]
    assert [item.name for item in graph["speak"].inputs] == ["prompts", "behaviour"]


def test_of_a_value_that_updates_change_the_lag_is_said() -> None:
    (told,) = [text for text in faults(lambda policy, model, prompts: speak.of(policy)(prompts)) if "lag" in text]
    assert "broadcast: lag" in told
    assert "broadcast(policy, lag=k)" in told
    assert not [t for t in faults(lambda p, m, x: speak.of(broadcast(p, lag=1))(x)) if "lag" in t]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (lambda p, m, x: speak.given(personna=x)(x), "speak.given: 'personna'"),
        (lambda p, m, x: judge_it.of(m)(x, x), "a node without an input of weights"),
        (lambda p, m, x: speak.of(x)(x), "a carried value"),
        (lambda p, m, x: speak.of(m)(x, m), "needed  1 value"),
        (lambda p, m, x: alternate(speak, serve, x, broadcast(p), turns=2)[0], "serve.given(persona=…, behaviour=…)"),
        (
            lambda p, m, x: alternate(speak, serve.given(persona=x).of(m), x, broadcast(p), turns=2, heat=0.5)[0],
            "serve.given(heat=…)",
        ),
    ],
)
def test_what_cannot_be_given_is_told_with_what_to_write(asked: Callable[..., Any], words: str) -> None:
    told = faults(asked)
    assert any(words in text for text in told) or words.startswith("needed"), told
    assert told


def test_outside_of_a_program_a_node_is_called_with_what_it_is_given() -> None:
    @node
    def double(length: int, *, weight: float = 2.0) -> float:
        return length * weight

    assert double.given(weight=3.0)(2) == 6.0
    with pytest.raises(GraphError):
        speak.of(object())


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        *((answer, True) for answer in (True, np.True_, torch.tensor(True), torch.tensor([True]))),
        *((answer, False) for answer in (False, np.False_, torch.tensor(False))),
        *((answer, None) for answer in (None, "no", 0.3, [True], torch.tensor([True, False]), torch.tensor(1))),
    ],
)
def test_a_filter_keeps_what_is_true_drops_what_is_false_and_refuses_the_rest(answer: Any, kept: bool | None) -> None:
    def verdict() -> Any:
        return Filter().run(None, {"0": "rollouts", "1": "rewards"}, {"when": lambda rollouts, rewards: answer})

    if kept is None:
        with pytest.raises(TypeError, match="needed True or False for the whole group"):
            verdict()
    else:
        assert verdict() == ("rollouts", "rewards") if kept else isinstance(verdict(), Dropped)
