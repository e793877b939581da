"""What a stage says of weights that are on their way: who really sends them, and who is awaited."""

import json
from pathlib import Path
from typing import Literal

import pytest

from penstock.graph import trace
from penstock.programs.toy import toy
from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.cluster.placement import place
from penstock.runtime.control.messages import Manifest, Result
from penstock.runtime.control.recorder import RunRecorder
from penstock.runtime.control.run import Manifests, Stage
from penstock.runtime.control.run_config import RunConfig, RunOptions
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.schedule.events import Arrived, Begin, Done, Published, Send
from penstock.runtime.schedule.replay import SegmentOrigin
from penstock.runtime.tensor.weight_sync import WeightPublisher
from tests.runtime.tensor.peer import Policy

CHANNEL = "policy>generator"
HOSTS = tuple(Host(name=name, cores=1) for name in "abcd")
GENERATORS = tuple(f"generator/{index}" for index in range(3))


@pytest.fixture(params=["auto", "shm"])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Stage:
    """Version 0 is on its way from a trainer on host a to generators on b, c and d."""
    transport: Literal["auto", "shm"] = request.param
    graph, flags = trace(toy, {}), RunOptions(updates=4, batch=2, transport=transport)
    plan = place([graph], Cluster(hosts=HOSTS, pools={"generator": ("b", "c", "d")}), generators=len(GENERATORS))
    config, folder = RunConfig(graph, None, plan, flags, "stage"), RunFolder.create(tmp_path / "run")
    folder.unlock()
    origin = SegmentOrigin("train", graph, plan, config.rules(0))
    made = Stage(origin, RunRecorder(folder, config, lambda line: None, 0.0), flags)
    made.recorder.open_stage(origin, 0.0)
    made.feed(Begin(), 0.0)
    while prompts := [what for kind, what, *_ in made.scheduler.answers if kind == "fire" and what.node == "prompts"]:
        made.answer(Result(Done(prompts[0], "generator/0")), 1.0)
    layout = json.dumps(WeightPublisher(CHANNEL, Policy(4), proof="off").description)
    published = Result(Published(CHANNEL, 0, "trainer/0"), manifest=Manifest(CHANNEL, 0, {}, layout))
    sends = [one for order in made.answer(published, 1.0).values() for one in order.commands if isinstance(one, Send)]
    assert {send.replica for send in sends} == {*GENERATORS}
    return made


def test_a_replica_is_told_the_layout_with_its_first_version_alone() -> None:
    manifests, first, second = Manifests(), Manifest(CHANNEL, 0, {"w": 5}, "the layout"), Manifest(CHANNEL, 1, {"w": 6})
    manifests.note(first)
    assert manifests.tell(CHANNEL, "generator/0") == first
    manifests.note(second)
    assert manifests.tell(CHANNEL, "generator/0") == second
    assert manifests.tell(CHANNEL, "generator/1") == Manifest(CHANNEL, 1, {"w": 6}, "the layout")
    assert manifests.tell(CHANNEL, "generator/1") == second


def senders(stage: Stage) -> list[str]:
    """From whom each generator has its weights."""
    return ["trainer/0", *GENERATORS[:2]] if stage.flags.transport == "auto" else ["trainer/0"] * 3


def test_an_overdue_version_is_of_the_replica_that_sends_it(stage: Stage) -> None:
    for index, (sender, name) in enumerate(zip(senders(stage), GENERATORS, strict=True)):
        assert stage.overdue(60.0, 60.0, {}) is None
        said = stage.overdue(62.0, 60.0, {})
        assert said is not None
        assert f"no answer from {name} rank 0 on host {'bcd'[index]} for 61 s" in said
        assert said.endswith(f"send {CHANNEL} 0 from {sender}")
        stage.answer(Result(Arrived(CHANNEL, 0, name)), 2.0)


def test_nothing_is_overdue_because_the_controller_was_stopped(stage: Stage) -> None:
    assert stage.overdue(2.0, 60.0, {}) is None
    assert stage.overdue(702.0, 60.0, {}, held_up=699.0) is None
    assert stage.overdue(760.0, 60.0, {}, held_up=699.0) is None
    assert "for 62 s" in str(stage.overdue(762.0, 60.0, {}, held_up=699.0))


def test_who_dies_was_moving_what_it_had_to_send_and_to_get(stage: Stage) -> None:
    links = [
        f"version 0 of {CHANNEL} from {s} to {d}, which has -1" for s, d in zip(senders(stage), GENERATORS, strict=True)
    ]
    for name in ("trainer/0", *GENERATORS, "scorer/0"):
        own = [link for link in links if f"from {name} " in link or f"to {name}," in link]
        assert stage.moving(name) == (f"moving {' and '.join(own)}" if own else "")
