"""Random models of each family, and what each rank of their tests does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.graph.protocols import expert_of
from penstock.graph.types import Context, Weights
from penstock.nodes.distill import policy_logprobs, reference_logprobs
from penstock.nodes.generate import make_engine
from penstock.nodes.learn.update import policy_update
from penstock.nodes.model import CausalLM, ModelConfig
from penstock.nodes.model.families import FAMILIES
from penstock.nodes.policy import make_reference

from .part_cases import own_parts
from .rank_cases import (
    OPTIONS,
    assert_boxes,
    assert_gradients_near,
    assert_near,
    assert_same_everywhere,
    assert_whole,
    context,
    goes_on,
    policy,
)
from .test_generate import run
from .tiny_model import CONFIG, TOKENIZER, model, save
from .updating import batch


def config_of(family: str, base: ModelConfig = CONFIG, **changes: Any) -> ModelConfig:
    """A small model of a family."""
    experts: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 14}
    own = experts if FAMILIES[family].experts else {}
    return replace(base, model_type=family, **{**own, **changes})


# What is beyond Llama.
CONFIGS: dict[str, ModelConfig] = {name: config_of(name) for name in FAMILIES if name != "llama"}


def random_model(config: ModelConfig, seed: int = 3) -> CausalLM:
    """With biases that are not zero and norms that are not one."""
    made = model(seed, config=config)
    for number, (name, parameter) in enumerate(made.named_parameters()):
        if parameter.dim() == 1:
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) / 4
            parameter.data.copy_(noise + float(name.endswith("norm.weight")))
    return made


def directory(family: str, folder: Path) -> str:
    save(random_model(CONFIGS[family]), folder / family)
    TOKENIZER.save(folder / family)
    return str(folder / family)


def update(rank: int, folder: Path, mesh: str, family: str) -> None:
    """A policy of a family over ranks learns what it does on one."""
    if rank == 0:
        directory(family, folder)
    dist.barrier()
    given: dict[str, Any] = {"model": str(folder / family)}
    parted, one = policy(mesh, rank, **given), policy(**given)
    assert_boxes(parted, one, rank)
    ours, theirs = (policy_update.fn(each, *batch(), **OPTIONS)[1] for each in (parted, one))
    assert_same_everywhere(ours)
    assert_near(ours, theirs)
    assert_gradients_near(parted, one)
    assert_whole(parted, one)
    logprobs = [policy_logprobs.fn(each, batch()[0], micro_tokens=12).logprobs_NT for each in (parted, one)]
    torch.testing.assert_close(*logprobs, rtol=1e-4, atol=1e-4)
    goes_on(parted, policy(mesh, rank, **given, seed=2))


def engine(rank: int, folder: Path, groups: str, family: str) -> None:
    """A generator's ranks sample what one samples."""
    config = replace(CONFIGS[family], num_key_value_heads=int(groups))
    made = random_model(config)
    if rank == 0:
        save(made, folder / "model")
        TOKENIZER.save(folder / "model")
    dist.barrier()
    context = Context(node="generate", seed=3, model=str(folder / "model"), slots=32, max_tokens=8)
    ranks = dist.get_world_size()
    parted = make_engine(replace(context, mesh=(("tp", ranks),), rank=rank), samples=3)
    ours = run(parted, range(6), own_parts(made, rank, ranks))
    theirs = run(make_engine(context, samples=3), range(6), Weights(0, made.state_dict()))
    for ordinal, (rollouts, metrics) in ours.items():
        assert torch.equal(rollouts.tokens_NS, theirs[ordinal][0].tokens_NS)
        torch.testing.assert_close(rollouts.logprobs_NT, theirs[ordinal][0].logprobs_NT, rtol=1e-4, atol=1e-4)
        assert metrics.get("mismatch", 0.0) < 1e-4


