"""A run's options, its session in one process, and what its recorder writes."""

import io
import json
import os
import queue
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field, asdict, fields
from dataclasses import replace as with_fields
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from penstock.graph import load, trace
from penstock.graph.context import Context
from penstock.graph.ir import Firing
from penstock.graph.protocols import Carried
from penstock.programs.toy import toy
from penstock.runtime.cli.flags import RunFlags, changes, with_changes
from penstock.runtime.cli.resume import ResumeFlags
from penstock.runtime.cli.watch import Watched as Reader
from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.cluster.placement import place
from penstock.runtime.control import recorder
from penstock.runtime.control.controller import Controller
from penstock.runtime.control.inprocess import InProcess, run_in_process
from penstock.runtime.control.messages import Note, Order, Result, pack
from penstock.runtime.control.process import told
from penstock.runtime.control.recorder import EVERY, QUIET, RunRecorder
from penstock.runtime.control.run import Orders, Session
from penstock.runtime.control.run_config import NODE_OPTIONS, OnResume, RunConfig, RunOptions, annotation, check_limits
from penstock.runtime.record.checkpoints import latest_checkpoint, sweep_checkpoints
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.record.metrics import read_rows
from penstock.runtime.report.run_history import read_facts
from penstock.runtime.schedule.compile import Rules
from penstock.runtime.schedule.events import Arrived, Begin, Commit, Done, Fire, Published, ReplicaLost, Send, Swapped
from penstock.runtime.schedule.replay import SegmentOrigin
from penstock.runtime.tensor.checkpoint import CheckpointShard
from penstock.runtime.tensor.quantise import ConversionError
from penstock.runtime.tensor.shm import ObjectRef
from penstock.runtime.tensor.weight_sync import WeightPublisher

from .sockets import Bench

# A run's options: one dataclass, from which flags, `config.json`, the ranks' setup and the scheduler's rules derive.


LANGUAGE = Path(__file__).parents[2] / "programs_for_language.py"
HOST = Cluster(hosts=(Host(name="local", cores=2),))


def defaults(cls: Any) -> dict[str, Any]:
    def default(field: "Field[Any]") -> Any:
        return field.default if field.default_factory is MISSING else field.default_factory()

    return {field.name: default(field) for field in fields(cls)}


def a_run(**options: Any) -> RunConfig:
    return RunConfig.make(trace(load("toy"), {}), None, HOST, RunOptions(**{"device": "cpu", **options}))


@pytest.mark.parametrize(("options", "kept"), [({}, 1), ({"lost_replica": "replace", "versions": "pinned"}, 3)])
def test_a_sender_keeps_the_versions_that_a_replica_may_still_need(options: dict[str, Any], kept: int) -> None:
    """The newest; and where replicas are replaced those of all groups under way, at a lag of 1."""
    assert a_run(**options).kept_versions == kept


