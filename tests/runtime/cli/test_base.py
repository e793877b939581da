import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.graph import load, trace
from penstock.runtime.cli import base_model
from penstock.runtime.cli.display import Line
from penstock.runtime.cli.flags import RunFlags
from penstock.runtime.cli.tracing import CommandError, Traced
from penstock.runtime.cluster.cluster import Cluster
from penstock.runtime.control.launcher import DONE, FAILED, INTERRUPTED
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.folder import RunFolder, begin_checkpoint, complete_checkpoint


class Builder:
    """Stands for the processes that train the base; counts how often it was asked."""

    def __init__(self) -> None:
        self.status, self.calls = DONE, 0

    def __call__(self, folder: RunFolder, cluster: Cluster, tell: Callable[[Line], None]) -> int:
        self.calls += 1
        tell({"kind": "row", "row": {"version": 7, "loss": 1.5}})
        if self.status == FAILED:
            tell({"kind": "error", "text": "trainer/0 rank 0 died"})
        if self.status == DONE:
            name = begin_checkpoint(folder, "r", 7)
            model = folder.checkpoints / name / "policy"
            model.mkdir()
            (model / "config.json").write_text("{}")
            complete_checkpoint(folder, name, {}, {})
        return self.status


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Builder:
    made = Builder()
    program = load("sft")
    flags = RunFlags(model="new", device="cpu", eval_groups=0)
    traced = Traced("sft", program.path, flags, trace(program), None, ())
    monkeypatch.setattr(base_model, "launch", made)
    monkeypatch.setattr(base_model, "trace_program", lambda verb, words: traced)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    return made


def test_a_base_is_built_once_and_then_found(builder: Builder, tmp_path: Path) -> None:
    lines: list[Line] = []
    place = base_model.base_model("", lines.append)
    assert (place / "config.json").is_file()
    assert lines[0] == {"kind": "stage", "stage": "base"}
    assert lines[1]["kind"] == "base"
    assert base_model.base_model("", lines.append) == place
    assert builder.calls == 1
    assert sorted(p.name for p in (tmp_path / "base").iterdir()) == sorted([place.name, "lock"])


def test_what_a_killed_builder_has_left_is_removed_by_the_next_one_and_by_who_finds_the_base(
    builder: Builder, tmp_path: Path
) -> None:
    """But not what another one is building, which holds the lock."""
    left = tmp_path / "base" / "building-x1" / "run"
    for _ in range(2):
        left.mkdir(parents=True)
        (left / "weights").touch()
        place = base_model.base_model("", lambda line: None)
        assert sorted(p.name for p in (tmp_path / "base").iterdir()) == sorted([place.name, "lock"])
    left.mkdir(parents=True)
    with (tmp_path / "base" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert base_model.base_model("", lambda line: None) == place
    assert left.is_dir()
    assert builder.calls == 1


def test_other_data_has_another_base(builder: Builder) -> None:
    assert base_model.base_model("", lambda line: None) != base_model.base_model("arithmetic:2", lambda line: None)


def test_another_recipe_makes_another_base(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    before = base_model.base_model("", lambda line: None)
    monkeypatch.setattr(base_model, "RECIPE", (*base_model.RECIPE, "--lr", "0.001"))
    assert base_model.base_model("", lambda line: None) != before


def test_a_base_that_failed_leaves_nothing_and_says_why(builder: Builder, tmp_path: Path) -> None:
    builder.status = FAILED
    with pytest.raises(CommandError, match=r"the base model could not be built:\ntrainer/0 rank 0 died"):
        base_model.base_model("", lambda line: None)
    assert [p.name for p in (tmp_path / "base").iterdir()] == ["lock"]


def test_stopping_while_the_base_is_built_stops_the_run(builder: Builder, tmp_path: Path) -> None:
    builder.status = INTERRUPTED
    with pytest.raises(KeyboardInterrupt):
        base_model.base_model("", lambda line: None)
    assert [p.name for p in (tmp_path / "base").iterdir()] == ["lock"]


def test_a_cache_that_cannot_be_written_says_so(
    builder: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file"))
    with pytest.raises(RecordError, match=r"cannot be written: .* \(PENSTOCK_CACHE=DIR\)"):
        base_model.base_model("", lambda line: None)
