"""Data-parallel threads compute what one thread does, in an order that does not depend on which of them is faster."""

import pytest
import torch
from torch import Tensor

from penstock.graph.types import Context
from penstock.nodes.learn.data_parallel_threads import DataParallelThreads
from penstock.nodes.model import Llama
from penstock.nodes.open_model import open_model

INPUTS = [torch.arange(i, i + 7) % 13 for i in range(5)]


def lanes(threads: int, dtype: str = "float32") -> DataParallelThreads[Llama]:
    return DataParallelThreads(open_model(Context(seed=1, dtype=dtype))[0], threads)


def backward(model: Llama, tokens_S: Tensor) -> float:
    loss = model.logits(model(tokens_S[None])).float().square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


@pytest.mark.parametrize("count", [2, 3, 7])
def test_lanes_add_up_to_one_thread(count: int) -> None:
    alone, together = lanes(1), lanes(count)
    assert together.map(backward, INPUTS) == pytest.approx(alone.map(backward, INPUTS), rel=1e-5)
    ours, theirs = together.collect(), alone.collect()
    assert ours.keys() == theirs.keys() == dict(alone.models[0].named_parameters()).keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-4)


def test_equal_items_make_equal_sums_to_the_bit_whichever_lane_is_faster() -> None:
    found = []
    for slow in (0, 1):
        each = lanes(2)

        def work(model: Llama, tokens_S: Tensor, each: DataParallelThreads[Llama] = each, slow: int = slow) -> float:
            if model is each.models[slow]:
                torch.randn(1000, 1000).mm(torch.randn(1000, 1000))
            return backward(model, tokens_S)

        found.append((each.map(work, INPUTS), each.collect()))
    (first, ours), (second, theirs) = found
    assert first == second
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_all_lanes_see_a_change_of_the_weights() -> None:
    each = lanes(3)
    with torch.no_grad():
        each.models[0].head_weight().zero_()
    assert each.map(backward, INPUTS) == [0.0] * len(INPUTS)


def test_gradients_are_summed_in_float32_and_forgotten_once_collected() -> None:
    each = lanes(2, "bfloat16")
    each.map(backward, INPUTS)
    assert {g.dtype for g in each.collect().values()} == {torch.float32}
    assert each.collect() == {}
    assert all(p.grad is None for model in each.models for p in model.parameters())


def test_no_gradient_is_kept_where_none_is_wanted() -> None:
    with torch.no_grad():
        logits = lanes(2).map(lambda model, tokens_S: model.logits(model(tokens_S[None])), INPUTS)
    assert not any(t.requires_grad for t in logits)


def test_an_error_in_a_lane_is_raised() -> None:
    def work(model: Llama, tokens_S: Tensor) -> None:
        if int(tokens_S[0]) == 3:
            raise ValueError("item 3")

    with pytest.raises(ValueError, match="item 3"):
        lanes(2).map(work, INPUTS)


@pytest.mark.parametrize(("threads", "count", "inner"), [(2, 2, 1), (4, 4, 1), (9, 4, 2)])
def test_lanes_share_out_the_threads_and_leave_the_callers_alone(threads: int, count: int, inner: int) -> None:
    before, each = torch.get_num_threads(), lanes(threads)
    assert len(each.models) == count
    torch.set_num_threads(3)
    try:
        assert each.map(lambda model, tokens_S: torch.get_num_threads(), INPUTS) == [inner] * len(INPUTS)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
