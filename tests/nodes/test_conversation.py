"""Conversations: turns, replies of another model, environments, the guessing game."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.graph import (
    Context,
    Graph,
    GraphError,
    Metrics,
    Policy,
    Prompts,
    Rewards,
    Rollouts,
    Weights,
    alternate,
    broadcast,
    check,
    node,
    program,
    trace,
)
from penstock.graph.node import NodeDef
from penstock.graph.protocols import Stream
from penstock.graph.types import Replies, TokenAdvantages, TurnRewards
from penstock.nodes.advantage import group_advantage
from penstock.nodes.environments.environment import Calls, OverdueError, environment, outcome, stack_of, turn_rewards
from penstock.nodes.environments.guessing_game import guessing_game, open_secrets
from penstock.nodes.environments.python_tool import python_tool
from penstock.nodes.fake import FakePolicy, FakePrompts, fake_generate, fake_score, fake_update
from penstock.nodes.generate import as_said, converse, generate, make_engine, make_replier, reply
from penstock.nodes.generate.engine import Engine
from penstock.nodes.generate.groups import OutgrownWarning
from penstock.nodes.generate.sampling import mismatch
from penstock.nodes.learn.batching import pack, sampled_mask, turn_of_tokens
from penstock.nodes.learn.logprobs import packed_logprobs
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.model import CausalLM
from penstock.nodes.open_model import open_model
from penstock.nodes.tokenizer import byte_tokenizer
from tests.nodes.rollouts import random_rollouts
from tests.nodes.tiny_model import TOKENIZER, model, weights
from tests.pages import SMALL, run

pytestmark = pytest.mark.timeout(120)


# Turns: a row goes on from the very tokens that were sampled; tokens that were not sampled are context, no target.


SAMPLES = 3


@pytest.fixture(scope="module")
def engine(context: Context) -> Engine:
    """One engine for all tests of turns: a row does not depend on what its engine has sampled before."""
    return make_engine(replace(context, max_tokens=6, options={}), samples=SAMPLES)


def prompts(ordinal: int) -> Prompts:
    return Prompts((ordinal,), ("37+58=" * (1 + ordinal % 3),), ("95",))


def answers(rollouts: Rollouts, done: Any = ()) -> Replies:
    """Return replies that depend on group, row and turn; the rows in `done` have ended."""
    turns = rollouts.turns()
    texts = tuple(f"<{'+-'[row % 2]}{rollouts.ordinals[row]}{turns[row]}>" for row in range(len(rollouts)))
    done_N = torch.tensor([row in done for row in range(len(rollouts))])
    return Replies(texts, ("user",) * len(texts), done_N)


def turn(engine: Engine, groups: dict[int, dict[str, Any]], behaviour: Weights) -> dict[int, Rollouts]:
    for ordinal, more in groups.items():
        engine.submit(ordinal, {"prompts": prompts(ordinal), "behaviour": behaviour, **more})
    results: dict[int, Rollouts] = {}
    while engine.busy():
        results |= {tag: rollouts for tag, (rollouts, _) in engine.step()}
    return results


def go_on(engine: Engine, before: dict[int, Rollouts], done: Any = (), behaviour: Weights | None = None) -> Any:
    """Sample the next turn of some groups together; the rows in `done` have ended."""
    more = {o: {"conversation": r, "replies": answers(r, done)} for o, r in before.items()}
    return turn(engine, more, behaviour or weights())


def play(engine: Engine, ordinals: Any, turns: int = 3, done: Any = ()) -> list[dict[int, Rollouts]]:
    """Sample all turns of some groups together; the rows in `done` end after their first turn."""
    made = [turn(engine, {ordinal: {} for ordinal in ordinals}, weights())]
    for _ in range(turns - 1):
        made.append(go_on(engine, made[-1], done))
    return made


def row_of(rollouts: Rollouts, row: int) -> list[Any]:
    """Return all that is known of one conversation, without padding."""
    begin, length = int(rollouts.prompt_lengths_N[row]), int(rollouts.response_lengths_N[row])
    return [
        rollouts.tokens_NS[row, : begin + length].tolist(),
        rollouts.logprobs_NT[row, :length].tolist(),
        rollouts.versions_NT[row, :length].tolist(),
        bool(rollouts.finished_N[row]),
        rollouts.texts[row],
        rollouts.transcripts[row],
    ]


def test_a_row_is_the_same_bits_whatever_its_neighbours_across_turns(engine: Engine) -> None:
    """It does not matter if the neighbours go on or are done."""
    together, backwards = play(engine, range(12)), play(engine, reversed(range(12)))
    for ordinal in range(12):
        alone = play(engine, [ordinal]) if ordinal in (2, 7) else backwards
        for first, second, third in zip(together, backwards, alone, strict=True):
            for row in range(SAMPLES):
                assert row_of(first[ordinal], row) == row_of(second[ordinal], row) == row_of(third[ordinal], row)
    some_done = play(engine, range(4), done={0, 2})[-1]
    assert all(row_of(together[-1][o], 1) == row_of(some_done[o], 1) for o in range(4))


def test_tokens_are_never_encoded_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a turn begin with those of the turn before; only the reply is encoded, once."""
    encoded: list[str] = []
    inner = engine.tokenizer._encode

    def noted(text: str, **kind: bool) -> list[int]:
        encoded.append(text)
        return inner(text, **kind)

    monkeypatch.setattr(engine.tokenizer, "_encode", noted)
    made = play(engine, [5], turns=4)
    for before, after in pairwise(made):
        replies = answers(before[5])
        for row in range(SAMPLES):
            old, new = row_of(before[5], row), row_of(after[5], row)
            reply = TOKENIZER.encode_reply(replies.texts[row], "user", after_stop=True)
            assert new[0][: len(old[0]) + len(reply)] == old[0] + reply
            assert new[1][: len(old[1])] == old[1]
            assert new[2][: len(old[2]) + len(reply)] == old[2] + [-1] * len(reply)
            assert new[5][:-1] == [*old[5], replies.texts[row]]
    assert encoded == ["37+58=" * 3, *(text for step in made[:-1] for text in answers(step[5]).texts)]