def dealt_engine(rank: int, folder: Path, dtype: str) -> None:
    """Ranks with a share of the experts each sample the bits of one rank, and record the same routing."""
    made = random_model(CONFIGS["qwen3_moe"]).to(getattr(torch, dtype))
    if rank == 0:
        directory("qwen3_moe", folder)
    dist.barrier()
    model = str(folder / "qwen3_moe")
    context = Context(
        node="generate", seed=3, model=model, slots=32, max_tokens=8, dtype=dtype, batch=1, replay_routing=True
    )
    mesh = (("ep", dist.get_world_size()),)
    whole = Weights(0, made.state_dict())
    parted = make_engine(replace(context, mesh=mesh, rank=rank), samples=3)
    own = dict(parted.model.named_parameters())
    assert all(own[name].shape == whole.tensors[name].shape for name in own)
    held = {expert for name in own if (expert := expert_of(name)) is not None}
    assert held == set(range(6)[rank * 6 // mesh[0][1] : (rank + 1) * 6 // mesh[0][1]])
    ours = run(parted, range(6), Weights(0, {name: whole.tensors[name] for name in own}))
    theirs = run(make_engine(context, samples=3), range(6), whole)
    assert ours.keys() == theirs.keys()
    for ordinal, (rollouts, metrics) in ours.items():
        one, figures = theirs[ordinal]
        assert torch.equal(rollouts.tokens_NS, one.tokens_NS)
        assert torch.equal(rollouts.logprobs_NT, one.logprobs_NT)
        assert torch.equal(rollouts.experts_NSLK, one.experts_NSLK)
        assert metrics["mismatch"] == figures["mismatch"]


def dealt_in_other_ways(rank: int, folder: Path, mesh: str) -> None:
    """With layers that are computed again, weights that stay whole, a batch that leaves a rank without work of its own,
    a reference beside the policy, and masters of another precision."""
    if rank == 0:
        directory("qwen3_moe", folder)
    dist.barrier()
    given: dict[str, Any] = {"model": str(folder / "qwen3_moe")}
    rollouts, advantage = (part.take([2]) for part in batch())
    for more in ({"recompute": "layer"}, {"zero": 1}, {"optimizer_state": "host"}):
        parted, one = policy(mesh, rank, **given, **more), policy(**given)
        for learnt in (batch(), (rollouts, advantage)):
            ours, theirs = (policy_update.fn(each, *learnt, **OPTIONS)[1] for each in (parted, one))
            assert_same_everywhere(ours)
            assert_near(ours, theirs)
        assert_whole(parted, one)
    references: Any = [make_reference(context(*place, **given)) for place in ((mesh, rank), ())]
    ours, theirs = (reference_logprobs.fn(each, batch()[0], micro_tokens=12).logprobs_NT for each in references)
    assert torch.equal(ours, theirs)
    half, alone = (policy(*place, **given, dtype="bfloat16") for place in ((mesh, rank), ()))
    assert {p.dtype for p in half.workers.parameters.values()} == {torch.float32}
    assert {tensor.dtype for tensor in half.weights().values()} == {torch.bfloat16}
    ours, theirs = (policy_update.fn(each, *batch(), **OPTIONS)[1] for each in (half, alone))
    assert abs(ours["loss"] - theirs["loss"]) < 0.02


def dealt_logprobs(rank: int, folder: Path, mesh: str, dtype: str) -> None:
    """Log-probabilities of a policy whose experts are dealt out have the bits of one rank's."""
    if rank == 0:
        directory("qwen3_moe", folder)
    dist.barrier()
    given: dict[str, Any] = {"model": str(folder / "qwen3_moe"), "dtype": dtype, "micro_tokens": 12}
    both = policy(mesh, rank, **given), policy(**given)
    ours, theirs = (policy_logprobs.fn(each, batch()[0]).logprobs_NT for each in both)
    assert torch.equal(ours, theirs)


def replayed(rank: int, folder: Path, mesh: str) -> None:
    """Over ranks, pipeline stages included, tokens go through the experts that were recorded."""
    if rank == 0:
        directory("qwen3_moe", folder)
    dist.barrier()
    given: dict[str, Any] = {"model": str(folder / "qwen3_moe"), "replay_routing": True}
    rollouts, advantage = batch()
    draw = torch.rand(
        *rollouts.tokens_NS.shape, CONFIG.num_hidden_layers, 6, generator=torch.Generator().manual_seed(1)
    )
    other = replace(rollouts, experts_NSLK=(draw.topk(3).indices + 1).to(torch.int16))
    parted, one, plain = policy(mesh, rank, **given), policy(**given), policy(**given)
    ours, theirs = (policy_update.fn(each, other, advantage, **OPTIONS)[1] for each in (parted, one))
    assert_near(ours, theirs)
    assert_whole(parted, one)
    assert ours["loss"] != policy_update.fn(plain, rollouts, advantage, **OPTIONS)[1]["loss"]
