"""With `--invariant` a generator records the trainer's log-probabilities, to the bit: whatever the batch, the way a
prompt was computed, the threads and the dtype."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.graph.context import Context
from penstock.graph.types import Advantages, Rollouts, Weights
from penstock.nodes.distill import policy_logprobs
from penstock.nodes.generate import make_engine
from penstock.nodes.generate.engine import MismatchWarning
from penstock.nodes.generate.sampling import mismatch
from penstock.nodes.learn.batching import pack
from penstock.nodes.learn.logprobs import packed_logprobs
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.model import CausalLM, ModelError, invariant
from penstock.nodes.model.decoder import attend_causal
from penstock.nodes.model.elementwise import gated, rms_norm
from penstock.nodes.policy import make_policy

from .family_cases import CONFIGS, random_model
from .test_generate import run
from .tiny_model import CONFIG, TOKENIZER, model, save

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    yield request.param
    torch.set_num_threads(1)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def written(family: str, tmp_path: Path) -> Context:
    """Return the context of a generator with a model of a family, of odd widths."""
    config = CONFIG if family == "llama" else CONFIGS[family]
    save(random_model(replace(config, intermediate_size=43)), tmp_path)
    TOKENIZER.save(tmp_path)
    return Context(node="generate", seed=3, model=str(tmp_path), slots=32, max_tokens=8, max_prompt=64, invariant=True)


def trained(context: Context) -> Any:
    return make_policy(replace(context, node="policy"))


def assert_the_trainers(policy: Any, rollouts: Rollouts) -> None:
    """Assert that the recorded log-probabilities are log π of packed sequences, in several packings."""
    with torch.no_grad():
        for micro_tokens in (16, 64, 4096):
            for packed in pack(rollouts, micro_tokens):
                logprobs_P, _ = packed_logprobs(policy.model, packed)
                assert rollouts.logprobs_NT is not None
                assert torch.equal(logprobs_P, rollouts.logprobs_NT[packed.sequence_P, packed.step_P])


@DTYPES
@pytest.mark.parametrize(
    ("family", "temperature"), [("llama", 1.0), ("qwen2", 0.7), ("qwen3", 1.0), ("gemma3_text", 1.0)]
)
def test_what_a_generator_records_is_what_a_trainer_computes(
    threads: int, dtype: torch.dtype, family: str, temperature: float, tmp_path: Path
) -> None:
    context = replace(written(family, tmp_path), dtype=str(dtype).removeprefix("torch."))
    policy = trained(context)
    torch.set_num_threads(threads)
    weights = Weights(0, policy.weights())
    together = run(make_engine(context, samples=3, temperature=temperature), range(8), weights)
    assert_the_trainers(policy, Rollouts.concat([rollouts for rollouts, _ in together.values()]))
    # A trainer may have another number of threads.
    torch.set_num_threads(3 - threads)
    assert_the_trainers(policy, together[1][0])
    torch.set_num_threads(threads)
    assert sum(metrics.get("mismatch", 0.0) for _, metrics in together.values()) == 0.0
    assert any("mismatch" in metrics for _, metrics in together.values())
    # With few slots, prompts are computed beside sampling and in other pieces. In the second case a group is alone.
    for slots, ordinals in ((16, [5, 0, 3, 2]), (48, [4])):
        apart = run(make_engine(replace(context, slots=slots), samples=3, temperature=temperature), ordinals, weights)
        for ordinal in ordinals:
            ours, theirs = apart[ordinal][0], together[ordinal][0]
            assert torch.equal(ours.tokens_NS, theirs.tokens_NS)
            assert torch.equal(ours.logprobs_NT, theirs.logprobs_NT)


def test_without_it_they_differ(context: Context) -> None:
    """Else the tests above would show nothing."""
    policy = trained(context)
    found = run(make_engine(context, samples=3), range(8), Weights(0, policy.weights()))
    assert sum(mismatch(policy.model, rollouts) for rollouts, _ in found.values()) > 0


@DTYPES
def test_an_update_learns_what_the_ordinary_one_does(context: Context, dtype: torch.dtype) -> None:
    """Forward passes differ in rounding; backward passes are the ordinary ones. `policy_logprobs` computes the recorded
    log-probabilities."""
    given = replace(context, dtype=str(dtype).removeprefix("torch."), invariant=True)
    ours, theirs = trained(given), trained(replace(given, invariant=False))
    found = run(make_engine(given, samples=3), range(4), Weights(0, ours.weights()))
    rollouts = Rollouts.concat([rollouts for rollouts, _ in found.values()])
    assert rollouts.logprobs_NT is not None
    logprobs_NT = policy_logprobs.fn(ours, rollouts).logprobs_NT
    steps_NT = torch.arange(rollouts.logprobs_NT.shape[1]) < rollouts.response_lengths_N[:, None]
    assert torch.equal(logprobs_NT[steps_NT], rollouts.logprobs_NT[steps_NT])
    advantage = Advantages(random(len(rollouts), seed=4))
    metrics = [aipo_update.fn(each, rollouts, advantage, lr=1e-3)[1] for each in (ours, theirs)]
    assert metrics[0]["ratio_max"] == metrics[0]["ratio_mean"] == 1.0
    near = 1e-4 if dtype == torch.float32 else 0.1
    assert metrics[0]["grad_norm"] == pytest.approx(metrics[1]["grad_norm"], rel=near)


@DTYPES
def test_gradients_are_those_of_the_plain_formulas(dtype: torch.dtype) -> None:
    x, weight, bias = (
        random(5, 7, 20, dtype=dtype),
        random(13, 20, seed=1, dtype=dtype),
        random(13, seed=2, dtype=dtype),
    )
    q, k = random(2, 7, 4, 8, dtype=dtype), random(2, 7, 2, 8, seed=1, dtype=dtype)

    cases: list[tuple[Any, Any, tuple[Tensor, ...]]] = [
        (invariant.linear, F.linear, (x, weight, bias)),
        (lambda *qkv: invariant.attend_causal(0, *qkv), lambda *qkv: attend_causal(0, *qkv), (q, k, k.flip(0))),
        (partial(invariant.attend_causal, 0, window=3), partial(attend_causal, 0, window=3), (q, k, k.flip(0))),
    ]
    near = 1e-5 if dtype == torch.float32 else 0.05
    for ours, theirs, given in cases:
        made = []
        for function in (ours, theirs):
            leaves = [tensor.clone().requires_grad_() for tensor in given]
            out = function(*leaves)
            gradients = torch.autograd.grad(out, leaves, random(*out.shape, seed=9, dtype=dtype))
            made.append((out, *gradients))
        for mine, their in zip(*made, strict=True):
            assert mine.dtype == dtype
            torch.testing.assert_close(mine, their, rtol=near, atol=near)


@DTYPES
def test_a_row_is_the_same_bits_in_any_rows_and_threads(threads: int, dtype: torch.dtype) -> None:
    """Sizes are on both sides of a tile, a vector, and a chunk of rows."""
    for rows, width, out in ((1, 5, 3), (7, 16, 4), (97, 33, 9), (200, 48, 130)):
        x, weight = random(rows, width, dtype=dtype), random(out, width, seed=1, dtype=dtype)
        norm = random(width, seed=2, dtype=dtype)

        def made(x: Tensor, weight: Tensor = weight, norm: Tensor = norm) -> list[Tensor]:
            logits = invariant.linear(x, weight)
            return [
                logits,
                rms_norm(x, norm, 1e-5),
                gated(x, x.flip(1)),
                invariant.log_softmax(logits),
            ]

        torch.set_num_threads(threads)
        whole = made(x)
        torch.set_num_threads(1)
        for index in {0, rows // 2, rows - 1}:
            for one, many in zip(made(x[index : index + 1]), whole, strict=True):
                assert torch.equal(one[0], many[index])
        torch.testing.assert_close(whole[0].float(), x.float() @ weight.float().t(), rtol=0.02, atol=0.1)
        torch.testing.assert_close(whole[3], whole[0].float().log_softmax(-1), rtol=1e-5, atol=1e-5)


def test_a_sum_that_is_no_number_stays_none() -> None:
    logits = random(2, 20)
    logits[1, 3] = torch.nan
    assert invariant.log_softmax(logits).isnan().all(1).tolist() == [False, True]


def test_what_it_does_not_cover_is_refused() -> None:
    with pytest.raises(ModelError, match="given a qwen3_moe, needed a model without experts"):
        random_model(CONFIGS["qwen3_moe"]).be_invariant()
    with pytest.raises(ModelError, match="given float16, needed float32 or bfloat16"):
        CausalLM(CONFIG, torch.float16).be_invariant()


def test_a_mismatch_beyond_rounding_is_warned_of_once(context: Context) -> None:
    for given, beyond in ((context, 2.0), (replace(context, invariant=True), 1 + 1e-6)):
        engine = make_engine(replace(given, batch=1), samples=3)
        # Let the trainer's pass rotate queries and keys by other angles.
        engine.unpacked.cos_PK = engine.unpacked.cos_PK * beyond
        weights = Weights(0, trained(given).weights())
        with pytest.warns(MismatchWarning) as told:
            run(engine, range(3), weights)
        assert len(told) == 1


def test_without_a_compiler_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    invariant._functions.cache_clear()
    try:
        with pytest.raises(ModelError, match=r"given '/nowhere/cc'.*needed a C compiler"):
            model().be_invariant()
    finally:
        invariant._functions.cache_clear()
