"""Why a rank is idle."""

from pathlib import Path

from penstock.runtime.report.run_history import read_facts
from penstock.runtime.report.summary import rank_accounts
from penstock.runtime.schedule.simulator import Durations

from .runs import simulated_run


def spent(path: Path, lag: int, **nodes: float) -> dict[str, dict[str, int]]:
    slow = Durations(
        {"fake_generate": 0.01, "fake_score": 0.0, "fake_update": 0.01, **nodes}, publish=0.002, wire=0.004
    )
    made = simulated_run(path, lag=lag, updates=6, durations=slow)
    return {lane[0]: account for lane, account in rank_accounts(read_facts(made.folder).training).items()}


def test_a_generator_that_is_ahead_waits_for_the_admission_bound(tmp_path: Path) -> None:
    found = spent(tmp_path / "r", 1, fake_update=0.2)["generator/0"]
    assert found["admission"] > 0.6 * sum(found.values())


def test_a_synchronous_generator_waits_for_the_update_and_then_for_its_sync(tmp_path: Path) -> None:
    found = spent(tmp_path / "r", 0)["generator/0"]
    assert found["admission"] == 5 * 10_000_000
    assert found["syncing"] == 6 * 6_000_000


def test_a_trainer_waits_for_data_and_its_snapshots_are_part_of_the_sync(tmp_path: Path) -> None:
    found = spent(tmp_path / "r", 1, fake_generate=0.3)["trainer/0"]
    assert found["data"] > 0.8 * sum(found.values())
    assert found["syncing"] == 6 * 2_000_000


def test_the_last_group_of_a_batch_is_a_straggler(tmp_path: Path) -> None:
    def lasting(node: str, index: int) -> float:
        return 0.5 if index % 8 == 7 else 0.01

    slow = Durations({"fake_generate": lasting, "fake_score": 0.0, "fake_update": 0.01})
    made = simulated_run(tmp_path / "r", lag=0, updates=3, durations=slow)
    found = rank_accounts(read_facts(made.folder).training)["trainer/0", 0]
    assert found["straggler"] == 3 * 490_000_000


def test_nothing_is_left_when_all_groups_of_the_run_are_through(tmp_path: Path) -> None:
    found = spent(tmp_path / "r", 1, fake_update=0.1)
    assert found["generator/0"]["done"] >= 100_000_000
    assert found["trainer/0"].get("done", 0) == 0
