"""Trackers: TensorBoard, Weights & Biases, trackio and MLflow behind one interface, each through its own client.

A `Tracker` is one run in one tracker's store. It gets the run's config when it is made, the rows of `metrics.jsonl` as
numbers by name with the update as the step, and the report when the run has ended. Clients read their own environment
variables (WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID, …), which are not stored here. The tracker's `kept` has
the names and ids, and nothing else, that a resumed run needs to go on with the same tracked run.

- `lacks` says what is not installed.
- `OPEN` opens a tracker by its name. Importing a client takes seconds, so only `runtime.record.track_run` does it, in a
  process of its own.
- `without_secrets` removes passwords and keys from a text that is shown or written.

Every method of a tracker may raise any error of its client, and may take as long as the network does.
"""

import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from penstock.graph.errors import Fault
from penstock.host import install_command
from penstock.runtime.record.folder import make_folder

Name = Literal["tensorboard", "wandb", "trackio", "mlflow"]
NAMES: tuple[Name, ...] = get_args(Name)
TITLES: Mapping[str, str] = dict(zip(NAMES, ("TensorBoard", "Weights & Biases", "trackio", "MLflow"), strict=True))
# The project of a run that names none.
PROJECT = "penstock"
# The part of a run folder for the memory of its trackers, and for the files of their clients.
FOLDER = "trackers"
Figures = Mapping[str, float]


@dataclass(frozen=True)
class TrackedRun:
    """The facts about a run that a tracker gets. `kept` is the tracker's `kept` of an earlier life of the run, and
    `logged` the last update that was sent; empty and -1 at first. `project` is "" if the user names none. `began` is
    when it began, in seconds since 1970 and without pauses between lives: a row's `time_s` is added to it."""

    folder: Path
    id: str
    name: str
    project: str
    config: Mapping[str, Any]
    kept: Mapping[str, str]
    logged: int
    began: float


class RowClock:
    """When a row was made, in seconds since 1970: not when its tracker gets it, since a client that opens late, or anew
    in a later life, gets many rows at once. Figures without a time are those of the newest row."""

    def __init__(self, run: TrackedRun) -> None:
        self.now = self._began = run.began

    def tick(self, figures: Figures) -> float:
        if "time_s" in figures:
            self.now = self._began + figures["time_s"]
        return self.now


class Tracker(Protocol):
    """`where` tells people where to find the run. `logged` is the last update that the store is known to have when the
    tracker is opened, -1 for none."""

    where: str
    kept: dict[str, str]
    logged: int

    def log(self, update: int, figures: Figures) -> None:
        """Store the metrics of an update."""

    def close(self, status: str, update: int, figures: Figures, report: Path | None) -> None:
        """End the run as "done", "stopped" or "failed". `figures` are metrics of the whole run, whose last update was
        `update`; `report` is its page. Waits until the store has everything."""


def lacks(name: str) -> Fault | None:
    """A package that a tracker needs and that is not installed, with the command to install it; None if there is
    none."""
    needed = [name]
    # MLflow keeps runs in a local database unless a server is configured.
    if name == "mlflow" and os.environ.get("MLFLOW_TRACKING_URI", "sqlite:").startswith("sqlite:"):
        needed.append("sqlalchemy")
    for package in needed:
        if find_spec(package) is None:
            given = f"no package {package} in {sys.executable}"
            return Fault("missing-module", f"--track {name}", given, install_command(name))
    return None


_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_IN_URL = re.compile(
    r"(?<=://)[^/@\s'\"]+(?=@)|(?<=[?&])(\w*(?:token|key|secret|password)\w*=)[^&\s'\"]+", re.IGNORECASE
)
# Shorter values of the environment are ordinary words, which may occur in any text.
_SECRET_LENGTH = 8
SECRET = "***"  # replaces a secret


def secret_values() -> tuple[str, ...]:
    """The values of environment variables that are named like keys, tokens and passwords, the longest first."""
    values = {value for name, value in os.environ.items() if _SECRET_NAME.search(name)}
    return tuple(sorted((value for value in values if len(value) >= _SECRET_LENGTH), key=len, reverse=True))


def without_secrets(text: str, values: Sequence[str] | None = None) -> str:
    """`text` with *** in place of users and passwords in URLs, and of `values`, by default `secret_values()`."""
    for value in secret_values() if values is None else values:
        text = text.replace(value, SECRET)
    return _IN_URL.sub(lambda found: f"{found[1] or ''}{SECRET}", text) if "://" in text or "=" in text else text


