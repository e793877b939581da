"""Which folders count as checkpoints and from when, which ones are removed, and run folders that are moved."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.record.checkpoints import (
    all_checkpoints,
    begin_checkpoint,
    checkpoint_of,
    complete_checkpoint,
    in_use,
    latest_checkpoint,
    newest_usable,
    read_best,
    retire,
    surplus,
    sweep_checkpoints,
)
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder.create(tmp_path / "run")
    made.write_json("config.json", {"run": "ours"})
    return made


def checkpoint(folder: RunFolder, update: int, row: dict[str, Any] | None = None) -> str:
    name = begin_checkpoint(folder, "ours", update)
    (folder.checkpoints / name / "part").write_text(name)
    return complete_checkpoint(folder, name, {"update": update}, {"before": 0.5}, row=row).name


def latest(folder: RunFolder) -> str | None:
    found = latest_checkpoint(folder)
    return found.folder.name if found else None


def test_a_folder_counts_once_its_cut_is_in_it_and_it_has_its_name(folder: RunFolder) -> None:
    assert latest(folder) is None
    cut = (folder.checkpoints / checkpoint(folder, 3) / "cut.json").read_bytes()
    for other in (begin_checkpoint(folder, "ours", 6), "notes"):
        (folder.checkpoints / other).mkdir(exist_ok=True)
        (folder.checkpoints / other / "cut.json").write_bytes(cut)
    assert latest(folder) == "00000003"


def test_a_checkpoint_is_never_replaced_and_the_newest_of_an_update_is_gone_on_from(folder: RunFolder) -> None:
    names = [checkpoint(folder, update) for update in (*[7] * 11, 4)]
    assert names == ["00000007", *(f"00000007.{number}" for number in range(2, 12)), "00000004"]
    assert len({(folder.checkpoints / name / "part").read_text() for name in names}) == len(names)
    found = latest_checkpoint(folder)
    assert found is not None
    assert (found.folder.name, found.update, found.cut) == ("00000007.11", 7, {"update": 7})
    assert found.accuracy == {"before": 0.5}
    assert (found.folder / "part").read_text() == found.written
    # Updates are compared as numbers.
    assert [checkpoint(folder, update) for update in (10**8, 99_999_999)] == ["100000000", "99999999"]
    assert latest(folder) == "100000000"


def test_what_a_cut_is_made_of_is_on_the_disk_before_it_counts(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[Any] = []
    sync, rename = os.fsync, os.rename

    def see_sync(fd: int) -> None:
        sync(fd)
        happened.append(Path(os.readlink(f"/proc/self/fd/{fd}")))

    def see_rename(source: Any, target: Any) -> None:
        if Path(target).parent == folder.checkpoints:
            happened.append("counts")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", see_sync)
    monkeypatch.setattr(os, "rename", see_rename)
    written = folder.checkpoints / begin_checkpoint(folder, "ours", 3)
    complete_checkpoint(folder, written.name, {}, {})
    before, after = happened[: happened.index("counts")], happened[happened.index("counts") :]
    assert any(path.parent == written for path in before)  # cut.json, under its temporary name
    assert before[-1] == written
    assert folder.checkpoints in after


def test_only_what_this_run_has_given_up_is_swept(folder: RunFolder) -> None:
    checkpoint(folder, 3)
    given_up = begin_checkpoint(folder, "ours", 4)
    (folder.checkpoints / given_up / "policy").mkdir()
    begin_checkpoint(folder, "theirs", 4)
    (folder.checkpoints / "00000004-ours-mine").mkdir()
    elsewhere = folder.path / "elsewhere"
    (elsewhere / "kept").mkdir(parents=True)
    (folder.checkpoints / "00000005-ours-0123456789abcdef").symlink_to(elsewhere)
    names = {path.name for path in folder.checkpoints.iterdir()}
    sweep_checkpoints(folder)
    assert {path.name for path in folder.checkpoints.iterdir()} == names - {given_up}
    assert (elsewhere / "kept").exists()


def keep(folder: RunFolder, number: int, best: str = "") -> list[str]:
    """Keep the `number` newest checkpoints and the best one; return the names of those that stay."""
    for path in retire(folder, "ours", surplus(all_checkpoints(folder), number, best)).values():
        assert (path / "part").exists()  # still complete, but it does not count any more
    return [saved.folder.name for saved in all_checkpoints(folder)]


def test_the_newest_checkpoints_stay_and_the_best_one(folder: RunFolder) -> None:
    for update, reward in ((3, 0.1), (4, 0.9), (5, 0.9), (5, 0.2), (100, None), (11, 0.3)):
        checkpoint(folder, update, {"reward_mean": reward, "kl": update, "pools": {}})
    names = ["00000003", "00000004", "00000005", "00000005.2", "00000011", "00000100"]
    assert keep(folder, 0, "reward_mean") == names
    assert keep(folder, 5, "kl:min") == names  # the best one stays in addition to the five newest
    assert keep(folder, 4, "no_metric") == names[2:]
    assert keep(folder, 2, "reward_mean") == ["00000005", "00000011", "00000100"]
    assert keep(folder, 1) == ["00000100"]
    assert latest(folder) == "00000100"


def test_a_checkpoint_that_goes_is_swept_if_nobody_has_removed_it(folder: RunFolder) -> None:
    for update in (3, 4):
        checkpoint(folder, update)
    keep(folder, 1)
    assert len(list(folder.checkpoints.iterdir())) == 2
    sweep_checkpoints(folder)
    assert [path.name for path in folder.checkpoints.iterdir()] == ["00000004"]


def test_a_checkpoint_that_is_read_stays_until_it_is_not(folder: RunFolder) -> None:
    for update in (3, 4):
        checkpoint(folder, update)
    saved = all_checkpoints(folder)[0]
    with in_use(saved):
        assert keep(folder, 1) == ["00000003", "00000004"]
    os.link(saved.folder / "cut.json", folder.path / "another-name")
    assert keep(folder, 1) == ["00000003", "00000004"]
    (folder.path / "another-name").unlink()
    assert keep(folder, 1) == ["00000004"]
    with pytest.raises(RecordError, match="the run has removed this checkpoint"), in_use(saved):
        pass


def test_checkpoints_go_on_a_network_file_system_too(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS emulates `flock` by range locks: an exclusive lock of a file opened for reading is refused."""
    for update in (3, 4):
        checkpoint(folder, update)
    monkeypatch.setattr(fcntl, "flock", fcntl.lockf)
    with in_use(all_checkpoints(folder)[0]):
        pass
    assert keep(folder, 1) == ["00000004"]


