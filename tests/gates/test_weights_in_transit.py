"""Weights and other values in transit from worker to worker, on one host and between hosts: they arrive as they were
sent, or the run stops and names the ranks and the value; and nothing of them is left behind.
"""

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from penstock.runtime.cluster.cluster import Cluster
from penstock.runtime.tensor.buffers import Shards
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.weight_sync import LocalTransport
from tests.halt import until_it_stands
from tests.nodes.test_eight_bit import needs_int8

from .plain import toy_loop
from .running import (
    ENDLESS,
    FAULTS,
    LARGE,
    ONE_HOST,
    TWO_NAMES,
    Running,
    assert_all_consumed,
    assert_equal_bits,
    delays,
    final_state,
    make_run,
    model_flags,
    num_rows,
    printed,
    rows,
    run_to_end,
    run_to_failure,
    segments_of,
    status_here,
    summary,
    toy_flags,
)

pytestmark = pytest.mark.timeout(480)

# Weights that do not arrive as they were sent stop a run before anything is generated with them.


Tensors = dict[str, Tensor]
FIRST, SECOND = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.q_proj.weight"


def flip_a_bit(new: Tensors, old: Tensors) -> None:
    new[FIRST].view(torch.int32)[3, 5] ^= 1


def skip_a_tensor(new: Tensors, old: Tensors) -> None:
    new[FIRST].copy_(old[FIRST])


def keep_the_version_before(new: Tensors, old: Tensors) -> None:
    for name, tensor in new.items():
        tensor.copy_(old[name])


def swap_two_tensors(new: Tensors, old: Tensors) -> None:
    kept = new[FIRST].clone()
    new[FIRST].copy_(new[SECOND])
    new[SECOND].copy_(kept)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (flip_a_bit, {FIRST}),
        (skip_a_tensor, {FIRST}),
        (keep_the_version_before, {FIRST, SECOND}),
        (swap_two_tensors, {FIRST, SECOND}),
    ],
)
def test_a_damaged_sync_stops_a_run_and_names_the_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Tensors, Tensors], None], named: set[str]
) -> None:
    before: Tensors = {}
    receive = LocalTransport.receive

    def damaged(self: LocalTransport, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        received = receive(self, version, copies, parts)
        tensors = {name: part.tensor for name, part in parts.items()}
        if version == 2:
            damage(tensors, before)
        before.update({name: tensor.clone() for name, tensor in tensors.items()})
        return received

    monkeypatch.setattr(LocalTransport, "receive", damaged)
    folder = make_run(tmp_path / "r", f"{FAULTS}digits", {}, model_flags(updates=4, max_tokens=4))
    assert status_here(folder)[0] == "failed"
    error = summary(folder)["error"]
    assert "version 2" in error
    assert {name for name in (FIRST, SECOND) if name in error} == named
    assert len(rows(folder)) == 2


def test_a_bad_wire_between_processes_stops_the_run_and_names_the_tensor_and_the_rank(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", f"{FAULTS}bad_wire", {}, toy_flags(updates=4, batch=2))
    errors, _ = run_to_failure(folder)
    assert [said for said in ("generator/0 rank 0", "version 2", "values: sent") if said not in errors] == []
    assert len(rows(folder)) == 2


# A rank that dies, stops or hangs while weights are half-way.


AT = 2
WAYS = pytest.mark.parametrize("way", ["", "messages"])
ENDS = pytest.mark.parametrize("pool", ["trainer", "generator"])


def half_way(path: Path, options: dict[str, Any], generators: int = 1, **flags: Any) -> tuple[Path, Path]:
    """Make a run whose sender stops in the middle of version 2; return it and the file that says so."""
    mark = path / "half"
    used = toy_flags(updates=ENDLESS, versions="pinned", **flags)
    return make_run(path / "r", LARGE, {**options, "mark": str(mark), "at": AT}, used, generators=generators), mark


def strike(
    running: Running, mark: Path, pool: str = "", number: int = signal.SIGKILL, index: int = 0, updates: int = AT + 1
) -> None:
    """Send a rank the signal when half of the version is sent and `updates` are done, and let the sender go on. The
    last of these updates used groups that the generator made with the version before."""
    pids = running.until_ready()["pools"]
    running.until(mark.exists, f"half of version {AT} was through")
    running.until_update(updates)
    if pool:
        os.kill(pids[pool][index], number)
        if number == signal.SIGSTOP:
            until_it_stands(pids[pool][index])  # else one of its threads may see the file below, and send all
        mark.with_suffix(".go").touch()


@pytest.mark.slow
@WAYS
@ENDS
def test_a_rank_killed_while_weights_are_half_way_is_named_with_the_version(
    tmp_path: Path, way: str, pool: str
) -> None:
    folder, mark = half_way(tmp_path, {"way": way})
    _, found = run_to_failure(folder, partial(strike, mark=mark, pool=pool))
    assert found["cause"] == "rank-died"
    assert f"{pool}/0 rank 0 died: killed by SIGKILL (pid " in found["error"]
    assert f"version {AT} of policy>generator from trainer/0 to generator/0, which has {AT - 1}" in found["error"]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "pool"), [("", "trainer"), ("messages", "generator")])
