"""Runs in trackers: the real clients without a network, and fake clients that fail, hang or die."""

import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.graph import trace
from penstock.programs.toy import toy
from penstock.runtime.cli import resume, tracker_processes
from penstock.runtime.cli.launching import summary_text
from penstock.runtime.cli.tracing import CommandError
from penstock.runtime.cli.tracker_processes import TrackerProcesses
from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.control.run_config import RunConfig, RunOptions
from penstock.runtime.control.signals import DONE, FAILED, INTERRUPTED
from penstock.runtime.record import track_run
from penstock.runtime.record.checkpoints import begin_checkpoint, complete_checkpoint
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.record.metrics import MetricsFile
from penstock.runtime.record.track_run import RowReader
from penstock.runtime.record.trackers import NAMES, lacks, without_secrets

Patch = pytest.MonkeyPatch
ROOT = Path(__file__).parents[3]
CUT = {"update": 3, "earlier": 0, "next": 0, "lost": [], "fates": {"consumed": 0}, "groups": []}
SECRET = "0123456789abcdef" * 3
# Seconds for a client to start: MLflow creates a database, and the machine may be busy.
DEADLINE = 240.0


def row(update: int, loss: float) -> dict[str, Any]:
    pools = {"trainer": {"busy": 0.25}}
    return {"update": update, "version": update + 1, "time_s": float(update), "loss": loss, "kl": None, "pools": pools}


class Life:
    """A run folder, written as a command and its controller write it, and the run's trackers."""

    def __init__(self, path: Path, *names: str, **options: Any) -> None:
        graph = trace(toy, {})
        cluster = Cluster(hosts=(Host(name="local", cores=1),))
        self.folder = RunFolder.create(path)
        self.config = RunConfig.make(graph, None, cluster, RunOptions(track=names, **options))  # type: ignore[arg-type]
        self.config.write(self.folder, {"program": "toy", "command": ["toy"]})
        self.names = names
        self.said: list[str] = []
        self.trackers = TrackerProcesses()

    def change(self, **options: Any) -> None:
        """Change options as a resume does."""
        self.config = replace(self.config, flags=replace(self.config.flags, **options))
        self.config.write(self.folder, {"program": "toy", "command": ["toy"]})

    def start(self) -> None:
        self.trackers.start(self.folder, self.names, lambda line: self.said.append(str(line["text"])))

    def rows(self, *rows: dict[str, Any]) -> None:
        file = MetricsFile(self.folder.metrics)
        for one in rows:
            file.append(one)
        file.close()

    def end(self, updates: int, status: str = "done") -> dict[str, Any]:
        summary = {"status": status, "accuracy_before": 0.25, "accuracy_after": 0.75, "updates": updates}
        summary["evaluated"] = {"after": {"accuracy": 0.7500001, "right_in_4": 0.5, "none": None}}
        self.folder.write_json("summary.json", summary)
        report = self.folder.path / "report.html"
        report.write_text(f"<html>{updates}</html>")
        found = self.trackers.end(report, updates, tracker_processes.END_S)
        self.folder.unlock()
        return found

    def told(self) -> list[str]:
        """Return the messages, except that a client is slow to start, which depends on the machine."""
        return [text for text in self.said if "has not come back" not in text]

    def heard(self, what: Callable[[], object]) -> None:
        """Wait until `what()` is true."""
        until = time.monotonic() + DEADLINE
        while not what():
            assert time.monotonic() < until
            time.sleep(0.02)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Life]]:
    """Return a maker of runs; their tracker processes are ended after the test."""
    lives: list[Life] = []

    def make(*names: str, **options: Any) -> Life:
        lives.append(Life(tmp_path / f"run{len(lives)}", *names, **options))
        return lives[-1]

    yield make
    for life in lives:
        for tracker in life.trackers.trackers:
            tracker.end()
        life.folder.unlock()


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: Patch) -> None:
    """Clients have no network, write only to the test's folders, and hold a key that must not appear in any file."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setattr(tracker_processes, "END_S", DEADLINE)
    given = {"WANDB_MODE": "offline", "WANDB_API_KEY": SECRET, "HF_TOKEN": SECRET, "MLFLOW_TRACKING_TOKEN": SECRET}
    given |= {f"WANDB_{kind}_DIR": str(home / kind) for kind in ("CACHE", "CONFIG")}
    given |= {"TRACKIO_DIR": str(home / "trackio"), "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    given |= {"MLFLOW_DISABLE_TELEMETRY": "true", "HOME": str(home)}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    for name in (
        "MLFLOW_TRACKING_URI",
        "MLFLOW_EXPERIMENT_NAME",
        "WANDB_PROJECT",
        "WANDB_DIR",
        "WANDB_DATA_DIR",
        "TRACKIO_SPACE_ID",
    ):
        monkeypatch.delenv(name, raising=False)


# What a tracker stored, read back with its client's own reader: (step, loss) of all rows in order, the config, the
# summary figures, and the report page.
Stored = tuple[list[tuple[int, float]], dict[str, Any], dict[str, float], str | None]


def kept(life: Life, name: str) -> Any:
    return json.loads((life.folder.path / "trackers" / f"{name}.json").read_text())["kept"]


def in_tensorboard(life: Life) -> Stored:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(life.folder.path / "tensorboard")).Reload()
    text = events.Tensors("config")[0].tensor_proto.string_val[0].decode()
    config = json.loads(text.removeprefix("```json\n").removesuffix("\n```"))
    figures = {name: events.Scalars(name)[-1].value for name in ("accuracy_before", "accuracy_after")}
    assert events.Scalars("right_in_4_after")[-1].value == 0.5
    assert [e.value for e in events.Scalars("pools/trainer/busy")] == [0.25 for _ in events.Scalars("loss")]
    losses = events.Scalars("loss")
    # The time of a row is the run's, however late the client has written it.
    assert [round(e.wall_time - losses[0].wall_time, 3) for e in losses] == [e.step - losses[0].step for e in losses]
    return [(e.step, e.value) for e in losses], config, figures, None


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: a LevelDB log of 32 KiB blocks, with a header before each fragment."""
    from wandb.proto import wandb_internal_pb2

    data, at, part = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or its last fragment
            record = wandb_internal_pb2.Record()
            record.ParseFromString(part)
            part = b""
            yield record


