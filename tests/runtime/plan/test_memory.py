"""Bytes by component, what does not fit and what would, and the traffic of a sync."""

from dataclasses import replace

import pytest

from penstock.runtime.cluster.gpus import GPUS
from penstock.runtime.plan.decode_cost import Generator
from penstock.runtime.plan.memory import (
    RESERVED,
    check_generator,
    check_trainer,
    generator_memory,
    slots_that_fit,
    trainer_memory,
)
from penstock.runtime.plan.model_shape import SHAPES, Parallel
from penstock.runtime.plan.sync_cost import layout, switch_cost, sync_cost, traffic
from penstock.runtime.plan.train_cost import Trainer
from penstock.runtime.tensor.reshard import BUCKET, chain, reshard

H100 = GPUS["H100"]
TRAINER = Trainer(SHAPES["llama-8b"], H100, Parallel(fsdp=8))
GENERATOR = Generator(SHAPES["llama-8b"], H100, Parallel(), slots=256)


def test_a_trainer_holds_eighteen_bytes_per_parameter_over_its_shards() -> None:
    parts = trainer_memory(TRAINER).parts
    state = parts["weights"] + parts["gradients"] + parts["moments"]
    assert state == pytest.approx(18 * SHAPES["llama-8b"].parameters / 8)
    assert trainer_memory(replace(TRAINER, frozen=True)).parts["moments"] == 0


def test_more_micro_tokens_and_less_recomputation_take_more() -> None:
    base = trainer_memory(TRAINER).bytes
    assert trainer_memory(replace(TRAINER, micro_tokens=16384)).bytes > base
    assert trainer_memory(replace(TRAINER, recompute=0.0)).bytes > base
    assert trainer_memory(replace(TRAINER, mesh=Parallel(fsdp=16))).bytes < base


def test_a_generators_cache_is_a_token_of_every_layer_for_each_slot() -> None:
    parts = generator_memory(GENERATOR, 1000).parts
    assert parts["cache"] == 256 * 1000 * 32 * 2 * 8 * 128 * 2
    assert parts["weights"] == 2 * 2 * SHAPES["llama-8b"].parameters
    assert generator_memory(GENERATOR, 1000, arenas=1).parts["weights"] == parts["weights"] / 2


def test_the_slots_that_fit_do_fit_and_one_more_does_not() -> None:
    slots = slots_that_fit(GENERATOR, 2000)
    assert generator_memory(replace(GENERATOR, slots=slots), 2000).bytes <= H100.memory_bytes
    assert generator_memory(replace(GENERATOR, slots=slots + 1), 2000).bytes > H100.memory_bytes
    assert slots_that_fit(Generator(SHAPES["llama-70b"], H100, Parallel(), 1), 1000) == 0


def test_a_latent_cache_is_whole_on_every_rank_and_heads_are_shared_out() -> None:
    wide = Parallel(tp=8)
    shared = Generator(SHAPES["llama-70b"], H100, wide, 1)
    latent = Generator(SHAPES["deepseek-v3"], H100, wide, 1)
    assert generator_memory(shared, 1).parts["cache"] == 80 * 2 * 128 * 2
    assert generator_memory(latent, 1).parts["cache"] == 61 * 576 * 2


def test_what_fits_is_no_finding() -> None:
    assert check_trainer(TRAINER) is None
    assert check_generator(replace(GENERATOR, slots=64), 1000) is None


@pytest.mark.parametrize(
    ("trainer", "change"),
    [
        (replace(TRAINER, recompute=0.0, micro_tokens=32768), "all activations recomputed"),
        (replace(TRAINER, micro_tokens=262144), "micro-batches of 131072 tokens"),
        (replace(TRAINER, shape=SHAPES["llama-70b"]), "fsdp 24 instead of 8: 24 GPUs"),
        (replace(TRAINER, mesh=Parallel(dp=8)), "fsdp 2 instead of 1, dp 4 instead of 8"),
    ],
)
def test_a_trainer_that_does_not_fit_is_told_the_smallest_change(trainer: Trainer, change: str) -> None:
    found = check_trainer(trainer)
    assert found is not None
    assert change in found.change
    assert f"trainer ({trainer.mesh}): given 85.5 GB of memory on each GPU, needed" in str(found)