def test_an_error_of_a_gpu_without_memory_names_flags_that_need_less() -> None:
    text = told(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    named = {word.replace("-", "_") for word in re.findall(r"--([a-z-]+)", text)}
    assert "Tried to allocate 2.00 GiB" in text
    assert {"micro_tokens", "slots", "mesh"} <= named <= {field.name for field in fields(RunOptions)}
    assert "--" not in told(MemoryError("no room"))


def test_every_option_is_a_flag_of_the_same_name_type_and_default() -> None:
    options, flags = ({f.name: (f.type, f.default) for f in fields(cls)} for cls in (RunOptions, RunFlags))
    assert options.items() <= flags.items()
    assert not {"cluster", "out", "config", "in_process", "plain", "json"} & options.keys()


def test_flags_give_the_options_that_they_were_given() -> None:
    assert RunFlags(slots=7, model="/m").options("/m") == RunOptions(slots=7, model="/m")
    assert RunFlags(model="new").options("new") == RunOptions()


def test_config_json_has_every_option(tmp_path: Path) -> None:
    config, folder = a_run(batch=3), RunFolder.create(tmp_path / "run")
    config.write(folder, {})
    folder.unlock()
    written = json.loads(folder.config.read_text())["flags"]
    assert written == json.loads(json.dumps(asdict(config.flags)))
    assert list(written) == list(defaults(RunOptions))
    assert RunConfig.load(folder) == config


def test_a_folder_made_before_max_prompt_was_a_flag_keeps_the_bound_that_its_program_had(tmp_path: Path) -> None:
    config, folder = a_run(), RunFolder.create(tmp_path / "run")
    graph = config.graph.replace(options=(("max_prompt", 96),))
    with_fields(config, graph=graph).write(folder, {})
    written = folder.read_json("config.json")
    assert RunConfig.load(folder).flags.max_prompt == 2048
    del written["flags"]["max_prompt"]
    folder.write_json("config.json", written)
    folder.unlock()
    assert RunConfig.load(folder).flags.max_prompt == 96


def test_an_option_outside_of_its_limits_is_refused_by_the_flag_and_by_config_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--slots: given 0, needed at least 1"):
        check_limits(RunFlags(slots=0))
    folder = RunFolder.create(tmp_path / "run")
    with_fields(a_run(), flags=RunOptions(slots=0)).write(folder, {})
    folder.unlock()
    with pytest.raises(RecordError, match="slots"):
        RunConfig.load(folder)


def test_a_folder_in_which_0_stood_for_what_was_not_given_is_read_as_before(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    a_run().write(folder, {})
    folder.unlock()
    written = folder.read_json("config.json")
    older = {"lora_alpha": 0.0, "mismatch_limit": 0.0}
    folder.write_json("config.json", {**written, "flags": {**written["flags"], **older}})
    flags = RunConfig.load(folder).flags
    assert (flags.lora_alpha, flags.mismatch_limit) == (None, None)


def test_all_limits_that_are_broken_are_said_at_once() -> None:
    wrong = RunOptions(updates=-1, seed=2**63, deadline=0.0, startup_deadline=float("inf"))
    with pytest.raises(ValueError, match=r"^--updates: .*\n--seed: .*\n--deadline: .*\n--startup-deadline: .*$"):
        check_limits(wrong)
    check_limits(RunOptions())


def test_a_ranks_setup_has_the_options_that_nodes_see() -> None:
    given = {"batch": 3, "updates": 5, "max_tokens": 9, "seed": 11, "slots": 13, "dtype": "bfloat16"}
    given |= {"model": "/model", "data": "words", "recompute": "layer", "micro_tokens": 64, "logit_elements": 4096}
    given |= {"data_split": "s", "eval_data": "others", "eval_split": "t", "prompt_field": "p", "answer_field": "a"}
    given |= {"row": "m:f", "system": "Be brief.", "segment": 5, "max_prompt": 99, "held_out": 7}
    given |= {"chat_template_kwargs": ("enable_thinking=false",)}
    given |= {"lora": 4, "lora_alpha": 8.0, "lora_targets": ("q_proj",), "optimizer_state": "host"}
    given |= {"replay_routing": True, "invariant": True, "engine": "vllm", "mismatch_limit": 0.5}
    given |= {"versions": "pinned", "deterministic": True, "lr_warmup": 4, "lr_decay": "cosine"}
    assert set(NODE_OPTIONS) == given.keys()
    config = a_run(**given)
    for replica in config.plan.replicas:
        for context in config.setup(replica, 0, Path("run"), None).contexts.values():
            assert {name: getattr(context, name) for name in NODE_OPTIONS} == given


def test_what_a_context_and_the_rules_share_with_the_options_has_their_defaults() -> None:
    known = defaults(RunOptions)
    alike = set(NODE_OPTIONS) - {"recompute", "optimizer_state"}  # a run resolves "auto" before a node sees it
    assert {name: defaults(Context)[name] for name in alike} == {name: known[name] for name in alike}
    shared = {name: value for name, value in defaults(Rules).items() if name in known and value is not MISSING}
    assert shared.items() <= known.items()
    assert set(shared) == {"versions", "order", "retries", "on_failure", "lost_replica", "drops", "failures"}


def test_rules_have_the_options_of_their_names() -> None:
    options: dict[str, Any] = {"batch": 2, "versions": "pinned", "retries": 3, "drops": 4, "failures": 5}
    assert a_run(updates=7, **options).rules(6) == Rules(**options, start=6, end=7)


def test_a_resume_takes_the_options_that_say_so_and_no_others() -> None:
    marked = {name for name in defaults(RunOptions) if annotation(RunOptions, name, OnResume)}
    small = {"keep", "keep_best", "recompute", "micro_tokens", "track", "grace", "restarts", "save_samples"}
    assert marked == {"updates", "mesh"} | small
    assert {field.name for field in fields(ResumeFlags)} & defaults(RunOptions).keys() == set()
    flags: Any = with_changes(ResumeFlags)
    assert changes(flags("runs/r")) == {}
    assert changes(flags("runs/r", updates=0, mesh=("trainer=tp2",))) == {"updates": 0, "mesh": ("trainer=tp2",)}


def test_a_run_on_no_device_in_particular_says_on_which_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert RunOptions().device == "auto"
    assert a_run(device="auto").flags.device == "cpu"


# A session driven in this process: what is in progress at a stop, and what accumulates.


UPDATES = 5
VALUES = ("prompts", "fake_generate", "fake_score")
HANDLE = ObjectRef("segment", 0, 8, 1, "worker/0")


class Watched(Session):
    """A session that stops when `stop_when` says so, or, with `stop_at_save`, while the last checkpoint is written.

    With `handles`, answers carry handles of values, as those of processes do. `left` are the firings whose handles a
    stage still has at its end; `held` is the largest number it had. `results` and `orders` are all results and orders.
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

    def take(self) -> Orders:
        self.orders.append(super().take())
        return self.orders[-1]

    def answer(self, result: Result, now: float) -> None:
        stage = self.stage
        assert stage is not None
        if self.handles and isinstance(result.event, Done) and result.event.firing.node in VALUES:
            result = replace(result, outputs={"out": HANDLE})
        super().answer(result, now)
        self.results.append(result)
        if stage.name == "train":
            self.left, self.held = list(stage.handles), max(self.held, len(stage.handles))
        if self.stop_at_save and self.stage is not None and self.stage.name == "save":
            self.stop(now)
        if self.stop_when is not None and self.stopping is None and self.stop_when(self, result):
            self.stop(now)


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
    keep: int = RunOptions.keep,
    lag: int = 1,
    stop_when: Callable[[Watched, Result], bool] | None = None,
) -> Watched:

    graph = trace(toy, {"lag": lag, **{f"{name}_ms": 0 for name in ("generate", "score", "update", "sync")}})
    plan = place([graph], Cluster(hosts=(Host(name="local", cores=1),)))
    config = RunConfig(
        graph,
        None,
        plan,
        RunOptions(updates=updates, batch=2, checkpoint_every=checkpoint_every, keep=keep),
        "session",
    )
    config.write(folder, {})
    session = Watched(config, RunRecorder(folder, config, lambda line: None, monotonic()))
    session.stop_at_save, session.stop_when, session.handles = stop_at_save, stop_when, handles
    InProcess(config, session, folder.path).run()
    folder.unlock()
    return session


def test_checkpoints_by_updates_are_at_their_updates_though_the_next_one_waits_for_nothing(folder: RunFolder) -> None:
    run(folder, updates=9, checkpoint_every=2, keep=0, lag=4)
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == [f"{n:08}" for n in (2, 4, 6, 8, 9)]


def test_the_end_of_a_run_waits_for_no_old_checkpoint_to_be_removed_and_its_sweep_removes_the_rest(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow file system, removal takes minutes, during which the controller would seem to hang."""
    ended, removed = threading.Event(), queue.SimpleQueue[bool]()

    def remove(path: Path, **how: Any) -> None:
        if threading.current_thread() is not threading.main_thread():  # here, the rank's thread
            removed.put(ended.wait(20.0))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", remove)
        run(folder, updates=3, checkpoint_every=1, keep=1)
        ended.set()
        assert removed.get(timeout=60.0)
    assert len(list(folder.checkpoints.iterdir())) > 1
    sweep_checkpoints(folder)
    assert [path.name for path in folder.checkpoints.iterdir()] == ["00000003"]


class Killed(BaseException):
    """Nothing catches it, as with a SIGKILL."""


class Kill:
    """Stop a session at the first scored group of `update`, then raise at the `number`-th change or sync of a file of a
    checkpoint. `before` has the files of the last good one."""

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
    """The inode and content of each file below a folder."""
    return {str(p.relative_to(folder)): (p.stat().st_ino, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


def last_policy(folder: RunFolder) -> list[float]:
    saved = latest_checkpoint(folder)
    assert saved is not None
    tensors, facts = CheckpointShard(saved.folder, "trainer/0", 0).carried("policy")
    return [facts["version"], *tensors["values"].tolist(), *tensors["momentum"].tolist()]


@pytest.mark.parametrize("update", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_kill_between_any_two_files_leaves_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: int
) -> None:
    """The stop comes at an update with a checkpoint, and at one without."""
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
    assert json.loads(first.layout).keys() == {"layout", "wire", "wanted", "experts", "proof", "about"}
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
    session = run(folder, handles=True, updates=60)
    assert session.status == "done"
    assert session.left == []
    assert len(VALUES) < session.held < 40  # of 120 groups, those in progress


def test_what_a_recorder_remembers_does_not_grow_with_the_updates(folder: RunFolder) -> None:
    recorder = run(folder).recorder
    assert isinstance(recorder, RunRecorder)
    assert set(recorder.published) == {"policy>generator"}
    assert set(recorder.sent) == {("policy>generator", "generator/0")}
    assert recorder.rows.groups == {}


@pytest.mark.parametrize(
    ("metric", "told"), [("reward", "reward_mean"), ("loss:min", ""), ("followed", ""), ("watched_sum", "")]
)
def test_a_metric_that_no_row_has_is_told_once_when_each_node_has_reported(
    folder: RunFolder, metric: str, told: str
) -> None:
    graph = trace(load(f"{LANGUAGE}:clocks"), {"every": 2, "look": 3})  # `followed` and `watched_sum` come later
    flags = RunOptions(updates=6, batch=2, device="cpu", checkpoint_every=1, keep_best=metric)
    RunConfig.make(graph, None, HOST, flags).write(folder, {})
    said = list[dict[str, Any]]()
    assert run_in_process(folder, said.append) == "done"
    warnings = [line["text"] for line in said if line["kind"] == "note" and "--keep-best" in line["text"]]
    assert len(warnings) == bool(told)
    assert told in "".join(warnings)


def test_a_resume_that_is_stopped_before_it_begins_has_the_groups_of_its_cut(folder: RunFolder) -> None:
    run(folder)
    cut, config = latest_checkpoint(folder), RunConfig.load(folder)
    assert cut is not None
    session = Session(config, RunRecorder(folder, config, lambda line: None, monotonic(), cut), cut.cut)
    session.stop(monotonic())
    summary = folder.read_json("summary.json")
    assert (summary["status"], summary["updates"], summary["groups"]) == ("stopped", UPDATES, 2 * UPDATES)


def test_who_was_lost_stands_in_the_summary_of_every_later_life_by_the_runs_time(folder: RunFolder) -> None:
    run(folder)
    cut, config, elapsed = latest_checkpoint(folder), RunConfig.load(folder), read_rows(folder.metrics)[-1]["time_s"]
    for life in (1, 2):
        assert cut is not None
        recorder = RunRecorder(folder, config, lambda line: None, 100.0 * life, cut)
        recorder.step(100.0 * life + 1.5, ReplicaLost("generator/0", "gone"), [], {})
        recorder.begin_checkpoint(cut.update, json.dumps(cut.cut))
        recorder.commit(Commit(cut.update, json.dumps(cut.cut)))
        recorder.finish(100.0 * life + 2, "stopped", "")
        lost = folder.read_json("summary.json")["replicas"]
        assert [one["time_s"] for one in lost] == [pytest.approx(elapsed + 1.5, abs=1e-3)] * life
        cut = latest_checkpoint(folder)


@pytest.mark.parametrize(("absent", "events"), [((), ["lost", "joined"]), (("generator/0",), ["lost"])])
def test_who_was_lost_is_there_again_in_a_later_life_that_begins_with_it(
    folder: RunFolder, absent: tuple[str, ...], events: list[str]
) -> None:
    run(folder)
    cut, config = latest_checkpoint(folder), RunConfig.load(folder)
    assert cut is not None
    cut = replace(
        cut, figures={**cut.figures, "replicas": [{"replica": "generator/0", "event": "lost", "time_s": 0.5}]}
    )
    recorder = RunRecorder(folder, config, lambda line: None, 100.0, cut)
    rules = config.rules(cut.update)
    recorder.open_stage(SegmentOrigin("train", config.graph, config.plan, rules, cut.cut, absent=absent), 100.0)
    recorder.finish(102.0, "stopped", "")
    assert [one["event"] for one in folder.read_json("summary.json")["replicas"]] == events


def test_a_resume_that_is_stopped_before_a_group_is_done_writes_no_checkpoint_again(folder: RunFolder) -> None:
    run(folder, lag=0)
    before = files_of(folder.checkpoints)
    cut, config = latest_checkpoint(folder), RunConfig.load(folder)
    assert cut is not None
    config = with_fields(config, flags=with_fields(config.flags, updates=UPDATES + 3))
    session = Watched(config, RunRecorder(folder, config, lambda line: None, monotonic(), cut), cut.cut)
    session.stop_when = lambda session, result: True
    InProcess(config, session, folder.path, cut.folder).run()
    assert (session.status, session.stopping is not None) == ("stopped", True)
    assert files_of(folder.checkpoints) == before != {}
    assert [path.name for path in folder.checkpoints.iterdir()] == [cut.folder.name]


def test_a_resume_whose_training_was_done_writes_no_checkpoint_again(folder: RunFolder) -> None:
    """For example, it was killed while it measured the accuracy after training."""
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


# What a recorder reports and remembers of scheduler and rank events: the status, and the bars of the trace.


CHANNEL, REPLICAS = "policy>generator", ("generator/0", "generator/1")
Said = list[dict[str, Any]]


@pytest.fixture
def said() -> Said:
    return []


@pytest.fixture
def record(folder: RunFolder, said: Said) -> Iterator[RunRecorder]:
    yield RunRecorder(folder, a_run(generators=2), said.append, 100.0)
    folder.unlock()


def tell(record: RunRecorder, event: Any, now: float, *commands: Any, began: float = 0.0, **made: Any) -> None:
    record.step(now, event, [*commands], {}, Result(event, began=began, ended=began + 0.5, **made))


def publish_version(record: RunRecorder, version: int, began: float) -> None:
    sends = (Send(CHANNEL, version, "trainer/0", replica) for replica in REPLICAS)
    tell(record, Published(CHANNEL, version, "trainer/0"), began + 1, *sends, began=began)


def test_a_status_is_said_at_once_and_then_after_some_time_with_what_each_pool_is_at(
    record: RunRecorder, said: Said
) -> None:
    record.live["generator/1"] = 3
    fires = [Fire(Firing("generate", 4 + i), f"generator/{i}") for i in range(2)]
    record.step(102.0, Begin(), [*fires], {"generator/0": "busy", "trainer/0": "data"})
    record.step(102.0 + EVERY / 2, Begin(), [], {})
    record.tick(102.0 + EVERY * 2)
    assert [line["time"] for line in said] == [2.0]
    assert said[0]["pools"] == {
        "generator": {"doing": ["generate[4]", "generate[5]"], "version": 3},
        "trainer": {"doing": ["data"], "version": None},
    }
    record.step(102.0 + EVERY * 2, Begin(), [], {})
    record.tick(103.0 + QUIET)
    assert [line["kind"] for line in said] == ["status"] * 3


def test_what_the_user_is_told_those_who_watch_are_told_once(record: RunRecorder, said: Said) -> None:
    watched = Reader(record.folder)

    def notes() -> list[Any]:
        return [line for line in watched.lines() if line["kind"] == "note"]

    assert notes() == []
    record.note("refused the agent of b: given no GPU", "warning")
    record.note("\udcff", "info")
    assert notes() == said
    record.folder.notes.write_bytes(record.folder.notes.read_bytes() + b'{"level": "inf')
    assert notes() == []
    record.note("it is there", "info")  # written after half a line
    record.note("it is lost", "warning")
    assert notes() == said[3:]
    assert [line for line in Reader(record.folder).lines() if line["kind"] == "note"] == [*said[:2], *said[3:]]
    record.config.write(record.folder, {})
    shown = read_facts(record.folder, alive=True).summary
    assert shown is not None
    assert shown["warnings"] == [said[0]["text"], "it is lost"]


def test_what_several_ranks_warn_of_is_said_once_and_what_happens_again_is_said_again(
    b: Bench, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_WARNINGS", 2)
    said: Said = []
    record = RunRecorder(folder, a_run(), said.append, 100.0)
    controller = Controller(folder, record.config, b.server, Session(record.config, record), None)
    for text in "abc":  # the last text comes when the summary is full
        for rank in range(8):
            controller._hear(f"trainer/0:{rank}", Note("warning", text))
    lost = "generator/0 is lost"
    for _ in range(2):
        record.note(lost, "warning")
    assert [line["text"] for line in said if line["kind"] == "note"] == ["a", "b", "c", lost, lost]
    assert record.warnings == ["a", "b"]
    folder.unlock()


def test_weights_on_their_way_are_remembered_once_per_channel_and_replica(record: RunRecorder) -> None:
    for version in range(100):
        publish_version(record, version, began=10.0 * version)
        for replica in REPLICAS:
            tell(record, Arrived(CHANNEL, version, replica), 10.0 * version + 3)
            tell(record, Swapped(CHANNEL, version, replica), 10.0 * version + 4)
        assert (len(record.published), len(record.sent)) == (1, 2)
        assert record.live == dict.fromkeys(REPLICAS, version)
    sends = [bar for bar in record.bars if bar.kind == "send"]
    assert [(bar.lane, bar.index, bar.seconds) for bar in sends[:2]] == [(replica, 0, 2.0) for replica in REPLICAS]
    assert len(record.bars) == 300


def test_a_bar_has_the_version_with_which_its_firing_began(record: RunRecorder) -> None:
    firing = Firing("fake_generate", 4)
    record.live["generator/0"] = 6
    record.step(1.0, Begin(), [Fire(firing, "generator/0", (4,))], {})
    record.live["generator/0"] = 7
    tell(record, Done(firing, "generator/0"), 2.0)
    assert [(bar.index, bar.version) for bar in record.bars if bar.kind == "group"] == [(4, 6)]


def test_a_version_that_is_swapped_in_late_is_counted_from_its_own_publication(
    record: RunRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[float] = []
    monkeypatch.setattr(record.rows, "synced", synced.append)
    publish_version(record, 0, began=1.0)
    record.published[CHANNEL] = 6.0  # of the next version, which is not sent yet
    tell(record, Swapped(CHANNEL, 0, "generator/0"), 7.0)
    assert synced == [6.0]


def test_the_trace_holds_the_first_bars_and_says_so(
    record: RunRecorder, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_BARS", 3)
    for version in range(5):
        publish_version(record, version, began=float(version))
    record.finish(110.0, "done", "")
    trace = json.loads((folder.path / "trace.json").read_text())
    assert trace["otherData"] == {"title": record.config.run, "note": "the first 3 bars of the run"}
    assert len([event for event in trace["traceEvents"] if event["ph"] == "X"]) == 3


def test_a_checkpoint_has_the_metrics_and_samples_of_its_cut_though_an_update_takes_them_while_it_is_written(
    record: RunRecorder, folder: RunFolder
) -> None:
    state = json.dumps({"groups": [[0, {"fake_score": "scorer/0"}, {}]], "trailing": {}})
    update = Firing("fake_update", 0)
    tell(
        record,
        Done(Firing("fake_score", 0), "scorer/0"),
        101.0,
        metrics={"reward_mean": 0.5},
        sample='{"rewards": [1]}',
    )
    record.begin_checkpoint(0, state)
    record.step(102.0, Begin(), [Fire(update, "trainer/0", (0,))], {})
    tell(record, Done(update, "trainer/0"), 103.0, metrics={"loss": 1.0})
    assert record.row["reward_mean"] == 0.5
    record.commit(Commit(0, state))
    saved = latest_checkpoint(folder)
    assert saved is not None
    assert saved.figures["groups"] == [[0, "fake_score", 0, {"reward_mean": 0.5}]]
    assert saved.figures["samples"] == [[0, "fake_score", {"rewards": [1]}]]