def in_wandb(life: Life) -> Stored:
    losses: list[tuple[int, float]] = []
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    ids, report, times = set(), None, []
    # One life's files have the whole run: `wandb sync` of them sends each update once.
    (path,) = life.folder.path.glob("trackers/wandb/offline-run-*/*.wandb")
    for record in wandb_records(path):
        match record.WhichOneof("record_type"):
            case "run":
                ids.add(record.run.run_id)
                # Rows of a run that is resumed would be added to those that an earlier sync has sent.
                assert not record.run.resume
                config |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
            case "history":
                read = {one.key or "/".join(one.nested_key): one.value_json for one in record.history.item}
                losses.append((record.history.step.num, json.loads(read["loss"])))
                times.append(json.loads(read["_timestamp"]))
                assert read["pools/trainer/busy"] == "0.25"
            case "summary":
                summary |= {one.key: json.loads(one.value_json) for one in record.summary.update}
            case "artifact":
                (entry,) = record.artifact.manifest.contents
                assert entry.path == "report.html"
                assert Path(entry.local_path).is_relative_to(life.folder.path)
                report = Path(entry.local_path).read_text()
    assert ids == {life.config.run}
    assert [round(time - times[0], 3) for time in times] == [step - losses[0][0] for step, _ in losses]
    assert not (Path(os.environ["HOME"]) / ".local").exists()
    return losses, config, {name: summary[name] for name in ("accuracy_before", "accuracy_after")}, report


def in_trackio(life: Life) -> Stored:
    from trackio.api import Api
    from trackio.sqlite_storage import SQLiteStorage

    at = kept(life, "trackio")
    logs = SQLiteStorage.get_logs(at["project"], at["name"])
    (run,) = [run for run in Api().runs(at["project"]) if run.name == at["name"]]
    figures = {name: log[name] for log in logs for name in ("accuracy_before", "accuracy_after") if name in log}
    files = [p for p in Path(os.environ["TRACKIO_DIR"]).rglob("*") if p.is_file() and p.stat().st_size < 100]
    pages = [text for p in files if (text := p.read_bytes()).startswith(b"<html>")]
    return [(log["step"], log["loss"]) for log in logs if "loss" in log], run.config, figures, max(pages).decode()


