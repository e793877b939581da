"""The samples kept of prompt groups: their texts and rewards."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.graph import Rewards, Rollouts
from penstock.runtime.record.errors import RecordError
from penstock.runtime.record.samples import MOST_BYTES, MOST_CHARACTERS, MOST_ROWS, SamplesFile, read_samples, sample

ORDER = ("generate", "score")


def rollouts(*texts: str, **changes: Any) -> Rollouts:
    num = len(texts)
    given: dict[str, Any] = {
        "ordinals": (4,) * num,
        "prompts": ("1+1=",) * num,
        "answers": ("2",) * num,
        "texts": texts,
        "tokens_NS": torch.zeros(num, 6, dtype=torch.int64),
        "prompt_lengths_N": torch.full((num,), 3),
        "response_lengths_N": torch.full((num,), 2),
        "logprobs_NT": torch.zeros(num, 3),
        "versions_NT": torch.tensor([[1, 2, 9]] * num),
        "finished_N": torch.tensor([True] * num),
    }
    return Rollouts(**{**given, **changes})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def told(*values: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(sample({str(place): value for place, value in enumerate(values)}))
    return found


def test_a_firing_tells_its_responses_by_prompt_and_its_rewards() -> None:
    said = told(rollouts("2", "3", prompts=("1+1=", "1+2="), answers=("2", "3")))
    facts = {"tokens": 2, "finished": True, "versions": [1, 2]}
    assert said == {
        "texts": [
            {"prompt": "1+1=", "answer": "2", "responses": [{"text": "2", **facts}]},
            {"prompt": "1+2=", "answer": "3", "responses": [{"text": "3", **facts}]},
        ]
    }
    assert told(Rewards(torch.tensor([0.5, 1.0]))) == {"rewards": [0.5, 1.0]}
    assert sample({"a": 3, "b": "text"}) == ""


def test_a_line_calls_nodes_as_the_program_does(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    file = SamplesFile(path, ("solver:generate", "judge:score"))
    file.tell(4, "solver:generate", sample({"rollouts": rollouts("2")}))
    file.tell(4, "judge:score", sample({"rewards": Rewards(torch.tensor([1.0]))}))
    file.take(0, (4,))
    (line,) = lines(path)
    assert [text["node"] for text in line["texts"]] == ["solver"]
    assert line["rewards"] == {"judge": [1.0]}


def test_a_conversation_has_its_turns_and_no_versions_of_an_environments_tokens() -> None:
    spoken = rollouts("b", transcripts=(["a", "no", "b"],), versions_NT=torch.tensor([[1, -1, 3]]))
    spoken.response_lengths_N = torch.tensor([3])
    (response,) = told(spoken)["texts"][0]["responses"]
    assert response == {"turns": ["a", "no", "b"], "tokens": 2, "finished": True, "versions": [1, 3]}


def test_a_sample_is_bounded() -> None:
    many = rollouts(*("x" * (2 * MOST_CHARACTERS) for _ in range(100)))
    ((said,),) = (told(many)["texts"],)
    assert len(said["responses"]) == MOST_ROWS
    text = said["responses"][0]["text"]
    assert (len(text), text[MOST_CHARACTERS // 2]) == (MOST_CHARACTERS + 1, "…")
    assert len(told(Rewards(torch.zeros(100)))["rewards"]) == MOST_ROWS


@pytest.mark.parametrize("turns", [1, 41, 100_000])
def test_a_sample_of_any_texts_fits_into_a_message(turns: int) -> None:
    said = sample({"out": rollouts(*["漢" * 40_000] * 8, transcripts=(["漢" * 40_000] * turns,) * 8)})
    assert len(said) <= MOST_BYTES
    assert bool(said) == (turns < 100_000)


def test_what_a_node_of_ones_own_makes_fails_no_firing() -> None:
    assert told(rollouts("a", answers=(3,)))["texts"][0]["answer"] == "3"
    assert sample({"out": rollouts("a", answers=())}) == ""
    assert sample({"out": rollouts("a", finished_N=None)}) == ""
    assert told(Rewards(torch.tensor([True, False])))["rewards"] == [1.0, 0.0]


def test_a_line_is_a_group_that_an_update_has_taken_and_others_are_kept_or_forgotten(tmp_path: Path) -> None:
    file = SamplesFile(tmp_path / "s.jsonl", ORDER)
    for group in range(5):
        file.tell(group, "score", sample({"out": Rewards(torch.tensor([float(group)]))}))
        file.tell(group, "generate", sample({"out": rollouts("first")}))
        file.tell(group, "generate", sample({"out": rollouts(str(group))}))  # a later turn
    file.take(0, (1, 3), overtaken={2})
    assert set(file.pending) == {2, 4}
    file.take(1, ())
    file.take(2, (2, 7))
    file.close()
    found = lines(tmp_path / "s.jsonl")
    assert [(line["update"], line["group"]) for line in found] == [(0, 1), (0, 3), (2, 2)]
    assert [line["texts"][0]["responses"][0]["text"] for line in found] == ["1", "3", "2"]
    assert [line["rewards"] for line in found] == [{"score": [1.0]}, {"score": [3.0]}, {"score": [2.0]}]
    assert found[0]["texts"][0]["node"] == "generate"


def test_each_output_of_rewards_of_a_node_has_its_own(tmp_path: Path) -> None:
    """Named as the `reward_mean` of each in the rows."""
    outputs = {"right": Rewards(torch.tensor([1.0, 0.0])), "note": 3, "style": Rewards(torch.tensor([0.5, 0.25]))}
    file = SamplesFile(tmp_path / "s.jsonl", ORDER)
    file.tell(0, "score", sample(outputs))
    # As in a checkpoint of a version that kept one output per node.
    file.restore([(1, "score", {"rewards": [2.0]})])
    file.take(0, (0, 1))
    file.close()
    found = [line["rewards"] for line in lines(tmp_path / "s.jsonl")]
    assert found == [{"score": [1.0, 0.0], "score.style": [0.5, 0.25]}, {"score": [2.0]}]


@pytest.mark.parametrize("damage", [b"", b'{"update": 1, "gr', b"no JSON\n", b"[" * 100_000 + b"\n", b"7\n"])
def test_a_resume_writes_the_lines_of_the_updates_again_that_it_does_again(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "s.jsonl"
    file = SamplesFile(path, ORDER)
    for update in range(3):
        file.tell(update, "score", sample({"out": Rewards(torch.tensor([float(update)]))}))
        file.tell(update + 10, "score", sample({"out": Rewards(torch.tensor([1.0]))}))
        if update == 1:
            held = json.loads(json.dumps(file.to_json({"groups": [[1, ["score"]], [10, ["score"]], [11, []]]})))
        file.take(update, (update,))
    file.close()
    before = path.read_bytes()
    path.write_bytes(before + damage)
    resumed = SamplesFile(path, ORDER, start=1)
    resumed.restore(held)
    assert set(resumed.pending) == {1, 10}
    resumed.take(1, (1,))
    resumed.close()
    assert [line["update"] for line in lines(path)] == [0, 1]
    assert path.read_bytes() == b"".join(before.splitlines(keepends=True)[:2])


def test_lines_behind_one_that_a_disk_has_damaged_stay(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    file = SamplesFile(path, ORDER)
    for update in range(4):
        file.tell(update, "score", sample({"out": Rewards(torch.tensor([float(update)]))}))
        file.take(update, (update,))
    file.close()
    told = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join((told[0], b"\xff" + told[1][1:], *told[2:])))
    SamplesFile(path, ORDER, start=3).close()
    assert path.read_bytes().splitlines(keepends=True)[2:] == told[2:3]


def test_the_first_line_and_the_last_ones_are_read(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    assert read_samples(path) == []
    file = SamplesFile(path, ORDER)
    for update in range(600):
        file.tell(update, "generate", sample({"out": rollouts("x" * MOST_CHARACTERS)}))
        file.take(update, (update,))
        if update < 4:
            shown = {0: [0], 1: [0, 1], 2: [0, 1, 2], 3: [0, 2, 3]}[update]
            assert [line["update"] for line in read_samples(path)] == shown
    file.close()
    with path.open("ab") as half:
        half.write(b'{"update": 600')
    assert [line["update"] for line in read_samples(path, 3)] == [0, 597, 598, 599]


@pytest.mark.parametrize("line", [b"no JSON\n", b"{}\n", b'{"update": 0, "group": 0, "texts": 3, "rewards": {}}\n'])
def test_a_line_that_is_none_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(line)
    with pytest.raises(RecordError, match=str(path)):
        read_samples(path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").symlink_to(tmp_path / "other")
    for opened in (lambda path: SamplesFile(path, ORDER), read_samples):
        with pytest.raises(RecordError):
            opened(tmp_path / "s.jsonl")
    assert not (tmp_path / "other").exists()
