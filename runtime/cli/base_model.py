"""The small model that runs start from when none is given: trained by the program `sft` once, and kept in the cache."""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock import __path__ as roots
from penstock import cache_folder
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


# The flags of `penstock run sft` beside the data; the rest is that program's own defaults.
RECIPE = ("--model", "new", "--seed", "0", "--device", "cpu", "--dtype", "float32", "--eval-groups", "0")
# What the names of folders begin with in which a base is built; its own name follows.
BUILDING = "building-"
# As many lanes, whatever the machine has: the sums, and so the base, are the same wherever it is built.
THREADS = 2
# What the base follows from: when one of these files changes, it is built again.
SOURCES = ("programs/sft.py", "nodes/*.py", "nodes/model/**/*.py", "nodes/model/*.[ch]", "nodes/learn/*.py")


def base_model(data: str, tell: Callable[[Line], None]) -> Path:
    """The directory of the base model for made-up data, building it if need be. Two builders of one base wait in line.

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
    """Be the only builder of a base; where there is one, call `wait` and wait. Raises OSError, also where there is one
    and no `wait`, and RecordError."""
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
    """Remove what builders have left that were killed, of any base: one that is alive has the lock."""
    for left in home.glob(f"{BUILDING}*"):
        with suppress(OSError, RecordError), _lock(home / left.name.removeprefix(BUILDING)):
            shutil.rmtree(left, ignore_errors=True)


def _build(data: str, place: Path, tell: Callable[[Line], None]) -> None:
    """Train in a folder beside `place`, and move the model there when it is whole."""
    tell({"kind": "stage", "stage": "base"})
    # In the same folder, so that the model takes its place by a rename: it is there whole or not at all.
    beside = place.with_name(f"{BUILDING}{place.name}")
    # Of a builder that was killed while this one waited for it.
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
            raise CommandError("\n".join(["the base model could not be built:", *errors]))
        else:
            # Stopped: the user wants no run, and no base without one.
            raise Preempted if status == PREEMPTED else KeyboardInterrupt
    finally:
        shutil.rmtree(beside, ignore_errors=True)