def in_mlflow(life: Life) -> Stored:
    import mlflow

    at = kept(life, "mlflow")
    client = mlflow.MlflowClient(at["store"])
    run = client.get_run(at["id"])
    assert run.info.status == "FINISHED"
    assert client.get_experiment(run.info.experiment_id).name == "arith"
    figures = {name: run.data.metrics[name] for name in ("accuracy_before", "accuracy_after")}
    report = Path(client.download_artifacts(at["id"], "report.html")).read_text()
    history = client.get_metric_history(at["id"], "loss")
    losses = [(one.step, one.value) for one in history]
    # The run is as long as its rows say.
    assert run.info.start_time == history[0].timestamp - 1000 * history[0].step
    assert run.info.end_time == history[-1].timestamp
    assert [one.timestamp - history[0].timestamp for one in history] == [1000 * one.step for one in history]
    return losses, run.data.params | run.data.tags, figures, report


READ: dict[str, Callable[[Life], Stored]] = {
    "tensorboard": in_tensorboard,
    "wandb": in_wandb,
    "trackio": in_trackio,
    "mlflow": in_mlflow,
}
FIGURES = {"accuracy_before": 0.25, "accuracy_after": 0.75}


# The MLflow client takes 20 s to import and to create its database.
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "mlflow")) for name in NAMES])
def test_a_tracker_has_each_update_once_over_the_lives_of_a_run_and_leaves_nothing_else(
    name: str, made: Callable[..., Life], tmp_path: Path, monkeypatch: Patch
) -> None:
    if lack := lacks(name):
        pytest.skip(str(lack))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))

    def repeated() -> list[str]:
        """On a slow machine a client may also be told to be slow."""
        return [note.partition(" ")[0] for note in life.told() if "are done again" in note]

    life = made(name, track_project="arith", lora=4)
    life.start()
    life.rows(*(row(update, 0.5) for update in range(5)))
    found = life.end(5)[name]
    assert (found["updates"], found["complete"], repeated()) == (5, True, [])
    losses, config, figures, report = READ[name](life)
    assert losses == [(update, 0.5) for update in range(5)]
    assert (config["program"], config["graph"]) == ("toy", life.config.graph.digest())
    assert (str(config["flags/lora"]), figures) == ("4", FIGURES)
    assert report in (None, "<html>5</html>")
    first = kept(life, name)

    # A life that resumes from the checkpoint before update 3: rows 3 and 4 come again with other values.
    complete_checkpoint(life.folder, begin_checkpoint(life.folder, "r", 3), CUT, {})
    life.change(keep=7)
    life.start()
    life.rows(*(row(update, 1.5) for update in range(3, 8)))
    found = life.end(8)[name]
    assert (found["updates"], found["complete"]) == (8, True)
    losses, config, figures, report = READ[name](life)
    assert (str(config["flags/keep"]), str(config["flags/lora"])) == ("7", "4")
    anew = name in ("tensorboard", "wandb")
    again = 3 if anew else 5
    assert losses == [(update, 0.5 if update < again else 1.5) for update in range(8)]
    assert report in (None, "<html>8</html>")
    assert (kept(life, name), figures) == (first, FIGURES)
    assert repeated() == [f"{name}:"] * (not anew)

    # The file with the tracker's state is damaged: some clients know by themselves what they have, others do not.
    complete_checkpoint(life.folder, begin_checkpoint(life.folder, "r", 8), CUT, {})
    (life.folder.path / "trackers" / f"{name}.json").write_bytes(b"")
    life.start()
    life.rows(row(8, 2.5))
    found = life.end(9)[name]
    assert (found["updates"], found["complete"]) == (9, True)
    assert [note for note in life.told() if f"{name}.json: given something that is not JSON" in note]

    files = [path for path in life.folder.path.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert len(list(life.folder.logs.glob("tracker-*.log"))) == 1
    assert list(tmp_path.glob("temporary/penstock-*")) == []


def test_the_rows_that_a_killed_life_held_back_are_in_the_files_of_the_next_one(made: Callable[..., Life]) -> None:
    if lack := lacks("wandb"):
        pytest.skip(str(lack))
    life = made("wandb")
    life.start()
    life.rows(*(row(update, 0.5) for update in range(70)))
    (tracker,) = life.trackers.trackers
    life.heard(lambda: tracker.logged == 69)
    tracker.end()  # kills the client's processes, too
    for update in (70, 71):
        complete_checkpoint(life.folder, begin_checkpoint(life.folder, "r", update), CUT | {"update": update}, {})
        life.start()
        life.rows(row(update, 0.5))
        assert life.end(update + 1)["wandb"]["complete"]
        assert in_wandb(life)[0] == [(done, 0.5) for done in range(update + 1)]
    # No copies of earlier reports are left.
    assert len(list(life.folder.path.glob("trackers/wandb/artifacts/staging/tmp*"))) == 1


# A fake client: a test puts the body of its `log` in, to choose what happens to the tracker's process.
CLIENT = """
import os, signal, time
from pathlib import Path

class Artifact:
    def __init__(self, name, type): pass
    def add_file(self, path, name=None): pass

class Settings:
    mode = "online"
    def __init__(self, **given): pass

class setup:
    settings = Settings()

class Run:
    id, name, url, offline, starting_step, summary = "i", "n", "http://bob:{secret}@here", False, 0, {{}}
    settings = type("S", (), {{"sync_dir": "here"}})
    def log(self, figures, step, commit):
        {log}
        with open("logged", "a") as file:
            print(step, file=file)
    def log_artifact(self, artifact): pass
    def finish(self, exit_code):
        print("key", "{secret}")

def init(**given):
    return Run()
"""


@pytest.fixture
def client(tmp_path: Path, monkeypatch: Patch) -> Callable[[str], Path]:
    """Return a function that puts this fake before the real client, and returns the file of the steps it received."""

    def put(log: str) -> Path:
        (tmp_path / "wandb.py").write_text(CLIENT.format(log=log, secret=SECRET))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT / "src")]))
        return tmp_path / "home" / "logged"

    return put


