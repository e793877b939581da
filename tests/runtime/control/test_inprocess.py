"""What the driver in one process hands on."""

import sys
from pathlib import Path

import pytest

from penstock.graph import trace
from penstock.programs.toy import toy
from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.cluster.placement import place
from penstock.runtime.control.inprocess import run_in_process
from penstock.runtime.control.run_config import RunConfig, RunOptions
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.folder import RunFolder


def test_a_run_that_insists_on_tensorboard_does_not_begin_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = trace(toy, {})
    plan = place([graph], Cluster(hosts=(Host(name="local", cores=1),)))
    folder = RunFolder.create(tmp_path / "run")
    RunConfig(graph, None, plan, RunOptions(updates=1, batch=1, tensorboard=True), "board").write(folder, {})
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(RecordError, match="--tensorboard: the package tensorboard is not installed"):
        run_in_process(folder, lambda line: None)
    folder.unlock()
