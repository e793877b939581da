"""`penstock export` writes a run's checkpoint for other programs, and refuses what does not exist."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from penstock.runtime.cli.export import main
from penstock.runtime.cli.tracing import CommandError
from penstock.runtime.record.errors import RecordError
from tests.gates.running import final_state, make_run, run_here, toy_flags


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("export") / "r", "toy", {}, toy_flags(updates=3, checkpoint_every=1))
    return run_here(folder)


@pytest.mark.timeout(300)
def test_a_checkpoint_is_exported_and_loads(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--to", "dcp", "--out", str(tmp_path / "out"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["checkpoint"], facts["value"], facts["folder"]) == (3, "policy", str(tmp_path / "out"))
    state = final_state(run, 3)
    wanted = {"other": {name: torch.zeros_like(tensor) for name, tensor in state.items()}}
    load(wanted, storage_reader=FileSystemReader(tmp_path / "out"), no_dist=True)
    assert all(torch.equal(wanted["other"][name], state[name]) for name in state)


def test_what_cannot_be_exported_is_refused_by_what_there_is(run: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    new = str(tmp_path / "new")
    for words, said in (
        (["--out", str(tmp_path / "full")], "--out: given .*full, which is there already"),
        (["--out", new, "--value", "critic"], "--value: given 'critic', needed a carried value of the run: policy"),
        (["--out", new, "--update", "1"], "--update: given 1, needed the update of a checkpoint: 2, 3"),
    ):
        with pytest.raises(CommandError, match=said):
            main([str(run), *words])
    assert not Path(new).exists()


@pytest.mark.timeout(300)
def test_what_fails_is_said_in_a_line_and_leaves_nothing(run: Path, tmp_path: Path) -> None:
    copy, new = tmp_path / "copy", tmp_path / "new"
    shutil.copytree(run, copy)
    os.truncate(copy / "checkpoints" / "00000003" / "trainer-0-0.safetensors", 100)
    with pytest.raises(CommandError, match=r"00000003/trainer-0-0\.safetensors: not a readable state") as raised:
        main([str(copy), "--out", str(new)])
    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match="file/new: cannot be written"):
        main([str(run), "--out", str(tmp_path / "file" / "new")])
    assert "Traceback" not in str(raised.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "file"]
