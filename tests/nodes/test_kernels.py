"""Kernels that are compiled for a CPU: norms, gated activations, rotary positions and causal attention are those of
the formulas, forward and backward; also without a compiler."""

import ctypes
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.graph.types import NodeWarning
from penstock.nodes.model import causal, elementwise
from penstock.nodes.model.compiled import NoCompilerWarning, compile_c, compiled_or_warned
from penstock.nodes.model.decoder import attend_causal
from penstock.nodes.model.elementwise import ACTIVATIONS, gated, rms_norm, rotate, transposed
from penstock.nodes.model.kernels import Linear, linear, together

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
NEAR = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
# Lengths on both sides of a tile, a vector, a block of queries and a chunk of sums; widths that no vector divides.
LENGTHS, WIDTHS = (1, 7, 16, 25, 66), (2, 10, 64)

Call = Callable[..., Tensor | tuple[Tensor, ...]]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def with_gradients(call: Call, given: tuple[Tensor, ...]) -> list[Tensor]:
    """Return a function's outputs, and the gradients of its inputs for output gradients that are drawn by shape."""
    leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in given]
    made = call(*leaves)
    outs = (made,) if isinstance(made, Tensor) else made
    grads = tuple(random(*out.shape, seed=7 + i).to(out.dtype) for i, out in enumerate(outs))
    return [out.detach() for out in outs] + list(torch.autograd.grad(outs, leaves, grads))


def assert_of_the_formula(call: Call, formula: Call, given: tuple[Tensor, ...]) -> None:
    """Compare with the formula in float64. Without gradients, and with two threads, the bits are the same."""
    torch.set_num_threads(1)
    found, exact = with_gradients(call, given), with_gradients(formula, tuple(x.double() for x in given))
    near = NEAR[given[0].dtype]
    for mine, theirs in zip(found, exact, strict=True):
        assert mine.dtype == given[0].dtype
        # The error of a sum over rows grows with the sum.
        torch.testing.assert_close(mine.double(), theirs, rtol=near, atol=near * max(1.0, float(theirs.abs().max())))
    with torch.no_grad():
        made = call(*given)
    for mine, theirs in zip((made,) if isinstance(made, Tensor) else made, found, strict=False):
        assert torch.equal(mine, theirs)
    torch.set_num_threads(2)
    for mine, theirs in zip(with_gradients(call, given), found, strict=True):
        assert torch.equal(mine, theirs)