def test_tokens_keep_the_version_that_made_them_and_nobody_s_have_none(engine: Engine) -> None:
    first = turn(engine, {1: {}}, weights(4))[1]
    second = go_on(engine, {1: first}, behaviour=weights(7, seed=2))[1]
    mask_NT = sampled_mask(second)
    for row in range(SAMPLES):
        said, whole = int(first.response_lengths_N[row]), int(second.response_lengths_N[row])
        heard = len(TOKENIZER.encode(answers(first).texts[row]))
        assert row_of(second, row)[2] == [4] * said + [-1] * heard + [7] * (whole - said - heard)
        assert mask_NT[row].tolist() == [
            step < said or said + heard <= step < whole for step in range(mask_NT.shape[1])
        ]
        assert not second.logprobs_NT[row, said : said + heard].any()
    assert second.turns() == [2] * SAMPLES


def test_the_next_turn_is_what_the_plain_forward_says_of_the_whole_conversation(
    context: Context, engine: Engine
) -> None:
    assert mismatch(model(), play(engine, [4])[-1][4]) < 1e-5
    rollouts = play(make_engine(context, samples=1, temperature=0.0), [4])[-1][4]
    ids, begin = rollouts.tokens_NS[0], int(rollouts.prompt_lengths_N[0])
    with torch.no_grad():
        likeliest_S = model().logits(model()(ids[None]))[0].argmax(-1)
    places = [begin + t for t, version in enumerate(rollouts.versions_NT[0].tolist()) if version == 0]
    assert ids[places].tolist() == likeliest_S[[place - 1 for place in places]].tolist()


def test_each_token_has_a_draw_of_its_own(engine: Engine) -> None:
    """A row has the key of its sample, and positions count through the whole conversation."""
    first = turn(engine, {1: {}}, weights())[1]
    empty = replace(first, response_lengths_N=torch.ones(SAMPLES, dtype=torch.long), tokens_NS=first.tokens_NS[:, :13])
    empty = replace(empty, logprobs_NT=first.logprobs_NT[:, :1], versions_NT=first.versions_NT[:, :1])
    empty.tokens_NS[:, 12] = empty.tokens_NS[0, 12]
    same = Replies(("+",) * SAMPLES, ("user",) * SAMPLES, torch.zeros(SAMPLES, dtype=torch.bool))
    after = turn(engine, {1: {"conversation": empty, "replies": same}}, weights())[1]
    assert len({tuple(row_of(after, row)[0]) for row in range(SAMPLES)}) > 1


def test_rows_that_are_done_pass_through(engine: Engine) -> None:
    first = turn(engine, {3: {}}, weights())
    second, nothing = (go_on(engine, first, done)[3] for done in ({0, 2}, {0, 1, 2}))
    assert second.turns() == [1, 2, 1]
    assert [row_of(second, row) == row_of(first[3], row) for row in range(SAMPLES)] == [True, False, True]
    assert all(row_of(nothing, row) == row_of(first[3], row) for row in range(SAMPLES))


def test_a_row_that_has_ended_is_not_opened_again(engine: Engine) -> None:
    """Whatever an environment says of it at later turns of other rows."""
    first = turn(engine, {3: {}}, weights())
    second = go_on(engine, first, {0})
    third, none = (go_on(engine, second, done)[3] for done in ((), {1, 2}))
    assert third.turns() == [1, 3, 3]
    assert second[3].in_newest_turn() == [False, True, True]
    assert row_of(third, 0) == row_of(first[3], 0)
    assert go_on(engine, {3: none})[3].turns() == [1, 2, 2]  # all have ended


