"""Why a rank is idle: busy time and idle time by cause add up to the wall time, whatever work there was."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.record.timeline import Kind
from penstock.runtime.report.follow import Work
from penstock.runtime.report.run_history import accounts, read_facts
from penstock.runtime.report.summary import make_report, slot_time
from penstock.runtime.schedule.simulator import Durations

from .runs import Made, simulated_run

RANK = ("pool/0", 0)


def work(start: int, end: int, kind: Kind = "group", outcome: str = "") -> Work:
    return Work("pool/0", "node", 0, start, end, kind, outcome=outcome)


def account(done: list[Work], reasons: list[tuple[int, str]], begin: int, end: int) -> dict[str, int]:
    return accounts(done, {RANK: reasons}, begin, end)[RANK]


def test_time_is_busy_where_anything_is_in_work_and_idle_by_its_cause_elsewhere() -> None:
    done = [work(10, 30), work(20, 40), work(50, 60, "publish"), work(70, 80, outcome="failed")]
    reasons = [(0, "data"), (40, "admission"), (60, "syncing"), (80, "done")]
    spent = account(done, reasons, 0, 100)
    assert spent == {"data": 10, "busy": 30, "admission": 10, "syncing": 20, "failed": 10, "done": 20}


def test_work_beside_failed_work_is_busy_and_transfers_are_no_work() -> None:
    assert account([work(0, 10, outcome="failed"), work(5, 10), work(0, 20, "send")], [(0, "data")], 0, 20) == {
        "failed": 5, "busy": 5, "data": 10}  # fmt: skip


KINDS: list[Kind] = ["group", "update", "publish", "send", "swap"]
ITEMS = st.tuples(
    st.integers(-50, 1000), st.integers(0, 300), st.sampled_from(KINDS), st.sampled_from(["", "failed", "unanswered"])
)
CHANGES = st.tuples(st.integers(0, 1000), st.sampled_from(["data", "weights", "done"]))


@given(st.lists(ITEMS, max_size=20), st.lists(CHANGES, max_size=8), st.integers(0, 400), st.integers(0, 700))
def test_the_parts_add_up_to_the_wall_time_exactly(
    items: list[tuple[int, int, Kind, str]], changes: list[tuple[int, str]], begin: int, length: int
) -> None:
    done = [work(start, start + took, kind, outcome) for start, took, kind, outcome in items]
    spent = account(done, sorted(changes), begin, begin + length)
    assert sum(spent.values()) == length
    assert all(time > 0 for time in spent.values())


def test_the_ranks_of_a_run_add_up_in_every_stage_and_all_in_all(made: Made) -> None:
    facts = read_facts(made.folder)
    for stage in facts.stages:
        assert len(stage.accounts) == 6
        assert {sum(spent.values()) for spent in stage.accounts.values()} == {stage.end - stage.begin}
    assert {sum(spent.values()) for spent in facts.whole_ns.values()} == {facts.end}
    busy = {lane[0]: spent.get("busy", 0) for lane, spent in facts.training_ns.items()}
    assert abs(busy["scorer/0"] / 1e9 - made.simulation.busy["scorer/0"]) < 1e-6


def test_slots_in_use_are_rows_and_never_more_than_there_are() -> None:
    assert slot_time([(work(0, 10), 4), (work(5, 20), 4)], 6) == 4 * 5 + 6 * 5 + 4 * 10
    assert slot_time([(work(*span), 1) for span in ((0, 10), (5, 20), (30, 40), (31, 32))], 1) == 30
    assert slot_time([], 6) == 0


def test_occupancy_counts_a_slot_for_each_sample_of_a_group(tmp_path: Path) -> None:
    seconds = Durations({"fake_generate": 1.0, "fake_score": 0.0, "fake_update": 0.0})
    report = make_report(read_facts(simulated_run(tmp_path / "run", batch=4, durations=seconds).folder), lambda: True)
    # The groups of two updates start together, with four samples each, on a replica with the default number of slots.
    assert report.occupancy["generator"] == 2 * 4 * 4 / report.facts.config.flags.slots


def spent(path: Path, lag: int, **nodes: float) -> dict[str, dict[str, int]]:
    seconds = {"fake_generate": 0.01, "fake_score": 0.0, "fake_update": 0.01, **nodes}
    made = simulated_run(path, lag=lag, durations=Durations(seconds, publish=0.002, wire=0.004))
    return {lane[0]: account for lane, account in read_facts(made.folder).training_ns.items()}


def test_a_generator_that_is_ahead_waits_for_the_admission_bound(tmp_path: Path) -> None:
    found = spent(tmp_path / "r", 1, fake_update=0.2)["generator/0"]
    assert found["admission"] > 0.6 * sum(found.values())


def test_a_synchronous_generator_waits_for_the_update_and_then_for_its_sync(tmp_path: Path) -> None:
    found = spent(tmp_path / "r", 0)["generator/0"]
    assert (found["admission"], found["syncing"]) == (5 * 10_000_000, 6 * 6_000_000)


def test_a_trainer_waits_for_data_and_its_snapshots_are_part_of_the_sync(tmp_path: Path) -> None:
    found = spent(tmp_path / "r", 1, fake_generate=0.3)["trainer/0"]
    assert found["data"] > 0.8 * sum(found.values())
    assert found["syncing"] == 6 * 2_000_000


def test_the_last_group_of_a_batch_is_a_straggler(tmp_path: Path) -> None:
    def lasting(node: str, index: int) -> float:
        return 0.5 if index % 8 == 7 else 0.01

    slow = Durations({"fake_generate": lasting, "fake_score": 0.0, "fake_update": 0.01})
    made = simulated_run(tmp_path / "r", lag=0, updates=3, durations=slow)
    found = read_facts(made.folder).training_ns["trainer/0", 0]
    assert found["straggler"] == 3 * 490_000_000


def test_nothing_is_left_when_all_groups_of_the_run_are_through(tmp_path: Path) -> None:
    found = spent(tmp_path / "r", 1, fake_update=0.1)
    assert found["generator/0"]["done"] >= 100_000_000
    assert found["trainer/0"].get("done", 0) == 0