def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def one(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((second, first), -1) * sin

    return one(q), one(k)


def attended(q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, window: int = 0) -> Tensor:
    """Attend by the whole matrix of scores."""
    groups, length = q_BSHK.shape[2] // k_BSGK.shape[2], q_BSHK.shape[1]
    k_BSHK, v_BSHK = (x.repeat_interleave(groups, 2) for x in (k_BSGK, v_BSGK))
    scores_BHSS = torch.einsum("bshk,bthk->bhst", q_BSHK, k_BSHK) / math.sqrt(q_BSHK.shape[-1])
    hidden_SS = torch.ones(length, length, dtype=torch.bool).triu(1)
    if window:
        hidden_SS |= torch.ones(length, length, dtype=torch.bool).tril(-window)
    return torch.einsum("bhst,bthk->bshk", scores_BHSS.masked_fill(hidden_SS, -math.inf).softmax(-1), v_BSHK)


@DTYPES
@pytest.mark.parametrize("width", [1, 5, 16, 33, 256])
def test_norms_and_gated_activations_are_those_of_the_formulas(dtype: torch.dtype, width: int) -> None:
    for rows in (1, 65, 130):
        x, other = random(rows, 2, width, dtype=dtype), 4 * random(rows, 2, width, seed=1, dtype=dtype)
        weight = random(width, seed=2, dtype=dtype)
        for offset in (0.0, 1.0):
            assert_of_the_formula(
                lambda x, w, offset=offset: rms_norm(x, w, 1e-5, offset),
                lambda x, w, offset=offset: F.rms_norm(x, w.shape, w + offset, 1e-5),
                (x, weight),
            )
        for name, formula in ACTIVATIONS.items():
            assert_of_the_formula(
                lambda a, b, name=name: gated(a, b, name), lambda a, b, formula=formula: formula(a) * b, (other, x)
            )


@DTYPES
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_right_where_its_exponential_ends(dtype: torch.dtype, name: str) -> None:
    x = torch.tensor([-1e30, -200.0, -88.0, -30.0, -0.0, 0.0, 30.0, 200.0, 1e30], dtype=dtype)
    one = torch.ones_like(x)
    exact = ACTIVATIONS[name](x.double())
    torch.testing.assert_close(gated(x, one, name).double(), exact, rtol=NEAR[dtype], atol=1e-30)
    assert gated(torch.full((3,), torch.nan, dtype=dtype), one[:3], name).isnan().all()


@DTYPES
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tables", [(7,), (3, 7), (1, 7)])
def test_rotary_positions_are_those_of_the_formula(dtype: torch.dtype, width: int, tables: tuple[int, ...]) -> None:
    """With a table of angles for all sequences, and with one for each."""
    cos, sin = (random(*tables, 1, width, seed=s, dtype=dtype) for s in (5, 6))
    q, k = random(3, 7, 4, width, dtype=dtype), random(3, 7, 2, width, seed=1, dtype=dtype)
    assert_of_the_formula(
        lambda q, k: rotate(q, k, cos, sin), lambda q, k: turned(q, k, cos.double(), sin.double()), (q, k)
    )


@DTYPES
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 4), (6, 2)])
def test_causal_attention_is_that_of_the_formula(dtype: torch.dtype, width: int, heads: int, groups: int) -> None:
    for length in LENGTHS:
        q = random(2, length, heads, width, dtype=dtype)
        k, v = (random(2, length, groups, width, seed=s, dtype=dtype) for s in (1, 2))
        assert causal.suits(q, k, v)
        for window in (0, 1, 9):
            ours, formula = partial(attend_causal, 0, window=window), partial(attended, window=window)
            assert_of_the_formula(ours, formula, (q, k, v))


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (16, 32), (33, 17), (97, 130)])
def test_a_transposed_matrix_has_the_same_numbers_to_the_bit(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = random(*shape, dtype=dtype)
    x.view(-1)[0], x.view(-1)[-1] = torch.finfo(dtype).smallest_normal / 4, -torch.inf
    assert torch.equal(transposed(x), x.t())
    wide = random(shape[0], shape[1] + 3, dtype=dtype)
    assert torch.equal(transposed(wide[:, :-3]), wide[:, :-3].t())
    assert torch.equal(transposed(wide.t()), wide)


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(1,), (3, 7), (66,)])
@pytest.mark.parametrize("outputs", [(3,), (130,), (32, 16, 16)])
def test_maps_of_one_input_and_their_gradients_are_those_of_the_formula(
    dtype: torch.dtype, outputs: tuple[int, ...], rows: tuple[int, ...], bias: bool
) -> None:
    x, count = random(*rows, 20, dtype=dtype), len(outputs)
    weights = [random(each, 20, seed=i, dtype=dtype) for i, each in enumerate(outputs)]
    biases = [random(each, seed=i, dtype=dtype) for i, each in enumerate(outputs)] if bias else []

    def ours(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        maps = [Linear(20, each, bias) for each in outputs]
        for i, each in enumerate(maps):
            for name, given in zip(("weight", "bias"), parameters[i::count], strict=False):
                del each._parameters[name]
                setattr(each, name, given)
        return tuple(together(x, *maps))

    def formula(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        return tuple(F.linear(x, *parameters[i::count]) for i in range(count))

    given = (x, *weights, *biases)
    found, exact = with_gradients(ours, given), with_gradients(formula, tuple(x.double() for x in given))
    for mine, theirs in zip(found, exact, strict=True):
        near = NEAR[dtype] * max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(mine.double(), theirs, rtol=NEAR[dtype], atol=near)
        assert mine.is_contiguous()


_OLD = """
import copy
import torch
from penstock.nodes.model.kernels import Linear, pack, together
torch.manual_seed(0)
maps = [Linear(20, 30, bias=True).to(torch.bfloat16) for _ in range(3)]
x = torch.randn(7, 20).bfloat16().requires_grad_()
sum(each.square().sum() for each in together(x, *maps)).backward()
found = [*together(x.detach(), *maps), x.grad, *(each.weight.grad for each in maps)]
exact = [copy.deepcopy(each).double() for each in maps]
pack(maps, 7)
with torch.no_grad():
    found += together(x, *maps)
wide = x.detach().double().requires_grad_()
outs = [torch.nn.functional.linear(wide, each.weight, each.bias) for each in exact]
grads = torch.autograd.grad(sum(each.square().sum() for each in outs), [wide, *(each.weight for each in exact)])
for mine, theirs in zip(found, [*outs, *grads, *outs], strict=True):
    assert mine.dtype == torch.bfloat16
    assert (mine - theirs).abs().max() < 0.02 * theirs.abs().max()
"""


def test_a_processor_whose_onednn_has_no_bfloat16_multiplies_and_learns_in_it() -> None:
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    assert subprocess.run([sys.executable, "-c", _OLD], env=environment, timeout=120).returncode == 0


def test_a_frozen_map_keeps_nothing_of_its_input() -> None:
    kept: list[torch.Size] = []

    def keep(each: Tensor) -> Tensor:
        kept.append(each.shape)
        return each

    frozen, x = Linear(4, 4).requires_grad_(False), random(3, 4).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        (out,) = together(x, frozen)
    assert kept == [(4, 4)]
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, frozen.weight.sum(0).expand(3, 4))


@DTYPES
@pytest.mark.parametrize("window", [0, 5])
def test_sequences_that_lie_end_to_end_attend_as_each_alone_to_the_bit(dtype: torch.dtype, window: int) -> None:
    lengths = [17, 1, 40, 6]
    q, k, v = (random(1, sum(lengths), heads, 16, seed=i, dtype=dtype) for i, heads in enumerate((4, 2, 2)))
    starts = torch.tensor([0, *accumulate(lengths)])
    grad = random(*q.shape, seed=9, dtype=dtype)
    leaves = q.clone().requires_grad_(), k.clone().requires_grad_(), v.clone().requires_grad_()
    whole = causal.attend(leaves[0], leaves[1], leaves[2], window, starts)
    found = [whole, *torch.autograd.grad(whole, leaves, grad)]
    for begin, length in zip(starts.tolist(), lengths, strict=False):
        own = slice(begin, begin + length)
        parts = tuple(x.detach()[:, own].requires_grad_() for x in leaves)
        alone = causal.attend(parts[0], parts[1], parts[2], window)
        for each, part in zip(found, [alone, *torch.autograd.grad(alone, parts, grad[:, own])], strict=True):
            assert torch.equal(each[:, own], part)


@DTYPES
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize(
    "families", [[(20, [5, 0, 33])], [(1, [3, 1]), (50, [])], [(5, [15]), (40, [24, 25, 1]), (3, [])]]
)
def test_sequences_with_one_beginning_attend_as_each_alone(
    families: list[tuple[int, list[int]]], window: int, dtype: torch.dtype
) -> None:
    """Outputs and gradients of queries are equal to the bit; keys and values have the sum of sequences' gradients."""
    starts, heads, sequences = [0], [0], []
    for prefix, rests in families:
        shared = list(range(starts[-1], starts[-1] + prefix))
        starts.append(starts[-1] + prefix)
        for rest in rests:
            sequences.append([*shared, *range(starts[-1], starts[-1] + rest)])
            starts.append(starts[-1] + rest)
        sequences += [] if rests else [shared]
        heads.append(len(starts) - 1)
    leaves = [random(1, starts[-1], n, 20, seed=i, dtype=dtype).requires_grad_() for i, n in enumerate((4, 2, 2))]
    out = causal.attend(leaves[0], leaves[1], leaves[2], window, torch.tensor(starts), torch.tensor(heads))
    grad = random(*out.shape, seed=9, dtype=dtype)
    found, sums = torch.autograd.grad(out, leaves, grad), [torch.zeros(x.shape) for x in leaves]
    for number, own in enumerate(sequences):
        parts = [x.detach()[:, own].requires_grad_() for x in leaves]
        alone = causal.attend(parts[0], parts[1], parts[2], window)
        assert torch.equal(alone, out[:, own])
        above = grad[:, own].clone()
        above[:, [i for i, token in enumerate(own) if any(token in other for other in sequences[:number])]] = 0
        for total, part in zip(sums, torch.autograd.grad(alone, parts, above), strict=True):
            total[:, own] += part.float()
    assert torch.equal(found[0].float(), sums[0])
    near = 1e-5 if dtype == torch.float32 else 2e-2
    for gradient, total in zip(found[1:], sums[1:], strict=True):
        torch.testing.assert_close(gradient.float(), total, rtol=near, atol=near)


@DTYPES
def test_no_bit_of_a_token_depends_on_those_after_it_or_on_other_sequences(dtype: torch.dtype) -> None:
    q, k, v = (random(3, 40, 2, 16, seed=s, dtype=dtype) for s in range(3))
    whole = causal.attend(q, k, v)
    assert torch.equal(causal.attend(q[1:2], k[1:2], v[1:2])[0], whole[1])

    def beginning(length: int, window: int = 0) -> Tensor:
        return causal.attend(q[:, :length], k[:, :length], v[:, :length], window)

    for length in (1, 6, 17, 33):
        assert torch.equal(beginning(length), whole[:, :length])
    # A window changes no bit of tokens whose whole context it covers.
    windowed = causal.attend(q, k, v, 11)
    assert torch.equal(windowed[:, :11], whole[:, :11])
    assert torch.equal(causal.attend(q, k, v, 40), whole)
    for length in (12, 33):
        assert torch.equal(beginning(length, 11), windowed[:, :length])


@DTYPES
def test_what_does_not_lie_side_by_side_gives_the_same_bits(dtype: torch.dtype) -> None:
    joined = random(3, 9, 40, dtype=dtype)
    gate, up = joined.chunk(2, -1)
    weight = random(20, seed=2, dtype=dtype)
    q, k, v = (random(3, 4, 9, 10, seed=s, dtype=dtype).transpose(1, 2) for s in range(3))
    cos, sin = (random(9, 1, 10, seed=s, dtype=dtype) for s in (5, 6))
    every_other = random(9, 3, 40, dtype=dtype).transpose(0, 1)[..., ::2]
    cases: list[tuple[Call, tuple[Tensor, ...]]] = [
        (gated, (gate, up)),
        (gated, (every_other, up)),
        (lambda x: rms_norm(x, weight, 1e-5), (up,)),
        (lambda x: rms_norm(x, weight, 1e-5), (every_other,)),
        (lambda q, k: rotate(q, k, cos, sin), (q, k)),
        (causal.attend, (q, k, v)),
        (causal.attend, tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))),
    ]
    for call, given in cases:
        needed = with_gradients(call, tuple(x.contiguous() for x in given))
        for mine, theirs in zip(with_gradients(call, given), needed, strict=True):
            assert torch.equal(mine, theirs)