def test_a_conversation_that_outgrows_its_room_ends_unfinished(context: Context) -> None:
    """A turn without room is no error, and does not change other rows."""
    short = replace(context, max_tokens=6, max_prompt=18)
    engine = make_engine(short, samples=SAMPLES)
    first = turn(engine, {2: {}, 3: {}}, weights())
    message = r"group 2, row 0: given a conversation of 2\d tokens, needed at most 18 [(]--max-prompt[)]"
    with pytest.warns(OutgrownWarning, match=message) as told:
        second = go_on(engine, first)
    assert len(told) == 1
    for row in range(SAMPLES):
        old, new = row_of(first[2], row), row_of(second[2], row)
        assert new[:4] == [*old[:3], False]
    brief = Replies((":",) * SAMPLES, ("user",) * SAMPLES, torch.zeros(SAMPLES, dtype=torch.bool))
    third = turn(engine, {2: {"conversation": second[2], "replies": brief}}, weights())[2]
    assert not any(third.in_newest_turn())
    assert all(row_of(third, row) == row_of(second[2], row) for row in range(SAMPLES))
    alone = play(make_engine(short, samples=SAMPLES), [3], turns=2)[-1][3]
    fits = [row for row, turns in enumerate(second[3].turns()) if turns == 2]
    assert fits
    assert all(row_of(second[3], row) == row_of(alone, row) for row in fits)
    _, _, metrics = generate.fn(engine, prompts(2), weights(), first[2], answers(first[2]), samples=SAMPLES)
    assert metrics == {"outgrown": 1.0, "generated_tokens": 0.0}


def test_the_node_called_directly_gives_what_the_stream_gives_in_later_turns(engine: Engine) -> None:
    _, first, metrics = generate.fn(engine, prompts(1), weights(), samples=SAMPLES)
    assert "outgrown" not in metrics
    _, second, metrics = generate.fn(engine, prompts(1), weights(), first, answers(first), samples=SAMPLES)
    streamed = play(engine, [1], turns=2)[-1][1]
    assert all(row_of(second, row) == row_of(streamed, row) for row in range(SAMPLES))
    assert metrics["outgrown"] == 0.0
    sampled = sampled_mask(second).sum() - sampled_mask(first).sum()
    assert metrics["response_length"] == pytest.approx(float(sampled) / SAMPLES)


def test_a_reset_forgets_conversations_too(engine: Engine) -> None:
    first = turn(engine, {1: {}}, weights())[1]
    for done in ({0, 1, 2}, ()):
        more = {"conversation": first, "replies": answers(first, done)}
        engine.submit("lost", {"prompts": prompts(1), "behaviour": weights(), **more})
        assert engine.busy()
        engine.reset()
        assert not engine.busy()


def test_groups_of_any_turns_join_into_a_batch(engine: Engine) -> None:
    made = play(engine, [0, 1])
    batch = Rollouts.concat([made[0][0], made[2][1]])
    assert batch.turns() == [1] * SAMPLES + [3] * SAMPLES
    assert int(sampled_mask(batch).sum()) == sum(int(sampled_mask(r).sum()) for r in (made[0][0], made[2][1]))


@pytest.mark.parametrize(
    ("options", "changed", "silent", "error"),
    [
        ({"samples": 2}, {}, False, "group 1: given a conversation of 3 rows and 3 replies, needed 2 of each"),
        ({}, {}, True, r"group 1, row 1: given a reply without a token \(''\)"),
        ({}, {"logprobs_NT": None}, False, r"^generate, group 1: given rollouts without log μ .*needed"),
        ({"temperature": 0.6}, {}, False, r"^generate, group 1: given a conversation of temperature 1, needed "),
    ],
)
def test_what_does_not_match_is_an_error(
    context: Context, engine: Engine, options: dict[str, Any], changed: dict[str, Any], silent: bool, error: str
) -> None:
    first = turn(engine, {1: {}}, weights())[1]
    replies = replace(answers(first, done={0}), texts=("", "", "+")) if silent else answers(first)
    other = make_engine(context, **{"samples": SAMPLES, **options})
    with pytest.raises(ValueError, match=error):
        turn(other, {1: {"conversation": replace(first, **changed), "replies": replies}}, weights())


def gradient(rollouts: Rollouts) -> dict[str, torch.Tensor]:
    learner = model()
    for packed in pack(rollouts, 256):
        logprobs_P, _ = packed_logprobs(learner, packed)
        ratio_P = torch.exp(logprobs_P - rollouts.logprobs_NT[packed.sequence_P, packed.step_P])
        ratio_P.sum().backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in learner.named_parameters() if p.grad is not None}


def test_what_an_environment_said_is_context_and_no_target(engine: Engine) -> None:
    """A gradient depends on the environment's tokens, but not on their log-probabilities."""
    rollouts = play(engine, [2], turns=2)[-1][2]
    (packed,) = pack(rollouts, 4096)
    assert len(packed.targets_P) == int(sampled_mask(rollouts).sum())
    assert bool((rollouts.versions_NT[packed.sequence_P, packed.step_P] >= 0).all())
    tokens_NS, nobody_NT, expected = rollouts.tokens_NS.clone(), rollouts.versions_NT < 0, gradient(rollouts)
    place = int(rollouts.prompt_lengths_N[0]) + int(nobody_NT[0].nonzero()[0])
    tokens_NS[0, place] = (tokens_NS[0, place] + 1) % 10
    priced = gradient(replace(rollouts, logprobs_NT=rollouts.logprobs_NT.masked_fill(nobody_NT, -77.0)))
    changed = gradient(replace(rollouts, tokens_NS=tokens_NS))
    assert all(torch.equal(expected[name], priced[name]) for name in expected)
    assert not all(torch.equal(expected[name], changed[name]) for name in expected)


