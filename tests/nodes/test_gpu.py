"""Code that is different on a GPU: Triton's kernels, which are compared with the formulas on a GPU or, without
bfloat16, in Triton's interpreter on a CPU; and a generator that replays its passes as CUDA graphs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from penstock.graph import Context, Metrics, Rollouts, Weights
from penstock.nodes.generate import make_engine
from penstock.nodes.generate.engine import Engine
from penstock.nodes.model.decoder import attend_causal
from penstock.nodes.model.eight_bit import QuantisedRows
from penstock.nodes.model.elementwise import ACTIVATIONS
from penstock.nodes.model.kernels import Linear
from penstock.runtime.tensor.buffers import held_bytes, shards_of
from penstock.runtime.tensor.layout import Layout
from tests.nodes.test_generate import assert_equal, become, run
from tests.nodes.tiny_model import CONFIG, weights

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# Tolerance of results near 1: the rounding of the results and, for attention, of its weights.
NEAR = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
KERNELS = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
SIXTEEN_BITS = torch.bfloat16 if GPU else torch.float16
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, SIXTEEN_BITS])


def _kernels() -> tuple[ModuleType, ModuleType]:
    """Return the modules of attention and of element-wise kernels. Without a GPU, Triton interprets them."""
    from penstock.nodes.generate import attention_triton
    from penstock.nodes.model import elementwise_triton

    return attention_triton, elementwise_triton


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def near(mine: Tensor, exact: Tensor, times: float = 1.0) -> None:
    most = times * NEAR[mine.dtype]
    torch.testing.assert_close(mine.double(), exact.double(), rtol=most, atol=most)


SLOTS = 16


def passed(length: int, dtype: torch.dtype, width: int, heads: int = 4) -> tuple[Tensor, ...]:
    """Return a pass of rows over 2 key-value heads: some rows have the same slot, and one is empty."""
    rows = [random(SLOTS, each, width, seed=each, dtype=dtype) for each in (heads, 2, 2)]
    slots = [random(SLOTS, 2, length, width, seed=seed, dtype=dtype) for seed in (7, 8)]
    slots_R, positions_R = torch.arange(SLOTS), torch.arange(SLOTS) * (length // SLOTS - 1) + 3
    slots_R[4:9], positions_R[4:9], positions_R[12] = 5, torch.arange(60, 65), -1
    return *rows, *slots, slots_R.to(DEVICE), positions_R.to(DEVICE)


def attend(given: Sequence[Tensor], window: int = 0) -> Tensor:
    """Attention over slots of one page, whose keys and values are given as [S, G, C, K]."""
    *rows, keys_SGCK, values_SGCK, slots_R, positions_R = given
    cache = keys_SGCK[:, None], values_SGCK[:, None]
    out_RHK: Tensor = _kernels()[0].attend(*rows, *cache, slots_R, positions_R, window)
    return out_RHK


SHORT, LONG = [(6, 200, 4), (256, 70, 2)], [(64, 900, 4), (80, 700, 6), (16, 1100, 2)]
"""Width, slots' length and heads. In the interpreter, which takes seconds for the long ones, these are in float32."""
SHAPES = [(*shape, torch.float32) for shape in SHORT + LONG]
SHAPES += [(*shape, SIXTEEN_BITS) for shape in (SHORT + LONG if GPU else SHORT)]


