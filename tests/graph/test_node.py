"""Nodes outside of programs: what a direct call does, and what workers use."""

import re
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from penstock.graph import Context, GraphError, Metrics, NodeDef, Rewards, node
from penstock.graph.interface import REQUIRED, interface
from penstock.graph.types import COLUMNS, Advantages, Batchable, Replies, TurnRewards
from tests.graph.programs_for_tests import Engine as Slots


class Reward(float): ...


class Length(int): ...


class Both(NamedTuple):
    reward: Reward
    length: Length


class Tally:
    def __init__(self, start: int) -> None:
        self.count = start


def start(context: Context, *, at: int) -> Tally:
    return Tally(at)


def open_slots(context: Context) -> Slots:
    return Slots(1)


@node
def plain(length: Length, *, weight: float = 2.0) -> Reward:
    """Doubles."""
    return Reward(length * weight)


@node(pool="scorer")
def measured(length: Length) -> tuple[Reward, Metrics]:
    return Reward(length), {"mean": 1.0}


@node
def split(length: Length) -> tuple[Reward, Length]:
    return Reward(length), length


@node
def split_measured(length: Length) -> tuple[Reward, Length, Metrics]:
    return Reward(length), length, {"mean": 1.0}


@node
def named(length: Length) -> Both:
    return Both(Reward(length), length)


@node
def named_measured(length: Length) -> tuple[Both, Metrics]:
    return Both(Reward(length), length), {"mean": 1.0}


@node
def figures(length: Length) -> Metrics:
    return {"mean": 1.0}


@node
def silent(length: Length) -> None: ...
@node(init=start)
def counted(tally: Tally, length: Length, *, at: int = 0) -> tuple[Tally, Reward]:
    tally.count += 1
    return tally, Reward(tally.count + at)


@node(clock="update", init=start)
def counted_measured(tally: Tally, length: Length, *, at: int = 0) -> tuple[Tally, tuple[Reward, Length], Metrics]:
    return tally, (Reward(1), length), {"mean": 1.0}


@node(init=start)
def counted_figures(tally: Tally, length: Length, *, at: int = 0) -> tuple[Tally, Metrics]:
    return tally, {"mean": 1.0}


@node(init=open_slots)
def streamed(slots: Slots, length: Length) -> tuple[Slots, Reward, Metrics]:
    return slots, Reward(length), {}


def test_a_direct_call_is_the_plain_function() -> None:
    assert plain(Length(3)) == 6.0
    assert plain(Length(3), weight=1.0) == 3.0
    assert measured.fn(Length(3)) == (3.0, {"mean": 1.0})
    tally = Tally(5)
    assert counted.fn(tally, Length(1), at=10) == (tally, 16.0)
    assert tally.count == 6


def test_a_node_keeps_the_name_and_documentation_of_its_function() -> None:
    assert (plain.__name__, plain.__doc__, plain.__module__) == ("plain", "Doubles.", __name__)
    assert plain.path == f"{__name__}:plain"
    assert repr(plain) == f"<node {__name__}:plain>"
    assert isinstance(plain, NodeDef)
    assert (plain.pool, plain.clock, plain.init) == ("default", "group", None)
    assert (counted_measured.clock, counted_measured.init) == ("update", start)


def test_the_signature_is_the_interface() -> None:
    found = counted.interface
    assert [(p.name, p.type, p.optional) for p in found.inputs] == [("length", Length, False)]
    assert found.options == {"at": 0}
    assert [(p.name, p.type) for p in found.outputs] == [("out", Reward)]
    assert not found.stream
    assert streamed.interface.stream


@pytest.mark.parametrize(
    ("definition", "outputs", "metrics"),
    [
        (plain, {"out": 6.0}, {}),
        (measured, {"out": 3.0}, {"mean": 1.0}),
        (split, {"0": 3.0, "1": 3}, {}),
        (split_measured, {"0": 3.0, "1": 3}, {"mean": 1.0}),
        (named, {"reward": 3.0, "length": 3}, {}),
        (named_measured, {"reward": 3.0, "length": 3}, {"mean": 1.0}),
        (figures, {}, {"mean": 1.0}),
        (silent, {}, {}),
    ],
)
def test_workers_split_a_result_into_outputs_and_metrics(
    definition: NodeDef[..., Any], outputs: dict[str, Any], metrics: Metrics
) -> None:
    result = definition.fn(Length(3))
    assert definition.split(result, stateful=False) == (None, outputs, metrics)


