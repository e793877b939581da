"""What follows the policy: its moving average by hand, snapshots, and their state."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.graph.protocols import Carried
from penstock.graph.types import Average, Context, Reference
from penstock.nodes.ema import FollowingPolicy, ema, make_average, refresh
from penstock.nodes.model import ModelError
from penstock.nodes.policy import LanguagePolicy, make_policy

CONTEXT = Context(node="policy", seed=1)


def average(**changes: Any) -> FollowingPolicy:
    made = make_average(replace(CONTEXT, node="average", **changes))
    assert isinstance(made, FollowingPolicy)
    return made


def policy(**changes: Any) -> LanguagePolicy:
    made = make_policy(replace(CONTEXT, **changes))
    assert isinstance(made, LanguagePolicy)
    return made


def test_an_average_starts_where_the_policy_does() -> None:
    made, first = average(), policy()
    assert isinstance(made, Carried)
    assert isinstance(made, Average)
    assert isinstance(made, Reference)
    assert all(torch.equal(w, first.weights()[name]) for name, w in made.weights().items())


def test_the_average_is_the_formula() -> None:
    """After two steps towards policies p and q: d² · a + d · (1 − d) · p + (1 − d) · q."""
    made, start, first, second = average(), average(), policy(seed=2), policy(seed=3)
    figures = [ema.fn(made, learnt, decay=0.75)[1] for learnt in (first, second)]
    for name, found in made.masters.items():
        needed = 0.5625 * start.masters[name] + 0.1875 * first.masters[name] + 0.25 * second.masters[name]
        torch.testing.assert_close(found, needed, rtol=1e-5, atol=1e-6)
    gaps = torch.cat([(start.masters[n] - p).detach().flatten() for n, p in first.masters.items()])
    whole = torch.cat([p.detach().flatten() for p in first.masters.values()])
    assert figures[0]["average_distance"] == pytest.approx(float(gaps.norm() / whole.norm()), rel=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_refreshed_copy_is_the_policy_to_the_bit_and_does_not_move_with_it(dtype: str) -> None:
    made, learnt = average(dtype=dtype), policy(seed=2, dtype=dtype)
    refresh.fn(made, learnt)
    assert all(torch.equal(w, made.weights()[name]) for name, w in learnt.weights().items())
    assert all(torch.equal(w, made.masters[name]) for name, w in learnt.masters.items())
    with torch.no_grad():
        learnt.masters["model.norm.weight"].zero_()
    assert made.masters["model.norm.weight"].min() > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restored_average_goes_on_to_the_bit(dtype: str) -> None:
    whole, resumed, learnt = average(dtype=dtype), average(dtype=dtype, seed=9), policy(seed=2, dtype=dtype)
    ema.fn(whole, learnt)
    tensors, facts = whole.state()
    resumed.restore({name: t.clone() for name, t in tensors.items()}, dict(facts))
    for each in (whole, resumed):
        ema.fn(each, learnt)
    (ours, our_facts), (theirs, their_facts) = whole.state(), resumed.state()
    assert our_facts == their_facts == {"version": 2}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(torch.equal(w, resumed.weights()[name]) for name, w in whole.weights().items())


def test_an_exported_average_is_a_model(tmp_path: Path) -> None:
    made = average()
    ema.fn(made, policy(seed=2))
    made.export(str(tmp_path))
    loaded = policy(model=str(tmp_path))
    assert all(torch.equal(w, loaded.weights()[name]) for name, w in made.weights().items())


def test_what_cannot_be_averaged_is_refused() -> None:
    with pytest.raises(TypeError, match="average: given a Average, needed a FollowingPolicy"):
        refresh.fn(Average(), policy())
    tensors, facts = average().state()
    del tensors["master.lm_head.weight"]  # type: ignore[attr-defined]
    with pytest.raises(ModelError, match=r"state of the average: master\.lm_head\.weight is missing"):
        average().restore(tensors, facts)
