"""A run has the bits of a plain loop, however it is run: with processes or without, with one generator or several, on a
mesh, with weights along a chain, in int8, or with a state that is offloaded between updates.

At lag 0 this holds always; at any other lag it holds with pinned versions, whatever the timing.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.graph.context import Context
from penstock.nodes.model import CausalLM, load_model, save_model
from penstock.nodes.open_model import initial_model
from penstock.nodes.score import math_answer
from penstock.runtime.control.run_config import RunOptions
from penstock.runtime.tensor import offload
from penstock.runtime.tensor.checkpoint import CheckpointShard

from .plain import aipo_loop, toy_loop
from .programs_for_gates import more_digits
from .running import (
    FAULTS,
    ONE_HOST,
    TWO_NAMES,
    assert_all_consumed,
    assert_equal_bits,
    delays,
    figures,
    final_state,
    interrupt_at,
    make_run,
    model_flags,
    passed_on,
    penstock,
    printed,
    rows,
    run_here,
    run_to_end,
    run_to_failure,
    status_here,
    summary,
    toy_flags,
)

pytestmark = pytest.mark.timeout(480)
UPDATES, SAMPLES, LR = 5, 4, 1e-3
TOY, REAL = toy_flags(updates=UPDATES), model_flags(updates=UPDATES)
UNEVEN = {**delays(generate=4.0, score=1.0, update=4.0), "jitter_ms": 20.0}
LEARNING = {"samples": SAMPLES, "lr": LR}
RUNS = pytest.mark.parametrize("generators", [1, 2])
LAGS = pytest.mark.parametrize("lag", [0, 2])


def at_lag(flags: RunOptions, lag: int) -> RunOptions:
    """Pin versions unless the lag is 0, at which there is only one version to use."""
    return replace(flags, versions="pinned" if lag else "free")


def toy(path: Path, lag: int, **more: Any) -> Path:
    return make_run(path, "toy", {"lag": lag, **UNEVEN}, at_lag(TOY, lag), **more)


def digits(path: Path, lag: int = 0, flags: RunOptions = REAL, accumulate: int = 0, **more: Any) -> Path:
    options = {"lag": lag, "accumulate": accumulate, **LEARNING}
    return make_run(path, f"{FAULTS}digits", options, at_lag(flags, lag), **more)


@cache
def real_loop(lag: int) -> list[dict[str, Tensor]]:
    facts = {name: getattr(REAL, name) for name in ("seed", "data", "max_tokens", "batch", "updates", "slots")}
    return aipo_loop(Context(**facts), more_digits, samples=SAMPLES, lr=LR, lag=lag)


def test_every_update_of_the_plain_loop_changes_every_weight() -> None:
    """Else the comparisons below would show little."""
    states = real_loop(lag=0)
    names = [name for name in states[0] if name.startswith("master.")]
    for before, after in pairwise(states):
        assert [name for name in names if torch.equal(before[name], after[name])] == []


@LAGS
@RUNS
def test_toy_in_one_process(tmp_path: Path, generators: int, lag: int) -> None:
    run = run_here(toy(tmp_path / "r", lag, generators=generators))
    assert_equal_bits(final_state(run, UPDATES), toy_loop(UPDATES, TOY.batch, lag=lag))


@LAGS
def test_toy_in_processes(tmp_path: Path, lag: int) -> None:
    run = run_to_end(toy(tmp_path / "r", lag))
    assert_equal_bits(final_state(run, UPDATES), toy_loop(UPDATES, TOY.batch, lag=lag))
    assert [row["lag_max"] for row in rows(run)] == [min(lag, update) for update in range(UPDATES)]


@pytest.mark.slow
def test_toy_on_meshes_is_toy_to_the_bit(tmp_path: Path) -> None:
    """Nodes that do not know of ranks do the same on each, in step; so do streams, whenever their commands arrive."""
    run = run_to_end(toy(tmp_path / "r", 2, generators=2, meshes=("trainer=dp2", "generator=tp2")))
    assert [row["lag_max"] for row in rows(run)] == [min(2, update) for update in range(UPDATES)]
    assert_equal_bits(final_state(run, UPDATES), toy_loop(UPDATES, TOY.batch, lag=2))
    assert_all_consumed(run, UPDATES * TOY.batch)
    assert [row["groups"] for row in rows(run)] == [TOY.batch] * UPDATES


@LAGS
@RUNS
def test_aipo_in_one_process(tmp_path: Path, generators: int, lag: int) -> None:
    run = run_here(digits(tmp_path / "r", lag, generators=generators))
    assert_equal_bits(final_state(run, UPDATES), real_loop(lag)[-1])


@LAGS
@pytest.mark.parametrize("generators", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_aipo_in_processes(tmp_path: Path, generators: int, lag: int) -> None:
    run = run_to_end(digits(tmp_path / "r", lag, generators=generators))
    assert_equal_bits(final_state(run, UPDATES), real_loop(lag)[-1])
    assert [row["lag_max"] for row in rows(run)] == [min(lag, update) for update in range(UPDATES)]


PARTED = replace(REAL, batch=4, updates=3)


@LAGS
def test_updates_in_parts_have_the_same_bits_in_one_process_and_in_several(tmp_path: Path, lag: int) -> None:
    here = [run_here(digits(tmp_path / f"{n}", lag, PARTED, accumulate=2, generators=n)) for n in (1, 2)]
    apart = run_to_end(digits(tmp_path / "apart", lag, PARTED, accumulate=2, generators=2))
    for other in (here[1], apart):
        assert_equal_bits(final_state(here[0], 3), final_state(other, 3))
        for ours, theirs in zip(rows(here[0]), rows(other), strict=True):
            assert {ours[name] == theirs[name] for name in ("loss", "grad_norm", "tokens", "lag_max", "ess")} == {True}
    whole = rows(run_here(digits(tmp_path / "whole", lag, PARTED)))[0]
    first = rows(apart)[0]
    # The first update begins with equal weights, so the figures differ only by rounding.
    assert all(first[name] == pytest.approx(whole[name], rel=1e-4) for name in ("loss", "grad_norm", "kl", "entropy"))
    assert {name: whole[name] for name in ("tokens", "groups")} == {name: first[name] for name in ("tokens", "groups")}


@pytest.mark.slow
def test_updates_in_parts_on_a_mesh_are_repeatable_to_the_bit(tmp_path: Path) -> None:
    mesh: dict[str, Any] = {"accumulate": 1, "meshes": ("trainer=fsdp2",)}
    runs = [run_to_end(digits(tmp_path / f"{n}", 0, PARTED, generators=n, **mesh)) for n in (1, 2)]
    for rank in range(2):
        parts = [CheckpointShard(run / "checkpoints" / f"{3:08d}", "trainer/0", rank) for run in runs]
        assert_equal_bits(*(part.carried("policy")[0] for part in parts))


@LAGS
def test_responses_in_segments_on_two_generators_are_the_same_bits(tmp_path: Path, lag: int) -> None:
    run = run_here(digits(tmp_path / "r", lag, replace(REAL, segment=2), generators=2))
    assert_equal_bits(final_state(run, UPDATES), real_loop(lag)[-1])


@pytest.mark.slow
def test_responses_in_segments_are_the_same_bits_in_processes(tmp_path: Path) -> None:
    run = run_to_end(digits(tmp_path / "r", 2, replace(REAL, segment=2), generators=2))
    assert_equal_bits(final_state(run, UPDATES), real_loop(2)[-1])


@LAGS
def test_what_goes_on_from_prefixes_is_the_same_bits_however_it_is_run(tmp_path: Path, lag: int) -> None:
    """Compare one process with several processes, two generators and segments."""
    options = {"lag": lag, **LEARNING}
    alone, spread = (
        make_run(tmp_path / name, f"{FAULTS}branches", options, at_lag(flags, lag), generators=count)
        for name, count, flags in (("a", 1, REAL), ("b", 2, replace(REAL, segment=2)))
    )
    first, second = final_state(run_here(alone), UPDATES), final_state(run_to_end(spread), UPDATES)
    assert_equal_bits(first, second)
    counts = [
        [{name: value for name, value in row.items() if name.endswith("prefixes")} for row in rows(run)]
        for run in (alone, spread)
    ]
    assert counts[0] == counts[1]
    assert any(value for row in counts[0] for value in row.values())


def ordered(path: Path, on: bool = True, **options: Any) -> Path:
    flags = replace(REAL, deterministic=on)
    return make_run(path, f"{FAULTS}ordered_digits", {"lag": 0, **LEARNING, **options}, flags)


@pytest.fixture
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo at the end of the test what a run in this process has set in PyTorch."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with torch.backends.cudnn.flags(benchmark=False):
        yield
    torch.use_deterministic_algorithms(False)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("run", [run_here, pytest.param(run_to_end, marks=pytest.mark.slow)])
def test_every_rank_of_a_deterministic_run_is_so_and_a_cpu_has_the_same_bits_without(
    tmp_path: Path, run: Callable[[Path], Path]
) -> None:
    names = [f"{pool}_{asked}" for pool in ("scorer", "trainer") for asked in ("ordered", "workspace")]
    for on in (False, True):
        done = run(ordered(tmp_path / str(on), on))
        assert [[row[name] for name in names] for row in rows(done)] == [[float(on)] * len(names)] * UPDATES
        assert_equal_bits(final_state(done, UPDATES), real_loop(lag=0)[-1])


@pytest.mark.usefixtures("as_before")
def test_an_operation_without_an_order_ends_a_deterministic_run(tmp_path: Path) -> None:
    run_here(ordered(tmp_path / "as it is", on=False, unordered=True))
    status, _ = status_here(ordered(tmp_path / "deterministic", unordered=True))
    found = summary(tmp_path / "deterministic")
    assert (status, found["cause"]) == ("failed", "node")
    assert "ordered_update" in found["error"]


def test_the_program_aipo_itself(tmp_path: Path) -> None:
    """Use a seed with which the untrained model solves a problem by chance, so that the weights change."""

    def loop(seed: int) -> list[dict[str, Tensor]]:
        context = Context(seed=seed, data="arithmetic", max_tokens=6, batch=4, updates=2, slots=64)
        return aipo_loop(context, math_answer, samples=32, lr=LR)

    # It was 9 on all machines so far.
    loops = ((seed, loop(seed)) for seed in (9, *range(30)))
    moved = ((seed, s) for seed, s in loops if any(not torch.equal(s[0][name], s[-1][name]) for name in s[0]))
    seed, states = next(moved)
    used = model_flags(updates=2, batch=4, slots=64, seed=seed)
    run = run_here(make_run(tmp_path / "r", "aipo", {"lag": 0, "samples": 32, "lr": LR}, used))
    assert_equal_bits(final_state(run, 2), states[-1])


@pytest.mark.slow
def test_conversations_are_the_same_bits_with_processes_as_without(tmp_path: Path) -> None:
    flags = RunOptions(updates=4, batch=4, max_tokens=1, slots=32, versions="pinned")
    options = {"lag": 2, "samples": 4}
    here = run_here(make_run(tmp_path / "here", "guessing", options, flags))
    there = run_to_end(make_run(tmp_path / "there", "guessing", options, flags, generators=2))
    assert_equal_bits(final_state(here, 4), final_state(there, 4))
    assert [row["reward_mean"] for row in rows(here)] == [row["reward_mean"] for row in rows(there)]
    assert_all_consumed(there, 4 * 4)


@pytest.mark.slow
def test_aipo_in_int8_keeps_its_ratios_near_one_and_is_the_same_in_one_process(tmp_path: Path) -> None:
    """At lag 0 only quantisation makes the ratio of a token differ from one."""
    flags = model_flags(updates=4, batch=4, max_tokens=8, wire="int8")
    runs = [digits(tmp_path / name, flags=flags) for name in ("processes", "here")]
    assert_equal_bits(final_state(run_to_end(runs[0]), 4), final_state(run_here(runs[1]), 4))
    assert_all_consumed(runs[0], 4 * 4)
    assert all(abs(row["ratio_mean"] - 1) < 0.02 and row["ess"] > 0.98 for row in rows(runs[0]))
    assert any(row["ratio_max"] > 1 for row in rows(runs[0]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_that_is_invariant_has_no_mismatch_and_ratios_of_one(tmp_path: Path, dtype: Any) -> None:
    flags = model_flags(updates=3, batch=4, max_tokens=8, dtype=dtype, invariant=True)
    run = run_here(digits(tmp_path / "r", flags=flags))
    assert all(row["mismatch"] == 0.0 and row["ratio_mean"] == row["ratio_max"] == 1.0 for row in rows(run))


@pytest.mark.slow
def test_shards_of_a_trainer_are_invariant_too(tmp_path: Path) -> None:
    flags = model_flags(updates=3, batch=4, max_tokens=8, invariant=True)
    run = run_to_end(digits(tmp_path / "r", flags=flags, meshes=("trainer=fsdp2",), generators=2))
    assert all(row["mismatch"] == 0.0 and row["ratio_mean"] == row["ratio_max"] == 1.0 for row in rows(run))


@pytest.mark.slow
def test_a_run_has_the_same_bits_with_a_chain_and_without(tmp_path: Path) -> None:
    """Each generator except the last passes weights on: by messages, or between the agents of two hosts."""

    def learnt(name: str, transport: Any = "auto", **cluster: Any) -> Path:
        flags = toy_flags(updates=4, batch=6, max_tokens=8, seed=3, transport=transport)
        return run_to_end(digits(tmp_path / name, flags=flags, generators=3, **cluster))

    direct = learnt("shm")
    assert passed_on(direct, 3) == [0, 0, 0]
    for run in (learnt("messages", "messages"), learnt("agents", cluster=TWO_NAMES)):
        assert [versions > 0 for versions in passed_on(run, 3)] == [True, True, False]
        assert_equal_bits(final_state(run, 4), final_state(direct, 4))


# Replicas of several ranks compute the same as one rank, except for the order of sums.


def reads_back(folder: Path) -> dict[str, Tensor]:
    """Return the weights of the exported policy. They are whole, whatever mesh wrote them."""
    model = load_model(CausalLM, folder / "checkpoints" / f"{UPDATES:08d}" / "policy")
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_close(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> None:
    """Compare in the 2-norm: Adam makes a full step for a gradient that is only rounding. Weights have moved by 0.1."""
    assert first.keys() == second.keys()
    far = {n: float((t - second[n]).norm() / t.norm()) for n, t in first.items()}
    assert {n: distance for n, distance in far.items() if distance > 1e-4} == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "meshes",
    [("trainer=tp2", "generator=tp2"), ("trainer=fsdp2xtp2",), ("trainer=pp2",)],
    ids=" ".join,
)
def test_learning_on_a_mesh_is_learning_on_one_rank_within_rounding(tmp_path: Path, meshes: Sequence[str]) -> None:
    alone, together = digits(tmp_path / "alone"), digits(tmp_path / "together", meshes=meshes)
    assert_close(reads_back(run_here(alone)), reads_back(run_to_end(together)))
    assert [row["tokens"] for row in rows(alone)] == [row["tokens"] for row in rows(together)]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "ranks", "hosts"), [("trainer=fsdp3", 3, 1), ("trainer=pp2", 2, 2)])
def test_a_run_goes_on_on_another_mesh_and_on_fewer_hosts(tmp_path: Path, mesh: str, ranks: int, hosts: int) -> None:
    """Fewer ranks go on from what four ranks wrote, the optimizer included: else the weights would differ."""
    meshes, more = ("trainer=fsdp2xtp2", "generator=tp2"), list[str]()
    cluster = TWO_NAMES.model_copy(update={"pools": {"trainer": ("a", "b")}}) if hosts > 1 else ONE_HOST
    moved = run_to_end(digits(tmp_path / "r", flags=replace(REAL, updates=2), meshes=meshes, cluster=cluster))
    if hosts > 1:
        (tmp_path / "one.toml").write_text('[[hosts]]\nname = "b"\ncores = 1\n')
        more = ["--cluster", str(tmp_path / "one.toml")]
    words = "--updates", str(UPDATES), "--mesh", mesh, "generator=1", "--plain", *more
    done = penstock("resume", str(moved), *words)
    assert done.returncode == 0, done.stderr
    places = json.loads((moved / "plan.json").read_text())["pools"]
    assert {rank["host"] for pool in places for own in pool["replicas"] for rank in own["ranks"]} == (
        {"b"} if hosts > 1 else {"local"}
    )
    assert_close(reads_back(run_here(digits(tmp_path / "alone"))), reads_back(moved))
    assert len(list((moved / "checkpoints" / f"{UPDATES:08d}").glob("trainer-0-*.safetensors"))) == ranks


def mixture(folder: Path) -> str:
    """Save an untrained mixture of experts with the arithmetic tokenizer, and return its directory."""
    config, tokenizer = initial_model("arithmetic")
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    made = CausalLM(replace(config, model_type="qwen3_moe", **experts))  # type: ignore[arg-type]
    made.init_weights(1)
    save_model(made, made.state_dict(), folder)
    tokenizer.save(folder)
    return str(folder)


@pytest.mark.slow
def test_a_generator_with_a_share_of_the_experts_changes_no_bit_of_a_run(tmp_path: Path) -> None:
    flags = replace(REAL, model=mixture(tmp_path / "model"), replay_routing=True)
    alone, together = (
        digits(tmp_path / name, flags=flags, meshes=m) for name, m in (("a", ()), ("b", ("generator=ep2",)))
    )
    assert_equal_bits(final_state(run_here(alone), UPDATES), final_state(run_to_end(together), UPDATES))


@pytest.mark.slow
def test_experts_that_are_dealt_out_learn_within_rounding_and_go_on_on_another_mesh(tmp_path: Path) -> None:
    """Weights go from ranks with two experts each to ranks with three, and after a resume to one with all six."""
    flags = replace(REAL, model=mixture(tmp_path / "model"))
    meshes = "trainer=ep3", "generator=ep2"
    moved = run_to_end(digits(tmp_path / "r", flags=replace(flags, updates=2), meshes=meshes))
    done = penstock(
        "resume", str(moved), "--updates", str(UPDATES), "--mesh", "trainer=fsdp2", "generator=1", "--plain"
    )
    assert done.returncode == 0, done.stderr
    alone = run_here(digits(tmp_path / "alone", flags=flags))
    assert_close(reads_back(alone), reads_back(moved))
    assert [row["tokens"] for row in rows(alone)] == [row["tokens"] for row in rows(moved)]


def test_ranks_that_work_together_need_processes(tmp_path: Path) -> None:
    done = penstock("run", "toy", "--in-process", "--mesh", "trainer=dp2", "--out", str(tmp_path / "r"))
    assert done.returncode == 2
    assert "--in-process with trainer/0 of 2 ranks (dp2), needed one rank for each" in " ".join(done.stderr.split())


@pytest.mark.slow
def test_a_mesh_that_cannot_work_is_not_what_the_run_goes_on_with(tmp_path: Path) -> None:
    """Three ranks cannot share four heads. The resume is refused before anything starts."""
    folder = run_to_end(digits(tmp_path / "r", flags=replace(REAL, updates=2)))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
    done = penstock("resume", str(folder), "--updates", "4", "--mesh", "trainer=tp3", "--plain")
    assert done.returncode == 2
    assert "--mesh trainer=tp3 [mesh-cut]" in done.stderr
    assert {path: path.read_bytes() for path in before} == before


# A trainer whose state is offloaded between updates, and generators that release their memory.


OFF = model_flags(updates=4, dtype="bfloat16", checkpoint_every=1, offload="off")
ON = replace(OFF, offload="on")
AVERAGED = f"{FAULTS}averaged"


def assert_equal_runs(first: Path, second: Path) -> None:
    """Compare all checkpoints that both have. An update that ends while another checkpoint is written has none."""
    both = set.intersection(
        *({path.parent.name for path in (run / "checkpoints").glob("*/cut.json")} for run in (first, second))
    )
    assert f"{OFF.updates:08d}" in both
    for name in both:
        ours, theirs = (CheckpointShard(run / "checkpoints" / name, "trainer/0", 0) for run in (first, second))
        for value in ("policy", "average"):
            assert_equal_bits(ours.carried(value)[0], theirs.carried(value)[0])
    assert figures(first) == figures(second)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("lag", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_in_one_process(tmp_path: Path, dtype: Any, lag: int) -> None:
    """In float32 the model computes with the master weights, so only the moments are offloaded."""
    flags = [at_lag(replace(each, dtype=dtype), lag) for each in (OFF, ON)]
    assert_equal_runs(*(run_here(make_run(tmp_path / f.offload, AVERAGED, {"lag": lag}, f)) for f in flags))


@pytest.mark.parametrize("meshes", [(), pytest.param(("trainer=fsdp2",), marks=pytest.mark.slow)])
def test_in_processes(tmp_path: Path, meshes: Sequence[str]) -> None:
    """On a mesh each rank offloads its moments, and computes with its master weights."""
    off, on = (make_run(tmp_path / f.offload, AVERAGED, {}, f, meshes=meshes) for f in (OFF, ON))
    assert_equal_runs(run_to_end(off) if meshes else run_here(off), run_to_end(on))
    moves = printed(on, "trainer-0-0")["offloaded"]["moves"]
    # Each value moves out at the start, and in and out at each update; the policy once more for the average.
    assert moves > 0 if meshes else moves == 2 * (1 + 2 * OFF.updates) + 2 * OFF.updates
    assert json.loads((on / "config.json").read_text())["flags"]["offload"] == "on"


@pytest.mark.slow
def test_an_interrupted_run_that_offloads_goes_on_exactly(tmp_path: Path) -> None:
    whole, parted = (make_run(tmp_path / f.offload, AVERAGED, {}, f) for f in (OFF, ON))
    assert status_here(parted, partial(interrupt_at, 1))[0] == "stopped"
    assert_equal_runs(run_here(whole), run_to_end(parted))


def test_a_move_that_fails_ends_the_run_with_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError("the host has no room")

    monkeypatch.setattr(offload, "touched", refuse)
    status, lines = status_here(make_run(tmp_path / "r", AVERAGED, {}, ON))
    assert status == "failed"
    assert "of trainer/0 rank 0: " in lines[-1]["text"]
    assert "bytes, to the host: the host has no room" in lines[-1]["text"]


def test_values_that_cannot_leave_are_refused(tmp_path: Path) -> None:
    flags = toy_flags(updates=2, batch=2, offload="on")
    errors, _ = run_to_failure(make_run(tmp_path / "r", "toy", {"lag": 0}, flags))
    needed = "trainer/0 rank 0: given policy, a FakePolicy, needed a value that can leave its device"
    assert f"--offload on: {needed}" in errors
