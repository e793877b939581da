"""Data are pure functions of the ordinal; held-out problems stay held out; errors of files have their place."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.graph import Context, NodeWarning, Prompts
from penstock.graph.protocols import Cyclic
from penstock.nodes.data import (
    CALLS,
    HELD_OUT,
    ROWS,
    SLOPPY,
    Demonstrations,
    FilePrompts,
    Problem,
    draw_problem,
    is_sloppy,
    open_calculations,
    open_demonstrations,
    open_pairs,
    open_prompts,
    open_tool_demonstrations,
)
from penstock.nodes.data_files import DataError
from penstock.nodes.environments.python_tool import find_call
from penstock.nodes.final_answer import final_number
from penstock.nodes.score import math_answer
from penstock.nodes.tokenizer import byte_tokenizer

# Data are pure functions of the ordinal; held-out problems stay held out; errors of files have their place.


TRAIN = Context(node="prompts", seed=3, data="arithmetic")
EVALUATE = replace(TRAIN, node="evaluate.prompts", split="evaluate")


def texts(context: Context, ordinals: range) -> list[str]:
    source = open_prompts(context)
    return [source.read(i).texts[0] for i in ordinals]


def written(path: Path, lines: Iterable[object]) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def jsonl(path: Path, rows: int) -> str:
    return written(path, [*({"question": f"q{i}", "answer": f"because\n#### {i}"} for i in range(rows)), "", ""])


def test_values_depend_on_seed_and_ordinal_alone() -> None:
    assert texts(TRAIN, range(20)) == texts(TRAIN, range(20))
    assert texts(TRAIN, range(20)) != texts(replace(TRAIN, seed=4), range(20))
    assert open_prompts(TRAIN).read(7).ordinals == (7,)
    for opens in (open_demonstrations, open_tool_demonstrations, open_calculations, open_pairs):
        assert opens(TRAIN).read(3) == opens(TRAIN).read(3) != opens(TRAIN).read(4)


def test_held_out_problems_are_distinct_fixed_and_never_trained_on() -> None:
    problems = texts(EVALUATE, range(HELD_OUT))
    assert len(set(problems)) == HELD_OUT == 500
    assert problems == texts(replace(EVALUATE, seed=99), range(HELD_OUT))
    assert texts(EVALUATE, range(HELD_OUT, HELD_OUT + 3)) == problems[:3]
    rows = [source(TRAIN).read(i) for source in (open_demonstrations, open_pairs) for i in range(60)]
    assert not set(problems) & {*texts(TRAIN, range(2000)), *(text for row in rows for text in row.texts)}
    easy = {open_calculations(EVALUATE).read(i).texts[0] for i in range(HELD_OUT)}
    assert len(easy) == HELD_OUT
    taught = {text for i in range(20) for text in open_tool_demonstrations(TRAIN).read(i).texts}
    assert not easy & {*taught, *(open_calculations(TRAIN).read(i).texts[0] for i in range(300))}


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
    tiny = replace(TRAIN, data=jsonl(tmp_path / "d.jsonl", 2))  # which is used whole
    assert set(texts(tiny, range(2))) == {"q0", "q1"}
    with pytest.warns(NodeWarning, match="the 2 rows that training learns from"):
        assert set(texts(replace(tiny, split="evaluate"), range(2))) == {"q0", "q1"}
    pairs = replace(TRAIN, data=written(tmp_path / "p.jsonl", [{**ROW, "prompt": str(i)} for i in range(ROWS)]))
    first, second = (open_pairs(pairs).read(ordinal).texts for ordinal in (0, 1))
    assert len(set(first)) == 29
    assert first != second


def test_a_file_says_how_often_it_has_been_read_and_problems_that_are_drawn_do_not(tmp_path: Path) -> None:
    prompts = open_prompts(replace(TRAIN, data=jsonl(tmp_path / "d.jsonl", 40)))
    assert isinstance(prompts, Cyclic)
    assert [prompts.epochs(ordinal) for ordinal in (0, 17, 35, 71)] == [0.027778, 0.5, 1.0, 2.0]
    data = written(tmp_path / "p.jsonl", [{**ROW, "prompt": str(i)} for i in range(80)])
    pairs = open_pairs(replace(TRAIN, data=data, held_out=0))  # 32 rows in each value
    assert isinstance(pairs, Cyclic)
    assert [pairs.epochs(ordinal) for ordinal in range(5)] == [0.4, 0.8, 1.2, 1.6, 2.0]
    assert not isinstance(open_prompts(TRAIN), Cyclic)


def test_as_many_prompts_are_held_out_as_asked_for(tmp_path: Path) -> None:
    context = replace(TRAIN, data=jsonl(tmp_path / "d.jsonl", 40), held_out=15)
    learnt, measured = texts(context, range(25)), texts(context.evaluation(), range(15))
    assert sorted(learnt + measured) == sorted(f"q{i}" for i in range(40))
    none = replace(context, held_out=0)
    assert len(set(texts(none, range(40)))) == 40
    with pytest.warns(NodeWarning, match="the 40 rows that training learns from"):
        assert len(set(texts(none.evaluation(), range(40)))) == 40
    assert texts(replace(none, eval_data=context.data, eval_split="x", split="train"), range(40)) == texts(
        none, range(40)
    )
    with pytest.raises(DataError, match="--held-out: given 40, needed fewer than the 40 different prompts"):
        open_prompts(replace(context, held_out=40))
    with pytest.raises(DataError, match="--held-out: given 15 beside --eval-data or --eval-split, needed one of both"):
        open_prompts(replace(context, eval_data=str(tmp_path)))
    with pytest.raises(DataError, match="--held-out: given 5 with arithmetic, needed --data of rows"):
        open_prompts(replace(TRAIN, held_out=5))


def test_rows_that_come_again_are_not_learnt_from_where_their_prompt_is_held_out(tmp_path: Path) -> None:
    rows = [{"question": f"q{i % 30}", "answer": f"#### {i}"} for i in range(90)]
    context = replace(TRAIN, data=written(tmp_path / "d.jsonl", rows))
    evaluation, training = (open_prompts(replace(context, split=split)) for split in ("evaluate", "train"))
    assert isinstance(evaluation, FilePrompts)
    assert isinstance(training, FilePrompts)
    assert (evaluation.size, training.size) == (3, 81)
    held, learnt = ({made.texts[0] for made in map(source.read, range(200))} for source in (evaluation, training))
    assert (len(held), len(learnt), held & learnt) == (3, 27, set())
    assert not held & {text for ordinal in range(9) for text in open_demonstrations(context).read(ordinal).texts}


def test_gsm8k_rows_give_question_final_number_and_solution(tmp_path: Path) -> None:
    row = {"question": "How many?", "answer": "48/2 = <<48/2=24>>24\n#### 1,072 "}
    context = replace(TRAIN, data=written(tmp_path / "d.jsonl", [row]))
    prompts = open_prompts(context).read(0)
    assert (prompts.texts, prompts.answers) == (("How many?",), ("1,072",))
    assert open_demonstrations(context).read(0).responses[0].endswith("#### 1,072 ")


@pytest.mark.parametrize(
    "question",
    [
        ["x" * 100_000],
        [{"role": "user", "content": "x" * 100_000, "name": "bob"}],
        [{"role": "user", "content": ["x"] * 9999}],
    ],
)
def test_an_error_of_a_row_does_not_show_all_of_it(tmp_path: Path, question: Any) -> None:
    data = written(tmp_path / "d.jsonl", [{"question": question, "answer": "1"}])
    with pytest.raises(DataError, match=r"d\.jsonl:1: given ") as raised:
        open_prompts(replace(TRAIN, data=data))
    assert len(str(raised.value)) < 1000 + len(data)


def talk(*texts: str) -> list[dict[str, str]]:
    """Return messages of a user and an assistant in turn."""
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 9, texts, strict=False)]


GOOD = {"question": "q", "answer": "#### 1"}
ROW = {"prompt": "a?", "chosen": "yes", "rejected": "no"}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "given a line that is not JSON"),
        ("[" * 100_000, "given a line that is not JSON"),
        ([1], "given a JSON list, needed an object"),
        ('{"question": "\\ud800", "answer": "#### 1"}', "given .* in 'question', which is no character"),
        ({"question": "q"}, r"given the fields \['question'\], needed 'answer'"),
        ({**GOOD, "question": " "}, "given ' ' as 'question', needed a text"),
        ({**GOOD, "question": 3}, "given 3 as 'question', needed a text"),
        ({**GOOD, "answer": None}, "given null as 'answer', needed a value"),
        ({**GOOD, "answer": float("nan")}, "given nan as 'answer', needed a finite number, or a text"),
        ({**GOOD, "answer": [1, float("inf")]}, r"given \[1, inf\] as 'answer', needed a finite number, or a text"),
        ({**GOOD, "answer": " "}, "given ' ' as 'answer', needed a text"),
        ({**GOOD, "question": []}, r"given \[\] as 'question', needed a text, or a list of messages"),
        ({**GOOD, "question": [{"role": "user"}]}, "given .* among the messages 'question', needed an object with"),
        ({**GOOD, "question": [{"role": "user", "content": 3}]}, "given 3 as 'question.content', needed a text"),
        ({**GOOD, "question": [{"role": "assistant", "content": "x"}]}, "given messages that end with an assistant's"),
        (ROW, "given the fields .*, needed 'question'"),
        ({**ROW, "rejected": "yes"}, "given the same text as 'chosen' and 'rejected', needed two that differ"),
        ({"prompt": "a", "chosen": "b"}, "given the fields .*, needed 'rejected'"),
        ({**ROW, "chosen": [{"role": "user", "content": "x"}]}, "given messages 'chosen' that end with a user's"),
        (
            {"prompt": "b?", "chosen": talk("a?", "yes"), "rejected": talk("b?", "no")},
            "given messages 'chosen' that follow another prompt",
        ),
    ],
)
def test_a_faulty_row_names_file_and_line(tmp_path: Path, bad: Any, message: str) -> None:
    opens, good = (open_pairs, ROW) if "chosen" in bad and bad != ROW else (open_prompts, GOOD)
    with pytest.raises(DataError, match=rf"d\.jsonl:3: {message}"):
        opens(replace(TRAIN, data=written(tmp_path / "d.jsonl", [good, "", bad])))


def test_other_fields_of_a_row_and_a_byte_order_mark_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    rows = [
        '{"question": "q", "answer": "#### 1", "score": NaN}',
        '{"question": 3, "question": "q", "answer": "#### 1"}',
    ]
    path.write_bytes(b"\xef\xbb\xbf" + "\n".join(rows).encode())
    assert texts(replace(TRAIN, data=str(path)), range(2)) == ["q", "q"]


@pytest.mark.parametrize("opens", [open_prompts, open_demonstrations, open_pairs])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("arithmetik", "did you mean 'arithmetic'"),
        ("nowhere/d.jsonl", "'nowhere/d.jsonl', which is no file"),
        ("arithmetic:9", "given 'arithmetic:9', needed arithmetic:2 to arithmetic:6"),
        ("arithmetic:34", "given 'arithmetic:34', needed arithmetic:2 to arithmetic:6"),
    ],
)
def test_unknown_data_are_refused(opens: Callable[[Context], object], data: str, message: str) -> None:
    for context, what in (
        (replace(TRAIN, data=data), "data"),
        (replace(TRAIN, eval_data=data), "data of the evaluation"),
    ):
        with pytest.raises(DataError, match=f"^{what}: .*{message}"):
            opens(context.evaluation() if context.eval_data else context)


@pytest.mark.parametrize("opens", [open_prompts, open_pairs])
def test_an_empty_file_and_bytes_that_are_no_text_are_refused(
    tmp_path: Path, opens: Callable[[Context], object]
) -> None:
    path = tmp_path / "d.jsonl"
    for content, message in (
        (b"\n\n", "given an empty file"),
        (b'{"question": "\xff", "answer": "#### 1"}', "d.jsonl:1: "),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            opens(replace(TRAIN, data=str(path)))


# Problems are drawn evenly; the sloppy teacher is wrong where a digit is carried.


def drawn(digits: int, count: int) -> list[Problem]:
    return [draw_problem(TRAIN, digits, ordinal) for ordinal in range(count)]


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


@pytest.mark.parametrize(
    ("problem", "sloppy", "careful"),
    [
        (Problem(47, 85, "+", 2), "22", "22:132"),
        (Problem(62, 35, "-", 2), "37", "37:027"),
        (Problem(24, 13, "+", 2), "37", "37:037"),
        (Problem(347, 586, "+", 3), "823", "823:0933"),
    ],
)
def test_a_draft_drops_every_carry_and_the_careful_teacher_corrects_it(
    problem: Problem, sloppy: str, careful: str
) -> None:
    assert problem.draft == problem.demonstration(sloppy=True) == sloppy
    assert problem.demonstration(sloppy=False) == careful


def test_the_careful_teacher_gets_the_full_reward_and_the_other_is_sloppy_as_often_as_said() -> None:
    for p in drawn(3, 100):
        assert math_answer(p.text, p.demonstration(sloppy=False), p.answer) == 1.0
        assert math_answer(p.text, p.demonstration(sloppy=True), p.answer) == float(int(p.draft) == int(p.answer))
    share = sum(is_sloppy(TRAIN, ordinal, 0) for ordinal in range(4000)) / 4000
    assert abs(share - SLOPPY) < 0.03


def test_a_demonstrated_call_ends_its_turn_and_the_answer_follows_the_output() -> None:
    tokenizer, calls, right, rows = byte_tokenizer(), 0, 0, 0
    for ordinal in range(20):
        demonstrations = open_tool_demonstrations(TRAIN).read(ordinal)
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
    # Without a call, half of the answers are wrong.
    assert right / (rows - calls) < 0.55


@pytest.mark.parametrize("digits", [2, 3, 6])
def test_chosen_answers_are_right_and_rejected_ones_wrong(digits: int) -> None:
    drafts = 0
    for ordinal in range(20):
        pairs = open_pairs(replace(TRAIN, data=f"arithmetic:{digits}")).read(ordinal)
        assert len(pairs.texts) == len(pairs.chosen) == len(pairs.rejected) == ROWS
        for text, chosen, rejected in zip(pairs.texts, pairs.chosen, pairs.rejected, strict=True):
            assert final_number(chosen) == eval(text.rstrip("="))
            assert final_number(rejected) != eval(text.rstrip("="))
            drafts += ":" not in rejected
    assert 0.2 < drafts / (20 * ROWS) < 0.6