def test_all_turns_are_sampled_at_the_temperature_that_the_rows_say(context: Context) -> None:
    cool = play(make_engine(context, samples=SAMPLES, temperature=0.6), [2], done=[1])[-1][2]
    assert cool.temperature_N.tolist() == pytest.approx([0.6] * SAMPLES)
    assert mismatch(model(), cool) < 1e-5
    with pytest.raises(ValueError, match=r"^mismatch: given rollouts without log μ .*needed"):
        mismatch(model(), replace(cool, logprobs_NT=None))


# A model that answers another model sees the conversation from the other side, in its own tokens.


CONTEXT = Context(node="reply", seed=3, data="by bytes", max_tokens=5, slots=8, max_prompt=60)


def asked(prompt: str, response: str, answer: str) -> str:
    return f"{prompt}|{response}|{answer}"


def reply_weights() -> Weights:
    model, _ = open_model(CausalLM, CONTEXT)
    return Weights(0, dict(model.named_parameters()))


def rollouts(*transcripts: list[str]) -> Rollouts:
    """Return conversations of one group, in tokens that the answering model does not have."""
    count = len(transcripts)
    made = random_rollouts([(1, 3)] * count)
    texts = tuple(transcript[-1] for transcript in transcripts)
    names, answers = tuple(f"p{row}" for row in range(count)), tuple(str(row) for row in range(count))
    foreign = torch.full_like(made.tokens_NS, 10**6)
    return replace(
        made, prompts=names, answers=answers, texts=texts, transcripts=transcripts, tokens_NS=foreign, turn_rewards=()
    )


def answered(
    said: Rollouts,
    earlier: Replies | None = None,
    context: Context = CONTEXT,
    over: Callable[[str], bool] | None = None,
    reward: Callable[[str], float] | None = None,
) -> Replies:
    replier = make_replier(context, ask=asked, over=over, reward=reward, temperature=0.0)
    _, replies, _ = reply.fn(
        replier, said, reply_weights(), earlier, ask=asked, over=over, reward=reward, temperature=0.0
    )
    assert not replier.busy()
    return replies  # type: ignore[no-any-return]


def generated(*texts: str) -> tuple[str, ...]:
    """Return what the same model says to the texts, asked one by one."""
    prompts = Prompts(tuple(range(len(texts))), texts, ("",) * len(texts))
    engine = make_engine(replace(CONTEXT, node="generate"), samples=1, temperature=0.0)
    _, made, _ = generate.fn(engine, prompts, reply_weights(), samples=1, temperature=0.0)
    assert isinstance(made, Rollouts)
    return made.texts


def test_a_turn_is_answered_in_view_of_all_before() -> None:
    """The first turn is asked as the question that `ask` makes of it."""
    replies = answered(rollouts(["12"], ["?"]))
    assert replies.texts == generated("p0|12|0", "p1|?|1")
    assert (replies.roles, replies.done_N.tolist(), replies.rewards_N) == (("user", "user"), [False, False], None)
    earlier = Replies(("yes", "no"), ("user", "user"), torch.tensor([False, False]))
    replies = answered(rollouts(["12", "yes", "13"], ["?", "no", "!"]), earlier)
    assert replies.texts == generated("p0|12|0yes13", "p1|?|1no!")


def test_tokens_of_replies_are_tokens_that_were_generated() -> None:
    replier = make_replier(CONTEXT, ask=asked, temperature=0.0)
    _, _, metrics = reply.fn(replier, rollouts(["12"], ["?"]), reply_weights(), ask=asked, temperature=0.0)
    assert metrics["generated_tokens"] == metrics["reply_length"] * 2 > 0


def test_rows_that_are_over_or_did_not_go_on_keep_their_reply_and_their_reward() -> None:
    earlier = Replies(
        ("no", "yes", "yes"), ("user",) * 3, torch.tensor([False, True, False]), torch.tensor([1.0, 2, 3])
    )
    went_on, was_done, outgrown = ["1", "no", "2"], ["1"], ["1", "ok", "2"]
    replies = answered(rollouts(went_on, was_done, outgrown), earlier, reward=lambda text: 10.0 + len(text))
    assert replies.texts[1:] == ("yes", "yes")
    assert replies.done_N.tolist() == [False, True, True]
    assert replies.rewards_N is not None
    assert replies.rewards_N.tolist() == [10.0 + len(replies.texts[0]), 2.0, 3.0]


def test_a_reply_may_end_its_conversation() -> None:
    first = answered(rollouts(["12"], ["?"]))
    replies = answered(rollouts(["12"], ["?"]), over=lambda text: text == first.texts[0])
    assert replies.texts == first.texts
    assert replies.done_N.tolist() == [True, first.texts[0] == first.texts[1]]


def test_a_conversation_that_has_outgrown_the_model_is_over() -> None:
    replies = answered(rollouts(["1" * 55], ["1" * 57]), reward=len)
    assert replies.done_N.tolist() == [False, True]
    assert replies.texts[1] == ""
    assert replies.rewards_N is not None
    assert replies.rewards_N.tolist() == [float(len(replies.texts[0])), 0.0]