def test_a_rank_stopped_while_weights_are_half_way_is_named_within_the_deadline(
    tmp_path: Path, way: str, pool: str
) -> None:
    folder, mark = half_way(tmp_path, {"way": way}, deadline=8.0)
    error = run_to_failure(folder, partial(strike, mark=mark, pool=pool, number=signal.SIGSTOP))[1]["error"]
    # Either the rank that waits for it reports it first, or the controller, which waits for that rank.
    by_peer = "policy>generator from trainer/0 to generator/0: " in error and (
        pool == "generator" or "source rank 0" in error
    )
    assert by_peer or f"send policy>generator {AT} from trainer/0" in error or f"{pool}/0 rank 0" in error
    assert f"version {AT}" in error or f"policy>generator {AT}" in error


@pytest.mark.slow
@WAYS
def test_a_transfer_that_stands_still_is_named_by_its_receiver(tmp_path: Path, way: str) -> None:
    """Both ranks are alive, and send heartbeats."""
    # Longer than a transfer that goes on may be suspended.
    folder, mark = half_way(tmp_path, {"way": way}, deadline=8.0)
    error = run_to_failure(folder, partial(strike, mark=mark))[1]["error"]
    assert [said for said in ("policy>generator", "trainer/0", "generator/0") if said not in error] == []
    assert len(rows(folder)) >= AT + 1


@pytest.mark.slow
def test_a_generator_killed_while_weights_go_through_it_ends_the_run_and_is_named(tmp_path: Path) -> None:
    """Half of version 2 is through the chain. The trainer goes on when the generator in the middle is dead."""
    # At lag 0 all replicas have a version before the next one is made.
    folder, mark = half_way(tmp_path, {"lag": 0}, generators=3, batch=6, transport="messages")
    _, found = run_to_failure(folder, partial(strike, mark=mark, pool="generator", index=1, updates=1))
    assert found["cause"] == "rank-died"
    assert "generator/1 rank 0 died: killed by SIGKILL (pid " in found["error"]
    for one in (0, 1):
        assert (
            f"version 2 of policy>generator from generator/{one} to generator/{one + 1}, which has 1" in found["error"]
        )


@pytest.mark.slow
def test_weights_for_which_there_is_no_room_come_as_messages_and_the_user_is_told(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", LARGE, {"way": "no room"}, toy_flags(updates=5))
    with Running(folder) as running:
        assert running.wait() == 0, running.errors
    (note,) = [note for note in running.notes if "segment" in note]
    assert "generator.0.0.policy.generator: no room for segment" in note
    assert "of 33555456 bytes (/dev/shm: File too large, " in note
    assert "bytes free); weights come as messages" in note
    assert summary(folder)["warnings"] == [note]
    # Weights for which there is room cause no warning.
    assert summary(run_to_end(make_run(tmp_path / "fits", LARGE, {}, toy_flags(updates=3))))["warnings"] == []


# Weights that are sent in another format than that of the sender's model.


@pytest.mark.slow
def test_a_format_with_scales_crosses_meshes(tmp_path: Path) -> None:
    flags = model_flags(updates=2, batch=4, max_tokens=8, wire="fp8_block")
    run = run_to_end(make_run(tmp_path / "r", "aipo", {"lag": 1}, flags, meshes=("trainer=fsdp2", "generator=tp2")))
    assert [abs(row["ratio_mean"] - 1) < 0.1 for row in rows(run)] == [True, True]


@needs_int8
@pytest.mark.slow
def test_a_generator_of_two_ranks_computes_in_int8_what_four_trainer_ranks_have_sent(tmp_path: Path) -> None:
    """Each rank of the sender holds a part of the rows and of the columns."""
    flags = model_flags(updates=3, batch=4, max_tokens=8, generator_precision="int8")
    meshes = ("trainer=fsdp2xtp2", "generator=tp2")
    run = run_to_end(make_run(tmp_path / "r", f"{FAULTS}in_int8", {"lag": 1}, flags, meshes=meshes))
    assert all(0 < abs(row["ratio_mean"] - 1) < 0.1 for row in rows(run))
    assert all("mismatch" not in row for row in rows(run))


@pytest.mark.slow
def test_deltas_over_tcp_between_two_agents_are_sent_proved_and_learnt_with(tmp_path: Path) -> None:
    """In bfloat16 an update changes few of the values; of any four syncs in a row one is full."""
    flags = model_flags(updates=20, batch=32, max_tokens=8, slots=128, wire="bfloat16", delta=4)
    options = {"lag": 1, "samples": 8, "lr": 1e-4}
    run = run_to_end(make_run(tmp_path / "r", f"{FAULTS}digits", options, flags, cluster=TWO_NAMES))
    sent = printed(run, "trainer-0-0")["sent"]
    assert sent["delta"] > 2 * sent["full"] >= 2
    assert sent["bytes"] < 0.7 * sent["whole"]
    rewards = [row["reward_mean"] for row in rows(run)]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:2]) / 2 + 0.3
    assert_all_consumed(run, 20 * 32)


