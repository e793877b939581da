"""Run folders that were damaged or edited: every reader refuses them with a clear error, or reads what is there.

Each case is drawn from a seed. One file of a complete run is damaged as bytes, as JSON, or as log records whose hash
chain is recomputed, as an attacker would do. A reader succeeds, or raises an error of ours that names a file; it never
raises another exception, and never computes for more than `CPU_S` seconds.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, reduce
from hashlib import blake2b
from operator import getitem
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from penstock.runtime.cli import report, resume
from penstock.runtime.cli.report import recorded_steps
from penstock.runtime.cli.tracing import CommandError
from penstock.runtime.cli.watch import watch_in_terminal
from penstock.runtime.cluster.cluster import Cluster
from penstock.runtime.control.messages import record_bytes
from penstock.runtime.control.security import Join, Keys
from penstock.runtime.plan.model_shape import read_shape
from penstock.runtime.plan.simulate import read_costed
from penstock.runtime.plan.workload import of_run, read_lengths
from penstock.runtime.record.checkpoints import begin_checkpoint, complete_checkpoint, read_facts
from penstock.runtime.record.event_log import MAGIC, commands_digest, new_records, read_log
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.report.write import write_report
from penstock.runtime.schedule.replay import SegmentOrigin
from penstock.runtime.schedule.replay import replay as replayed
from tests.runtime.report.runs import simulated_run

CPU_S = 30.0
ODD: list[Any] = [
    None, True, False, -1, 0, 1, 7, 10**9, 2**53, 2**62, 2**70, 1e308, -0.5, float("nan"), "", "x", "../../x",
    "trainer", "generator/0", "cpu", "\x00", "\udcff", [], {}, [[]], {"a": 1}, [1, 2, 3],
]  # fmt: skip
"""Values that replace another one."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three updates on two generators, with a checkpoint at its end."""
    folder = simulated_run(tmp_path_factory.mktemp("runs") / "whole", updates=3, batch=2, generators=2).folder
    (stage,) = read_log(folder.events)[0].stages
    stages = [(SegmentOrigin.from_json(stage.facts), recorded_steps(stage))]
    cut = replayed(stages, lambda said: commands_digest(map(record_bytes, said)))[0].states[-1]
    complete_checkpoint(folder, begin_checkpoint(folder, "abcdef012345", 3), cut, {"before": 0.4})
    config = folder.read_json("config.json")
    asked = {"cluster": {"hosts": [{"name": "local", "cores": 2}]}, "folder": "/", "digests": {}}
    folder.write_json("config.json", {**config, "asked": {**config["asked"], **asked}})
    return folder.path