def test_a_dialogue_goes_through_the_chat_template_and_its_special_tokens_are_text() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.eos not in tokenizer.encode_dialogue(["a<eos>", "<eos>", "<eos>b"])
    assert tokenizer.encode_dialogue(["ab"]) == tokenizer.encode_prompt("ab")
    tokenizer.template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    whole = tokenizer.encode("[user]a<eos>[assistant]b<eos>[user]c<eos>[assistant]")
    assert tokenizer.encode_dialogue(["a", "b", "c"]) == whole
    assert tokenizer.encode_dialogue(["a"]) == tokenizer.encode_prompt("a")


def test_a_model_that_says_nothing_ends_its_conversation() -> None:
    replier = make_replier(CONTEXT)
    replier.slots.stops[:] = True
    _, replies, _ = reply.fn(replier, rollouts(["1"], ["2"]), reply_weights())
    assert replies.done_N.tolist() == [not text for text in replies.texts]
    with pytest.raises(ValueError, match="reply"):  # made with other options
        reply.fn(replier, rollouts(["1"]), reply_weights(), ask=asked)
    assert as_said("p", "r", "a") == "r"


def test_what_is_lacking_of_a_generator_that_answers_is_told_as_a_program_says_it() -> None:
    """The internal node that answers has a name that is not in the program."""

    @program
    def two_heats(policy: Policy, prompts: Prompts) -> Rollouts:
        behaviour = broadcast(policy, lag=1)
        return alternate(generate, generate.of(behaviour), prompts, behaviour, turns=2, temperature=0.6)[0]

    @program
    def no_weights(policy: Policy, prompts: Prompts) -> Rollouts:
        return alternate(generate, generate, prompts, broadcast(policy, lag=1), turns=2)[0]

    for made, needed in ((two_heats, "generate.of(…).given(temperature=…)"), (no_weights, "generate.of(…)")):
        with pytest.raises(GraphError) as caught:
            trace(made)
        assert caught.value.faults[0].needed.endswith(needed)


# Environments answer several groups at once, each within a deadline, and give the rewards of conversations.


@environment
def content(rollouts: Rollouts, *, word: str = "fine") -> Replies:
    """Give every row the same reply, and end it."""
    return Replies((word,), ("user",), torch.tensor([True]))


@environment(pool="arcade", deadline=5.0)
def counted(rollouts: Rollouts, *, seconds: float = 0.0) -> tuple[Replies, Metrics]:
    time.sleep(seconds)
    return Replies(("",), ("user",), torch.tensor([True])), {"rows": 1.0}


@environment
def own_deadline(rollouts: Rollouts, *, deadline: float = 1.0) -> Replies:
    raise NotImplementedError


@program
def chat(policy: FakePolicy, prompts: FakePrompts, *, deadline: float = 60.0) -> FakePolicy:
    rollouts, _ = alternate(fake_generate, content, prompts, broadcast(policy), turns=2, deadline=deadline)
    return fake_update(policy, rollouts, fake_score(rollouts))


@program
def twice_named(policy: FakePolicy, prompts: FakePrompts) -> FakePolicy:
    rollouts, _ = alternate(fake_generate, own_deadline, prompts, broadcast(policy), turns=2)
    return fake_update(policy, rollouts, fake_score(rollouts))


def test_the_graph_knows_its_pool_its_deadline_and_that_it_works_on_several_groups_at_once() -> None:
    graph = trace(chat, {"deadline": 2.5})
    node = graph["content"]
    assert (node.pool, node.stream, node.stateful, node.answers) == ("environment", True, False, True)
    assert dict(node.options) == {"deadline": 2.5, "word": "fine"}
    assert [o.name for o in node.outputs] == ["out"]
    assert check(graph, batch=2) == []
    loaded = Graph.from_json(json.loads(json.dumps(graph.to_json())))
    assert (loaded, loaded.digest()) == (graph, graph.digest())


def test_the_deadline_is_the_decorator_s_unless_the_program_says_another() -> None:
    assert dict(content.interface.options) == {"word": "fine", "deadline": 60.0}
    assert content(None, word="well").texts == ("well",)  # type: ignore[arg-type]
    assert (counted.interface.options["deadline"], counted.pool) == (5.0, "arcade")
    assert dict(python_tool.interface.options)["deadline"] > dict(guessing_game.interface.options)["deadline"]
    for deadline in (0.0, -1.0):
        assert [fault.code for fault in check(trace(chat, {"deadline": deadline}), batch=2)] == ["out-of-range"]
    with pytest.raises(GraphError, match="own_deadline: option 'deadline'"):
        trace(twice_named, {})


def test_a_worker_s_state_is_the_calls_and_what_they_return_fits_the_node() -> None:
    for definition, options, metrics in ((content, {"word": "so"}, {}), (counted, {"seconds": 0.0}, {"rows": 1.0})):
        assert definition.init is not None
        calls = definition.init(Context(), deadline=60.0, **options)
        submit(calls, ["x"], "rollouts")
        state, outputs, figures = definition.split(answered_to(calls, 1)["x"], stateful=False)
        assert state is None
        assert isinstance(outputs["out"], Replies)
        assert figures == metrics
    with pytest.raises(TypeError, match=r"counted returned tuple\[Rewards, dict\], needed tuple\[.*Replies, Metrics\]"):
        counted.split((Rewards(torch.ones(1)), {}), stateful=False)


PATIENCE_S = 60.0