@DTYPES
@pytest.mark.filterwarnings("ignore::penstock.nodes.model.compiled.NoCompilerWarning")
def test_without_a_compiler_results_are_the_same_within_rounding(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    x, other, weight = (random(*shape, seed=s, dtype=dtype) for s, shape in enumerate(((3, 9, 20), (3, 9, 20), (20,))))
    q, k, v = (random(2, 9, heads, 8, seed=s, dtype=dtype) for s, heads in enumerate((4, 2, 2)))
    cos, sin = (random(9, 1, 8, seed=s, dtype=dtype) for s in (5, 6))
    cases: list[tuple[Call, tuple[Tensor, ...]]] = [
        (lambda x, w: rms_norm(x, w, 1e-5), (x, weight)),
        (lambda x, w: rms_norm(x, w, 1e-5, 1.0), (x, weight)),
        (gated, (x, other)),
        (lambda a, b: gated(a, b, "gelu_pytorch_tanh"), (x, other)),
        (linear, (x, random(30, 20, dtype=dtype))),
        (lambda q, k: rotate(q, k, cos, sin), (q, k)),
        (lambda *qkv: attend_causal(0, *qkv), (q, k, v)),
    ]
    compiled = [with_gradients(*case) for case in cases]
    monkeypatch.setenv("CC", "/nowhere/cc")
    kinds = causal.functions, elementwise.functions
    try:
        for kind in kinds:
            kind.cache_clear()
        assert not causal.suits(q, k, v)
        for (call, given), needed in zip(cases, compiled, strict=True):
            found = with_gradients(call, given)
            with torch.no_grad():
                made = call(*given)
            for mine, theirs in zip((made,) if isinstance(made, Tensor) else made, found, strict=False):
                assert torch.equal(mine, theirs)
            for mine, theirs in zip(found, needed, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=NEAR[dtype], atol=5 * NEAR[dtype])
    finally:
        for kind in kinds:
            kind.cache_clear()


def test_without_a_compiler_it_is_said_in_one_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    texts = set()
    for kind in (causal.functions, elementwise.functions):
        with pytest.warns(NoCompilerWarning, match="given '/nowhere/cc'.* needed a C compiler") as said:
            assert kind.__wrapped__(torch.float32) is None
        texts |= {str(each.message) for each in said}
    assert len(texts) == 1


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that counts calls of the compiler. The user's cache is empty."""
    calls, program = tmp_path / "calls", tmp_path / "cc"
    calls.touch()
    program.write_text(f'#!/bin/sh\necho >> {calls}\nexec cc "$@"\n')
    program.chmod(0o700)
    monkeypatch.setenv("CC", str(program))
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return lambda: len(calls.read_text().splitlines())


def counting(folder: Path, number: int) -> Path:
    source = folder / "counting.c"
    source.write_text(f"int number(void) {{ return {number} + N; }}\n")
    return source


def number(library: ctypes.CDLL) -> int:
    return int(library.number())


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_what_was_compiled_is_kept_for_what_it_follows_from(tmp_path: Path, compilations: Callable[[], int]) -> None:
    source, kept = counting(tmp_path, 1), tmp_path / "cache" / "compiled"
    assert [number(compile_c(source, torch.float32, ["-DN=1"])) for _ in range(3)] == [2] * 3
    assert (compilations(), len(list(kept.iterdir()))) == (1, 1)
    # Other definitions, another dtype, another source, another compiler.
    assert number(compile_c(source, torch.float32, ["-DN=5"])) == 6
    assert number(compile_c(source, torch.bfloat16, ["-DN=1"])) == 2
    assert number(compile_c(counting(tmp_path, 7), torch.float32, ["-DN=1"])) == 8
    (tmp_path / "cc").write_text((tmp_path / "cc").read_text() + "\n")
    assert number(compile_c(source, torch.float32, ["-DN=1"])) == 8
    assert (compilations(), len(list(kept.iterdir()))) == (5, 5)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_what_is_not_whole_or_may_be_others_is_compiled_again(tmp_path: Path, compilations: Callable[[], int]) -> None:
    source, kept = counting(tmp_path, 1), tmp_path / "cache" / "compiled"
    assert number(compile_c(source, torch.float32, ["-DN=1"])) == 2
    (library,) = kept.iterdir()
    whole = library.read_bytes()
    library.unlink()  # do not write into the file that the process has loaded
    library.touch()
    assert number(compile_c(source, torch.float32, ["-DN=1"])) == 2
    assert (compilations(), library.stat().st_size) == (2, len(whole))
    # A folder that others may write is neither read nor written.
    kept.chmod(0o777)
    library.unlink()
    with pytest.warns(NodeWarning, match="given .*compiled, to which other users can write, needed a folder"):
        assert number(compile_c(source, torch.float32, ["-DN=1"])) == 2
    assert (compilations(), list(kept.iterdir())) == (3, [])
    # Nor is a link, which may be another user's.
    kept.rename(tmp_path / "other")
    (tmp_path / "other").chmod(0o700)
    kept.symlink_to(tmp_path / "other")
    with pytest.warns(NodeWarning, match="PENSTOCK_CACHE"):
        assert number(compile_c(source, torch.float32, ["-DN=1"])) == 2
    assert (compilations(), list((tmp_path / "other").iterdir())) == (4, [])


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_user_without_a_home_keeps_it_in_a_folder_that_is_its_own(
    tmp_path: Path, compilations: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PENSTOCK_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 54321)  # the system knows nothing of this user
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert [number(compile_c(counting(tmp_path, 1), torch.float32, ["-DN=1"])) for _ in range(2)] == [2] * 2
    assert compilations() == 1
    (tmp_path / f"penstock-{os.geteuid()}").chmod(0o777)
    with pytest.warns(NodeWarning, match="PENSTOCK_CACHE"):
        assert [number(compile_c(counting(tmp_path, 1), torch.float32, ["-DN=1"])) for _ in range(2)] == [2] * 2
    assert compilations() == 3


@pytest.mark.parametrize("given", ["'cc", "", " "])
def test_a_compiler_that_cannot_be_called_is_as_none(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("CC", given)
    with pytest.warns(NoCompilerWarning, match="needed a C compiler"):
        assert compiled_or_warned(Path("none.c"), torch.float32) is None


def test_operations_say_what_they_make_without_making_it() -> None:
    """Compilers trace such shapes, and planners count them."""
    q, k = torch.empty(2, 5, 4, 8, device="meta"), torch.empty(2, 5, 2, 8, device="meta")
    table, ops = torch.empty(5, 1, 8, device="meta"), torch.ops.penstock
    assert ops.rms_norm(q, q[0, 0, 0], 1e-5).shape == q.shape
    assert [x.shape for x in ops.rms_norm_backward(q, q, q[0, 0, 0], 1e-5)] == [q.shape, (8,)]
    assert ops.gated(q, q).shape == q.shape
    assert [x.shape for x in ops.gated_backward(q, q, q)] == [q.shape] * 2
    assert [x.shape for x in ops.rotate(q, k, table, table, False)] == [q.shape, k.shape]
    assert ops.causal(q, k, k, 0).shape == q.shape
    assert [x.shape for x in ops.causal_backward(q, q, k, k, 0)] == [q.shape, k.shape, k.shape]


@DTYPES
@pytest.mark.parametrize("shape", [(2, 1, 3, 64), (1, 5, 3, 64), (2, 5, 1, 64)])
def test_rows_that_are_repeated_are_rows(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """An expanded tensor has strides of 0, and so has the gradient of a sum over positions."""
    x, weight = random(*shape, dtype=dtype).expand(2, 5, 3, 64), random(64, dtype=dtype)
    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm(x.contiguous(), weight, 1e-6))
    assert torch.equal(gated(x, x), gated(x.contiguous(), x.contiguous()))
    cos, sin = random(5, 1, 64, seed=1, dtype=dtype), random(5, 1, 64, seed=2, dtype=dtype)
    for mine, theirs in zip(rotate(x, x, cos, sin), rotate(x.contiguous(), x.contiguous(), cos, sin), strict=True):
        assert torch.equal(mine, theirs)
    q = x.contiguous().requires_grad_()
    for dim in (0, 1, 2):
        (found,) = torch.autograd.grad(rotate(q, q, cos, sin)[0].sum(dim).sum(), q)
        (exact,) = torch.autograd.grad(turned(q.double(), q.double(), cos.double(), sin.double())[0].sum(), q)
        torch.testing.assert_close(found.double(), exact.double(), rtol=NEAR[dtype], atol=NEAR[dtype])


def test_turning_back_without_a_compiler_is_that_of_the_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    x, cos, sin = random(2, 5, 3, 64), random(5, 1, 64, seed=1), random(5, 1, 64, seed=2)
    found = torch.ops.penstock.rotate(x, x, cos, sin, True)
    monkeypatch.setattr(elementwise, "functions", lambda dtype: None)
    for mine, theirs in zip(found, torch.ops.penstock.rotate(x, x, cos, sin, True), strict=True):
        torch.testing.assert_close(mine, theirs)
