"""A session driven in this process: what a stop finds in work, and what piles up."""

import io
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import replace as replace_fields
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.graph import trace
from penstock.graph.ir import Firing
from penstock.graph.protocols import Carried
from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.cluster.placement import place
from penstock.runtime.control.inprocess import InProcess, run_in_process
from penstock.runtime.control.messages import Order, Result, pack
from penstock.runtime.control.recorder import RunRecorder
from penstock.runtime.control.run import Orders, Session, _merge
from penstock.runtime.control.run_config import RunConfig, RunOptions
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.folder import RunFolder, latest_checkpoint
from penstock.runtime.schedule.events import Done, Published
from penstock.runtime.tensor.checkpoint import CheckpointShard
from penstock.runtime.tensor.quantise import ConversionError
from penstock.runtime.tensor.shm import ObjectRef
from penstock.runtime.tensor.weight_sync import WeightPublisher

UPDATES = 5
VALUES = ("prompts", "fake_generate", "fake_score")
HANDLE = ObjectRef("segment", 0, 8, "{}", "worker/0")


class Watched(Session):
    """Asks itself to stop when `stop_when` says so, or while the last checkpoint is being written, if `stop_at_save`.

    With `handles`, the answers have those of values, as the answers of processes have. `left` are the firings that
    a stage still has handles of when it is over, `held` is how many it had at most. `results` and `orders` are all that
    was said.
    """

    stop_at_save = False
    stop_when: Callable[["Watched", Result], bool] | None = None
    handles = False
    held = 0
    left: Iterable[Firing] = ()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.results: list[Result] = []
        self.orders: list[Orders] = []

    def answer(self, result: Result, now: float) -> Orders:
        stage = self.stage
        assert stage is not None
        if self.handles and isinstance(result.event, Done) and result.event.firing.node in VALUES:
            result = replace(result, outputs={"out": HANDLE})
        orders = super().answer(result, now)
        self.results.append(result)
        self.orders.append(orders)
        if stage.name == "train":
            self.left, self.held = list(stage.handles), max(self.held, len(stage.handles))
        if self.stop_at_save and self.stage is not None and self.stage.name == "save":
            assert self.stop(now) == {}
        if self.stop_when is not None and self.stopping is None and self.stop_when(self, result):
            return _merge(orders, self.stop(now))
        return orders


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run")


def run(
    folder: RunFolder,
    *,
    stop_at_save: bool = False,
    handles: bool = False,
    updates: int = UPDATES,
    checkpoint_every: int = 0,
    lag: int = 1,
    stop_when: Callable[[Watched, Result], bool] | None = None,
) -> Watched:
    from penstock.programs.toy import toy

    graph = trace(toy, {"lag": lag, **{f"{name}_ms": 0 for name in ("generate", "score", "update", "sync")}})
    plan = place([graph], Cluster(hosts=(Host(name="local", cores=1),)))
    config = RunConfig(
        graph,
        None,
        plan,
        RunOptions(updates=updates, batch=2, checkpoint_every=checkpoint_every),
        "session",
    )
    config.write(folder, {})
    session = Watched(config, RunRecorder(folder, config, lambda line: None, monotonic()))
    session.stop_at_save, session.stop_when, session.handles = stop_at_save, stop_when, handles
    InProcess(config, session, folder.path).run()
    folder.unlock()
    return session


class Killed(BaseException):
    """Nothing catches it, as nothing sees a SIGKILL."""


