"""The invariants hold for random graphs, plans, rules, timings, failures, checkpoints and resumes, and a recorded run
replays to identical commands.

Hypothesis chooses the events step by step, and prints how to repeat a failure. The seeded runs are longer, and a
failure names its seed. A few of each run always; the others are marked slow.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from msgspec import structs

from penstock.graph.ir import Firing
from penstock.runtime.record.event_log import Step
from penstock.runtime.schedule.compile import Rules
from penstock.runtime.schedule.events import Answer, Checkpoint, Command, Copied, Done, each, first_answer
from penstock.runtime.schedule.replay import ReplayError, SegmentOrigin, replay
from penstock.runtime.schedule.scheduler import Scheduler

from .graphs import aipo
from .random_settings import random_setting
from .world import World, world

slow = pytest.mark.slow


def digest(commands: Sequence[Command]) -> bytes:
    return blake2b(repr(commands).encode(), digest_size=8).digest()


def recorded(world: World, stage: str = "train") -> tuple[SegmentOrigin, list[Step]]:
    """Return what a log would hold of a world's life; its origin has passed through JSON."""
    setting, rules = world.setting, world.scheduler.rules
    origin = SegmentOrigin(stage, setting.graph, setting.plan, rules, world.cut, world.live or {}, world.cut or {})
    steps = zip(world.heard, world.told, strict=True)
    log = [Step(i, i * 0.1, event, digest(told)) for i, (event, told) in enumerate(steps)]
    return SegmentOrigin.from_json(json.loads(json.dumps(origin.to_json()))), log


def test_random_runs_keep_the_invariants_and_replay() -> None:
    live_through_all(range(40))


@slow
@pytest.mark.parametrize("first", range(40, 360, 80))
def test_many_random_runs_keep_the_invariants_and_replay(first: int) -> None:
    live_through_all(range(first, first + 80))


