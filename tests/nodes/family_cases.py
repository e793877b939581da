"""Random models of each family, and the work of each rank in their tests."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.graph.context import Context
from penstock.graph.types import Weights
from penstock.nodes.distill import policy_logprobs
from penstock.nodes.generate import make_engine
from penstock.nodes.learn.update import policy_update
from penstock.nodes.model import CausalLM, ModelConfig
from penstock.nodes.model.families import FAMILIES

from .part_cases import own_parts
from .rank_cases import (
    OPTIONS,
    assert_boxes,
    assert_gradients_near,
    assert_near,
    assert_same_everywhere,
    assert_whole,
    goes_on,
    policy,
)
from .test_generate import run
from .tiny_model import CONFIG, TOKENIZER, model, save
from .updating import batch


def config_of(family: str, base: ModelConfig = CONFIG, **changes: Any) -> ModelConfig:
    """Return the config of a small model of a family. Mistral and some layers of Gemma 3 have a sliding window; queries
    of Gemma 3 are scaled by another number than their width."""
    own: dict[str, Any] = {"sliding_window": 7} if family == "mistral" else {}
    if FAMILIES[family].experts:
        own = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 14}
    if FAMILIES[family].local_rope:
        kinds = "sliding_attention", "full_attention", "sliding_attention"
        own = {"sliding_window": 7, "layer_types": (kinds * base.num_hidden_layers)[: base.num_hidden_layers]}
        own |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 7}
    return replace(base, model_type=family, **{**own, **changes})


# All families except Llama.
# Padding that texts have, which gets no gradient as an input.
PAD = TOKENIZER.encode("1")[0]
CONFIGS: dict[str, ModelConfig] = {name: config_of(name, pad_token_id=PAD) for name in FAMILIES if name != "llama"}


def random_model(config: ModelConfig, seed: int = 3) -> CausalLM:
    """Make a model whose biases are not zero and whose norms have weights other than one."""
    made = model(seed, config=config)
    for number, parameter in enumerate(made.parameters()):
        if parameter.dim() == 1:
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) / 4
            parameter.data += noise
    return made


def directory(family: str, folder: Path) -> str:
    save(random_model(CONFIGS[family]), folder / family)
    TOKENIZER.save(folder / family)
    return str(folder / family)


def update(rank: int, folder: Path, mesh: str, family: str) -> None:
    """A policy of a family learns the same over ranks as on one."""
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
    """A generator's ranks sample the same as one rank."""
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


def replayed(rank: int, folder: Path, mesh: str) -> None:
    """Over ranks and pipeline stages, tokens go through the recorded experts."""
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