class Kill:
    """Stops a session at the first scored group of `update`, and from then on dies at the `number`-th change or sync of
    a checkpoint's files. `before` is what was in the last good one."""

    CALLS = ((os, "mkdir"), (os, "rename"), (os, "replace"), (os, "open"), (os, "fsync"), (io, "open"))

    def __init__(self, patch: pytest.MonkeyPatch, folder: RunFolder, update: int, number: int) -> None:
        self.checkpoints, self.update, self.left = folder.checkpoints, update, number
        self.before: dict[str, tuple[int, bytes]] = {}
        for module, name in self.CALLS:
            patch.setattr(module, name, partial(self._call, getattr(module, name)))

    def stop_when(self, session: Watched, result: Result) -> bool:
        event, stage = result.event, session.stage
        scored = isinstance(event, Done) and event.firing.node == "fake_score"
        if not scored or stage is None or stage.name != "train" or stage.scheduler.update != self.update:
            return False
        self.before = files_of(self.checkpoints / "00000002")
        return True

    def _call(self, real: Callable[..., Any], place: Any, *args: Any, **kwargs: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else os.fsdecode(place)
        if self.before and path.startswith(str(self.checkpoints)):
            self.left -= 1
            if self.left < 0:
                raise Killed
        return real(place, *args, **kwargs)


def files_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Each file below, with its inode and content."""
    return {str(p.relative_to(folder)): (p.stat().st_ino, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


def last_policy(folder: RunFolder) -> list[float]:
    saved = latest_checkpoint(folder)
    assert saved is not None
    tensors, facts = CheckpointShard(saved.folder, "trainer/0", 0).carried("policy")
    return [facts["version"], *tensors["values"].tolist(), *tensors["momentum"].tolist()]


@pytest.mark.parametrize("update", [2, 3])
def test_a_kill_between_any_two_files_leaves_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: int
) -> None:
    """Asked to stop at an update that has a checkpoint, and at one that has none."""
    whole = RunFolder.create(tmp_path / "whole")
    run(whole, updates=4, checkpoint_every=2, lag=0)
    killed, number = True, 0
    while killed:
        folder = RunFolder.create(tmp_path / f"{number}")
        with monkeypatch.context() as patch:
            kill = Kill(patch, folder, update, number)
            try:
                run(folder, updates=4, checkpoint_every=2, lag=0, stop_when=kill.stop_when)
                killed = False
            except Killed:
                folder.unlock()
        saved, new = latest_checkpoint(folder), "00000002.2" if update == 2 else "00000003"
        assert saved is not None
        assert saved.folder.name in ([new, "00000002"] if killed else [new])
        assert files_of(folder.checkpoints / "00000002") == kill.before != {}
        folder.lock()
        assert run_in_process(folder, lambda line: None) == "done"
        folder.unlock()
        assert last_policy(folder) == last_policy(whole)
        assert {path.name for path in folder.checkpoints.iterdir()} <= {
            "00000002",
            "00000002.2",
            "00000003",
            "00000004",
        }
        number += 1
    assert number > 20


def test_a_stop_while_the_last_checkpoint_is_written_leaves_it_whole(folder: RunFolder) -> None:
    assert run(folder, stop_at_save=True).status == "stopped"
    saved = latest_checkpoint(folder)
    assert saved is not None
    assert saved.update == UPDATES


def test_the_layout_of_weights_crosses_once_and_digests_with_each_version(folder: RunFolder) -> None:
    session = run(folder, updates=6)
    assert session.status == "done"
    said = [result.manifest for result in session.results if isinstance(result.event, Published)]
    told = [one for orders in session.orders for order in orders.values() for one in order.manifests]
    assert said == told  # there is one replica on either side
    assert len(said) > 3
    first, *others = said
    assert first is not None
    assert json.loads(first.layout).keys() == {"layout", "wire", "wanted", "proof"}
    for manifest in others:
        assert manifest is not None
        assert (manifest.layout, manifest.digests.keys()) == ("", first.digests.keys())
        assert manifest.digests != first.digests
        assert len(pack(Order((), manifests=(manifest,)))) < len(pack(Order((), manifests=(first,)))) / 2


def test_a_publication_that_fails_ends_the_run_and_says_what_was_raised(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = WeightPublisher.publish

    def publish_one(publisher: WeightPublisher, version: int, carried: Carried | None = None) -> dict[str, int]:
        if version:
            raise ConversionError("values: row 3 has inf or NaN")
        return publish(publisher, version, carried)

    monkeypatch.setattr(WeightPublisher, "publish", publish_one)
    session = run(folder)
    assert session.status == "failed"
    assert session.error.startswith("policy>generator[1] on trainer/0 rank 0:\n")
    assert "values: row 3 has inf or NaN" in session.error


def test_no_handle_of_a_groups_value_outlives_its_last_reader(folder: RunFolder) -> None:
    session = run(folder, handles=True, updates=200)
    assert session.status == "done"
    assert session.left == []
    assert len(VALUES) < session.held < 40  # of 400 groups, those that are under way


def test_what_a_recorder_remembers_does_not_grow_with_the_updates(folder: RunFolder) -> None:
    recorder = run(folder).recorder
    assert isinstance(recorder, RunRecorder)
    assert set(recorder.bars.published) == {"policy>generator"}
    assert set(recorder.bars.sent) == {("policy>generator", "generator/0")}
    assert recorder.rows.groups == {}


def test_a_resume_that_is_stopped_before_it_begins_has_the_groups_of_its_cut(folder: RunFolder) -> None:
    run(folder)
    cut, config = latest_checkpoint(folder), RunConfig.load(folder)
    assert cut is not None
    session = Session(config, RunRecorder(folder, config, lambda line: None, monotonic(), cut), cut.cut)
    session.stop(monotonic())
    summary = folder.read_json("summary.json")
    assert (summary["status"], summary["updates"], summary["groups"]) == ("stopped", UPDATES, 2 * UPDATES)


def test_a_resume_that_is_stopped_before_a_group_is_done_writes_no_checkpoint_again(folder: RunFolder) -> None:
    run(folder, lag=0)
    before = files_of(folder.checkpoints)
    cut, config = latest_checkpoint(folder), RunConfig.load(folder)
    assert cut is not None
    config = replace_fields(config, flags=replace_fields(config.flags, updates=UPDATES + 3))
    session = Watched(config, RunRecorder(folder, config, lambda line: None, monotonic(), cut), cut.cut)
    session.stop_when = lambda session, result: True
    InProcess(config, session, folder.path, cut.folder).run()
    assert (session.status, session.stopping is not None) == ("stopped", True)
    assert files_of(folder.checkpoints) == before != {}
    assert [path.name for path in folder.checkpoints.iterdir()] == [cut.folder.name]


def test_a_resume_whose_training_was_done_writes_no_checkpoint_again(folder: RunFolder) -> None:
    """As one that was killed while it measured the accuracy afterwards."""
    run(folder)
    before = files_of(folder.checkpoints)
    folder.lock()
    assert run_in_process(folder, lambda line: None) == "done"
    folder.unlock()
    assert files_of(folder.checkpoints) == before != {}


def test_a_run_of_another_format_is_refused_with_both_versions(folder: RunFolder) -> None:
    run(folder)
    folder.write_json("config.json", folder.read_json("config.json") | {"format": 7, "asked": {"penstock": "9.0"}})
    told = r"run: given a run folder of another format, written by penstock 9\.0 .*given format 7, needed 1.*newer"
    with pytest.raises(RecordError, match=told):
        RunConfig.load(folder)