# Values go from worker to worker, and nothing of them is left behind.


# The scorer always has groups to read that the generator made some time ago.
SLOW_SCORER = {**delays(score=300.0), "lag": 4}


@pytest.mark.slow
def test_values_of_another_host_are_asked_for_and_have_equal_bits(tmp_path: Path) -> None:
    folder = run_to_end(
        make_run(tmp_path / "r", "toy", {**delays(), "lag": 0}, toy_flags(updates=5), cluster=TWO_NAMES)
    )
    assert_equal_bits(final_state(folder, 5), toy_loop(5, 4))
    generator, scorer, trainer = (printed(folder, f"{pool}-0-0") for pool in ("generator", "scorer", "trainer"))
    assert (scorer["asked"]["asked"], trainer["asked"]["asked"]) == (20, 20)  # each of 20 groups in one part
    assert generator["answered"] == {"served": 40}
    assert "answered" not in scorer  # its values are read on its own host only: it does not listen
    assert summary(folder)["dropped_frames"] == {}


@pytest.mark.slow
def test_ranks_of_one_host_ask_nobody_and_do_not_listen_for_it(tmp_path: Path) -> None:
    """The scorer receives no weights either, so it does not listen at all."""
    folder = make_run(tmp_path / "r", "toy", delays(update=10.0), toy_flags(updates=ENDLESS))
    with Running(folder) as running:
        (scorer,) = running.until_ready()["pools"]["scorer"]
        running.until_update(2)
        assert psutil.Process(scorer).net_connections("inet") == []
        running.interrupt()
        assert running.wait() == 130
    for pool in ("generator", "scorer", "trainer"):
        found = printed(folder, f"{pool}-0-0")
        assert (found["asked"], "answered" in found) == ({}, False)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [True, False])
def test_an_owner_that_is_stopped_is_named_by_the_reader_within_its_deadline(tmp_path: Path, killed: bool) -> None:
    """It is stopped, or also killed, while the reader waits for an answer."""
    flags = toy_flags(updates=ENDLESS, deadline=60.0 if killed else 8.0)
    folder = make_run(tmp_path / "r", "toy", SLOW_SCORER, flags, cluster=TWO_NAMES)

    def stop_the_generator(running: Running) -> None:
        (pid,) = running.until_ready()["pools"]["generator"]
        running.until_update(1)
        os.kill(pid, signal.SIGSTOP)
        if killed:
            sleep(1.0)  # by now the scorer has asked
            os.kill(pid, signal.SIGKILL)

    errors, found = run_to_failure(folder, stop_the_generator)
    if killed:
        assert "generator/0 rank 0 on host b died: killed by SIGKILL (pid " in errors
        return
    assert "fake_score[" in errors
    assert "generator.0.0 on host b has not answered" in errors
    assert "for 4 s: dead, stopped, or out of reach of host a" in errors
    assert found["fates"]["failed"] == 0  # no group was given up, and none had a reward made up


@pytest.mark.slow
@pytest.mark.parametrize(("cluster", "updates"), [(ONE_HOST, 100), (TWO_NAMES, 20)], ids=["one host", "two hosts"])
def test_nothing_leaks_over_ten_thousand_groups(tmp_path: Path, cluster: Cluster, updates: int) -> None:
    """No store ever needs more than its first segment, every block is free at the end, and no segment is left."""
    flags, groups = toy_flags(updates=updates, batch=100, slots=64), updates * 100
    folder = make_run(tmp_path / "r", "toy", {**delays(), "lag": 1}, flags, cluster=cluster)
    segments = set[Path]()

    def look() -> bool:
        segments.update(segments_of(running.run, folder))
        return num_rows(folder) >= updates - 1

    with Running(folder) as running:
        running.until(look, "all updates but the last")
        assert running.wait() == 0, running.errors  # and nothing is left
    assert len(segments) <= 4  # of three stores, and of the generator's weights
    assert summary(folder)["groups"] == groups
    for pool, puts in (("generator", groups), ("scorer", groups), ("trainer", 0)):
        found = printed(folder, f"{pool}-0-0")
        assert (found["blocks"], found["block_bytes"], found["segments"], found["puts"]) == (0, 0, 1, puts)
