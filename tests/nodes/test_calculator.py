"""The teacher's calls are calls that the tool understands, and half of its answers in the head are wrong."""

from penstock.graph.types import Context
from penstock.nodes.data import CALLS, open_calculations, open_tool_demonstrations
from penstock.nodes.environments.python_tool import find_call
from penstock.nodes.score import math_answer
from penstock.nodes.tokenizer import byte_tokenizer

CONTEXT = Context(node="demonstrations", seed=5)


def test_a_demonstrated_call_ends_its_turn_and_the_answer_follows_the_output() -> None:
    tokenizer, calls, right, rows = byte_tokenizer(), 0, 0, 0
    for ordinal in range(20):
        demonstrations = open_tool_demonstrations(CONTEXT).read(ordinal)
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
    train = open_calculations(CONTEXT)
    held_out = open_calculations(Context(split="evaluate"))
    assert train.read(3) == open_calculations(CONTEXT).read(3)
    kept = {held_out.read(i).texts for i in range(500)}
    assert len(kept) == 500
    assert not kept & {train.read(i).texts for i in range(300)}
