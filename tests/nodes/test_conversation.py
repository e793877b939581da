"""Turns: a row goes on from the very tokens that were sampled; what nobody sampled is context and no target."""

from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.graph.types import Context, Prompts, Replies, Rollouts, Weights
from penstock.nodes.generate import generate, make_engine
from penstock.nodes.generate.engine import Engine, OutgrownWarning
from penstock.nodes.generate.sampling import mismatch
from penstock.nodes.learn.batching import pack, sampled_mask
from penstock.nodes.learn.logprobs import packed_logprobs
from penstock.nodes.model import Llama, ModelConfig, save_model
from penstock.nodes.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer("0123456789+-=abc<eos>")
CONFIG = ModelConfig(
    vocab_size=TOKENIZER.vocab_size,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=96,
    initializer_range=0.25,
    eos_token_ids=TOKENIZER.stops,
)
SAMPLES = 3


def model(seed: int = 1) -> Llama:
    made = Llama(CONFIG, torch.float32)
    made.init_weights(seed)
    return made


def weights(version: int = 0, seed: int = 1) -> Weights:
    return Weights(version, {name: p.detach() for name, p in model(seed).named_parameters()})


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Context:
    folder: Path = tmp_path_factory.mktemp("model")
    save_model(model(), folder)
    TOKENIZER.save(folder)
    return Context(node="generate", seed=3, model=str(folder), slots=32, max_tokens=6)


def prompts(ordinal: int) -> Prompts:
    return Prompts((ordinal,), ("37+58=" * (1 + ordinal % 3),), ("95",))


def answers(rollouts: Rollouts, done: Any = ()) -> Replies:
    """A reply that depends on group, row and turn; the rows in `done` have ended."""
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


def play(engine: Engine, ordinals: Any, turns: int = 3, done: Any = ()) -> list[dict[int, Rollouts]]:
    """All turns of some groups together; the rows in `done` end after their first turn."""
    made = [turn(engine, {ordinal: {} for ordinal in ordinals}, weights())]
    for _ in range(turns - 1):
        more = {o: {"conversation": r, "replies": answers(r, done)} for o, r in made[-1].items()}
        made.append(turn(engine, more, weights()))
    return made


def row_of(rollouts: Rollouts, row: int) -> list[Any]:
    """All that is known of one conversation, without padding."""
    begin, length = int(rollouts.prompt_lengths_N[row]), int(rollouts.response_lengths_N[row])
    return [
        rollouts.tokens_NS[row, : begin + length].tolist(),
        rollouts.logprobs_NT[row, :length].tolist(),
        rollouts.versions_NT[row, :length].tolist(),
        bool(rollouts.finished_N[row]),
        rollouts.texts[row],
        rollouts.transcripts[row],
    ]


def test_a_row_is_the_same_bits_whatever_its_neighbours_across_turns(context: Context) -> None:
    together = play(make_engine(context, samples=SAMPLES), range(12))
    backwards = play(make_engine(context, samples=SAMPLES), reversed(range(12)))
    used = make_engine(context, samples=SAMPLES)
    for ordinal in range(12):
        alone = play(used, [ordinal]) if ordinal in (2, 7) else backwards
        for first, second, third in zip(together, backwards, alone, strict=True):
            for row in range(SAMPLES):
                assert row_of(first[ordinal], row) == row_of(second[ordinal], row) == row_of(third[ordinal], row)


def test_a_row_is_the_same_bits_whether_its_neighbours_go_on_or_are_done(context: Context) -> None:
    all_on = play(make_engine(context, samples=SAMPLES), range(4))[-1]
    some_done = play(make_engine(context, samples=SAMPLES), range(4), done={0, 2})[-1]
    assert all(row_of(all_on[o], 1) == row_of(some_done[o], 1) for o in range(4))