def test_the_change_that_is_named_for_a_generator_makes_it_fit() -> None:
    found = check_generator(replace(GENERATOR, slots=4000), 2000)
    assert found is not None
    slots = int(found.change.split("with ")[1].split()[0])
    assert check_generator(replace(GENERATOR, slots=slots), 2000) is None
    large = check_generator(Generator(SHAPES["llama-405b"], H100, Parallel(tp=2), 8), 1000)
    assert large is not None
    assert "pp 12 instead of 1" in large.change


def test_roles_that_share_a_gpu_add_up_and_reserve_once() -> None:
    own, other = trainer_memory(TRAINER), generator_memory(GENERATOR, 1000)
    assert (own + other).bytes == pytest.approx(own.bytes + other.bytes - RESERVED)
    found = check_generator(GENERATOR, 1000, beside=own)
    assert found is not None
    slots = int(found.change.split("with ")[1].split()[0])
    assert check_generator(replace(GENERATOR, slots=slots), 1000, beside=own) is None
    assert check_generator(replace(GENERATOR, slots=slots + 1), 1000, beside=own) is not None


def test_a_sync_moves_what_its_plan_says() -> None:
    """Each of 8 generators receives all weights; each of 8 trainers sends its eighth to each of them."""
    shape = SHAPES["llama-8b"]
    moved = traffic(shape, Parallel(fsdp=8), Parallel(), "bf16")
    assert moved.received == 2 * shape.parameters
    assert 8 * moved.sent == pytest.approx(2 * shape.parameters, rel=0.01)
    assert traffic(shape, Parallel(fsdp=8), Parallel(), "fp8").received < moved.received * 0.51
    assert sync_cost(moved, 8, H100, H100).seconds == pytest.approx(moved.received / 40e9, rel=0.02)
    assert sync_cost(moved, 8, H100, H100, together=True).seconds < sync_cost(moved, 8, H100, H100).seconds


@pytest.mark.parametrize(("trainers", "heads"), [(8, 8), (4, 4), (1, 1)])
def test_few_trainers_feed_chains_of_many_replicas_as_a_run_does(trainers: int, heads: int) -> None:
    shape = SHAPES["llama-8b"]
    moved = traffic(shape, Parallel(fsdp=trainers), Parallel(), "bf16")
    plan = reshard(layout(shape, Parallel(fsdp=trainers), "bfloat16"), layout(shape, Parallel(), "bfloat16"))
    links = chain(plan, 8)
    assert sum(link.source is None for link in links) == heads
    direct, chained = (sync_cost(moved, 8, H100, H100, chained=chained).parts for chained in (False, True))
    assert direct["wire"] == pytest.approx(8 / heads * moved.received / 40e9, rel=0.01)
    assert chained["wire"] == pytest.approx(moved.received / 40e9, rel=0.01)
    assert ("chain" in chained) == (heads < 8)
    assert chained.get("chain", 0.0) == pytest.approx((8 // heads - 1) * (BUCKET / 40e9 + H100.latency_s))


def test_a_mixture_over_stages_can_be_synced() -> None:
    shape = SHAPES["deepseek-v3"]
    moved = traffic(shape, Parallel(fsdp=4, pp=4), Parallel(tp=16), "bf16")
    assert moved.received >= 2 * shape.parameters / 16


def test_switching_by_hand() -> None:
    assert switch_cost(H100, 40e9, 20e9).seconds == pytest.approx(1.5)


def test_the_change_that_would_fit_is_one_that_a_plan_can_have() -> None:
    """No micro-batch below the longest sequence, and no tensor parallelism beyond NVLink."""
    tight = Trainer(SHAPES["llama-8b"], GPUS["H100"], Parallel(), micro_tokens=4224)
    misfit = check_trainer(tight, shortest=4224)
    assert misfit is not None
    assert "micro-batches" not in misfit.change
    wide = Generator(SHAPES["llama-405b"], GPUS["H100"], Parallel(tp=8), 8, "fp8")
    refused = check_generator(wide, 1000)
    assert refused is not None
    assert "tp 16" not in refused.change