FAILS_ONCE = """
        if step == 2 and not Path("failed").exists():
            Path("failed").touch()
            raise ConnectionError(f"no way to http://bob:{os.environ['WANDB_API_KEY']}@here")"""


def test_a_client_is_given_again_what_it_failed_to_take_alone(made: Callable[..., Life], client: Any) -> None:
    logged = client(FAILS_ONCE)
    life = made("wandb")
    life.start()
    life.rows(*(row(update, 0.5) for update in range(4)))
    life.heard(lambda: life.said)
    found = life.end(4)["wandb"]
    assert logged.read_text().split() == ["0", "1", "2", "3"]
    assert (found["updates"], found["complete"]) == (4, True)
    # Once it has everything, nothing is left to warn of.
    said, mended = life.said
    assert said.startswith("wandb: ConnectionError: ")
    assert (found["warning"], mended.partition(" ")[0]) == ("", "wandb:")
    # Neither what is raised nor what is printed puts a secret into the run folder.
    files = [path for path in life.folder.path.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in json.dumps(found) + said
    assert (life.folder.logs / "tracker-wandb.log").read_text() == "key ***\n"


@pytest.mark.parametrize(
    ("log", "ended"), [("time.sleep(1000)", False), ("raise KeyError", True), ("os.kill(os.getpid(), 9)", True)]
)
def test_a_client_that_hangs_fails_or_dies_is_told_of_once_and_left_behind(
    log: str, ended: bool, made: Callable[..., Life], client: Any, monkeypatch: Patch
) -> None:
    client(log)
    life = made("wandb")
    life.start()
    life.rows(row(0, 0.5), row(1, 0.5))
    if ended:
        life.heard(lambda: life.said)
    else:
        monkeypatch.setattr(tracker_processes, "END_S", 1.0)
        monkeypatch.setattr(tracker_processes, "ALOUD_S", 0.5)
    found = life.end(2)["wandb"]
    assert (found["updates"], found["complete"]) == (0, False)
    (said,) = life.said
    assert said.startswith("wandb: ")
    assert found["warning"] in said
    (tracker,) = life.trackers.trackers
    assert tracker.process.returncode is not None
    assert not psutil.pid_exists(tracker.process.pid)


class SlowClient:
    """A tracker whose client takes 100 s for each row, and then does what `ends` says."""

    where, logged = "here", -1

    def __init__(self, follower: track_run.Follower, ends: list[Exception | None]) -> None:
        self.kept: dict[str, str] = {}
        self.follower, self.ends = follower, ends

    def log(self, update: int, figures: Any) -> None:
        assert self.follower.busy_since is not None
        for late in (1.0, 100.0, 101.0):
            self.follower.check_slowness(self.follower.busy_since + late)
        if error := self.ends.pop(0):
            raise error


def test_a_client_that_does_not_come_back_is_told_of_until_it_has_everything_or_says_why(
    made: Callable[..., Life], monkeypatch: Patch
) -> None:
    told: list[dict[str, Any]] = []
    life = made("wandb")
    life.rows(row(0, 0.5))
    follower = track_run.Follower("wandb", life.folder, 0, told.append)
    client = SlowClient(follower, [ConnectionError("no way"), None])
    monkeypatch.setattr(track_run, "OPEN", {"wandb": lambda run: client})

    def kinds() -> list[str]:
        found = [kind for line in told for kind in line if kind in ("slow", "failed", "well")]
        told.clear()
        return found

    follower.look(0.0)
    assert kinds() == ["slow", "failed"]
    follower.look(time.monotonic() + track_run.LONGEST_RETRY_S)
    assert kinds() == ["well"]
    follower.look(time.monotonic() + track_run.LONGEST_RETRY_S)
    assert kinds() == []


SLOW_THEN = """
        while not Path("go").exists():
            time.sleep(0.01)
        if not Path("well").exists():
            raise ConnectionError("no way")"""


@pytest.mark.parametrize("well", [True, False])
def test_that_a_client_was_slow_is_no_warning_of_a_run_that_has_ended(
    well: bool, made: Callable[..., Life], client: Any, tmp_path: Path, monkeypatch: Patch
) -> None:
    logged = client(SLOW_THEN)
    track = "import sys; from penstock.runtime.record import track_run; track_run.SLOW_S = 0.1; "
    track += "sys.exit(track_run.main(*sys.argv[1:]))"
    monkeypatch.setattr(
        tracker_processes, "module_command", lambda _, *words: [sys.executable, "-c", track, *map(str, words)]
    )
    life = made("wandb")
    life.start()
    life.rows(row(0, 0.5))
    life.heard(lambda: life.said)
    assert "has not come back" in life.said[0]
    if well:
        (tmp_path / "home" / "well").touch()
    (tmp_path / "home" / "go").touch()
    if well:
        life.heard(logged.exists)
    found = life.end(1)["wandb"]
    warned = "" if well else "wandb: ConnectionError: no way"
    assert (found["complete"], found["warning"]) == (well, warned)


@pytest.mark.slow
def test_mlflow_says_that_its_server_is_not_there(made: Callable[..., Life], monkeypatch: Patch) -> None:
    if lack := lacks("mlflow"):
        pytest.skip(str(lack))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    life = made("mlflow")
    life.start()
    life.rows(row(0, 0.5))
    (tracker,) = life.trackers.trackers
    life.heard(lambda: "MlflowException: " in tracker.warning)


def test_a_tracker_that_was_not_opened_is_told_with_what_an_earlier_life_sent(
    made: Callable[..., Life], client: Any
) -> None:
    client("pass")
    life = made("wandb")
    life.start()
    life.rows(row(0, 0.5), row(1, 0.5))
    assert life.end(2)["wandb"]["updates"] == 2
    complete_checkpoint(life.folder, begin_checkpoint(life.folder, "r", 2), CUT | {"update": 2}, {})
    (life.folder.path / "graph.json").unlink()  # before it gets to its client
    life.start()
    life.rows(row(2, 0.5))
    found = life.end(3)["wandb"]
    assert (found["where"], found["updates"], found["complete"]) == ("", 2, False)


FAILS_UNTIL_WELL = """
        if not Path("well").exists():
            raise ConnectionError("no way")"""


def test_a_resume_of_a_finished_run_sends_trackers_what_they_lack(
    made: Callable[..., Life], client: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logged = client(FAILS_UNTIL_WELL)
    life = made("wandb", updates=2)
    life.start()
    life.rows(row(0, 0.5), row(1, 0.5))
    complete_checkpoint(life.folder, begin_checkpoint(life.folder, "r", 2), CUT | {"update": 2}, {})
    tracked = life.end(2)
    path, warning = life.folder.path, tracked["wandb"]["warning"]
    summary = {"status": "done", "updates": 2, "tracked": tracked, "warnings": ["other", warning], "error": ""}
    summary["command_s"] = 1234.5
    life.folder.write_json("summary.json", summary)
    assert f"penstock resume {path}" in summary_text(summary, 2, str(path))

    def resumed(*words: str) -> tuple[int, Any, Any]:
        status = resume.resume([str(path), "--plain", *words])
        found = json.loads((path / "summary.json").read_text())
        return status, {name: (one["updates"], one["complete"]) for name, one in found["tracked"].items()}, found

    status, has, found = resumed()
    assert (status, has, found["warnings"]) == (FAILED, {"wandb": (0, False)}, ["other", warning])
    assert found["command_s"] == 1234.5
    with pytest.raises(CommandError, match=r"--grace: given 7\.5, needed --track alone"):
        resumed("--grace", "7.5")
    (tmp_path / "home" / "well").touch()
    status, has, found = resumed()
    assert (status, has, found["warnings"]) == (DONE, {"wandb": (2, True)}, ["other"])
    assert logged.read_text().split() == ["0", "1"]
    assert "penstock resume" not in capsys.readouterr().out.rpartition("status ")[2]
    if not lacks("tensorboard"):
        status, has, _ = resumed("--track", "wandb", "tensorboard")
        assert (status, has) == (DONE, {"wandb": (2, True), "tensorboard": (2, True)})
    with pytest.raises(resume.AllDone):
        resumed()


def test_a_tracker_ends_with_a_command_that_is_killed(made: Callable[..., Life], client: Any) -> None:
    logged = client("pass")
    life = made("wandb")
    life.start()
    life.rows(row(0, 0.5))
    life.heard(logged.exists)
    (tracker,) = life.trackers.trackers
    assert tracker.process.stdin is not None
    tracker.process.stdin.close()  # as the kernel does when the command is killed
    assert tracker.process.wait(DEADLINE) in (0, 1)


def test_rows_are_read_once_and_anew_from_another_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = RowReader(path)

    def read() -> list[int]:
        return [row["update"] for rows in reader.unread() for row in rows]

    assert read() == []
    path.write_bytes(b'{"update": 0}\n{"upd')
    assert (read(), read()) == ([0], [])
    with path.open("ab") as file:
        file.write(b'ate": 1}\n{"update": 2}\n')
    assert (read(), read()) == ([1, 2], [])
    (tmp_path / "other").write_bytes(b'{"update": 0}\n')
    (tmp_path / "other").replace(path)
    assert read() == [0]
    path.write_bytes(b'{"update": 0}\n')  # the same file, rewritten from its start
    reader.restart()
    assert read() == [0]


def test_secrets_are_taken_out_of_texts(monkeypatch: Patch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "a-long-secret")
    monkeypatch.setenv("KEYBOARD_LAYOUT", "de")  # too short to be a secret
    assert (
        without_secrets("de: http://u:p@h/a-long-secret?write_token=abc&x=1")
        == "de: http://***@h/***?write_token=***&x=1"
    )
    assert without_secrets("sqlite:////tmp/mlflow.db") == "sqlite:////tmp/mlflow.db"


# The command with more time for trackers at its end, since other tests may slow them down.
PATIENT = """
import sys
from penstock.runtime.cli import launching, main

launching.END_S = 240.0
sys.exit(main.main())
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_from_the_command_line_is_in_all_trackers_that_are_installed(tmp_path: Path) -> None:
    names = [name for name in NAMES if not lacks(name)]
    if not names:
        pytest.skip("no tracker's client is installed")
    out = tmp_path / "run"

    def penstock(*words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", PATIENT, *words, "--plain"]
        return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})

    def summary() -> Any:
        return json.loads((out / "summary.json").read_text())

    stopped = penstock("run", "toy", "--updates", "4000", "--out", str(out), "--track", *names)
    until = time.monotonic() + DEADLINE
    try:
        while not (out / "metrics.jsonl").exists() or (out / "metrics.jsonl").read_bytes().count(b"\n") < 3:
            assert time.monotonic() < until
            assert stopped.poll() is None
            time.sleep(0.1)
    finally:
        stopped.send_signal(signal.SIGINT)
        assert stopped.wait(3 * DEADLINE) == INTERRUPTED
    done = summary()["updates"]
    assert penstock("resume", str(out), "--updates", str(done + 5)).wait(3 * DEADLINE) == 0
    tracked = {name: (one["updates"], one["complete"]) for name, one in summary()["tracked"].items()}
    assert tracked == dict.fromkeys(names, (done + 5, True))
    assert [one["warning"] for one in summary()["tracked"].values()] == [""] * len(names)
