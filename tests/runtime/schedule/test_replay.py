"""A recorded run replays to identical commands; anything else is refused, by record."""

import json
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from random import Random

import pytest

from penstock.graph.ir import Firing
from penstock.runtime.schedule.events import Checkpoint, Command, Done
from penstock.runtime.schedule.replay import RecordedStep, ReplayError, SegmentOrigin, replay, replay_all

from .graphs import aipo, place
from .world import Setting, World, random_setting


def digest(commands: Sequence[Command]) -> bytes:
    return blake2b(repr(commands).encode(), digest_size=8).digest()


def recorded(world: World, stage: str = "train") -> tuple[SegmentOrigin, list[RecordedStep]]:
    """What a log would hold of a world's life; the origin through JSON."""
    setting = world.setting
    rules, live, complete = world.scheduler.rules, world.live or {}, world.cut or {}
    origin = SegmentOrigin(stage, setting.graph, setting.plan, rules, world.cut, live, complete)
    steps = zip(world.heard, world.told, strict=True)
    log = [RecordedStep(i, i * 0.1, event, digest(told)) for i, (event, told) in enumerate(steps)]
    return SegmentOrigin.from_json(json.loads(json.dumps(origin.to_json()))), log


def test_a_recorded_run_replays_to_identical_commands_over_all_its_resumes() -> None:
    for seed in range(60):
        rng = Random(seed)
        world = World(random_setting(rng))
        stages = []
        for _ in range(2):
            world.run(rng, steps=rng.randrange(1, 100))
            if world.finish is None:
                world.feed(Checkpoint(final=True))
                world.run(rng)
            stages.append(recorded(world))
            world = world.resumed()
        world.run(rng)
        results = replay_all([*stages, recorded(world)], digest)
        assert results[-1].finish == world.finish, f"seed {seed}"
        assert results[-1].outcomes == world.scheduler.ledger.outcomes


def test_a_log_that_does_not_say_which_checkpoint_was_complete_had_every_cut_written() -> None:
    world = finished()
    made = recorded(world)[0]
    assert SegmentOrigin.from_json(
        json.loads(json.dumps(replace(made, complete={"update": 1}).to_json()))
    ).complete == {"update": 1}
    older = {name: value for name, value in made.to_json().items() if name != "complete"}
    assert SegmentOrigin.from_json(older).complete is None


def finished() -> World:
    world = World(Setting(aipo(), place(aipo()), replace(random_setting(Random(0)).rules, batch=2, end=2), {}, {}))
    world.run(Random(0))
    return world


def test_the_result_counts_what_happened() -> None:
    world = finished()
    result = replay(*recorded(world), digest)
    assert (result.events, result.updates) == (len(world.heard), 2)
    assert result.commands == sum(map(len, world.told))
    assert result.outcomes == {"consumed": 4, "dropped": 0, "failed": 0}


def test_other_commands_than_recorded_are_refused_by_record() -> None:
    origin, log = recorded(finished())
    log[5] = log[5]._replace(digest=b"other")
    with pytest.raises(
        ReplayError, match=r"record 5, at 0\.500000 s in stage 'train', after Arrived.*computed [0-9a-f]+ for"
    ):
        replay(origin, log, digest)


def test_other_rules_than_recorded_are_refused() -> None:
    origin, log = recorded(finished())
    with pytest.raises(ReplayError, match="record"):
        replay(replace(origin, rules=replace(origin.rules, batch=3)), log, digest)


def test_an_event_that_could_not_have_been_heard_is_refused() -> None:
    origin, log = recorded(finished())
    log[3] = log[3]._replace(event=Done(Firing("update", 7), "trainer/0"))
    with pytest.raises(ReplayError, match=r"record 3.*nobody awaits"):
        replay(origin, log, digest)


def test_a_stage_must_continue_from_a_cut_that_was_made() -> None:
    world = World(Setting(aipo(), place(aipo()), replace(random_setting(Random(0)).rules, batch=2, end=9), {}, {}))
    world.run(Random(0), steps=40)
    world.feed(Checkpoint(final=True))
    world.run(Random(0))
    resumed = world.resumed()
    resumed.run(Random(0))
    assert len(replay_all([recorded(world), recorded(resumed)], digest)) == 2
    with pytest.raises(ReplayError, match="stage 'train' continues from the cut before update"):
        replay_all([recorded(resumed)], digest)


def test_a_stage_without_its_origin_is_refused() -> None:
    with pytest.raises(ValueError, match="given the fields stage, graph; needed stage, graph, plan, rules, cut, live"):
        SegmentOrigin.from_json({"stage": "train", "graph": aipo().to_json()})