FILES = (
    "config.json",
    "graph.json",
    "plan.json",
    "events.log",
    "metrics.jsonl",
    "summary.json",
    "checkpoints/00000003/cut.json",
)


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each part of a JSON value."""
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*place, key))


def changed(value: Any, draw: Random) -> Any:
    """A JSON value with one part removed, added, moved or replaced."""
    value = json.loads(json.dumps(value))
    known = list(places(value))
    place, other = draw.choice(known), draw.choice(known)
    if not place:
        return draw.choice(ODD)
    parent, key, taken = (
        reduce(getitem, place[:-1], value),
        place[-1],
        json.loads(json.dumps(reduce(getitem, other, value))),
    )
    match draw.randrange(5):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[draw.choice(["x", "update", "name", ""])] = draw.choice(ODD)
        case 1:
            parent.append(parent[key] if draw.random() < 0.5 else draw.choice(ODD))
        case 2:
            parent[key] = taken
        case _:
            parent[key] = draw.choice(ODD)
    return value


def packable(value: Any) -> Any:
    """Return the value with what MessagePack cannot hold replaced."""
    if isinstance(value, dict):
        return {packable(key): packable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [packable(item) for item in value]
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    return min(value, 2**62) if isinstance(value, int) else value


def chained(records: list[Any]) -> bytes:
    """Return the bytes of a log of these records, in the format of `runtime.record.event_log`."""
    data, chain = bytearray(MAGIC), blake2b(MAGIC, digest_size=16).digest()
    for record in records:
        payload = msgspec.msgpack.encode(record)
        length = len(payload).to_bytes(4, "little")
        data += length + blake2b(chain + length, digest_size=4).digest() + payload
        chain = blake2b(chain + payload, digest_size=16).digest()
        data += chain
    return bytes(data)


def changed_log(path: Path, draw: Random) -> bytes:
    records: list[Any] = [msgspec.to_builtins(record, builtin_types=(bytes,)) for record, _ in new_records(path)]
    place = draw.randrange(len(records))
    events = [k for k, record in enumerate(records) if record[0] == "event"]
    match draw.randrange(6):
        case 0 | 1:
            place = draw.choice([k for k, record in enumerate(records) if record[0] != "event"])
            records[place] = [records[place][0], packable(changed(records[place][1], draw))]
        case 2:
            event = records[draw.choice(events)]
            event[2] = msgspec.msgpack.encode(packable(changed(msgspec.msgpack.decode(event[2]), draw)))
        case 3:
            records[draw.choice(events)][draw.randrange(4)] = packable(draw.choice(ODD))
        case 4:
            records.insert(draw.randrange(len(records)), records.pop(place))
        case _:
            records[place] = packable(draw.choice(ODD))
    return chained(records)


def damaged(data: bytes, draw: Random) -> bytes:
    """Return the bytes truncated, changed, or with too much inserted."""
    here = draw.randrange(len(data))
    return draw.choice([
        data[:here],
        data[:here] + bytes([draw.randrange(256)]) + data[here + 1 :],
        data[:here] + data[here + draw.randrange(1, 50) :],
        data[:here] + b"[" * 100_000 + data[here:],
        b'{"a":' * 50_000,
        b"",
    ])  # fmt: skip


def damage(folder: Path, draw: Random) -> str:
    """Change one file of a folder and return its name."""
    path = folder / draw.choice(FILES)
    data, how = path.read_bytes(), draw.randrange(10)
    if how == 0:
        path.unlink()
        makers: list[Callable[[], object]] = [
            path.mkdir,
            partial(os.mkfifo, path),
            partial(path.symlink_to, "/dev/zero"),
            bool,
        ]
        draw.choice(makers)()
    elif how < 3:
        path.write_bytes(damaged(data, draw))
    elif path.name == "events.log":
        path.write_bytes(changed_log(path, draw))
    elif path.name == "metrics.jsonl":
        lines = data.splitlines()
        place = draw.randrange(len(lines))
        lines[place] = json.dumps(changed(json.loads(lines[place]), draw)).encode()
        path.write_bytes(b"\n".join(lines) + b"\n")
    else:
        path.write_text(json.dumps(changed(json.loads(data), draw)))
    return path.name


class TooLong(BaseException):
    pass


@contextmanager
def computing() -> Iterator[None]:
    """Raise TooLong in a body that uses too much CPU time, however slow the machine is."""

    def stop(number: int, frame: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def refused(read: Callable[[], object], names: tuple[str, ...]) -> str:
    """Return "" if a reader succeeds or raises an error of ours that has one of `names`, else what it raised."""
    try:
        with computing():
            read()
    except (Exception, TooLong) as error:
        ours = isinstance(error, CommandError) or type(error).__module__.startswith("penstock.")
        if not (ours and any(name in str(error) for name in names)):
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.fixture
def readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[Path], object]]:
    """All readers of a run folder; `resume` stops before it would start processes."""
    monkeypatch.setattr(resume, "go", lambda *args, **kwargs: 0)
    monkeypatch.setattr(resume, "require_inputs", lambda *args: None)
    return {
        "report": lambda path: write_report(RunFolder.open(path), tmp_path / "page.html", 0.0),
        "replay": lambda path: report.replay([str(path)]),
        "watch": lambda path: watch_in_terminal(RunFolder.open(path), plain=True, once=False),
        "dashboard": lambda path: watch_in_terminal(RunFolder.open(path), plain=False, once=True),
        "resume": lambda path: resume.resume([str(path), "--updates", "9"]),  # the last, since it may write
    }


@pytest.mark.parametrize(
    "seeds",
    [range(24), pytest.param(range(24, 200), marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_a_damaged_folder_is_refused_in_words(
    seeds: range, whole: Path, readers: dict[str, Callable[[Path], object]], tmp_path: Path
) -> None:
    wrong = []
    for seed in seeds:
        case = tmp_path / "case"
        shutil.rmtree(case, ignore_errors=True)
        shutil.copytree(whole, case)
        name = damage(case, Random(seed))
        for reader, read in readers.items():
            if said := refused(partial(read, case), (str(case), name)):
                wrong.append(f"seed {seed}, {name}, {reader}: {said}")
    assert wrong == []


def test_other_files_that_are_no_json_of_theirs_are_refused_in_words(whole: Path, tmp_path: Path) -> None:
    """Plans, model configs, lengths, join files, cluster files, and checkpoint shards."""
    (tmp_path / "keys").mkdir()
    keys = tmp_path / "keys" / "a.json"
    Keys.make("run1", "ipc:///tmp/x", ["a"]).join("a", "ipc:///tmp/x", tmp_path).write(keys)
    wrong = []
    texts = [b"", b"[" * 100_000, b'{"a":' * 50_000, b"null", b"[]", b"7", b"\xff", b'{"flags": 3}', b"9" * 5000]
    texts += [json.dumps(changed(json.loads(keys.read_bytes()), Random(seed))).encode() for seed in range(20)]
    for text in texts:
        file = tmp_path / "config.json"
        file.write_bytes(text)
        part = tmp_path / "x.safetensors"
        part.write_bytes(len(text).to_bytes(8, "little") + text)
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir()
        (run / "metrics.jsonl").write_bytes(text + b"\n")
        (run / "config.json").write_bytes(text)
        file.chmod(0o600)
        readers: dict[str, Callable[[], object]] = {
            "plan": partial(read_costed, file, "aipo"),
            "shape": partial(read_shape, str(tmp_path)),
            "lengths": partial(read_lengths, file),
            "lengths of a run": partial(of_run, run, 100),
            "join": partial(Join.read, file),
            "cluster": partial(Cluster.read, file),
        }
        for name, read in readers.items():
            if said := refused(read, (file.name, "metrics.jsonl")):
                wrong.append(f"{name} of {text[:40]!r}: {said}")
        with pytest.raises(ValueError, match="not a readable state"):
            read_facts(part)
    assert wrong == []
