"""What each rank of the tests of a generator's parts does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.graph.types import Context, Metrics, Rollouts, Weights
from penstock.nodes.generate import make_engine
from penstock.nodes.generate.engine import Engine
from penstock.nodes.model import Llama, ModelError, save_model
from penstock.nodes.model.tensor_parallel import tensor_parallel
from penstock.runtime.tensor.layout import Mesh, sharded

from .test_generate import run
from .tiny_model import CONFIG, TOKENIZER


def engine(rank: int, folder: Path, groups: str, tied: str, dtype: str) -> None:
    config = replace(CONFIG, num_key_value_heads=int(groups), tie_word_embeddings=tied == "tied")
    model = Llama(config, getattr(torch, dtype))
    model.init_weights(1)
    if rank == 0:
        save_model(model, model.state_dict(), folder / "model")
        TOKENIZER.save(folder / "model")
    dist.barrier()
    context = Context(node="generate", seed=3, model=str(folder / "model"), slots=32, max_tokens=8, dtype=dtype)
    ranks = dist.get_world_size()
    parted = make_engine(replace(context, mesh=(("tp", ranks),), rank=rank), samples=3)
    ours = _sampled(parted, own_parts(model, rank, ranks))
    theirs = _sampled(make_engine(context, samples=3), whole(model))
    assert ours.keys() == theirs.keys()
    for ordinal, (rollouts, metrics) in ours.items():
        _assert_same(rollouts, theirs[ordinal][0], dtype)
        assert metrics.get("mismatch", 0.0) < (1e-4 if dtype == "float32" else 0.05)
    assert any("mismatch" in metrics for _, metrics in ours.values())
    tokens = torch.cat([rollouts.tokens_NS.flatten() for rollouts, _ in ours.values()])
    every = [torch.empty_like(tokens) for _ in range(ranks)]
    dist.all_gather(every, tokens)
    assert all(torch.equal(each, tokens) for each in every)
    with pytest.raises(ModelError, match="given shape"):
        _sampled(parted, replace(whole(model), version=1))


def own_parts(model: Llama, rank: int, ranks: int) -> Weights:
    """The boxes of the weights that the tensor plane delivers."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    named = [(name, tuple(p.shape), "float32") for name, p in parameters.items()]
    layout = sharded(named, Mesh((("tp", ranks),)), tensor_parallel(model.config))
    found = {}
    for tensor in layout.tensors:
        (box,) = tensor.held_by(rank)
        box_slices = tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
        found[tensor.name] = parameters[tensor.name][box_slices].contiguous()
    return Weights(0, found)


def whole(model: Llama) -> Weights:
    return Weights(0, {name: p.detach() for name, p in model.named_parameters()})


def _sampled(engine: Engine, behaviour: Weights) -> dict[int, tuple[Rollouts, Metrics]]:
    return run(engine, range(6), behaviour)


def _assert_same(ours: Rollouts, theirs: Rollouts, dtype: str) -> None:
    """The same tokens, where rounding cannot make another word of a draw."""
    if dtype == "float32":
        given: Any = ours.texts, ours.tokens_NS.tolist()
        assert given == (theirs.texts, theirs.tokens_NS.tolist())
        torch.testing.assert_close(ours.logprobs_NT, theirs.logprobs_NT, rtol=1e-4, atol=1e-4)
