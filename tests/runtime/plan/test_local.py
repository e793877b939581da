import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.nodes.generate.cache import block_bounds
from penstock.nodes.learn.packing import pack
from penstock.nodes.model import Llama, ModelConfig
from penstock.runtime.plan.local import LocalGenerator, LocalTrainer, micro_batches, products, reached
from penstock.runtime.plan.shape import SHAPES, Shape

from .machines import UNIT

SHAPE = Shape("small", 128, 256, 4, 4, 2, 64, 672, tied=True)


def generator(slots: int = 32) -> LocalGenerator:
    return LocalGenerator(SHAPE, UNIT, slots, 128)


def test_matrix_products_are_those_of_the_model() -> None:
    config = ModelConfig(128, 256, 672, 4, 4, 2, 64, tie_word_embeddings=True)
    matrices = [p.numel() for p in Llama(config).parameters() if p.dim() == 2]
    assert sum(k * n * count for k, n, count in products(SHAPE)) == sum(matrices)


def test_experts_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"qwen3-30b-a3b.*dense"):
        products(SHAPES["qwen3-30b-a3b"])


@settings(deadline=None)
@given(st.integers(1, 2000))
def test_attention_reaches_whole_blocks_of_the_cache(reach: int) -> None:
    assert reached(reach) == next(end for _, end in block_bounds(1 << 12) if end >= reach)


@settings(deadline=None)
@given(st.lists(st.integers(2, 90), min_size=1, max_size=60), st.integers(50, 400), st.integers(1, 4))
def test_micro_batches_are_those_of_the_trainer(lengths: list[int], most: int, multiple: int) -> None:
    tokens_NS = torch.zeros(len(lengths), max(lengths) + 1, dtype=torch.long)
    ones_N, rest_N = torch.ones(len(lengths), dtype=torch.long), torch.tensor(lengths)
    packed = pack(tokens_NS, ones_N, rest_N, most, multiple)
    assert micro_batches(lengths, most, multiple) == [tuple(p.tokens_RW.shape) for p in packed]


def test_a_batch_that_fits_the_slots_takes_as_many_steps_as_its_longest_response() -> None:
    one = generator().step(1).parts["launches"]
    few = generator().rollout([3, 7, 5, 7], 4, 4).parts["launches"]
    many = generator().rollout([3, 7, 5, 20], 4, 4).parts["launches"]
    assert (many - few) / one == pytest.approx(13)


def test_unused_slots_cost_as_much_as_used_ones() -> None:
    assert generator().rollout([9] * 32, 4, 8).parts["cache"] == generator().rollout([9] * 8, 4, 8).parts["cache"]


def test_responses_beyond_the_slots_wait_for_one() -> None:
    one = generator(16).step(1).parts["launches"]
    at_once = generator(16).rollout([10] * 16, 4, 16).parts["launches"]
    two_rounds = generator(16).rollout([10] * 32, 4, 32).parts["launches"]
    assert (two_rounds - at_once) / one == pytest.approx(10)


def test_an_update_is_its_slowest_lane_and_one_optimizer_step() -> None:
    trainer = LocalTrainer(SHAPE, UNIT, 10.0, micro_tokens=64)
    one, two = trainer.step([32, 32]), trainer.step([32, 32, 32, 32])
    assert one.parts["products"] == pytest.approx(trainer.micro(1, 32).parts["products"])
    assert two.parts["products"] == pytest.approx(2 * one.parts["products"])
    assert two.parts["optimizer"] == one.parts["optimizer"] > 0


def test_time_grows_with_tokens() -> None:
    trainer = LocalTrainer(SHAPE, UNIT, 10.0)
    seconds = [trainer.step([length] * 8).seconds for length in (8, 16, 64, 256)]
    assert (np.diff(seconds) > 0).all()
