"""The base model, with which runs start if no model is given: trained once by the program `sft`, kept in the cache."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock import __path__ as roots
from penstock.host import cache_folder
from penstock.runtime.cli.display import Line
from penstock.runtime.cli.launching import asked, configure, launch
from penstock.runtime.cli.tracing import CommandError, trace_program
from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.control.signals import DONE, PREEMPTED, Preempted
from penstock.runtime.record.checkpoints import latest_checkpoint
from penstock.runtime.record.errors import RecordError, disk_fault
from penstock.runtime.record.folder import RunFolder, open_regular

# The cluster file in the cache that `penstock doctor --measure` writes and `--cluster this` reads.
PROFILE = "machine.toml"


# The flags of `penstock run sft` besides the data; all others have that program's defaults.
RECIPE = ("--model", "new", "--seed", "0", "--device", "cpu", "--dtype", "float32", "--eval-groups", "0")
# A base is built in a folder with this prefix before its own name.
BUILDING = "building-"
# A fixed number of data-parallel threads, so that sums, and thus the base, are equal on every machine.
THREADS = 2
# The code that determines the base: when one of these files changes, it is built again.
SOURCES = ("programs/sft.py", "nodes/*.py", "nodes/model/**/*.py", "nodes/model/*.[ch]", "nodes/learn/*.py")


def base_model(data: str, tell: Callable[[Line], None]) -> Path:
    """The directory of the base model for made-up data; builds it if necessary. Of two builders of a base, one waits.

    Raises CommandError if the training fails, RecordError if the cache cannot be written.
    """
    key = hashlib.sha256(repr((RECIPE, THREADS, data)).encode())
    for path in (path for pattern in SOURCES for path in sorted(Path(roots[0]).glob(pattern))):
        key.update(path.read_bytes())
    home = cache_folder() / "base"
    place = home / key.hexdigest()[:16]
    try:
        _sweep(home)
        if not place.is_dir():
            home.mkdir(parents=True, exist_ok=True)
            with _lock(place, lambda: tell({"kind": "stage", "stage": "queue"})):
                # Another builder may have made it while this one waited for the lock.
                if not place.is_dir():
                    _build(data, place, tell)
    except OSError as error:
        raise disk_fault(home, error, choice="PENSTOCK_CACHE=DIR") from error
    return place


@contextmanager
def _lock(place: Path, wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of a base's builder. If another builder has it, call `wait` and wait. Raises OSError, also if
    another builder has it and there is no `wait`, and RecordError."""
    with os.fdopen(open_regular(place.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if wait is None:
                raise
            wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _sweep(home: Path) -> None:
    """Remove the folders of killed builders of any base: a live builder holds its lock."""
    for left in home.glob(f"{BUILDING}*"):
        with suppress(OSError, RecordError), _lock(home / left.name.removeprefix(BUILDING)):
            shutil.rmtree(left, ignore_errors=True)


def _build(data: str, place: Path, tell: Callable[[Line], None]) -> None:
    """Train in a folder next to `place`, and move the model to `place` when it is complete."""
    tell({"kind": "stage", "stage": "base"})
    # On the same file system, so that the model is moved by a rename: it appears complete or not at all.
    beside = place.with_name(f"{BUILDING}{place.name}")
    # Left by a builder that was killed while this one waited for it.
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(mode=0o700)
    try:
        words = ["sft", *RECIPE, *(["--data", data] if data else [])]
        cluster = Cluster(hosts=(Host(name="local", cores=THREADS),))
        config = configure(trace_program("run", words), cluster, "")
        folder = RunFolder.create(beside / "run")
        config.write(folder, asked("sft", words, cluster, {}))
        errors: list[str] = []

        def hear(line: Line) -> None:
            if line["kind"] == "error":
                errors.append(str(line["text"]))
            elif line["kind"] == "row":
                update, loss = line["row"]["version"], line["row"].get("loss")
                tell({"kind": "base", "update": update, "updates": config.flags.updates, "loss": loss})

        status = launch(folder, cluster, hear)
        checkpoint = latest_checkpoint(folder)
        if status == DONE and checkpoint is not None:
            os.replace(checkpoint.folder / "policy", place)
        elif status == DONE or errors:
            raise CommandError("\n".join(["the base model could not be built:", *errors]), 1)
        else:
            # Stopped: the user does not want the run, so it must not go on without a base.
            raise Preempted if status == PREEMPTED else KeyboardInterrupt
    finally:
        shutil.rmtree(beside, ignore_errors=True)
