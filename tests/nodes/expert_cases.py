"""The work of each rank in the tests of experts that are sharded over ranks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.graph.context import Context, Origin
from penstock.graph.protocols import expert_of
from penstock.graph.types import Policy, Weights
from penstock.nodes.distill import policy_logprobs, reference_logprobs
from penstock.nodes.generate import make_engine
from penstock.nodes.learn.update import policy_update
from penstock.nodes.model.lora import ATTENTION
from penstock.nodes.policy import make_policy, make_reference

from .family_cases import CONFIGS, directory, random_model
from .rank_cases import OPTIONS, assert_near, assert_same_everywhere, assert_whole, context, policy
from .test_eight_bit import reading, sent
from .test_generate import run
from .updating import batch


def shared_model(rank: int, folder: Path) -> str:
    """Return the directory of a model with experts, which the first rank writes."""
    if rank == 0:
        directory("qwen3_moe", folder)
    dist.barrier()
    return str(folder / "qwen3_moe")


def engine(rank: int, folder: Path, dtype: str) -> None:
    """Ranks that each have some of the experts sample the bits of one rank, and record the same routing; with adapters
    of attention, too."""
    made = random_model(CONFIGS["qwen3_moe"]).to(getattr(torch, dtype))
    model = shared_model(rank, folder)
    given = Context(
        node="generate", seed=3, model=model, slots=32, max_tokens=8, dtype=dtype, batch=1, replay_routing=True
    )
    mesh = (("ep", dist.get_world_size()),)
    whole = Weights(0, made.state_dict())
    parted = make_engine(replace(given, mesh=mesh, rank=rank), samples=3)
    own = dict(parted.model.named_parameters())
    assert all(own[name].shape == whole.tensors[name].shape for name in own)
    held = {expert for name in own if (expert := expert_of(name)) is not None}
    assert held == set(range(6)[rank * 6 // mesh[0][1] : (rank + 1) * 6 // mesh[0][1]])
    ours = run(parted, range(6), Weights(0, {name: whole.tensors[name] for name in own}))
    theirs = run(make_engine(given, samples=3), range(6), whole)
    assert ours.keys() == theirs.keys()
    for ordinal, (rollouts, metrics) in ours.items():
        one, figures = theirs[ordinal]
        assert torch.equal(rollouts.tokens_NS, one.tokens_NS)
        assert torch.equal(rollouts.logprobs_NT, one.logprobs_NT)
        assert torch.equal(rollouts.experts_NSLK, one.experts_NSLK)
        assert metrics["mismatch"] == figures["mismatch"]
    learner: Any = make_policy(replace(given, node="policy", lora=3, lora_targets=ATTENTION))
    for number, master in enumerate(learner.masters.values()):
        master.data.copy_(torch.randn(master.shape, generator=torch.Generator().manual_seed(number)) / 8)
    sent = Weights(1, dict(learner.weights()), learner.about())
    reading = replace(given, weights={"behaviour": Origin(Policy.maker, learner.context)})
    places = replace(reading, mesh=mesh, rank=rank), reading
    ours, theirs = (run(make_engine(place, samples=3), range(2), sent) for place in places)
    assert all(torch.equal(ours[ordinal][0].logprobs_NT, theirs[ordinal][0].logprobs_NT) for ordinal in ours)


def in_int8(rank: int, folder: Path) -> None:
    """Each rank computes in int8 with its own experts, and all sample the bits of one rank."""
    model = shared_model(rank, folder)
    one = reading(Context(node="generate", seed=3, model=model, slots=32, max_tokens=8), "int8")
    weights, _ = sent(make_policy(replace(one, node="policy")), "int8")
    parted = make_engine(replace(one, mesh=(("ep", dist.get_world_size()),), rank=rank), samples=3)
    own = {name: weights.tensors[name] for name in parted.model.own_parameters()}
    assert 0 < len(own) < len(weights.tensors)
    ours, theirs = run(parted, range(4), Weights(0, own)), run(make_engine(one, samples=3), range(4), weights)
    for ordinal, (rollouts, _) in ours.items():
        assert torch.equal(rollouts.tokens_NS, theirs[ordinal][0].tokens_NS)
        assert torch.equal(rollouts.logprobs_NT, theirs[ordinal][0].logprobs_NT)


def other_ways(rank: int, folder: Path, mesh: str) -> None:
    """Updates with recomputed layers, weights that stay gathered, moments on the host, a batch with no work for one
    rank, adapters of attention, a reference beside the policy, and masters of another precision."""
    given: dict[str, Any] = {"model": shared_model(rank, folder)}
    rollouts, advantage = (part.take([2]) for part in batch())
    for more in ({"recompute": "layer"}, {"zero": 1}, {"optimizer_state": "host"}):
        parted, one = policy(mesh, rank, **given, **more), policy(**given)
        for learnt in (batch(), (rollouts, advantage)):
            ours, theirs = (policy_update.fn(each, *learnt, **OPTIONS)[1] for each in (parted, one))
            assert_same_everywhere(ours)
            assert_near(ours, theirs)
        assert_whole(parted, one)
    own = {**given, "lora": 3, "lora_targets": ATTENTION}
    adapters, alone = policy(mesh, rank, **own), policy(**own)
    for _ in range(2):
        ours, theirs = (policy_update.fn(each, *batch(), **OPTIONS)[1] for each in (adapters, alone))
        assert_same_everywhere(ours)
        assert_near(ours, theirs)
    assert_whole(adapters, alone)
    references: Any = [make_reference(context(*place, **given)) for place in ((mesh, rank), ())]
    ours, theirs = (reference_logprobs.fn(each, batch()[0], micro_tokens=12).logprobs_NT for each in references)
    assert torch.equal(ours, theirs)
    half, alone = (policy(*place, **given, dtype="bfloat16") for place in ((mesh, rank), ()))
    assert {p.dtype for p in half.workers.parameters.values()} == {torch.float32}
    assert {tensor.dtype for tensor in half.weights().values()} == {torch.bfloat16}
    ours, theirs = (policy_update.fn(each, *batch(), **OPTIONS)[1] for each in (half, alone))
    assert abs(ours["loss"] - theirs["loss"]) < 0.02


def logprobs(rank: int, folder: Path, mesh: str, dtype: str) -> None:
    """Log-probabilities of a policy with sharded experts have the bits of one rank's."""
    given: dict[str, Any] = {"model": shared_model(rank, folder), "dtype": dtype, "micro_tokens": 12}
    both = policy(mesh, rank, **given), policy(**given)
    ours, theirs = (policy_logprobs.fn(each, batch()[0]).logprobs_NT for each in both)
    assert torch.equal(ours, theirs)
