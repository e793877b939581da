"""The invariants hold for random graphs, plans, rules, timings, failures, checkpoints and resumes.

Hypothesis chooses what happens, step by step, and prints how to repeat a failure; the seeded runs go on for longer,
and name their seed.
"""

from random import Random

import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from penstock.graph.ir import Firing
from penstock.runtime.schedule.events import Begin, Checkpoint, Done

from .world import World, random_setting

RUNS = 1200
BLOCK = 100
FAST = 400
"""Runs that every change is tested with; the others are slow, all together."""


@pytest.mark.parametrize(
    "first", [pytest.param(n, marks=pytest.mark.slow if n >= FAST else ()) for n in range(0, RUNS, BLOCK)]
)
def test_random_runs_keep_the_invariants(first: int) -> None:
    for seed in range(first, first + BLOCK):
        try:
            live_through(Random(seed))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def live_through(rng: Random) -> None:
    """A run that is stopped, checkpointed or killed up to three times, and resumed from its last cut to its end."""
    world = World(random_setting(rng))
    for _ in range(rng.choice([0, 1, 1, 3])):
        world.run(rng, steps=rng.randrange(1, 120))
        end = rng.choice(["stop", "checkpoint", "kill"])
        if world.finish is None and end != "kill":
            world.feed(Checkpoint(final=end == "stop"))
            world.run(rng, steps=10**6 if end == "stop" else rng.randrange(200))
        if world.finish is not None and world.finish.status != "stopped":
            return
        world = world.resumed()
    world.run(rng)


class Runs(RuleBasedStateMachine):
    """A run whose ranks do what Hypothesis says."""

    world: World

    @initialize(rng=st.randoms(use_true_random=False))
    def start(self, rng: Random) -> None:
        setting = random_setting(rng)
        note(f"{setting}")
        self.world = World(setting)
        self.world.feed(Begin())

    def going(self) -> bool:
        return self.world.finish is None

    @precondition(going)
    @rule(indices=st.lists(st.integers(0, 1000), min_size=1, max_size=30))
    def answer(self, indices: list[int]) -> None:
        for index in indices:
            if self.going():
                self.world.step(index % len(self.world.pending))

    @precondition(going)
    @rule(index=st.integers(0, 1000))
    def fail(self, index: int) -> None:
        """A firing raises, where that does not end most runs."""
        rules = self.world.setting.rules
        working = [i for i, event in enumerate(self.world.pending) if isinstance(event, Done)]
        if working and (rules.retries or rules.on_failure == "replace"):
            self.world.fail(working[index % len(working)])

    @precondition(going)
    @rule(final=st.booleans())
    def checkpoint(self, final: bool) -> None:
        self.world.feed(Checkpoint(final))

    @precondition(going)
    @rule(index=st.integers(0, 1000))
    def stray(self, index: int) -> None:
        """An answer that comes twice, or from nowhere, is refused."""
        awaited = self.world.checker.awaited
        done = [event for event in self.world.heard if isinstance(event, Done)]
        twice = [e for e in done if e.rank not in awaited.get(("fire", e.firing, e.replica), set())]
        for event in twice[index % len(twice) :][:1] if twice else []:
            with pytest.raises(ValueError, match="nobody awaits"):
                self.world.scheduler.handle(event)
        with pytest.raises(ValueError, match="nobody awaits"):
            self.world.scheduler.handle(Done(Firing("nothing", index), "nowhere/0"))

    @rule(killed=st.booleans())
    def resume(self, killed: bool) -> None:
        """The process is killed, or has ended; a new one goes on from the last cut."""
        if not self.going() or killed:
            self.world = self.world.resumed()
            self.world.feed(Begin())

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run(Random(0))


def test_any_history_keeps_the_invariants() -> None:
    run_state_machine_as_test(
        Runs,
        settings=settings(
            max_examples=200,
            stateful_step_count=30,
            deadline=None,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
