"""Tracing: a program is called once, and what it calls is the graph."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock.graph import (
    Advantages,
    Context,
    Graph,
    GraphError,
    Metrics,
    Policy,
    Rewards,
    Rollouts,
    broadcast,
    check,
    load,
    node,
    program,
    trace,
)
from penstock.graph.interface import REQUIRED
from penstock.graph.ir import Argument, Input, Node, Output, Ref

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


def test_a_trace_records_arguments_nodes_and_results() -> None:
    graph = trace(program_of("aipo"), {"samples": 4})
    assert (graph.name, graph.op) == ("aipo", f"{PROGRAMS}:aipo")
    assert graph.options == (("lag", 1), ("rho", 4.0), ("samples", 4))
    assert graph.doc.startswith("Asynchronous importance-weighted")
    assert graph.results == (("policy", Ref("aipo_update")),)
    where = graph.where
    assert where.startswith(f"{PROGRAMS}:")
    assert graph.arguments == (
        Argument("policy", "carried", f"{TYPES}:Policy", "penstock.nodes.policy:make_policy", "trainer", where),
        Argument("prompts", "source", f"{TYPES}:Prompts", "penstock.nodes.data:open_prompts", "generator", where),
    )
    assert [n.name for n in graph.nodes] == ["broadcast", "generate", "score", "group_advantage", "aipo_update"]
    source = PROGRAMS.read_text().splitlines()
    row = 1 + source.index("    rewards = score(rollouts, by=math_answer)")
    assert graph["score"] == Node(
        name="score",
        op=f"{PROGRAMS}:score",
        inputs=(Input("rollouts", f"{TYPES}:Rollouts", Ref("generate")),),
        outputs=(Output("out", f"{TYPES}:Rewards"),),
        options=(("by", {"path": f"{PROGRAMS}:math_answer"}),),
        pool="scorer",
        clock="group",
        where=f"{PROGRAMS}:{row}",
        given=("by",),
    )


def test_a_broadcast_is_a_node_of_the_pool_that_reads_it() -> None:
    node = trace(program_of("aipo"), {"lag": 3})["broadcast"]
    assert (node.construct, node.op, node.clock, node.lag, node.pool) == (
        "broadcast",
        "broadcast",
        "update",
        3,
        "generator",
    )
    assert node.outputs == (Output("out", f"{TYPES}:Weights"),)
    assert node.inputs[0].ref == Ref("policy")


def test_a_dict_result_carries_several_values() -> None:
    graph = trace(program_of("actor_critic"))
    assert graph.results == (("policy", Ref("aipo_update")), ("critic", Ref("critic_update")))
    assert [(a.name, a.kind, a.pool) for a in graph.arguments] == [
        ("policy", "carried", "trainer"),
        ("critic", "carried", "critic"),
        ("prompts", "source", "generator"),
    ]
    assert [n.lag for n in graph.nodes if n.construct == "broadcast"] == [1, 2]


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
    def smooth(tally: Tally, rewards: Rewards, *, decay: float = 0.5) -> tuple[Tally, Rewards]:
        raise NotImplementedError

    @program
    def stateful(model: Model, answers: Answers) -> Model:
        return learn(model, smooth(judge(answers)))

    found = trace(stateful)["smooth"]
    assert found.stateful
    assert [i.name for i in found.inputs] == ["rewards"]
    assert [o.type for o in found.outputs] == [f"{TYPES}:Rewards"]
    assert not trace(program_of("aipo"))["generate"].stateful


def test_the_types_bases_are_listed() -> None:
    table = dict(trace(program_of("actor_critic")).types)
    assert table[f"{PROGRAMS}:Critic"] == (f"{TYPES}:Policy", f"{TYPES}:Model")
    assert table[f"{TYPES}:Rollouts"] == (f"{TYPES}:Batchable",)


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


def test_a_frozen_value_lives_in_the_pool_that_reads_it() -> None:
    graph = trace(program_of("anchored"))
    assert graph.results == (("policy", Ref("aipo_update")), ("reference", Ref("reference")))
    reference = graph.argument("reference")
    assert reference is not None
    assert (reference.kind, reference.pool) == ("carried", "reference")
    assert graph.producer("reference") is None


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
    def rich(answers: Answers, *, table: Any, by: Any, kind: Any) -> Rewards:
        raise NotImplementedError

    @program
    def options(model: Model, answers: Answers, *, by: Any = both) -> Model:
        return learn(model, rich(answers, table={"a": (1, 2.5, None, True)}, by=by, kind=Answers))

    graph = trace(options)
    assert graph["rich"].option("table") == {"a": [1, 2.5, None, True]}
    assert graph["rich"].option("by") == {"path": f"{__name__}:both"}
    assert graph["rich"].option("kind") == {"path": f"{__name__}:Answers"}
    assert graph.options == (("by", {"path": f"{__name__}:both"}),)


def test_given_options_may_name_functions_by_path() -> None:
    rule = f"{PROGRAMS}:length"

    @program
    def rated(model: Model, rollouts: Rollouts, *, by: Any = None) -> Model:
        return learn(model, program_of("score")(rollouts, by=by))

    assert trace(rated, {"by": {"path": rule}})["score"].option("by") == {"path": rule}


def test_a_trace_leaves_nothing_behind_when_the_program_raises() -> None:
    @program
    def broken(model: Model, answers: Answers) -> Model:
        judge(answers)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trace(broken)
    assert both.fn is not None
    assert len(trace(program_of("aipo")).nodes) == 5


def test_a_program_knows_its_flags() -> None:
    flags = program_of("aipo").flags
    assert [(f.name, f.annotation, f.default, f.help) for f in flags] == [
        ("samples", int, 8, "responses per prompt, at least two."),
        ("lag", int, 1, "how old the generator's weights may be."),
        ("rho", float, 4.0, ""),
    ]
    aipo = program_of("aipo")
    assert (aipo.name, aipo.path) == ("aipo", f"{PROGRAMS}:aipo")
    assert aipo.evaluation is program_of("evaluate")
    assert aipo.doc.startswith("Asynchronous importance-weighted")
    assert repr(aipo) == f"<program {PROGRAMS}:aipo>"


def test_flags_without_annotation_or_default() -> None:
    @program
    def bare(model: Model, answers: Answers, *, must, rate=0.5, maybe=None):  # type: ignore[no-untyped-def]
        return learn(model, judge(answers))

    assert [(f.annotation, f.default) for f in bare.flags] == [(Any, REQUIRED), (float, 0.5), (Any, None)]
    fails(lambda: trace(bare), "bare: option 'must'", "given   nothing", "no default")
    assert dict(trace(bare, {"must": 1}).options) == {"must": 1, "rate": 0.5, "maybe": None}


# Inputs that are lists ----------------------------------------------------------------------------------------


@node(clock="update")
def summed(rollouts: Rollouts, hints: Rewards | None = None, rewards: Sequence[Rewards] = ()) -> Rewards:
    """All rewards together."""
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
    assert summed.run(None, {"rollouts": None, **twelve}, {}).values_N == 111_111_111_111
    assert summed.run(None, {"rollouts": None}, {}).values_N == 0.0


def test_what_is_no_list_of_such_values_is_refused() -> None:
    @program
    def alone(policy: Policy, rollouts: Rollouts, one: Rewards) -> Policy:
        told(summed(rollouts, rewards=one))  # type: ignore[arg-type]
        return policy

    @program
    def mistyped(policy: Policy, rollouts: Rollouts, one: Rewards) -> Policy:
        told(summed(rollouts, rewards=[one, rollouts]))  # type: ignore[list-item]
        return policy

    with pytest.raises(GraphError, match=r"summed: input 'rewards'\n.*\n +needed  a list of values of type Rewards"):
        trace(alone)
    faults = [(f.what, f.given) for f in check(trace(mistyped)) if "input" in f.what]
    assert faults == [("summed: input 'rewards[1]'", "Rollouts (from rollouts)")]
