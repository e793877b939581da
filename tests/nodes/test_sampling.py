"""Draws are keyed, follow the distribution, and the recorded log-probability is that of the distribution used."""

import pytest
import torch
from torch import Tensor

from penstock.nodes.generate.sampling import Sampler, keyed_uniform

MASK = (1 << 64) - 1


def splitmix64(seed: int, index: int) -> int:
    """The generator as published, in exact integers."""
    state = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def logits(rows: int, vocab: int, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(5)) * scale


def test_uniforms_are_those_of_splitmix64() -> None:
    keys = torch.tensor([0, 1, 2**62 + 12345, 2**63 - 1])
    positions = torch.tensor([0, 7, 100_000, 3])
    expected = [(splitmix64(k, p) >> 12) * 2.0**-52 for k, p in zip(keys.tolist(), positions.tolist(), strict=True)]
    assert keyed_uniform(keys, positions).tolist() == expected


def test_uniforms_are_uniform_over_keys_and_over_positions() -> None:
    many = torch.arange(100_000)
    for values in (keyed_uniform(torch.tensor(17), many), keyed_uniform(many, torch.tensor(3))):
        assert float(values.min()) >= 0
        assert float(values.max()) < 1
        counts = torch.histc(values.float(), 20, 0, 1)
        assert ((counts - 5000).abs() < 5 * 5000**0.5).all()


def test_draws_follow_the_distribution() -> None:
    num_draws, sampler = 40_000, Sampler()
    row_V = logits(1, 7)
    tokens, _ = sampler(row_V.expand(num_draws, -1), keyed_uniform(torch.tensor(1), torch.arange(num_draws)))
    expected_V = row_V[0].softmax(0) * num_draws
    counts_V = torch.bincount(tokens, minlength=7)
    assert ((counts_V - expected_V).abs() < 5 * expected_V.sqrt()).all()


def test_the_whole_range_of_uniforms_gives_tokens_of_positive_probability() -> None:
    logits_SV = torch.full((2, 6), -torch.inf)
    logits_SV[:, 2], logits_SV[:, 4] = 0.0, 1.0
    tokens, logprobs = Sampler()(logits_SV, torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64))
    assert tokens.tolist() == [2, 4]
    assert torch.allclose(logprobs.exp().sum(), torch.tensor(1.0))


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.5), Sampler(1.5, 3), Sampler(1.0, 0, 0.6)])
def test_the_recorded_logprob_is_that_of_the_distribution_used(sampler: Sampler) -> None:
    logits_SV = logits(64, 11)
    tokens, logprobs = sampler(logits_SV, keyed_uniform(torch.arange(64), torch.tensor(0)))
    allowed = sampler.logprobs(logits_SV)
    torch.testing.assert_close(allowed.exp().sum(-1), torch.ones(64))
    assert torch.equal(logprobs, allowed.gather(1, tokens[:, None]).squeeze(1))
    kept = (allowed > -torch.inf).sum(-1)
    if sampler.top_k:
        assert set(kept.tolist()) == {sampler.top_k}
    uncut = Sampler(sampler.temperature).logprobs(logits_SV)
    torch.testing.assert_close(uncut, torch.log_softmax(logits_SV / sampler.temperature, -1))


def test_top_p_keeps_the_fewest_tokens_that_hold_it() -> None:
    logits_SV = torch.tensor([[0.5, 0.1, 0.3, 0.1]]).log()
    for top_p, kept in ((0.4, [0]), (0.5, [0]), (0.51, [0, 2]), (0.85, [0, 1, 2]), (1.0, [0, 1, 2, 3])):
        allowed = Sampler(top_p=top_p).logprobs(logits_SV)[0]
        assert (allowed > -torch.inf).nonzero().flatten().tolist() == kept


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.5, 2), (0.75, 3), (0.7500001, 4), (0.2499999, 1), (1.0, 4)])
def test_a_token_with_which_top_p_is_reached_exactly_is_the_last_one(top_p: float, kept: int) -> None:
    """Four equal tokens: their probabilities and the sums of them are exact."""
    allowed = Sampler(top_p=top_p).logprobs(torch.zeros(1, 4))[0]
    assert (allowed > -torch.inf).tolist() == [True] * kept + [False] * (4 - kept)
    torch.testing.assert_close(allowed[:kept].exp(), torch.full((kept,), 1 / kept))


def test_temperature_zero_takes_the_likeliest_with_probability_one() -> None:
    logits_SV = logits(5, 9)
    tokens, logprobs = Sampler(0.0)(logits_SV, torch.rand(5, dtype=torch.float64))
    assert torch.equal(tokens, logits_SV.argmax(-1))
    assert logprobs.tolist() == [0.0] * 5


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits_SV, uniform_S = logits(64, 23), keyed_uniform(torch.arange(64), torch.tensor(9))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    for sampler in (Sampler(), Sampler(0.7, 5, 0.9)):
        tokens, logprobs = sampler(logits_SV, uniform_S)
        other_tokens, other_logprobs = sampler(logits_SV[order], uniform_S[order])
        assert torch.equal(tokens[order], other_tokens)
        assert torch.equal(logprobs[order], other_logprobs)