@node
def own_rewards(length: Length) -> Rewards:
    return Rewards(torch.tensor([1, 0, 1, 0][:length]))


@node
def own_mean(length: Length) -> tuple[Rewards, Metrics]:
    return Rewards(torch.ones(2)), {"reward_mean": 7.0}


@node
def dear(length: Length) -> Rewards:
    """Finite rewards whose sum is not."""
    return Rewards(torch.full((length,), 1.5e308, dtype=torch.float64))


@node
def twice(length: Length) -> tuple[Rewards, Length, Rewards]:
    return Rewards(torch.arange(float(length))), length, Rewards(torch.ones(length))


@node
def dearer(rewards: Rewards) -> Rewards:
    return rewards - 1.0


def test_rewards_that_a_node_makes_have_a_mean_among_its_metrics() -> None:
    def metrics(definition: NodeDef[..., Any], given: Any) -> Metrics:
        return definition.split(definition.fn(given), stateful=False)[2]

    assert metrics(own_rewards, Length(4)) == {"reward_mean": 0.5}
    assert metrics(own_rewards, Length(0)) == {}
    assert metrics(own_mean, Length(4)) == {"reward_mean": 7.0}
    assert metrics(dear, Length(4)) == {}
    assert metrics(twice, Length(4)) == {"reward_mean": 1.5, "2_reward_mean": 1.0}
    assert metrics(dearer, Rewards(torch.ones(2))) == {"dearer_reward_mean": 0.0}


def test_workers_split_the_state_off() -> None:
    tally = Tally(0)
    result = counted.fn(tally, Length(3), at=1)
    assert counted.split(result, stateful=True) == (tally, {"out": 2.0}, {})
    result = counted_measured.fn(tally, Length(3))
    assert counted_measured.split(result, stateful=True) == (tally, {"0": 1.0, "1": 3}, {"mean": 1.0})
    result = counted_figures.fn(tally, Length(3))
    assert counted_figures.split(result, stateful=True) == (tally, {}, {"mean": 1.0})


def test_a_stream_hands_outputs_over_without_the_state() -> None:
    assert streamed.split((Reward(1), {"mean": 2.0}), stateful=False) == (None, {"out": 1.0}, {"mean": 2.0})
    assert counted.split(Reward(1), stateful=False) == (None, {"out": 1.0}, {})


@pytest.mark.parametrize(
    ("definition", "result", "given", "needed"),
    [
        (plain, 3, "int", "Reward"),
        (plain, None, "NoneType", "Reward"),
        (measured, Reward(1), "Reward", "Reward, Metrics]"),
        (measured, ({}, Reward(1)), "tuple[dict, Reward]", "Reward, Metrics]"),
        (split, (Reward(1),), "tuple[Reward]", "Reward, "),
        (split, Reward(1), "Reward", "Reward, "),
        (figures, None, "NoneType", "Metrics"),
        (silent, Reward(1), "Reward", "None"),
    ],
)
def test_a_result_that_does_not_fit_the_annotation(
    definition: NodeDef[..., Any], result: Any, given: str, needed: str
) -> None:
    with pytest.raises(TypeError) as raised:
        definition.split(result, stateful=False)
    text = str(raised.value)
    assert f"{definition.__name__} returned {given}, needed " in text
    assert needed in text
    assert text.startswith(f"{__file__}:")


@node
def judged(length: Length) -> tuple[Rewards, Metrics]:
    return Rewards(torch.tensor([1.0, 0, float(length)])), {}


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_a_reward_that_is_no_finite_number_does_not_leave_its_node(bad: str) -> None:
    rewards = Rewards(torch.tensor([1.0, 0, 2.5]))
    _, made, _ = judged.split((rewards, {}), stateful=False)
    assert made == {"out": rewards}
    with pytest.raises(ValueError, match=f"{__file__}:.* judged returned a reward of {bad} for row 1 of 3, needed a"):
        judged.split((Rewards(torch.tensor([1.0, float(bad), float("nan")])), {}), stateful=False)


@node
def replied(length: Length) -> Replies:
    return Replies(("", ""), ("user", "user"), torch.ones(2, dtype=torch.bool))


