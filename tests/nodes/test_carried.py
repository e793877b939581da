"""`@carried`: which values it takes, and that a checkpoint's JSON gives them back as they were."""

import json
from copy import deepcopy
from dataclasses import FrozenInstanceError, dataclass, field
from typing import Any

import pytest
import torch

from penstock.graph import Context, GraphError, load
from penstock.graph.protocols import Carried
from penstock.nodes.carried import carried


@carried
class Plain:
    rate: float = 0
    count: int = 0
    name: str = "a"
    on: bool = True
    nothing: None = None
    parts: list[Any] = field(default_factory=list)
    pair: tuple[Any, ...] = ()
    table: dict[str, Any] = field(default_factory=dict)


@carried
@dataclass(frozen=True)
class Frozen:
    mean: float = 0.5


@carried
class Started:
    """Its first value depends on the run."""

    start: float

    @classmethod
    def make(cls, context: Context) -> "Started":
        return cls(context.options["start"])


@pytest.mark.parametrize(
    "value",
    [
        Plain(),
        Plain(0.1, 2**70, "ä\n", False, None, [1, [2.5, None], (3,)], ((), (1, [2])), {"a": {"b": (1,)}, "": []}),
        Plain(float("inf"), -1),
    ],
)
def test_a_value_comes_back_from_a_checkpoint_as_it_was(value: Any) -> None:
    tensors, facts = value.state()
    again = Plain(rate=9.0, name="other")
    again.restore(tensors, json.loads(json.dumps(facts)))  # type: ignore[attr-defined]
    assert again == value == deepcopy(value)
    assert [type(x) for x in vars(again).values()] == [type(x) for x in vars(value).values()]
    assert isinstance(value, Carried)


def test_the_first_value_is_made_of_the_defaults_or_by_the_class() -> None:
    assert load(Plain.maker)(Context()) == Plain()  # type: ignore[attr-defined]
    assert load(Started.maker)(Context(options={"start": 3.0})) == Started(3.0)  # type: ignore[attr-defined]


def test_numbers_are_sent_with_dtypes_that_stay() -> None:
    sent: dict[str, torch.Tensor] = Plain().weights()  # type: ignore[attr-defined]
    later: dict[str, torch.Tensor] = Plain(0.5, 3).weights()  # type: ignore[attr-defined]
    assert {name: t.dtype for name, t in sent.items()} == {name: t.dtype for name, t in later.items()}
    assert {name: t.item() for name, t in later.items()} == {"rate": 0.5, "count": 3, "on": True}


def test_a_frozen_dataclass_stays_frozen_and_is_restored_all_the_same() -> None:
    value: Any = Frozen(0.25)
    with pytest.raises(FrozenInstanceError):
        value.mean = 1.0
    value.restore({}, {"mean": 2.0})
    assert value == Frozen(2.0)
    with pytest.raises(ValueError, match="given a checkpoint with the fields avg, needed mean"):
        value.restore({}, {"avg": 2.0})
    with pytest.raises(TypeError, match=r"Frozen\.mean: given a torch\.Tensor"):
        Frozen(torch.tensor(1.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [torch.tensor(1.0), {1: 2}, {"a tuple": 1}, {1, 2}, b"x", [object()], 1j])
def test_what_is_not_plain_is_refused_with_the_field(bad: Any) -> None:
    value = Plain()
    with pytest.raises(TypeError, match=r"test_carried.py:\d+: Plain.table: given a .*, needed a number, a text"):
        value.table = bad
    assert value.table == {}
    value.parts.append(bad)
    with pytest.raises(TypeError, match=r"Plain\.parts: given a"):
        value.state()  # type: ignore[attr-defined]


def test_a_whole_number_that_no_tensor_holds_is_kept_but_not_sent() -> None:
    value: Any = Plain(rate=float("-inf"), count=2**70)
    assert value.state()[1]["count"] == 2**70
    with pytest.raises(ValueError, match=r"Plain\.count: given 1180591620717411303424, needed a whole number"):
        value.weights()
    value.count = -(2**63)
    assert (value.weights()["count"].item(), value.weights()["rate"].item()) == (-(2**63), float("-inf"))


def test_a_class_that_cannot_be_made_elsewhere_is_refused_at_its_line() -> None:
    with pytest.raises(GraphError, match="a class inside a function") as error:

        @carried
        class Inner:
            mean: float = 0.0

    assert error.value.faults[0].where.startswith(f"{__file__}:")
    needy = type("Needy", (), {"__annotations__": {"mean": float}, "__module__": __name__})
    with pytest.raises(GraphError, match=r"field 'mean' \[field-without-default\]\n"):
        carried(needy)
