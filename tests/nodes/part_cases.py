"""The work of each rank in the tests of a generator over ranks."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.graph.context import Context, Origin
from penstock.graph.protocols import rule_of
from penstock.graph.types import Policy, Weights
from penstock.nodes.generate import make_engine
from penstock.nodes.model import CausalLM, ModelError
from penstock.nodes.model.tensor_parallel import part_of, tensor_parallel
from penstock.nodes.policy import make_policy
from penstock.nodes.prefixes import after_tokens, cut
from penstock.runtime.tensor.layout import Mesh, sharded
from penstock.runtime.tensor.weight_sync import WeightPublisher, WeightReceiver, sync_in_process

from .test_generate import run
from .tiny_model import CONFIG, TOKENIZER, save
from .tiny_model import model as make


def engine(rank: int, folder: Path, groups: str, tied: str, dtype: str) -> None:
    config = replace(CONFIG, num_key_value_heads=int(groups), tie_word_embeddings=tied == "tied")
    model = make(1, getattr(torch, dtype), config)
    if rank == 0:
        save(model, folder / "model")
        TOKENIZER.save(folder / "model")
    dist.barrier()
    context = Context(node="generate", seed=3, model=str(folder / "model"), slots=32, max_tokens=8, dtype=dtype)
    ranks = dist.get_world_size()
    parted = make_engine(replace(context, mesh=(("tp", ranks),), rank=rank), samples=3)
    own, alone = own_parts(model, rank, ranks), make_engine(context, samples=3)
    ours = run(parted, range(6), own)
    whole = Weights(0, model.state_dict())
    theirs = run(alone, range(6), whole)
    assert ours.keys() == theirs.keys()
    for ordinal, (rollouts, metrics) in ours.items():
        if dtype == "float32":  # rounding cannot change a sampled token
            assert rollouts.texts == theirs[ordinal][0].texts
            assert torch.equal(rollouts.tokens_NS, theirs[ordinal][0].tokens_NS)
            torch.testing.assert_close(rollouts.logprobs_NT, theirs[ordinal][0].logprobs_NT, rtol=1e-4, atol=1e-4)
        assert metrics.get("mismatch", 0.0) < (1e-4 if dtype == "float32" else 0.05)
    assert any("mismatch" in metrics for _, metrics in ours.values())
    if dtype == "float32":
        rows = theirs[4][0]
        prefixes, _ = cut.fn(rows, at=partial(after_tokens, tokens=2), context=context)
        assert len(prefixes)
        more = {"after": prefixes}
        branched = [run(*each, more)[4][0] for each in ((parted, [4], own), (alone, [4], whole))]
        assert torch.equal(branched[0].tokens_NS, branched[1].tokens_NS)
    tokens = torch.cat([rollouts.tokens_NS.flatten() for rollouts, _ in ours.values()])
    every = [torch.empty_like(tokens) for _ in range(ranks)]
    dist.all_gather(every, tokens)
    assert all(torch.equal(each, tokens) for each in every)
    with pytest.raises(ModelError, match="given shape"):
        run(parted, range(6), replace(whole, version=1))


def adapters(rank: int, folder: Path, groups: str) -> None:
    """A generator's ranks apply their parts of adapters to their parts of the base."""
    if rank == 0:
        save(make(1, config=replace(CONFIG, num_key_value_heads=int(groups))), folder / "model")
        TOKENIZER.save(folder / "model")
    dist.barrier()
    context = Context(node="policy", seed=3, model=str(folder / "model"), slots=32, max_tokens=8, lora=3)
    learner: Any = make_policy(context)
    for master in learner.masters.values():
        master.data.copy_(torch.randn(master.shape, generator=torch.Generator().manual_seed(5)) / 8)
    context = replace(context, node="generate", weights={"behaviour": Origin(Policy.maker, context)})
    ranks = dist.get_world_size()
    parted = make_engine(replace(context, mesh=(("tp", ranks),), rank=rank), samples=3)
    ours = run(parted, range(6), own_parts(learner.model, rank, ranks, learner.about()))
    whole = Weights(0, dict(learner.weights()), learner.about())
    theirs = run(make_engine(context, samples=3), range(6), whole)
    for ordinal, (rollouts, metrics) in ours.items():
        assert torch.equal(rollouts.tokens_NS, theirs[ordinal][0].tokens_NS)
        torch.testing.assert_close(rollouts.logprobs_NT, theirs[ordinal][0].logprobs_NT, rtol=1e-4, atol=1e-4)
        assert metrics.get("mismatch", 0.0) < 1e-4


def own_parts(model: CausalLM, rank: int, ranks: int, about: Mapping[str, str] = MappingProxyType({})) -> Weights:
    """Return the boxes of the weights that the tensor plane delivers to a rank."""
    parameters = dict(model.own_parameters())
    named = [(name, tuple(p.shape), "float32") for name, p in parameters.items()]
    layout = sharded(named, Mesh((("tp", ranks),)), tensor_parallel(model.config))
    found = {}
    for tensor in layout.tensors:
        (box,) = tensor.held_by(rank)
        box_slices = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        found[tensor.name] = parameters[tensor.name][box_slices].detach().contiguous()
    return Weights(0, found, dict(about))


def in_int8(rank: int, folder: Path, groups: str) -> None:
    """A generator's ranks have slices of one rank's elements and scales, and all sample the same tokens."""
    if rank == 0:
        save(make(1, config=replace(CONFIG, num_key_value_heads=int(groups))), folder / "model")
        TOKENIZER.save(folder / "model")
    dist.barrier()
    ranks = dist.get_world_size()
    context = Context(node="generate", seed=3, model=str(folder / "model"), slots=32, max_tokens=8)
    origin = Origin(Policy.maker, replace(context, node="policy"), "int8")
    context = replace(context, weights={"behaviour": origin})
    publisher = WeightPublisher("w", make_policy(replace(context, node="policy")), wire="int8")
    digests, mesh = publisher.publish(0), (("tp", ranks),)
    whole = WeightReceiver("w", restores=False)
    own = WeightReceiver("w", rank=rank, mesh=mesh, add=add, restores=False)
    for receiver in (whole, own):
        receiver.describe(publisher.description)
        sync_in_process(publisher, receiver, 0, digests)
        receiver.swap(0)
    rules = tensor_parallel(replace(CONFIG, num_key_value_heads=int(groups)))
    for name, tensor in whole.weights.tensors.items():
        # A scale belongs to a row: ranks that split its columns have the same scale.
        rule = rule_of(name.removesuffix(".scale"), rules)
        if name.endswith(".scale") and rule is not None and rule[0] == 1:
            rule = None
        assert torch.equal(own.weights.tensors[name], tensor[part_of(tensor.shape, rule, ranks, rank)]), name
    parted = make_engine(replace(context, mesh=mesh, rank=rank), samples=3)
    ours = run(parted, range(6), own.weights)
    tokens = torch.cat([rollouts.tokens_NS.flatten() for rollouts, _ in ours.values()])
    every = [torch.empty_like(tokens) for _ in range(ranks)]
    dist.all_gather(every, tokens)
    assert all(torch.equal(each, tokens) for each in every)


def add(own: torch.Tensor) -> torch.Tensor:
    summed = own.clone()
    dist.all_reduce(summed)
    return summed