@KERNELS
@pytest.mark.parametrize("window", [0, 1, 21, 300])
@pytest.mark.parametrize(("width", "length", "heads", "dtype"), SHAPES)
def test_attention_over_slots_is_attention(
    window: int, width: int, length: int, heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_kernels()[0], "MOST_RUNS", 4)  # so the runs of the longest slots are longer than the least
    given = passed(length, dtype, width, heads)
    *_, keys_SGCK, values_SGCK, slots_R, positions_R = given
    before = keys_SGCK.clone()
    out_RHK = attend(given, window)
    for row, (slot, position) in enumerate(zip(slots_R.tolist(), positions_R.tolist(), strict=True)):
        if position < 0:
            assert torch.equal(keys_SGCK[slot], before[slot])
            continue
        assert torch.equal(keys_SGCK[slot, :, position], given[1][row])
        assert torch.equal(values_SGCK[slot, :, position], given[2][row])
        seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
        k_HCK, v_HCK = (x[slot, :, seen].double().repeat_interleave(heads // 2, 0) for x in (keys_SGCK, values_SGCK))
        near(out_RHK[row], F.scaled_dot_product_attention(given[0][row, :, None].double(), k_HCK, v_HCK)[:, 0])


@KERNELS
@DTYPES
def test_a_row_of_attention_has_the_same_bits_beside_others_and_in_another_row(dtype: torch.dtype) -> None:
    q_RHK, k_RGK, v_RGK, keys_SGCK, values_SGCK, slots_R, positions_R = passed(400, dtype, 64)
    together = attend((q_RHK, k_RGK, v_RGK, keys_SGCK.clone(), values_SGCK.clone(), slots_R, positions_R))
    order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    moved = q_RHK[order], k_RGK[order], v_RGK[order]
    other = attend((*moved, keys_SGCK.clone(), values_SGCK.clone(), slots_R[order], positions_R[order]))
    there = positions_R[order] >= 0
    assert torch.equal(other[there], together[order][there])
    for row in (0, 11, 15):
        alone_R = torch.full_like(positions_R, -1)
        alone_R[row] = positions_R[row]
        alone = attend((q_RHK, k_RGK, v_RGK, keys_SGCK.clone(), values_SGCK.clone(), slots_R, alone_R))
        assert torch.equal(alone[row], together[row])


class Asked(TorchFunctionMode):
    """Notes the numbers of query heads and key heads in calls of torch's attention."""

    heads = (0, 0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.heads = args[0].shape[1], args[1].shape[1]
        return func(*args, **(kwargs or {}))


# With 4 heads for queries and 2 for keys: the number of key heads that a GPU's kernel gets.
GROUPED = pytest.mark.parametrize(
    ("dtype", "window", "heads"), [(torch.bfloat16, 0, 2), (torch.bfloat16, 16, 4), (torch.float32, 0, 4)]
)


@GROUPED
def test_a_gpus_kernels_that_know_no_groups_get_a_key_for_each_query(
    dtype: torch.dtype, window: int, heads: int
) -> None:
    with FakeTensorMode(), Asked() as asked:
        q_BSHK, k_BSGK = (torch.empty(2, 64, each, 32, dtype=dtype, device="cuda:0") for each in (4, 2))
        assert attend_causal(0, q_BSHK, k_BSGK, k_BSGK, window).shape == q_BSHK.shape
    assert asked.heads == (4, heads)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@GROUPED
def test_no_attention_of_a_trainer_keeps_the_scores_of_all_pairs(dtype: torch.dtype, window: int, heads: int) -> None:
    q_BSHK, k_BSGK, v_BSGK = (random(2, 64, each, 32, seed=each, dtype=dtype) for each in (4, 2, 2))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        out_BSHK = attend_causal(0, q_BSHK, k_BSGK, v_BSGK, window)
    given = (x.double().transpose(1, 2).repeat_interleave(4 // x.shape[2], 1) for x in (q_BSHK, k_BSGK, v_BSGK))
    q_BHSK, k_BHSK, v_BHSK = given
    seen_SS = torch.ones(64, 64, dtype=torch.bool, device=DEVICE).tril().triu(1 - window if window else -64)
    near(out_BSHK, F.scaled_dot_product_attention(q_BHSK, k_BHSK, v_BHSK, seen_SS).transpose(1, 2), 5)


@KERNELS
@DTYPES
@pytest.mark.parametrize("shape", [(3, 5, 20), (2, 1500), (7, 1, 8), (0, 8)])
def test_the_norm_is_the_formula(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = random(*shape[:-1], 2 * shape[-1], dtype=dtype).chunk(2, -1)[0], random(shape[-1], seed=1, dtype=dtype)
    for offset in (0.0, 1.0):
        needed = F.rms_norm(x.double(), weight.shape, weight.double() + offset, 1e-5)
        near(_kernels()[1].rms_norm(x, weight, 1e-5, offset), needed, 2)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("shape", [(64, 2048), (3, 48)])
def test_rows_become_eight_bits_as_on_a_cpu(shape: tuple[int, int]) -> None:
    rows_RD = random(*shape, dtype=torch.bfloat16)
    rows_RD[1] = 0
    mine, theirs = QuantisedRows.of(rows_RD, torch.float8_e4m3fn), QuantisedRows.of(rows_RD.cpu(), torch.float8_e4m3fn)
    assert torch.equal(mine.scales.cpu(), theirs.scales)
    assert torch.equal(mine.elements.cpu().view(torch.uint8), theirs.elements.view(torch.uint8))


@KERNELS
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_stays_none_in_eight_bits(bad: float) -> None:
    rows_RD = random(2, 48)
    rows_RD[1, 3] = bad
    # Use float32 in place of eight bits, which the interpreter does not have.
    elements_RD, scales_R1 = _kernels()[1].quantised(rows_RD, torch.float32, 448.0, torch.finfo(torch.float32).tiny)
    made_RD = elements_RD * scales_R1
    near(made_RD[0], rows_RD[0])
    assert not made_RD[1, 3].isfinite()
    assert not elements_RD[1, 3].isfinite()


@KERNELS
@DTYPES
@pytest.mark.parametrize("shape", [(3, 5, 20), (2, 1500), (7, 1, 8), (0, 8)])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_gated_activation_is_the_formula_and_so_is_its_gradient(
    dtype: torch.dtype, shape: tuple[int, ...], name: str
) -> None:
    kernels = _kernels()[1]
    both = random(*shape[:-1], 2 * shape[-1], dtype=dtype)
    gate, up = both.chunk(2, -1)  # as one product gives them
    grad, exact = random(*shape, seed=1, dtype=dtype), [x.double().requires_grad_() for x in (gate, up)]
    formula = ACTIVATIONS[name](exact[0]) * exact[1]
    near(kernels.gated(gate, up, name), formula)
    for mine, theirs in zip(
        kernels.gated_backward(grad, gate, up, name), torch.autograd.grad(formula, exact, grad.double()), strict=True
    ):
        near(mine, theirs, 2)


@KERNELS
@DTYPES
@pytest.mark.parametrize("batch", [None, 1, 3])
@pytest.mark.parametrize(("length", "heads", "width"), [(5, 4, 8), (1, 3, 6), (7, 2, 64)])
def test_rotary_positions_are_a_turn_and_the_way_back_is_the_gradient(
    dtype: torch.dtype, batch: int | None, length: int, heads: int, width: int
) -> None:
    rows, kernels = batch or 2, _kernels()[1]
    both = random(rows, length, 2 * heads * width, dtype=dtype).chunk(2, -1)
    q, k = (x.view(rows, length, heads, width) for x in both)
    table = (length, 1, width) if batch is None else (batch, length, 1, width)
    cos, sin = random(*table, seed=1, dtype=dtype), random(*table, seed=2, dtype=dtype)

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos.double() + torch.cat((second, first), -1) * sin.double()

    exact = [x.double().requires_grad_() for x in (q, k)]
    forward: Callable[..., Any] = kernels.rotate
    grads = [random(rows, length, heads, width, seed=seed, dtype=dtype) for seed in (3, 4)]
    for mine, theirs in zip(forward(q, k, cos, sin), map(turned, exact), strict=True):
        near(mine, theirs, math.sqrt(8))
    backward = torch.autograd.grad([turned(x) for x in exact], exact, [each.double() for each in grads])
    for mine, theirs in zip(forward(*grads, cos, sin, True), backward, strict=True):
        near(mine, theirs, math.sqrt(8))


def placed(engine: Engine, given: Weights, memory: Tensor) -> Weights:
    """Return the same weights in `memory`, at the places of a sync for this engine."""
    tensors = given.tensors
    layout = Layout.whole([(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()])
    fused = engine.fused()
    taken = held_bytes(layout, 0, fused)
    parts = shards_of(layout, 0, memory[:taken], fused)
    for name, part in parts.items():
        part.tensor.copy_(tensors[name])
    return Weights(given.version, {name: part.tensor for name, part in parts.items()})


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_replayed_passes_have_the_bits_of_plain_ones_with_each_version_of_the_weights(
    context: Context, dtype: str
) -> None:
    """Versions come into two buffers in turn, each over the version before the last."""
    memories, found = torch.zeros(2, 1 << 22, dtype=torch.uint8, device="cuda"), []
    for replays in (True, False):
        engine = make_engine(replace(context, dtype=dtype, device="cuda"), samples=5)
        assert engine.replays
        assert len(engine.fused()) == 2 * CONFIG.num_hidden_layers
        engine.replays = replays
        behaviour, results = Weights(-1, {}), dict[int, tuple[Rollouts, Metrics]]()
        for version in range(4):
            become(behaviour, placed(engine, weights(version, version, getattr(torch, dtype)), memories[version % 2]))
            results |= run(engine, range(6 * version, 6 * version + 6), behaviour)
            maps = [module for module in engine.model.modules() if isinstance(module, Linear)]
            assert sum(each.joined is not None for each in maps) == 2 * CONFIG.num_hidden_layers
        found.append(results)
        assert engine.memory is not None
        assert bool(engine.memory.graphs._kept) == replays
    assert_equal(found[0], found[1], range(24))
    assert all(group[1].get("mismatch", 0.0) < (1e-4 if dtype == "float32" else 0.05) for group in found[0].values())
    assert len({int(group[0].tokens_NS.sum()) for group in found[0].values()}) > 6