class TensorBoard:
    """Event files in the run folder's `tensorboard`, replacing those of earlier lives. TensorBoard has no artifacts:
    the report is in the same run folder."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        path = make_folder(run.folder / "tensorboard")
        for old in path.glob("events.out.tfevents.*"):
            old.unlink()
        self.where, self.logged = str(path), -1
        self.kept: dict[str, str] = {}
        self._clock = RowClock(run)
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        # By the descriptor's number: TensorBoard takes no path that is not UTF-8.
        self._writer = EventFileWriter(f"/proc/self/fd/{self._folder}", filename_suffix=f".{secrets.token_hex(8)}")
        text = json.dumps(run.config, indent=1)
        table = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[f"```json\n{text}\n```".encode()])
        metadata = summary_pb2.SummaryMetadata(plugin_data={"plugin_name": "text"})
        self._write(0, [self._summary.Value(tag="config", tensor=table, metadata=metadata)])

    def log(self, update: int, figures: Figures) -> None:
        self._clock.tick(figures)
        self._write(update, [self._summary.Value(tag=name, simple_value=value) for name, value in figures.items()])
        self._writer.flush()

    def _write(self, update: int, values: list[Any]) -> None:
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=self._clock.now, step=update, summary=summary))

    def close(self, status: str, update: int, figures: Figures, report: Path | None) -> None:
        self.log(update, figures)
        self._writer.close()
        os.close(self._folder)


class WeightsAndBiases:
    """A run of wandb with the same id as our run. Its files are in the run folder, or in WANDB_DIR. An offline life
    writes the whole run anew, in place of the files of earlier lives: wandb writes to them in blocks, so that a life
    that was killed has lost rows. Rows have the time when they were made, but wandb's relative time, `_runtime`, is
    when they were sent: the client allows no other."""

    def __init__(self, run: TrackedRun) -> None:
        own = None if os.environ.get("WANDB_DIR") else make_folder(run.folder / FOLDER) / "wandb"
        if own is not None:
            # For copies of the report: this process is the tracker's own, and the client's processes inherit this.
            os.environ.setdefault("WANDB_DATA_DIR", str(own))
        import wandb

        self._client, self._report, self._clock = wandb, f"report-{run.id}", RowClock(run)
        project = run.kept.get("project") or run.project or os.environ.get("WANDB_PROJECT") or PROJECT
        # Do not send what the run folder has anyway or what could hold a secret: the code, git's remote, the output.
        settings = wandb.Settings(console="off", disable_code=True, disable_git=True, save_code=False)
        self._run = wandb.init(
            project=project,
            name=run.kept.get("name", run.name),
            id=run.kept.get("id", run.id),
            # `wandb sync` adds the rows of a resumed run to those that the server has; those of another replace them.
            resume=None if wandb.setup().settings.mode in ("offline", "dryrun") else "allow",
            config=dict(run.config),
            allow_val_change=True,
            dir=None if own is None else str(own.parent),
            settings=settings,
        )
        self.kept = {"id": self._run.id, "name": str(self._run.name or run.name), "project": project}
        # The server knows the last step.
        self.logged = -1 if self._run.offline else self._run.starting_step - 1
        local = self._run.settings.sync_dir
        if own is not None and (self._run.offline or self._run.url):
            for path in (*own.glob(f"offline-run-*-{escape(self._run.id)}"), own / "artifacts"):
                if path.name != Path(local).name:
                    shutil.rmtree(path, ignore_errors=True)
        self.where = self._run.url or (f"{local} (wandb sync sends it)" if self._run.offline else "wandb is disabled")

    def log(self, update: int, figures: Figures) -> None:
        self._run.log({**figures, "_timestamp": self._clock.tick(figures)}, step=update, commit=True)

    def close(self, status: str, update: int, figures: Figures, report: Path | None) -> None:
        self._run.summary.update({**figures, "status": status})
        if report is not None:
            artifact = self._client.Artifact(self._report, type="report")
            artifact.add_file(str(report), name=report.name)
            self._run.log_artifact(artifact)
        self._run.finish(exit_code=int(status == "failed"))


class Trackio:
    """A run of trackio: in a local database, a Space or a server, as its environment says. trackio resumes a run by
    name, so the name contains part of our run's id. Rows have the time when they were sent: the client's `log` takes no
    other."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio
        from trackio.utils import TRACKIO_DIR

        self._client, self._report = trackio, f"report-{run.id}"
        project = run.kept.get("project") or run.project or PROJECT
        name = run.kept.get("name") or f"{run.name}-{run.id[:6]}"
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._run = trackio.init(project, name=name, config=dict(run.config), resume="allow", **quiet)
        self.kept = {"id": str(self._run.id), "name": name, "project": project}
        # The store's last step, which may be behind `run.logged`: trackio sends rows half a second after `log`.
        self.logged = int(self._run._next_step) - 1
        remote = without_secrets(os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL") or "")
        self.where = f"{project}/{name} in {remote or TRACKIO_DIR}"

    def log(self, update: int, figures: Figures) -> None:
        self._run.log(dict(figures), step=update)

    def close(self, status: str, update: int, figures: Figures, report: Path | None) -> None:
        if figures:
            self._run.log(dict(figures), step=update)
        if report is not None:
            artifact = self._client.Artifact(self._report, type="report")
            artifact.add_file(str(report))
            self._client.log_artifact(artifact)
        self._client.finish()


class MLflow:
    """A run of MLflow in the experiment named as the project: in the store of MLFLOW_TRACKING_URI, else in the store
    where the run began, by default MLflow's database in the current folder. An option that a resume changes becomes a
    tag with the name of its parameter."""

    # The limits of one request, and of a parameter's characters.
    METRICS, PARAMS, VALUE = 1000, 100, 6000

    def __init__(self, run: TrackedRun) -> None:
        # By default the client repeats a request for minutes before it says what is wrong: we try again ourselves.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric, self._clock = Metric, RowClock(run)
        if (store := run.kept.get("store")) and "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri(store)
        store = mlflow.get_tracking_uri()
        self._client = client = mlflow.MlflowClient()
        project = run.kept.get("project") or run.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        params: Mapping[str, str] = {}
        tags: Mapping[str, str] = {}
        if found := run.kept.get("id"):
            data = client.get_run(found).data
            params, tags = data.params, data.tags
            # `data.metrics` has the newest value of each metric; a row's version is its update + 1.
            self._id, self.logged = found, int(data.metrics.get("version", 0.0)) - 1
            self._clock.tick({"time_s": data.metrics.get("time_s", 0.0)})
            client.update_run(found, status="RUNNING")
        else:
            experiment = mlflow.set_experiment(project).experiment_id
            made = client.create_run(experiment, start_time=int(1000 * run.began), run_name=run.name)
            self._id, self.logged = made.info.run_id, -1
        config = {self._named(name): str(value)[: self.VALUE] for name, value in run.config.items()}
        new = [Param(name, value) for name, value in config.items() if name not in params]
        for at in range(0, len(new), self.PARAMS):
            client.log_batch(self._id, params=new[at : at + self.PARAMS])
        # A parameter cannot change, so a tag of the same name has the value in a later life. A value that is hidden as
        # a secret in one life only does not count as a change.
        for name in config.keys() & params:
            if (was := tags.get(name, params[name])) != config[name] and SECRET not in was + config[name]:
                client.set_tag(self._id, name, config[name])
        shown = without_secrets(store)
        self.kept = {"id": self._id, "project": project} | ({"store": store} if shown == store else {})
        self.where = f"run {self._id} of {project} in {shown}"

    @staticmethod
    def _named(name: str) -> str:
        """The name as MLflow accepts it: letters, digits and a few signs."""
        return re.sub(r"[^\w\-./ ]", "_", name)

    def log(self, update: int, figures: Figures) -> None:
        made = int(1000 * self._clock.tick(figures))
        metrics = [self._metric(self._named(name), value, made, update) for name, value in figures.items()]
        # The version goes last: a later life reads from it which updates are complete.
        metrics.sort(key=lambda metric: bool(metric.key == "version"))
        for at in range(0, len(metrics), self.METRICS):
            self._client.log_batch(self._id, metrics=metrics[at : at + self.METRICS])

    def close(self, status: str, update: int, figures: Figures, report: Path | None) -> None:
        self.log(update, figures)
        if report is not None:
            self._client.log_artifact(self._id, str(report))
        ends = {"done": "FINISHED", "stopped": "KILLED"}
        self._client.set_terminated(self._id, ends.get(status, "FAILED"), int(1000 * self._clock.now))


OPEN: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
    "mlflow": MLflow,
}
