"""A result is kept only of a tree that its commit names."""

import argparse
import subprocess
from importlib import import_module
from pathlib import Path

import pytest


def test_results_of_changed_and_new_files_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = import_module("report")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    source, page, result = (tmp_path / name for name in ("graph.py", "README.md", "benchmarks/results/walk.json"))
    result.parent.mkdir(parents=True)
    for path in (source, page, result):
        path.write_text("1\n")
    (tmp_path / ".gitignore").write_text("runs/\n")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "All of it"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    parser = argparse.ArgumentParser()
    parser.add_argument("--keep", action=report.Keep)
    page.write_text("2\n")
    result.write_text("2\n")
    for new in (page.with_name("NEW.md"), result.with_name("new.json"), tmp_path / "runs" / "new.py"):
        new.parent.mkdir(exist_ok=True)
        new.write_text("1\n")
    assert parser.parse_args(["--keep"]).keep is True
    assert parser.parse_args([]).keep is False
    assert not report.commit().endswith("+")
    for name, text in (("graph.py", "2\n"), ("nodes/new.py", "1\n")):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        assert parser.parse_args([]).keep is False
        with pytest.raises(SystemExit):
            parser.parse_args(["--keep"])
        assert f"given 1 changed or not committed ({name})" in capsys.readouterr().err
        assert report.commit().endswith("+")
        subprocess.run(["git", "checkout", "-q", "."], cwd=tmp_path, check=True)