def test_rewards_of_an_environment_are_finite_numbers() -> None:
    replies = replied.fn(3)
    for rewards, said in (
        (torch.tensor([1.0, float("nan")]), "a reward of nan for row 1 of 2, needed a finite number"),
        ([1.0, 0.0], r"rewards of a list, needed an array \[N\]"),
    ):
        with pytest.raises(ValueError, match=f"replied returned {said}"):
            replied.split(replace(replies, rewards_N=rewards), stateful=False)
    assert replied.split(replies, stateful=False)[1] == {"out": replies}


@node
def judged_by_turn(length: Length) -> TurnRewards:
    return TurnRewards(torch.ones(1, int(length)), torch.tensor([int(length)]))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([[1.0]], r"TurnRewards of a list, needed an array \[N, K\]"),
        (torch.ones(3), r"TurnRewards of an array of shape \[3\], needed an array \[N, K\]"),
        (torch.tensor([[1.0, 0], [2.0, float("nan")]]), "a reward of nan for row 1 of 2, needed a finite number"),
    ],
)
def test_rewards_of_turns_are_finite_numbers_for_each_turn(values: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"judged_by_turn returned {said}"):
        judged_by_turn.split(TurnRewards(values, torch.tensor([1])), stateful=False)


@pytest.mark.parametrize(
    ("values", "given"), [(1.0, "a float"), ([1.0], "a list"), (torch.ones(1, 3), r"an array of shape \[1, 3\]")]
)
def test_rewards_are_one_row(values: Any, given: str) -> None:
    with pytest.raises(ValueError, match=f"judged returned Rewards of {given}, needed an array \\[N\\]"):
        judged.split((Rewards(values), {}), stateful=False)


def test_arithmetic_works_on_rewards_as_on_an_array() -> None:
    array = torch.tensor([1.0, 0.0, -2.0])
    rewards, length = Rewards(array), torch.tensor([1.0, 2.0, 4.0])
    made = [1 - rewards, length - rewards, rewards / 2, rewards / length, -rewards, 2 * rewards + length]
    plain = [1 - array, length - array, array / 2, array / length, -array, 2 * array + length]
    assert [each.values_N.tolist() for each in made] == [each.tolist() for each in plain]


@node
def weighed(length: Length) -> Advantages:
    return Advantages(torch.ones(int(length)))


@pytest.mark.parametrize("values", [torch.ones(3), torch.ones(3, 5), torch.tensor([float("nan")])])
def test_advantages_are_of_responses_or_of_tokens(values: Tensor) -> None:
    assert weighed.split(Advantages(values), stateful=False)[1]["out"].values_N is values


@pytest.mark.parametrize(
    ("values", "given"),
    [([1.0], "a list"), (torch.tensor(1.0), "an array of shape []"), (torch.ones(1, 2, 3), "an")],
)
def test_advantages_of_anything_else_do_not_leave_their_node(values: Any, given: str) -> None:
    with pytest.raises(ValueError, match=f"weighed returned Advantages of {re.escape(given)}.*, needed an array"):
        weighed.split(Advantages(values), stateful=False)


@dataclass
class Verdicts(Batchable):
    sure_N: Tensor
    words: tuple[str, ...]
    notes: tuple[str, ...] = ()
    other_N: Tensor | None = None


@node
def convinced(length: Length) -> Verdicts:
    return Verdicts(torch.ones(int(length)), ("yes",) * int(length))


def test_a_groups_value_has_as_many_rows_in_each_column() -> None:
    even, uneven = Verdicts(torch.ones(2), ("yes", "no")), Verdicts(torch.ones(3), ("yes", "no"))
    assert convinced.split(even, stateful=False)[1] == {"out": even}
    with pytest.raises(
        ValueError, match="convinced returned Verdicts with 3 rows of sure_N and 2 rows of words, needed"
    ):
        convinced.split(uneven, stateful=False)
    # A value of a whole batch is not joined with others.
    assert convinced.per_update.split(uneven, stateful=False)[1] == {"out": uneven}


