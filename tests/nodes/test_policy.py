"""A policy's state is all there is: restored, it goes on to the bit; exported, other tools load it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.graph.protocols import Carried
from penstock.graph.types import Context
from penstock.nodes.data import Demonstrations
from penstock.nodes.learn.sft import sft_update
from penstock.nodes.model import ModelError
from penstock.nodes.policy import LanguagePolicy, make_policy, make_reference

CONTEXT = Context(node="policy", seed=1, updates=10)
LESSON = Demonstrations(("12+34=", "50-9="), ("046", "041"))


def policy(context: Context = CONTEXT) -> LanguagePolicy:
    made = make_policy(context)
    assert isinstance(made, LanguagePolicy)
    return made


def learn(learner: LanguagePolicy, steps: int) -> None:
    for _ in range(steps):
        sft_update.fn(learner, LESSON)


def saved(learner: LanguagePolicy) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, facts = learner.state()
    return {name: t.clone() for name, t in tensors.items()}, dict(facts)


def same(a: LanguagePolicy, b: LanguagePolicy) -> bool:
    (ours, our_facts), (theirs, their_facts) = a.state(), b.state()
    return (
        our_facts == their_facts and ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("steps", [0, 3])
def test_a_restored_policy_goes_on_to_the_bit(dtype: str, steps: int) -> None:
    context = replace(CONTEXT, dtype=dtype)
    whole, resumed = policy(context), policy(replace(context, seed=2))
    learn(whole, steps)
    resumed.restore(*saved(whole))
    assert same(whole, resumed)
    learn(whole, 2)
    learn(resumed, 2)
    assert same(whole, resumed)
    assert resumed.version == steps + 2


def test_restoring_forgets_what_was_learnt_since() -> None:
    learner = policy()
    state = saved(learner)
    learn(learner, 2)
    learner.restore(*state)
    learn(learner, 1)
    fresh = policy()
    learn(fresh, 1)
    assert same(learner, fresh)


def test_what_a_rank_has_no_elements_of_is_not_restored() -> None:
    """As a pipeline stage is given the layers of the others, from a state of another mesh."""
    learner, other = policy(), policy(replace(CONTEXT, seed=9))
    tensors, facts = saved(other)
    learner.restore({**tensors, "master.model.layers.9.mlp.up_proj.weight": torch.empty(0, 64)}, facts)
    assert same(learner, other)


def test_the_state_of_another_model_is_refused() -> None:
    learner = policy()
    tensors, facts = saved(learner)
    with pytest.raises(ModelError, match=r"master\.lm_head\.weight.*given shape \[1\]"):
        learner.restore({**tensors, "master.lm_head.weight": torch.zeros(1)}, facts)
    del tensors["master.model.norm.weight"]
    with pytest.raises(ModelError, match=r"master\.model\.norm\.weight"):
        learner.restore(tensors, facts)


def test_every_pool_makes_the_same_initial_model() -> None:
    first, other = policy().weights(), policy(replace(CONTEXT, node="elsewhere")).weights()
    assert all(torch.equal(first[name], other[name]) for name in first)
    different = policy(replace(CONTEXT, seed=2)).weights()
    assert not torch.equal(first["lm_head.weight"], different["lm_head.weight"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exported_policy_is_what_a_run_starts_from(tmp_path: Path, dtype: str) -> None:
    learner = policy(replace(CONTEXT, dtype=dtype))
    learn(learner, 1)
    learner.export(str(tmp_path))
    loaded = policy(replace(CONTEXT, dtype=dtype, model=str(tmp_path), seed=9))
    assert all(torch.equal(w, loaded.weights()[name]) for name, w in learner.weights().items())
    assert loaded.tokenizer.encode("1+2=") == learner.tokenizer.encode("1+2=")
    assert loaded.version == 0


def test_an_exported_policy_loads_into_transformers_with_equal_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    learner = policy()
    learn(learner, 2)
    learner.export(str(tmp_path))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.tensor([learner.tokenizer.encode("12+34=")])
    with torch.no_grad():
        ours = learner.model.logits(learner.model(tokens))
        torch.testing.assert_close(ours, theirs(tokens).logits, rtol=1e-4, atol=1e-5)
    text = transformers.AutoTokenizer.from_pretrained(tmp_path)("12+34=", add_special_tokens=False)
    assert text["input_ids"] == tokens[0].tolist()


def test_a_reference_is_frozen_and_equal_to_the_first_policy() -> None:
    reference = make_reference(CONTEXT)
    assert isinstance(reference, Carried)
    ours = policy().weights()
    assert all(torch.equal(w, ours[name]) for name, w in reference.weights().items())
    assert reference.state() == ({}, {})


def test_policies_are_carried_values() -> None:
    assert isinstance(policy(), Carried)
