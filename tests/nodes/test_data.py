"""Data are pure functions of the ordinal; held-out problems stay held out; faulty files say where."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.graph import Context, Prompts
from penstock.nodes.data import (
    CALLS,
    HELD_OUT,
    ROWS,
    SLOPPY,
    DataError,
    Demonstrations,
    Pairs,
    Problem,
    draw_problem,
    held_out,
    is_sloppy,
    open_calculations,
    open_demonstrations,
    open_pairs,
    open_prompts,
    open_tool_demonstrations,
)
from penstock.nodes.environments.python_tool import find_call
from penstock.nodes.score import final_number, math_answer
from penstock.nodes.tokenizer import byte_tokenizer

# Data are pure functions of the ordinal; held-out problems stay held out; faulty files say where.


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


# Problems are drawn evenly and held out for ever; the sloppy teacher is wrong where something is carried.


CONTEXT = Context(node="demonstrations", seed=1)


def drawn(digits: int, count: int) -> list[Problem]:
    return [draw_problem(CONTEXT, digits, ordinal) for ordinal in range(count)]


def test_operands_have_the_given_digits_and_differences_are_not_negative() -> None:
    for digits in (2, 3, 5):
        for p in drawn(digits, 200):
            assert len(str(p.a)) == len(str(p.b)) == digits
            assert p.sign == "+" or p.a >= p.b


def test_both_operations_and_all_leading_digits_are_drawn_evenly() -> None:
    problems = drawn(2, 4000)
    assert 0.45 < sum(p.sign == "+" for p in problems) / 4000 < 0.55
    sums = [p for p in problems if p.sign == "+"]
    for first in "123456789":
        assert 0.08 < sum(str(p.a)[0] == first for p in sums) / len(sums) < 0.15


def test_held_out_problems_are_distinct_and_never_drawn() -> None:
    problems = held_out(2)
    assert len(set(problems)) == len(problems) == HELD_OUT
    assert not set(problems) & set(drawn(2, 5000))


def test_a_draft_drops_every_carry_and_borrow() -> None:
    assert Problem(47, 85, "+", 2).draft == "22"
    assert Problem(62, 35, "-", 2).draft == "37"
    assert Problem(24, 13, "+", 2).draft == "37"


def test_the_careful_teacher_corrects_the_draft_and_the_sloppy_one_does_not() -> None:
    assert Problem(47, 85, "+", 2).demonstration(sloppy=True) == "22"
    assert Problem(47, 85, "+", 2).demonstration(sloppy=False) == "22:132"
    assert Problem(62, 35, "-", 2).demonstration(sloppy=False) == "37:027"
    assert Problem(347, 586, "+", 3).demonstration(sloppy=False) == "823:0933"


def test_the_careful_teacher_gets_the_full_reward() -> None:
    for p in drawn(3, 100):
        assert math_answer(p.text, p.demonstration(sloppy=False), p.answer) == 1.0
        assert math_answer(p.text, p.demonstration(sloppy=True), p.answer) == float(int(p.draft) == int(p.answer))


def test_the_teacher_is_sloppy_as_often_as_said() -> None:
    share = sum(is_sloppy(CONTEXT, ordinal, 0) for ordinal in range(4000)) / 4000
    assert abs(share - SLOPPY) < 0.03


# The teacher's calls are calls that the tool understands, and half of its answers in the head are wrong.


CALCULATOR_CONTEXT = Context(node="demonstrations", seed=5)


def test_a_demonstrated_call_ends_its_turn_and_the_answer_follows_the_output() -> None:
    tokenizer, calls, right, rows = byte_tokenizer(), 0, 0, 0
    for ordinal in range(20):
        demonstrations = open_tool_demonstrations(CALCULATOR_CONTEXT).read(ordinal)
        for prompt, response in zip(demonstrations.texts, demonstrations.responses, strict=True):
            rows += 1
            call = find_call(response)
            if call is None:
                right += eval(prompt[:-1]) == int(response)
                continue
            calls += 1
            assert call == prompt[:-1]
            turn = response.partition("</output>")[2]
            assert math_answer(prompt, turn, str(eval(call))) == 1.0
            assert tokenizer.encode(response).count(tokenizer.eos) == 1
    assert abs(calls / rows - CALLS) < 0.06
    assert right / (rows - calls) < 0.55


def test_problems_follow_from_the_ordinal_and_held_out_ones_are_never_trained_on() -> None:
    train = open_calculations(CALCULATOR_CONTEXT)
    held_out = open_calculations(Context(split="evaluate"))
    assert train.read(3) == open_calculations(CALCULATOR_CONTEXT).read(3)
    kept = {held_out.read(i).texts for i in range(500)}
    assert len(kept) == 500
    assert not kept & {train.read(i).texts for i in range(300)}


# Pairs are a function of the ordinal; the chosen answer is right and the rejected one is not.


PAIRS_CONTEXT = Context(node="pairs", seed=1)
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


def test_an_empty_file_of_pairs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match="given an empty file, needed a JSON object per line with prompt, chosen and rej"
    ):
        read(written(tmp_path / "pairs.jsonl", []))
