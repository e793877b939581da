"""A training step by hand, and what each axis of its mesh costs."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.runtime.cluster.gpus import GPUS
from penstock.runtime.plan.collectives import Cost, bandwidth, gather_s, reduce_s
from penstock.runtime.plan.model_shape import SHAPES, Parallel
from penstock.runtime.plan.train_cost import Trainer

H100 = GPUS["H100"]
ALONE = Trainer(SHAPES["llama-8b"], H100, Parallel(), micro_tokens=8192, recompute=0.0)
BATCH = np.full(64, 4096)


def test_the_flops_of_a_step_are_six_per_parameter_and_token_and_attention() -> None:
    parts = ALONE.update(BATCH).parts
    tokens = 64 * 4096
    shape = SHAPES["llama-8b"]
    assert parts["products"] == pytest.approx(6 * shape.active_parameters * tokens / (989e12 * 0.7))
    forward = 2 * 32 * 64 * 4096**2 * 4096
    assert parts["attention"] == pytest.approx(forward * 3.5 / (989e12 * 0.6))


def test_recomputing_adds_a_forward_pass_and_frozen_weights_save_one() -> None:
    base = ALONE.update(BATCH).parts["products"]
    assert replace(ALONE, recompute=1.0).update(BATCH).parts["products"] == pytest.approx(base * 4 / 3)
    assert replace(ALONE, frozen=True).update(BATCH).parts["products"] == pytest.approx(base * 2 / 3)
    assert ALONE.logprobs(BATCH).parts["products"] == pytest.approx(base / 3)


def test_a_packed_batch_costs_attention_by_the_square_of_each_sequence() -> None:
    long, short = np.full(8, 8192), np.full(64, 1024)
    assert ALONE.update(long).parts["products"] == pytest.approx(ALONE.update(short).parts["products"])
    assert ALONE.update(long).parts["attention"] == pytest.approx(8 * ALONE.update(short).parts["attention"])


def test_a_pipelines_bubble_is_its_stages_less_one_over_micro_batches() -> None:
    piped = replace(ALONE, mesh=Parallel(pp=4), zero3=False)
    parts = piped.update(BATCH)
    micro = 64 * 4096 // 8192
    work = parts.seconds - parts.parts["bubble"] - parts.parts["optimizer"]
    assert parts.parts["bubble"] == pytest.approx(work / micro * 3)


def test_sharding_over_more_gpus_is_faster_but_never_by_more_than_their_number() -> None:
    seconds = [replace(ALONE, mesh=Parallel(fsdp=n)).update(BATCH).seconds for n in (1, 2, 4, 8)]
    assert seconds == sorted(seconds, reverse=True)
    assert all(seconds[0] / s <= n * 1.001 for s, n in zip(seconds, (1, 2, 4, 8), strict=True))


def test_gathers_of_weights_hide_behind_computation_until_it_is_too_short() -> None:
    wide = replace(ALONE, mesh=Parallel(fsdp=64))
    assert wide.update(np.full(64, 8192)).parts["fsdp"] == 0
    assert wide.update(np.full(64, 256)).parts["fsdp"] > 0


def test_tensor_parallelism_pays_for_its_all_reduces() -> None:
    assert replace(ALONE, mesh=Parallel(tp=8)).update(BATCH).parts["tp"] > 0 == ALONE.update(BATCH).parts["tp"]


def test_collectives_by_hand() -> None:
    assert gather_s(H100, 8e9, 1) == reduce_s(H100, 8e9, 1) == 0
    assert gather_s(H100, 8e9, 8) == pytest.approx(7 / 8 * 8e9 / 360e9 + 1e-5)
    assert reduce_s(H100, 8e9, 8) == pytest.approx(2 * gather_s(H100, 8e9, 8))
    assert bandwidth(H100, 16) == pytest.approx(8 * 40e9)  # eight NICs of a machine, side by side
    assert bandwidth(H100, 16, stride=8) == pytest.approx(40e9)  # one GPU of each machine has its own NIC


def test_few_bytes_go_through_a_tree() -> None:
    assert reduce_s(H100, 1e3, 256) < 20 * H100.latency_s


def test_a_mesh_divides_heads_and_layers() -> None:
    shape = SHAPES["llama-8b"]
    assert [Parallel(tp=tp).divides(shape) for tp in (8, 16, 32, 64, 3)] == [True, True, True, False, False]
    assert [Parallel(pp=pp).divides(shape) for pp in (3, 32, 33)] == [True, True, False]
    assert Parallel(fsdp=4, tp=8, pp=2).axes == (("pp", 2), ("fsdp", 4), ("tp", 8))


def test_costs_add_up_and_name_what_bounds_them() -> None:
    cost = Cost({"a": 1.0, "b": 2.0}) + Cost({"b": 1.0}) * 2
    assert (cost.seconds, cost.bound, cost.parts["b"]) == (5.0, "b", 4.0)
    assert Cost().bound == "nothing"
