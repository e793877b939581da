"""The work of ranks, derived from events and commands alone."""

from collections import Counter

from penstock.graph.ir import Firing
from penstock.runtime.report.follow import NS, cause_of
from penstock.runtime.report.run_history import read_facts
from penstock.runtime.schedule.events import Done, Failed, Published, Swapped

from .runs import Made


def test_the_work_of_a_record_is_that_of_the_run(made: Made) -> None:
    (stage,) = read_facts(made.folder).stages
    real = {(w.name, w.index, w.start - stage.begin, w.end - stage.begin) for w in stage.followed.work
            if w.kind in ("group", "update")}  # fmt: skip
    told = {(b.name, b.index, round(b.start * NS), round(b.end * NS)) for b in made.simulation.bars
            if b.kind in ("group", "update")}  # fmt: skip
    assert {key[:2] for key in real} == {key[:2] for key in told}
    ends = {(name, index): (start, end) for name, index, start, end in told}
    assert all(abs(start - ends[name, index][0]) <= 2 and abs(end - ends[name, index][1]) <= 2
               for name, index, start, end in real)  # fmt: skip


def test_the_depths_of_queues_are_what_was_in_work_from_then_on(made: Made) -> None:
    (stage,) = read_facts(made.folder).stages
    groups = [w for w in stage.followed.work if w.kind == "group" and w.rank == 0]
    nodes = {"generator": "fake_generate", "scorer": "fake_score"}
    assert len(stage.depths) > 50
    for depth in stage.depths[:-1]:
        for pool, node in nodes.items():
            assert depth.in_work[pool] == sum(w.name == node and w.start <= depth.time < w.end for w in groups)


def test_lags_and_swaps_are_those_of_the_run(made: Made) -> None:
    (stage,) = read_facts(made.folder).stages
    assert Counter(stage.followed.lags.values()) == made.simulation.lags
    assert list(stage.followed.ends) == list(range(8))
    for lane, swaps in stage.followed.swaps.items():
        versions = [version for _, version in swaps]
        assert versions == sorted(versions)
        assert bool(versions) == lane[0].startswith("generator")


def test_a_cause_names_what_happened() -> None:
    assert cause_of(Done(Firing("score", 7), "scorer/0")) == ("score[#] was done", 7)
    assert cause_of(Published("policy>generator", 3, "trainer/0")) == ("version # of policy>generator was published", 3)
    assert cause_of(Swapped("policy>generator", 4, "generator/1"))[0] == "version # went live on generator/1"
    assert cause_of(Failed(Firing("score", 2), "scorer/0", 0, "no")) == ("score[#] had failed", 2)