class Clock:
    """The clock of deadlines. It moves only when a test moves it, so that a call has time to reach its hang."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("penstock.nodes.environments.environment.monotonic", made)
    return made


def until(look: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not look():
        assert time.monotonic() < end


def answered_to(calls: Calls, count: int) -> dict[Any, Any]:
    """Step until `count` firings have ended."""
    found: dict[Any, Any] = {}
    until(lambda: found.update(calls.step()) or len(found) == count)
    return found


def submit(calls: Calls, values: Sequence[Any], name: str = "value") -> None:
    for value in values:
        calls.submit(value, {name: value})


def test_as_many_calls_are_in_work_as_there_are_firings() -> None:
    """Three calls that wait for each other end only if they run at once."""
    meet = threading.Barrier(3, timeout=PATIENCE_S)

    def together(value: int) -> tuple[int, dict[str, float]]:
        meet.wait()
        return value, {}

    calls = Calls(together, PATIENCE_S)
    assert isinstance(calls, Stream)
    submit(calls, range(3))
    assert calls.busy()
    assert answered_to(calls, 3) == {value: (value, {}) for value in range(3)}
    assert not calls.busy()
    submit(calls, range(2))
    calls.reset()
    assert not calls.busy()
    assert len(calls.abandoned) == 2
    assert calls.step() == []


def test_a_call_that_has_ended_is_not_given_up_with_those_in_work() -> None:
    """Another thread may have its thread's number by then, and would get the exception."""
    go_on = threading.Event()

    def waits(value: int) -> tuple[int, dict[str, float]]:
        if value:
            go_on.wait(PATIENCE_S)
        return value, {}

    calls = Calls(waits, PATIENCE_S)
    submit(calls, range(2))
    until(lambda: not calls.calls[0].thread.is_alive())
    calls.reset()
    go_on.set()
    assert len(calls.abandoned) == 1


@pytest.mark.parametrize("error", [ZeroDivisionError("broke"), SystemExit(3), KeyboardInterrupt()])
def test_a_call_that_raises_fails_alone(error: BaseException) -> None:
    def breaks(value: int) -> tuple[int, dict[str, float]]:
        if value == 1:
            raise error
        return value, {}

    calls = Calls(breaks, PATIENCE_S)
    submit(calls, range(3))
    assert answered_to(calls, 3) == {0: (0, {}), 1: error, 2: (2, {})}


def test_an_overdue_call_fails_by_name_and_place_and_is_counted_until_it_ends(clock: Clock) -> None:
    reader, writer = os.pipe()

    def reads(value: str) -> tuple[str, dict[str, float]]:
        if value == "hangs[3.1]":
            os.read(reader, 1)
        return value, {"served": 1.0}

    calls = Calls(reads, 0.2)
    submit(calls, ["hangs[3.1]"])
    until(lambda: "os.read(reader, 1)" in stack_of(calls.calls["hangs[3.1]"].thread))
    assert calls.step() == []
    clock.now += 0.2
    error = answered_to(calls, 1)["hangs[3.1]"]
    assert isinstance(error, OverdueError)
    assert "hangs[3.1]: given no reply within 0.2 s, needed one (deadline=0.2); it was at" in str(error)
    assert "os.read(reader, 1)" in str(error)
    assert str(error).count("File ") == 1  # only the function's own line
    calls.deadline = PATIENCE_S
    submit(calls, ["quick"])
    assert answered_to(calls, 1) == {"quick": ("quick", {"served": 1.0, "abandoned": 1.0})}
    (thread,) = calls.abandoned
    os.write(writer, b"x")
    until(lambda: not thread.is_alive())
    submit(calls, ["quick"])
    assert answered_to(calls, 1) == {"quick": ("quick", {"served": 1.0})}
    os.close(reader)
    os.close(writer)


def test_a_time_in_which_the_whole_process_stood_still_makes_no_call_overdue(clock: Clock) -> None:
    gate = threading.Event()

    def waits(value: int) -> tuple[int, dict[str, float]]:
        gate.wait(PATIENCE_S)
        return value, {}

    calls = Calls(waits, 3.0)
    clock.now += 60.0  # before there was a call
    submit(calls, range(2))
    clock.now += 60.0
    assert calls.step() == []
    gate.set()
    assert answered_to(calls, 2) == {0: (0, {}), 1: (1, {})}
    gate.clear()
    submit(calls, [3])
    clock.now += 60.0  # before there was the next call
    submit(calls, [2])

    def overdue_after(seconds: float) -> list[object]:
        clock.now += seconds
        found = calls.step()
        assert all(isinstance(error, OverdueError) for _, error in found)
        return [tag for tag, _ in found]

    assert [overdue_after(1.0) for _ in range(3)] == [[], [3], [2]]
    # A delay that comes again and again is other work of the process, and counts.
    submit(calls, [4])
    assert [overdue_after(20.0) for _ in range(2)] == [[], [4]]
    gate.set()


def test_the_thread_of_a_loop_without_end_is_ended(clock: Clock) -> None:
    begun = threading.Event()

    def loops(value: int) -> None:
        begun.set()
        while True:
            try:
                while True:
                    pass
            except Exception:
                continue

    calls = Calls(loops, 0.2)
    submit(calls, [0])
    until(begun.is_set)
    clock.now += 0.2
    assert isinstance(answered_to(calls, 1)[0], OverdueError)
    (thread,) = calls.abandoned
    until(lambda: not thread.is_alive())