def test_a_run_goes_on_beside_an_earlier_checkpoint_that_was_damaged(folder: RunFolder) -> None:
    for update in (3, 4, 5):
        checkpoint(folder, update)
    (folder.checkpoints / "00000003" / "cut.json").write_text("{")
    assert keep(folder, 1) == ["00000005"]
    # If the damaged one is asked for, this is an error.
    with pytest.raises(RecordError, match=r"00000003/cut\.json: given something that is not JSON"):
        checkpoint_of(folder, 3)
    (folder.checkpoints / "00000005" / "cut.json").write_text("{")
    with pytest.raises(RecordError, match=r"00000005/cut\.json"):
        latest(folder)


def test_each_bit_of_a_cut_that_a_disk_has_changed_is_told_with_what_there_is_beside_it(folder: RunFolder) -> None:
    for update in (3, 5):
        checkpoint(folder, update, {"reward_mean": 0.25})
    place = folder.checkpoints / "00000005"
    path, beside = place / "cut.json", f"without the folder {place} a resume begins with update 3"
    whole = path.read_bytes()
    facts = json.loads(whole)
    said, kept = set[str](), {name: facts[name] for name in facts if name != "check"}
    for number in range(8 * len(whole)):
        data = bytearray(whole)
        data[number // 8] ^= 1 << number % 8
        path.write_bytes(data)
        try:
            found = latest_checkpoint(folder)
        except RecordError as error:
            said.add(str(error))
        else:  # the bit changed only white space, or the name "check"
            assert found is not None
            assert kept == {name: getattr(found, name) for name in kept}
    assert len(said) > len(whole)
    wrong = [text for text in said if not (text.startswith(f"{path}: ") and text.endswith(f"; {beside}"))]
    assert wrong == []
    path.unlink()
    with pytest.raises(RecordError, match=f"{path}: no such file; needed .*; {beside}"):
        latest_checkpoint(folder)
    # A cut written by a version without checks.
    del facts["check"]
    path.write_text(json.dumps(facts))
    assert latest(folder) == "00000005"


def test_the_newest_checkpoint_that_can_be_used_is_found_behind_damaged_ones(folder: RunFolder) -> None:
    assert newest_usable(folder) == (None, [])
    assert newest_usable(folder, refused=True) == (None, [])
    for update in (3, 4, 5):
        checkpoint(folder, update)
    (folder.checkpoints / "00000004" / "cut.json").unlink()
    for refused, update, damaged in ((False, 5, []), (True, 3, ["00000005", "00000004"])):
        saved, places = newest_usable(folder, refused=refused)
        assert saved is not None
        assert (saved.update, [place.name for place in places]) == (update, damaged)


@pytest.mark.parametrize("text", ["reward_mean:least", ":min", "kl:"])
def test_a_metric_that_is_to_be_best_has_a_name_and_a_direction(text: str) -> None:
    assert (read_best("kl:min"), read_best("kl"), read_best("kl:max")) == (("kl", -1), ("kl", 1), ("kl", 1))
    with pytest.raises(ValueError, match=r"--keep-best: given '.*', needed the name of a metric"):
        read_best(text)


@pytest.mark.parametrize("name", ["pools", "not_finite", "pools:min"])
def test_a_metric_that_is_to_be_best_is_a_number_of_rows(name: str) -> None:
    with pytest.raises(ValueError, match=r"--keep-best: given '.*', .* no number"):
        read_best(name)


def test_a_cut_has_a_folder_of_its_own_and_none_is_made_or_swept_through_a_link(folder: RunFolder) -> None:
    names, elsewhere = {begin_checkpoint(folder, "ours", 3) for _ in range(2)}, folder.path / "elsewhere"
    assert len(names) == 2
    folder.checkpoints.rename(elsewhere)
    with pytest.raises(RecordError, match="checkpoints/00000003-ours-"):
        begin_checkpoint(folder, "ours", 3)
    assert not folder.checkpoints.exists()
    folder.checkpoints.symlink_to(elsewhere)
    with pytest.raises(RecordError, match="checkpoints: given a symbolic link"):
        begin_checkpoint(folder, "ours", 4)
    sweep_checkpoints(folder)
    assert {path.name for path in elsewhere.iterdir()} == names


def test_a_run_folder_that_is_moved_or_removed_is_noticed_and_followed(folder: RunFolder) -> None:
    folder.hold()
    folder.require()
    old, new = folder.path, folder.path.with_name("new")
    os.rename(old, new)
    for _ in range(2):
        with pytest.raises(RecordError, match=f"{old}: the run folder was moved to {new} while the run went on"):
            folder.require()
        old.mkdir(exist_ok=True)  # another one in its place
    assert f"moved to {new}" in folder.follow()
    assert folder.path == new
    assert (folder.held / "config.json").is_file()
    assert folder.follow() == ""
    os.rename(new, old)
    assert f"moved to {old}" in folder.follow()
    for path in sorted(old.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    old.rmdir()
    with pytest.raises(RecordError, match="the run folder was removed while the run went on"):
        folder.require()
    folder.release()