def live_through_all(seeds: range) -> None:
    for seed in seeds:
        try:
            live_through(Random(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def live_through(rng: Random) -> None:
    """Stop, checkpoint or kill a run up to three times; resume it each time from its last cut, and run it to its end.
    The lives that ended with a cut, and the last one, replay to the same commands."""
    world, stages = World(random_setting(rng)), []
    for _ in range(rng.choice([0, 1, 1, 3])):
        world.run(rng, steps=rng.randrange(1, 120))
        end = rng.choice(["stop", "checkpoint", "kill"])
        if world.finish is None and end != "kill":
            world.feed(Checkpoint(final=end == "stop"))
            world.run(rng, steps=10**6 if end == "stop" else rng.randrange(200))
            if end == "checkpoint" and world.finish is None:  # another checkpoint, perhaps during the first one's write
                world.feed(Checkpoint(final=rng.random() < 0.3))
                world.run(rng, steps=rng.randrange(200))
        stages.append(recorded(world))
        if world.finish is not None and world.finish.status != "stopped":
            break
        world = world.resumed()
    else:
        world.run(rng)
        stages.append(recorded(world))
    result = replay(stages, digest)[-1]
    assert (result.finish, result.outcomes) == (world.finish, world.outcomes)


@pytest.mark.parametrize("replicas", [1, 2])
def test_pinned_groups_that_are_lost_are_made_again_with_their_older_version(replicas: int) -> None:
    """In a third of these runs a replica must go back to a version older than its own."""
    rules = Rules(batch=2, end=6, versions="pinned", lost_replica="replace")
    for seed in range(10):
        made = World(replace(world(aipo(lag=2), rules, replicas).setting, loses=0.03))
        assert made.end(rng=Random(seed)).status == "done"


@pytest.mark.parametrize("update", [2, 3])
def test_a_pinned_run_may_stop_in_its_last_updates(update: int) -> None:
    """Its cut waits for the groups that need older versions: none of these may be past the last update."""
    made = world(aipo(lag=2), Rules(batch=2, end=4, versions="pinned"), replicas=2)
    made.until_fired("update", update)
    assert made.stop().end().status == "done"


class Runs(RuleBasedStateMachine):
    """A run whose ranks answer as Hypothesis chooses."""

    world: World

    @initialize(rng=st.randoms(use_true_random=False))
    def start(self, rng: Random) -> None:
        setting = random_setting(rng)
        note(f"{setting}")
        self.world = World(setting)

    def going(self) -> bool:
        return self.world.finish is None

    @precondition(going)
    @rule(indices=st.lists(st.integers(0, 1000), min_size=1, max_size=30))
    def answer(self, indices: list[int]) -> None:
        for index in indices:
            if self.going() and self.world.pending:
                self.world.step(self.world.pending[index % len(self.world.pending)])

    @precondition(going)
    @rule(index=st.integers(0, 1000))
    def fail(self, index: int) -> None:
        """A firing raises, if that does not end most runs."""
        rules = self.world.setting.rules
        working = [event for event in self.world.pending if isinstance(event, Done)]
        if working and (rules.retries or rules.on_failure == "replace"):
            self.world.fail(working[index % len(working)])

    @precondition(going)
    @rule(index=st.integers(0, 1000))
    def lose(self, index: int) -> None:
        """A replica is lost, if one may be."""
        if losable := self.world.losable:
            self.world.lose(losable[index % len(losable)])

    @precondition(going)
    @rule(index=st.integers(0, 1000))
    def find_gone(self, index: int) -> None:
        """A node of an update finds that its input values were lost with their replica."""
        if firings := self.world.unreadable():
            self.world.blind.add(firings[index % len(firings)])

    @precondition(going)
    @rule(index=st.integers(0, 1000))
    def join(self, index: int) -> None:
        """A lost replica joins again."""
        if absent := sorted(self.world.scheduler.absent):
            self.world.join(absent[index % len(absent)])

    @precondition(going)
    @rule(final=st.booleans())
    def checkpoint(self, final: bool) -> None:
        self.world.feed(Checkpoint(final))

    @precondition(going)
    @rule(index=st.integers(0, 1000))
    def stray(self, index: int) -> None:
        """An answer given twice, by another rank, or to no question, is refused and changes nothing."""
        left = self.world.checker.awaited
        done = [event for event in self.world.heard if isinstance(event, Done)]
        twice = [e for e in done if e.rank not in left.get(first_answer(e), set())]
        others = [structs.replace(event, rank=9) for event in self.world.pending[index % 7 :][:1]]
        nowhere = Done(Firing("nothing", index), "nowhere/0")
        for event in [*(twice[index % len(twice) :][:1] if twice else []), *others, nowhere]:
            with pytest.raises(ValueError, match="nobody awaits"):
                self.world.scheduler.handle(event)

    @rule(killed=st.booleans())
    def resume(self, killed: bool) -> None:
        """The process is killed or has ended; a new one resumes from the last cut."""
        if not self.going() or killed:
            self.world = self.world.resumed()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run(Random(0))


@pytest.mark.parametrize("examples", [40, pytest.param(120, marks=slow)])
def test_any_history_keeps_the_invariants(examples: int) -> None:
    health = [HealthCheck.too_slow, HealthCheck.data_too_large]
    given = settings(
        max_examples=examples, stateful_step_count=30, deadline=None, print_blob=True, suppress_health_check=health
    )
    run_state_machine_as_test(Runs, settings=given)


# Replay -----------------------------------------------------------------------------------------------------


def finished() -> tuple[SegmentOrigin, list[Step]]:
    made = world(aipo(), Rules(batch=2, end=2))
    made.end()
    return recorded(made)


def test_the_result_of_a_replay_counts_what_happened() -> None:
    made = world(aipo(), Rules(batch=2, end=2))
    made.end()
    result = replay([recorded(made)], digest)[0]
    assert (result.events, result.updates, result.commands) == (len(made.heard), 2, sum(map(len, made.told)))
    assert result.outcomes == {"consumed": 4, "dropped": 0, "failed": 0}


def test_one_answer_for_several_ranks_is_as_good_as_one_of_each() -> None:
    made = world(aipo(lag=1), Rules(batch=2, end=4), replicas=2, ranks=3)
    made.until_fired("update", 1)
    made.feed(Checkpoint())
    while made.finish is None:
        made.step()
    together: list[Any] = []
    for event in made.heard:
        last: Any = together[-1] if together else None
        now: Any = event
        same = isinstance(event, Answer | Copied) and type(last) is type(event)
        if same and structs.replace(now, rank=last.rank, others=last.others) == last:
            together[-1] = structs.replace(last, others=last.others + 1)
        else:
            together.append(event)
    assert len(together) < len(made.heard) / 2
    assert [one for event in together for one in each(event)] == made.heard
    scheduler = Scheduler(made.tables, made.scheduler.rules, complete={})
    told = [command for event in together for command in scheduler.handle(event)]
    assert told == [command for commands in made.told for command in commands]


def test_an_answer_for_a_rank_too_many_changes_nothing() -> None:
    made = world(aipo(), Rules(batch=1, end=1), ranks=3)
    event = made.pending[0]
    for rank, others in ((0, 3), (1, 2), (2, 1), (0, 1 << 19)):
        with pytest.raises(ValueError, match="nobody awaits"):
            made.scheduler.handle(structs.replace(event, rank=rank, others=others))
    made.end()


def test_other_commands_than_recorded_are_refused_by_record() -> None:
    origin, log = finished()
    other = [*log[:5], log[5]._replace(digest=b"other"), *log[6:]]
    said = r"record 5, at 0\.500000 s in stage 'train', after .*computed [0-9a-f]+ for"
    with pytest.raises(ReplayError, match=said):
        replay([(origin, other)], digest)
    with pytest.raises(ReplayError, match="record"):
        replay([(replace(origin, rules=replace(origin.rules, batch=3)), log)], digest)
    stray = log[3]._replace(event=Done(Firing("update", 7), "trainer/0"))
    with pytest.raises(ReplayError, match=r"record 3.*nobody awaits"):
        replay([(origin, [*log[:3], stray])], digest)


def test_a_stage_must_continue_from_a_cut_that_was_made() -> None:
    made = world(aipo(), Rules(batch=2, end=9))
    made.run(Random(0), steps=40)
    resumed = made.stop()
    resumed.end()
    assert len(replay([recorded(made), recorded(resumed)], digest)) == 2
    with pytest.raises(ReplayError, match="stage 'train' continues from the cut before update"):
        replay([recorded(resumed)], digest)


def test_an_origin_goes_through_json_whole() -> None:
    made = replace(finished()[0], complete={"update": 1})
    assert SegmentOrigin.from_json(made.to_json()) == made
    older = {name: value for name, value in made.to_json().items() if name != "complete"}
    assert SegmentOrigin.from_json(older).complete is None
    with pytest.raises(ValueError, match="given the fields stage, graph; needed stage, graph, plan, rules, cut, live"):
        SegmentOrigin.from_json({"stage": "train", "graph": aipo().to_json()})