def test_the_late_result_of_a_call_is_not_taken_for_that_of_a_later_one(clock: Clock) -> None:
    first, second = threading.Event(), threading.Event()
    gates = [first, second]

    def waits(value: int) -> tuple[str, dict[str, float]]:
        gate = gates.pop(0)
        gate.wait(PATIENCE_S)
        return ("first" if gate is first else "second"), {}

    calls = Calls(waits, 0.2)
    submit(calls, [7])
    until(lambda: gates == [second])
    clock.now += 0.2
    assert isinstance(answered_to(calls, 1)[7], OverdueError)
    calls.deadline = PATIENCE_S
    submit(calls, [7])
    first.set()
    until(lambda: not calls.abandoned[0].is_alive())
    assert calls.step() == []
    second.set()
    assert answered_to(calls, 1)[7][0] == "second"


@pytest.mark.parametrize(
    "hang",
    [
        "time.sleep(3600)",
        "[None for _ in iter(int, 1)]",
        pytest.param("os.read(os.pipe()[0], 1)", marks=pytest.mark.slow),
    ],
)
def test_a_call_that_hangs_does_not_keep_its_process(hang: str) -> None:
    code = f"""
import os, time
from penstock.nodes.environments.environment import Calls
calls = Calls(lambda value: {hang}, 0.1)
calls.submit("a", {{"value": 1}})
while not calls.step():
    pass
calls.submit("b", {{"value": 2}})
print("over")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "over\n", "")


# The game says higher or lower, ends when the guess is right, and chooses its secrets by ordinal.


def game_rollouts(texts: list[str], answers: list[str]) -> Rollouts:
    made = random_rollouts([(1, 1)] * len(texts))
    return replace(made, ordinals=(3,) * len(texts), answers=tuple(answers), texts=tuple(texts))


def test_each_guess_is_answered_and_the_right_one_ends_the_game_with_reward_one() -> None:
    replies, metrics = guessing_game.fn(game_rollouts(["3", "I say 7 or 5", "what", "5"], ["5"] * 4), unclear="?")
    assert replies.texts[:3] == ("higher", "lower", "?")
    assert replies.done_N.tolist() == [False, False, False, True]
    assert replies.rewards_N is not None
    assert replies.rewards_N.tolist() == [0, 0, 0, 1]
    assert (replies.done, metrics) == (False, {"unclear": 0.25})
    assert guessing_game.fn(game_rollouts(["5"], ["5"]))[0].done
    with pytest.raises(ValueError, match="group 3: given the secret 'five', needed a whole number"):
        guessing_game.fn(game_rollouts(["3"], ["five"]))


def test_secrets_follow_from_seed_and_ordinal_and_stay_in_their_range() -> None:
    source = open_secrets(Context(node="prompts", seed=4, options={"low": 3, "high": 6}))
    again = open_secrets(Context(node="prompts", seed=4, options={"low": 3, "high": 6}))
    assert [source.read(i) for i in range(50)] == [again.read(i) for i in range(50)]
    assert {source.read(i).answers[0] for i in range(50)} == set("3456")
    assert source.read(7).texts == ("3-6:",)
    held_out = open_secrets(Context(split="evaluate"))
    assert [held_out.read(i).answers[0] for i in range(12)] == list("012345678901")
    with pytest.raises(ValueError, match="given the range 5 to 5, needed 0 <= low < high"):
        open_secrets(Context(options={"low": 5, "high": 5}))


def test_the_outcome_is_what_the_environment_gave() -> None:
    replies, _ = guessing_game.fn(game_rollouts(["5", "6"], ["5", "5"]))
    rewards = outcome.fn(replies)
    assert isinstance(rewards, Rewards)
    assert rewards.values_N.tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match="an environment that gives no rewards"):
        outcome.fn(Replies(("",), ("user",), torch.tensor([True])))
    both = Replies.concat([replies, replies])
    assert (len(both), both.done_N.tolist()) == (4, [True, False] * 2)
    bare = Replies(("a",), ("user",), torch.tensor([True]))
    assert Replies.concat([bare, bare]).rewards_N is None
    rollouts = replace(random_rollouts(), ordinals=(8,) * 5)
    silent = Replies((":",) * 5, ("user",) * 5, torch.ones(5, dtype=torch.bool))
    with pytest.raises(ValueError, match="turn_rewards, group 8, row 0: given no reward for turn 0, needed one"):
        turn_rewards.fn(rollouts, silent)


@environment
def paying(rollouts: Rollouts) -> Replies:
    """Pay k + row / 10 after turn k. Row r is done after r + 1 turns, but gets replies as long as others go on."""
    turn = max(rollouts.turns())
    rewards_N = torch.tensor([turn + row / 10 for row in range(len(rollouts))])
    done_N = torch.tensor([turn > row for row in range(len(rollouts))])
    return Replies((":",) * len(rollouts), ("user",) * len(rollouts), done_N, rewards_N)


@environment
def forgetful(rollouts: Rollouts) -> Replies:
    """Pay 1 for the first turn of row 0, which is done then, and nothing later, when it is not done any more."""
    first = max(rollouts.turns()) == 1
    done_N = torch.tensor([first and row == 0 for row in range(len(rollouts))])
    return Replies((":",) * len(rollouts), ("user",) * len(rollouts), done_N, done_N * 1.0)


@node(pool="scorer")
def remembered(rollouts: Rollouts, rewards: Rewards) -> Rewards:
    assert rollouts.turns() == [1, 3, 3]
    assert rewards.values_N.tolist() == [1.0, 0.0, 0.0]
    return rewards


@program
def forgotten(policy: Policy, prompts: Prompts) -> Policy:
    rollouts, replies = converse(prompts, broadcast(policy), environment=forgetful, turns=3, samples=3)
    return aipo_update(policy, rollouts, group_advantage(remembered(rollouts, outcome(replies))))


def test_what_has_ended_stays_so_and_keeps_its_reward(tmp_path: Path) -> None:
    summary = run(forgotten, tmp_path / "run", replace(SMALL, eval_groups=0, updates=1))
    assert summary["status"] == "done", summary["error"]


def split(definition: NodeDef[..., Any], result: Any) -> None:
    """Take the result of a firing as a run does."""
    if isinstance(result, ValueError):
        raise result
    definition.split(result, stateful=False)


@pytest.mark.parametrize(
    ("replies", "said"),
    [
        (
            {"texts": (":",), "roles": ("user",), "done_N": torch.tensor([True])},
            "1 replies, needed 3, one for each row",
        ),
        ({"texts": (), "roles": (), "done_N": torch.zeros(0, dtype=torch.bool)}, "0 replies, needed 3"),
        ({"done_N": [True] * 3}, "done_N of a list, needed an array"),
        ({"done_N": torch.full((3,), 0.1)}, "done_N of float, needed an array .N., one bool"),
        ({"roles": ("user", "martian", "tool")}, 'the role \'martian\', needed "user" or "tool"'),
    ],
)
def test_malformed_replies_fail_their_group(replies: dict[str, Any], said: str) -> None:
    """Too few replies, for example, are not the end of the other rows."""
    sound = {"texts": (":",) * 3, "roles": ("user",) * 3, "done_N": torch.ones(3, dtype=torch.bool)}

    @environment
    def malformed(rollouts: Rollouts) -> Replies:
        return Replies(**{**sound, **replies})

    assert malformed.init is not None
    calls = malformed.init(CONTEXT, deadline=PATIENCE_S)
    calls.submit("", {"rollouts": random_rollouts([(1, 1)] * 3)})
    while not (finished := calls.step()):
        pass
    ((_, result),) = finished
    with pytest.raises(ValueError, match=f"malformed returned {said}"):
        split(malformed, result)


@node(pool="scorer")
def noted(rollouts: Rollouts, rewards: TurnRewards) -> tuple[Rewards, Metrics]:
    expected = torch.tensor([[1.0, 0, 0], [1.1, 2.1, 0], [1.2, 2.2, 3.2], [1.3, 2.3, 3.3]])
    torch.testing.assert_close(rewards.values_NK, expected)
    turn_NT = turn_of_tokens(rollouts)
    assert [row.max() + 1 for row in turn_NT] == rewards.turns_N.tolist() == rollouts.turns() == [1, 2, 3, 3]
    assert torch.equal(turn_NT >= 0, sampled_mask(rollouts))
    return Rewards(rewards.values_NK.sum(1)), {"turn_reward_mean": float(rewards.values_NK.mean())}


@program
def paid(policy: Policy, prompts: Prompts) -> Policy:
    rollouts, replies = converse(prompts, broadcast(policy), environment=paying, turns=3, samples=4)
    rewards = noted(rollouts, turn_rewards(rollouts, replies))
    return aipo_update(policy, rollouts, group_advantage(rewards))


@node(pool="scorer")
def credited(rollouts: Rollouts, rewards: TurnRewards) -> TokenAdvantages:
    turn_NT = turn_of_tokens(rollouts)
    return TokenAdvantages(rewards.values_NK.gather(1, turn_NT.clamp(min=0)).masked_fill(turn_NT < 0, 0.0))


@program
def paid_by_turn(policy: Policy, prompts: Prompts) -> Policy:
    rollouts, replies = converse(prompts, broadcast(policy), environment=paying, turns=3, samples=4)
    return aipo_update(policy, rollouts, credited(rollouts, turn_rewards(rollouts, replies)))


def test_the_reward_of_a_response_with_rewards_of_turns_is_their_sum(tmp_path: Path) -> None:
    run(paid_by_turn, tmp_path / "run", replace(SMALL, eval_groups=0, updates=1))
    (row,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert row["reward_mean"] == pytest.approx((1.0 + 3.2 + 6.6 + 6.9) / 4)
    (sample,) = map(json.loads, (tmp_path / "run" / "samples.jsonl").read_text().splitlines())
    assert sample["rewards"] == {"turn_rewards": pytest.approx([1.0, 3.2, 6.6, 6.9])}


def test_a_node_reads_what_every_turn_was_worth(tmp_path: Path) -> None:
    summary = run(paid, tmp_path / "run", replace(SMALL, eval_groups=0, updates=1))
    assert summary["status"] == "done", summary["error"]
