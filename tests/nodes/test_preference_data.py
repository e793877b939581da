"""Pairs are a function of the ordinal; the chosen answer is right and the rejected one is not."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.graph.types import Context
from penstock.nodes.data import ROWS, DataError, Pairs, held_out, open_pairs
from penstock.nodes.score import final_number

CONTEXT = Context(node="pairs", seed=1)
ROW = {"prompt": "a?", "chosen": "yes", "rejected": "no"}


def written(path: Path, lines: Sequence[object]) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def read(data: str, ordinal: int = 0) -> Pairs:
    pairs = open_pairs(Context(node="pairs", seed=1, data=data)).read(ordinal)
    assert isinstance(pairs, Pairs)
    return pairs


@pytest.mark.parametrize("digits", [2, 3, 6])
def test_chosen_answers_are_right_and_rejected_ones_wrong(digits: int) -> None:
    drafts = 0
    for ordinal in range(20):
        pairs = read(f"arithmetic:{digits}", ordinal)
        assert len(pairs.texts) == len(pairs.chosen) == len(pairs.rejected) == ROWS
        for text, chosen, rejected in zip(pairs.texts, pairs.chosen, pairs.rejected, strict=True):
            sign = "+" if "+" in text else "-"
            a, b = text.rstrip("=").split(sign)
            answer = int(a) + int(b) if sign == "+" else int(a) - int(b)
            assert final_number(chosen) == answer
            assert final_number(rejected) != answer
            drafts += ":" not in rejected
    assert 0.2 < drafts / (20 * ROWS) < 0.6


def test_pairs_are_a_function_of_the_ordinal_and_never_held_out() -> None:
    assert read("arithmetic", 3) == read("arithmetic", 3) != read("arithmetic", 4)
    texts = {problem.text for problem in held_out(2)}
    assert not texts & {text for ordinal in range(20) for text in read("arithmetic:2", ordinal).texts}


def test_a_files_pairs_come_in_another_order_in_each_epoch(tmp_path: Path) -> None:
    data = written(tmp_path / "pairs.jsonl", [{**ROW, "prompt": str(i)} for i in range(ROWS)])
    first, second = read(data).texts, read(data, 1).texts
    # 3 rows, a tenth, are held out
    assert len(set(first)) == 29
    assert first != second


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "given a line that is not JSON"),
        (["a"], "given a JSON list, needed an object with prompt, chosen and rejected"),
        ({"prompt": "a", "chosen": "b"}, r"given the fields \['chosen', 'prompt'\], needed 'rejected'"),
        ({**ROW, "chosen": ""}, "given '' as 'chosen', needed a text"),
        ({**ROW, "rejected": "yes"}, "given the same text as 'chosen' and 'rejected', needed two that differ"),
    ],
)
def test_a_faulty_line_is_named(tmp_path: Path, bad: object, message: str) -> None:
    data = written(tmp_path / "pairs.jsonl", [ROW, "", bad])
    with pytest.raises(DataError, match=rf"pairs\.jsonl:3: {message}"):
        read(data)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="given an empty file, needed a JSON object per line with prompt, chosen and rej"
    ):
        read(written(tmp_path / "pairs.jsonl", []))