def test_tokens_are_never_encoded_again(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a turn begin with those of the turn before; only the reply is encoded, once."""
    engine = make_engine(context, samples=SAMPLES)
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


def test_tokens_keep_the_version_that_made_them_and_nobody_s_have_none(context: Context) -> None:
    engine = make_engine(context, samples=SAMPLES)
    first = turn(engine, {1: {}}, weights(4))[1]
    second = turn(engine, {1: {"conversation": first, "replies": answers(first)}}, weights(7, seed=2))[1]
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


def test_the_next_turn_is_what_the_plain_forward_says_of_the_whole_conversation(context: Context) -> None:
    rollouts = play(make_engine(context, samples=SAMPLES), [4])[-1][4]
    assert mismatch(model(), rollouts) < 1e-5
    greedy = make_engine(context, samples=1, temperature=0.0)
    rollouts = play(greedy, [4])[-1][4]
    ids, begin = rollouts.tokens_NS[0], int(rollouts.prompt_lengths_N[0])
    with torch.no_grad():
        likeliest_S = model().logits(model()(ids[None]))[0].argmax(-1)
    places = [begin + t for t, version in enumerate(rollouts.versions_NT[0].tolist()) if version == 0]
    assert ids[places].tolist() == likeliest_S[[place - 1 for place in places]].tolist()


def test_each_token_has_a_draw_of_its_own(context: Context) -> None:
    """A row's key is its sample's, and the position counts through the whole conversation."""
    engine = make_engine(context, samples=SAMPLES)
    first = turn(engine, {1: {}}, weights())[1]
    empty = replace(first, response_lengths_N=torch.ones(SAMPLES, dtype=torch.long), tokens_NS=first.tokens_NS[:, :13])
    empty = replace(empty, logprobs_NT=first.logprobs_NT[:, :1], versions_NT=first.versions_NT[:, :1])
    empty.tokens_NS[:, 12] = empty.tokens_NS[0, 12]
    same = Replies(("+",) * SAMPLES, ("user",) * SAMPLES, torch.zeros(SAMPLES, dtype=torch.bool))
    after = turn(engine, {1: {"conversation": empty, "replies": same}}, weights())[1]
    assert len({tuple(row_of(after, row)[0]) for row in range(SAMPLES)}) > 1


def test_rows_that_are_done_pass_through(context: Context) -> None:
    engine = make_engine(context, samples=SAMPLES)
    first = turn(engine, {3: {}}, weights())[3]
    second = turn(engine, {3: {"conversation": first, "replies": answers(first, done={0, 2})}}, weights())[3]
    assert second.turns() == [1, 2, 1]
    assert [row_of(second, row) == row_of(first, row) for row in range(SAMPLES)] == [True, False, True]
    nothing = turn(engine, {3: {"conversation": first, "replies": answers(first, done={0, 1, 2})}}, weights())[3]
    assert all(row_of(nothing, row) == row_of(first, row) for row in range(SAMPLES))


def test_a_conversation_that_outgrows_its_room_ends_unfinished(context: Context) -> None:
    """Two prompts of one length: the turn that has no room is no error, and takes nothing from others."""
    short = replace(context, options={"max_prompt": 18})
    engine = make_engine(short, samples=SAMPLES)
    first = turn(engine, {2: {}, 3: {}}, weights())
    more = {o: {"conversation": r, "replies": answers(r)} for o, r in first.items()}
    message = (
        r"group 2, row 0: given a conversation of 2\d tokens, needed at most 18: the context of 24 less max_tokens"
    )
    with pytest.warns(OutgrownWarning, match=message) as told:
        second = turn(engine, more, weights())
    assert len(told) == 1
    for row in range(SAMPLES):
        old, new = row_of(first[2], row), row_of(second[2], row)
        assert new[:3] == old[:3]
        assert new[3] is False
    alone = play(make_engine(short, samples=SAMPLES), [3], turns=2)[-1][3]
    fits = [row for row, turns in enumerate(second[3].turns()) if turns == 2]
    assert fits
    assert all(row_of(second[3], row) == row_of(alone, row) for row in fits)
    _, _, metrics = generate.fn(engine, prompts(2), weights(), first[2], answers(first[2]), samples=SAMPLES)
    assert (metrics["outgrown"], metrics["response_length"]) == (1.0, 0.0)


def test_the_node_called_directly_gives_what_the_stream_gives(context: Context) -> None:
    engine = make_engine(context, samples=SAMPLES)
    _, first, metrics = generate.fn(engine, prompts(1), weights(), samples=SAMPLES)
    assert "outgrown" not in metrics
    _, second, metrics = generate.fn(engine, prompts(1), weights(), first, answers(first), samples=SAMPLES)
    streamed = play(make_engine(context, samples=SAMPLES), [1], turns=2)[-1][1]
    assert all(row_of(second, row) == row_of(streamed, row) for row in range(SAMPLES))
    assert metrics["outgrown"] == 0.0
    sampled = sampled_mask(second).sum() - sampled_mask(first).sum()
    assert metrics["response_length"] == pytest.approx(float(sampled) / SAMPLES)


def test_a_reset_forgets_conversations_too(context: Context) -> None:
    engine = make_engine(context, samples=SAMPLES)
    first = turn(engine, {1: {}}, weights())[1]
    for done in ({0, 1, 2}, ()):
        more = {"conversation": first, "replies": answers(first, done)}
        engine.submit("lost", {"prompts": prompts(1), "behaviour": weights(), **more})
        assert engine.busy()
        engine.reset()
        assert not engine.busy()


def test_groups_of_any_turns_join_into_a_batch(context: Context) -> None:
    made = play(make_engine(context, samples=SAMPLES), [0, 1])
    batch = Rollouts.concat([made[0][0], made[2][1]])
    assert batch.turns() == [1] * SAMPLES + [3] * SAMPLES
    assert int(sampled_mask(batch).sum()) == sum(int(sampled_mask(r).sum()) for r in (made[0][0], made[2][1]))
    assert {f.name for f in fields(batch)} == {f.name for f in fields(made[0][0])}


def test_what_does_not_match_is_an_error(context: Context) -> None:
    engine = make_engine(context, samples=SAMPLES)
    first = turn(engine, {1: {}}, weights())[1]
    other = make_engine(context, samples=2)
    with pytest.raises(ValueError, match="group 1: given a conversation of 3 rows and 3 replies, needed 2 of each"):
        other.submit(
            0, {"prompts": prompts(1), "behaviour": weights(), "conversation": first, "replies": answers(first)}
        )
    silent = replace(answers(first, done={0}), texts=("", "", "+"))
    with pytest.raises(ValueError, match=r"group 1, row 1: given a reply without a token \(''\)"):
        engine.submit(0, {"prompts": prompts(1), "behaviour": weights(), "conversation": first, "replies": silent})


def gradient(rollouts: Rollouts) -> dict[str, torch.Tensor]:
    learner = model()
    lengths = rollouts.prompt_lengths_N, rollouts.response_lengths_N
    for packed in pack(rollouts.tokens_NS, *lengths, 256, sampled_NT=sampled_mask(rollouts)):
        logprobs_P, _ = packed_logprobs(learner, packed)
        ratio_P = torch.exp(logprobs_P - rollouts.logprobs_NT[packed.sequence_P, packed.step_P])
        ratio_P.sum().backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in learner.named_parameters() if p.grad is not None}


def test_a_gradient_does_not_depend_on_log_probabilities_that_an_environment_s_tokens_would_have(
    context: Context,
) -> None:
    rollouts = play(make_engine(context, samples=SAMPLES), [2])[-1][2]
    nobody_NT = rollouts.versions_NT < 0
    other = replace(rollouts, logprobs_NT=rollouts.logprobs_NT.masked_fill(nobody_NT, -77.0))
    expected, found = gradient(rollouts), gradient(other)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_what_an_environment_said_is_context_and_no_target(context: Context) -> None:
    rollouts = play(make_engine(context, samples=SAMPLES), [2], turns=2)[-1][2]
    (packed,) = pack(
        rollouts.tokens_NS,
        rollouts.prompt_lengths_N,
        rollouts.response_lengths_N,
        4096,
        sampled_NT=sampled_mask(rollouts),
    )
    assert len(packed.targets_P) == int(sampled_mask(rollouts).sum())
    assert bool((rollouts.versions_NT[packed.sequence_P, packed.step_P] >= 0).all())
    heard = int((rollouts.versions_NT[0] < 0).nonzero()[0])
    place = int(rollouts.prompt_lengths_N[0]) + heard
    tokens_NS = rollouts.tokens_NS.clone()
    tokens_NS[0, place] = (tokens_NS[0, place] + 1) % 10
    changed = gradient(replace(rollouts, tokens_NS=tokens_NS))
    expected = gradient(rollouts)
    assert not all(torch.equal(expected[name], changed[name]) for name in expected)


def test_a_conversation_without_the_log_probabilities_of_who_sampled_it_is_refused(context: Context) -> None:
    engine = make_engine(context, samples=SAMPLES)
    first = turn(engine, {1: {}}, weights())[1]
    lacking = replace(first, logprobs_NT=None)
    with pytest.raises(ValueError, match=r"^generate, group 1: given rollouts without log μ .*needed"):
        turn(engine, {1: {"conversation": lacking, "replies": answers(first)}}, weights())
    with pytest.raises(ValueError, match=r"^mismatch: given rollouts without log μ .*needed"):
        mismatch(model(), lacking)


def test_all_turns_are_sampled_at_the_temperature_that_the_rows_say(context: Context) -> None:
    cool = play(make_engine(context, samples=SAMPLES, temperature=0.6), [2], done=[1])
    assert cool[-1][2].temperature_N.tolist() == pytest.approx([0.6] * SAMPLES)
    assert mismatch(model(), cool[-1][2]) < 1e-5
    first = cool[0][2]
    with pytest.raises(ValueError, match=r"^generate, group 2: given a conversation of temperature 0\.6, needed "):
        turn(make_engine(context, samples=SAMPLES), {2: {"conversation": first, "replies": answers(first)}}, weights())