@pytest.mark.parametrize(
    ("metrics", "given"),
    [({"cost": "high"}, "'cost': 'high'"), ({3: 1.0}, "3: 1.0"), ({"cost": torch.ones(2)}, "'cost': tensor")],
)
def test_a_figure_has_a_name_and_one_number(metrics: dict[Any, Any], given: str) -> None:
    _, _, figures = judged.split((Rewards(torch.ones(1)), {"cost": torch.tensor(2)}), stateful=False)
    assert figures == {"reward_mean": 1.0, "cost": 2.0}
    with pytest.raises(TypeError, match=f"judged returned {given}.* among its metrics, needed a name with one number"):
        judged.split((Rewards(torch.ones(1)), metrics), stateful=False)


@pytest.mark.parametrize("name", [*sorted(COLUMNS), "judged_update"])
def test_a_figure_does_not_take_the_name_of_a_rows_own_column(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"{__file__}:.* judged returned '{name}' .* needed another name than .*groups"
    ):
        judged.split((Rewards(torch.ones(1)), {name: 1.0}), stateful=False)


@pytest.mark.parametrize("name", ["", "a\nb", "\x1b[31mred", "half \ud800", "n" * 101, "n" * 10**6])
def test_a_figure_has_a_name_that_can_be_shown(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"judged returned a figure named .* needed a name of 1 to 100 printable"
    ) as said:
        judged.split((Rewards(torch.ones(1)), {name: 1.0}), stateful=False)
    assert len(str(said.value)) < 1000


def test_a_firing_has_no_million_figures() -> None:
    with pytest.raises(ValueError, match="judged returned 1000000 figures, needed at most 1000 of a firing"):
        judged.split((Rewards(torch.ones(1)), dict.fromkeys(map(str, range(10**6)), 0.0)), stateful=False)


def test_a_figure_larger_than_any_float_is_refused() -> None:
    with pytest.raises(TypeError, match="needed a name with one number"):
        judged.split((Rewards(torch.ones(1)), {"huge": 10**400}), stateful=False)


# Signatures that cannot be read ---------------------------------------------------------------------------


def refused(function: Any, code: str, *words: str, stateful: bool = False) -> None:
    with pytest.raises(GraphError) as raised:
        interface(function, stateful=stateful)
    assert [fault.code for fault in raised.value.faults] == [code]
    for word in (f"{__file__}:{function.__code__.co_firstlineno}: {function.__name__}", *words):
        assert word in str(raised.value)


def test_inputs_need_a_class_and_no_default() -> None:
    def bare(x) -> Reward: ...  # type: ignore[no-untyped-def]
    def union(x: Reward | Length) -> Reward: ...
    def preset(x: Length = Length(3)) -> Reward: ...  # noqa: B008
    def starred(*x: Length) -> Reward: ...
    def open_ended(**x: Length) -> Reward: ...
    def unnamed(x: Length, /) -> Reward: ...

    refused(bare, "bad-annotation", "parameter 'x'", "no annotation")
    refused(union, "bad-annotation", "parameter 'x'", "Reward | ")
    refused(preset, "input-with-default", "parameter 'x'", "the default 3")
    refused(starred, "bad-parameter", "variadic positional")
    refused(open_ended, "bad-parameter", "variadic keyword")
    refused(unnamed, "bad-parameter", "positional-only")


def test_outputs_need_classes() -> None:
    def bare(x: Length): ...  # type: ignore[no-untyped-def]
    def text(x: Length) -> "Reward | Length": ...
    def missing(x: Length) -> "Nowhere": ...  # type: ignore[name-defined] # noqa: F821

    refused(bare, "bad-annotation", "return annotation", "no annotation")
    refused(text, "bad-annotation", "return annotation")
    refused(missing, "unresolved-annotation", "signature", "name 'Nowhere' is not defined")


def test_a_stateful_node_returns_its_state() -> None:
    def forgets(tally: Tally, x: Length) -> Reward: ...

    refused(forgets, "state-not-returned", "return annotation", stateful=True)


def test_optional_inputs_and_required_options() -> None:
    def optional(x: Length, y: Reward | None = None, *, must: int) -> Reward: ...

    found = interface(optional, stateful=False)
    assert [(p.name, p.type, p.optional) for p in found.inputs] == [("x", Length, False), ("y", Reward, True)]
    assert found.options == {"must": REQUIRED}


def test_clocks_are_group_and_update() -> None:
    with pytest.raises(GraphError, match=r"plain: clock \[unknown-clock\]\n    given   'weekly'"):
        node(clock="weekly")(plain.fn)  # type: ignore[call-overload]
