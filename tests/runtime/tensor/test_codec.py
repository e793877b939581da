"""Values of edges come back equal, as the declared class, or are refused with the field's name."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.graph.types import Advantages, Prompts, Rewards, Rollouts
from penstock.runtime.tensor.codec import DTYPES, CodecError, decode, encode
from penstock.runtime.tensor.layout import ITEMSIZE


def through_json(value: Any, cls: type[Any]) -> Any:
    tensors, meta = encode(value)
    return decode(cls, tensors, json.loads(json.dumps(meta)))


@dataclass(frozen=True)
class Mixed:
    name: str
    scale: float
    count: int
    flag: bool
    nothing: None
    table: dict[str, list[int]]
    words: tuple[str, ...]
    values: Any


def mixed(values: Any, **changes: Any) -> Mixed:
    fields = {"name": "a", "scale": 0.1, "count": 2**70, "flag": True, "nothing": None, "table": {"k": [1]}}
    return Mixed(**{**fields, "words": ("x", "\ud800"), "values": values, **changes})


def rollouts(rows: int = 3) -> Rollouts:
    return Rollouts(
        ordinals=(7,),
        prompts=("1+1=",),
        answers=("2",),
        texts=tuple(f"é{i}" for i in range(rows)),
        tokens_NS=torch.arange(rows * 5).view(rows, 5),
        prompt_lengths_N=torch.full((rows,), 4),
        response_lengths_N=torch.ones(rows, dtype=torch.int64),
        logprobs_NT=torch.randn(rows, 2),
        versions_NT=torch.zeros(rows, 2, dtype=torch.int64),
        finished_N=torch.ones(rows, dtype=torch.bool),
    )


@pytest.mark.parametrize(
    "value",
    [rollouts(), rollouts(0), Prompts((1,), ("p",), ("a",)), Rewards(torch.randn(4)), Advantages(torch.zeros(0))],
)
def test_what_flows_on_edges_comes_back_equal(value: Any) -> None:
    back = through_json(value, type(value))
    assert type(back) is type(value)
    for name, item in vars(value).items():
        if isinstance(item, torch.Tensor):
            assert torch.equal(getattr(back, name), item)
            assert getattr(back, name).dtype == item.dtype
        else:
            assert getattr(back, name) == item


@settings(deadline=None)
@given(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 3), max_size=3))
def test_every_dtype_and_shape_keeps_its_bits(dtype: str, shape: list[int]) -> None:
    raw = torch.randint(0, 2, (*shape, ITEMSIZE[dtype]), dtype=torch.uint8)
    tensor = raw.view(DTYPES[dtype]).reshape(shape)
    back = through_json(mixed(tensor), Mixed).values
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back.reshape(-1).view(torch.uint8), raw.reshape(-1))


def test_json_fields_keep_their_values_and_tuples_stay_tuples() -> None:
    value = mixed(torch.zeros(1))
    back = through_json(value, Mixed)
    assert [getattr(back, n) for n in vars(value) if n != "values"] == [
        getattr(value, n) for n in vars(value) if n != "values"
    ]


def test_numpy_becomes_torch_and_numpy_scalars_become_numbers() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::-1]
    back = through_json(mixed(array, count=np.int64(3), scale=np.float32(0.5)), Mixed)
    assert back.values.tolist() == array.tolist()
    assert back.values.dtype == torch.int16
    assert (back.count, back.scale) == (3, 0.5)


def test_strided_and_differentiable_tensors_travel_as_plain_ones() -> None:
    tensor = torch.randn(3, 4, requires_grad=True)
    back = through_json(mixed(tensor.t()), Mixed).values
    assert torch.equal(back, tensor.t())
    assert not back.requires_grad


@pytest.mark.parametrize("value", [torch.arange(3), 1.5, 7, "text", True])
def test_a_tensor_or_scalar_is_a_value_by_itself(value: Any) -> None:
    back = through_json(value, type(value))
    assert torch.equal(back, value) if isinstance(value, torch.Tensor) else back == value


@pytest.mark.parametrize("item", [{1, 2}, ((1, 2),), {1: 2}, [(1,)], object(), b"bytes", np.array(["x"])])
def test_what_json_cannot_give_back_is_refused_by_field(item: Any) -> None:
    with pytest.raises(CodecError, match=r"Mixed\.values"):
        encode(mixed(item))


@pytest.mark.parametrize(
    "tensor", [torch.zeros(2, dtype=torch.complex64), torch.eye(2).to_sparse()], ids=["complex", "sparse"]
)
def test_tensors_that_do_not_travel_are_refused_by_field(tensor: torch.Tensor) -> None:
    with pytest.raises(CodecError, match=r"Mixed\.values"):
        encode(mixed(tensor))


def test_the_declared_class_decides_and_must_fit() -> None:
    tensors, meta = encode(Rewards(torch.zeros(2)))
    assert type(decode(Advantages, tensors, meta)) is Advantages
    with pytest.raises(CodecError, match=r"Prompts: given the fields \['values_N'\]"):
        decode(Prompts, tensors, meta)
    with pytest.raises(CodecError, match="needed a str"):
        decode(str, *encode(3))
