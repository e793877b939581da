"""Data are pure functions of the ordinal; held-out problems stay held out; faulty files say where."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.graph.types import Context, Prompts
from penstock.nodes.data import HELD_OUT, ROWS, DataError, Demonstrations, open_demonstrations, open_prompts

TRAIN = Context(node="prompts", seed=3, data="arithmetic")
EVALUATE = replace(TRAIN, node="evaluate.prompts", split="evaluate")


def texts(context: Context, ordinals: range) -> list[str]:
    source = open_prompts(context)
    return [source.read(i).texts[0] for i in ordinals]


def jsonl(path: Path, rows: int) -> str:
    lines = [json.dumps({"question": f"q{i}", "answer": f"because\n#### {i}"}) for i in range(rows)]
    path.write_text("\n".join(lines) + "\n\n")
    return str(path)


def test_a_prompt_depends_on_seed_and_ordinal_alone() -> None:
    assert texts(TRAIN, range(20)) == texts(TRAIN, range(20))
    assert texts(TRAIN, range(20)) != texts(replace(TRAIN, seed=4), range(20))
    assert open_prompts(TRAIN).read(7).ordinals == (7,)


def test_held_out_problems_are_distinct_fixed_and_never_trained_on() -> None:
    problems = texts(EVALUATE, range(HELD_OUT))
    assert len(set(problems)) == HELD_OUT == 500
    assert problems == texts(replace(EVALUATE, seed=99), range(HELD_OUT))
    assert texts(EVALUATE, range(HELD_OUT, HELD_OUT + 3)) == problems[:3]
    demonstrated = [text for i in range(60) for text in open_demonstrations(TRAIN).read(i).texts]
    assert not set(problems) & {*texts(TRAIN, range(2000)), *demonstrated}


@pytest.mark.parametrize("data", ["arithmetic:2", "arithmetic:4"])
def test_arithmetic_is_right_and_both_operations_occur(data: str) -> None:
    source = open_prompts(replace(TRAIN, data=data))
    prompts = Prompts.concat([source.read(i) for i in range(100)])
    assert {"+", "-"} <= set("".join(prompts.texts))
    for text, answer in zip(prompts.texts, prompts.answers, strict=True):
        assert eval(text.rstrip("=")) == int(answer) >= 0
        assert len(text) == 2 * int(data[-1]) + 2


def test_demonstrations_come_by_groups_and_join() -> None:
    source = open_demonstrations(replace(TRAIN, node="demonstrations"))
    joined = Demonstrations.concat([source.read(0), source.read(1)])
    assert len(joined.texts) == len(joined.responses) == 2 * ROWS
    assert source.read(1) == source.read(1)
    assert set(map(len, joined.responses)) == {3, 8}


def test_a_file_is_read_in_a_new_order_each_epoch_and_a_tenth_is_held_out(tmp_path: Path) -> None:
    context = replace(TRAIN, data=jsonl(tmp_path / "d.jsonl", 40))
    epochs = [texts(context, range(36 * e, 36 * (e + 1))) for e in range(3)]
    assert len(set(epochs[0])) == 36
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1]
    held = texts(replace(context, split="evaluate"), range(4))
    assert sorted(epochs[0] + held) == sorted(f"q{i}" for i in range(40))
    assert held == texts(replace(context, split="evaluate", seed=5), range(4))


def test_a_tiny_file_is_used_whole(tmp_path: Path) -> None:
    context = replace(TRAIN, data=jsonl(tmp_path / "d.jsonl", 2))
    assert set(texts(context, range(2))) == set(texts(replace(context, split="evaluate"), range(2))) == {"q0", "q1"}


def test_gsm8k_rows_give_question_final_number_and_solution(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"question": "How many?", "answer": "48/2 = <<48/2=24>>24\n#### 1,072 "}))
    context = replace(TRAIN, data=str(path))
    prompts = open_prompts(context).read(0)
    assert (prompts.texts, prompts.answers) == (("How many?",), ("1,072",))
    assert open_demonstrations(context).read(0).responses[0].endswith("#### 1,072 ")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"d\.jsonl:2: given a line that is not JSON"),
        ("[" * 100_000, r"d\.jsonl:2: given a line that is not JSON: .*; needed one object per line"),
        ("[1]", r"d\.jsonl:2: given a JSON list, needed an object"),
        ('{"question": "\\ud800", "answer": "#### 1"}', r"d\.jsonl:2: given '\\ud800' in 'question', which is no char"),
        ('{"question": "q"}', r"d\.jsonl:2: given the fields \['question'\], needed 'answer'"),
        ('{"question": "", "answer": "#### 1"}', r"d\.jsonl:2: given '' as 'question', needed a text"),
        ('{"question": "q", "answer": 3}', r"d\.jsonl:2: given 3 as 'answer', needed a text"),
        ('{"question": "q", "answer": "no mark"}', r"d\.jsonl:2: given an answer without a final number"),
        ('{"question": "q", "answer": "#### none"}', r"d\.jsonl:2: given the reference answer ' none' with no number"),
        ('{"question": "q", "answer": "#### 3 or 4"}', r"d\.jsonl:2: given the reference answer .* with 2 numbers"),
    ],
)
def test_a_faulty_row_names_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"question": "q", "answer": "#### 1"}\n' + line)
    with pytest.raises(DataError, match=message):
        open_prompts(replace(TRAIN, data=str(path)))


def test_bytes_that_are_no_text_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"question": "\xff", "answer": "#### 1"}')
    with pytest.raises(DataError, match=r"d\.jsonl:1: "):
        open_prompts(replace(TRAIN, data=str(path)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("arithmetik", "did you mean 'arithmetic'"),
        ("nowhere/d.jsonl", "'nowhere/d.jsonl', which is no file"),
        ("arithmetic:9", "given 'arithmetic:9', needed arithmetic:2 to arithmetic:6"),
        ("arithmetic:34", "given 'arithmetic:34', needed arithmetic:2 to arithmetic:6"),
    ],
)
def test_unknown_data_are_refused(data: str, message: str) -> None:
    for make in (open_prompts, open_demonstrations):
        with pytest.raises(DataError, match=message):
            make(replace(TRAIN, data=data))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="empty file"):
        open_prompts(replace(TRAIN, data=str(tmp_path / "d.jsonl")))
