"""Responses depend only on weights, prompt, key and number of slots: not on neighbours, their slot, order or timing."""

import warnings
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import decoders, normalizers
from tokenizers.models import BPE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.graph import Context, Metrics, Policy, Prompts, Rewards, Rollouts, Weights
from penstock.graph.context import Origin
from penstock.graph.machine import free_memory
from penstock.graph.node import Paused
from penstock.graph.types import NodeWarning, Replies
from penstock.nodes import fake
from penstock.nodes.fake import FakeEngine, FakePolicy, fake_environment, fake_generate, fake_score, fake_update
from penstock.nodes.generate import attention, generate, kv_cache, make_engine, sampling
from penstock.nodes.generate.attention import attend, cache_shape
from penstock.nodes.generate.conversation import SampledGroup, StopStrings, never_said
from penstock.nodes.generate.engine import Engine
from penstock.nodes.generate.kv_cache import WIDE, Cache, CacheSize, DecodeMemory
from penstock.nodes.generate.sampling import Sampler, keyed_uniform
from penstock.nodes.learn.batching import Packed
from penstock.nodes.learn.logprobs import packed_logprobs
from penstock.nodes.model import CausalLM, ModelConfig, ModelError
from penstock.nodes.model.compiled import NoCompilerWarning
from penstock.nodes.policy import LanguagePolicy, make_policy
from penstock.nodes.prefixes import after_tokens, cut
from penstock.nodes.tokenizer import Tokenizer, byte_tokenizer
from tests.nodes.tiny_model import CONFIG, TOKENIZER, model, save, weights

TEXTS = ("1+2=", "37+58=", "abc" * 5, "9", "0123456789+-=abc0", "12-7=" * 9, "4+4=", "77-")


def prompts(ordinal: int, text: str | None = None) -> Prompts:
    return Prompts((ordinal,), (TEXTS[ordinal % len(TEXTS)] if text is None else text,), ("0",))


def run(
    engine: Engine, ordinals: Iterable[int], behaviour: Weights, more: Mapping[str, Any] = MappingProxyType({})
) -> dict[int, tuple[Rollouts, Metrics]]:
    for ordinal in ordinals:
        engine.submit(ordinal, {"prompts": prompts(ordinal), "behaviour": behaviour, **more})
    return drain(engine)


def drain(engine: Engine) -> dict[int, tuple[Rollouts, Metrics]]:
    results: dict[int, tuple[Rollouts, Metrics]] = {}
    while engine.busy():
        results |= dict(engine.step())
    return results


def become(behaviour: Weights, new: Weights) -> None:
    """Make new weights live, in the same object."""
    behaviour.version, behaviour.tensors = new.version, new.tensors


def equal(a: Rollouts, b: Rollouts) -> bool:
    return (a.ordinals, a.prompts, a.texts) == (b.ordinals, b.prompts, b.texts) and all(
        torch.equal(getattr(a, name), getattr(b, name))
        for name in ("tokens_NS", "logprobs_NT", "versions_NT", "response_lengths_N", "finished_N")
    )


def assert_equal(found: dict[int, Any], expected: dict[int, Any], ordinals: Iterable[int]) -> None:
    for ordinal in ordinals:
        assert equal(found[ordinal][0], expected[ordinal][0]), ordinal


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_and_logprobs_are_those_of_the_plain_forward(context: Context, temperature: float) -> None:
    """At temperature 0 the tokens are the likeliest ones."""
    for rollouts, _ in run(make_engine(context, samples=4, temperature=temperature), range(8), weights()).values():
        for row in range(len(rollouts)):
            begin, length = int(rollouts.prompt_lengths_N[row]), int(rollouts.response_lengths_N[row])
            tokens_S = rollouts.tokens_NS[row, : begin + length]
            assert TOKENIZER.decode(tokens_S[:begin].tolist()) == rollouts.prompts[row]
            with torch.no_grad():
                logits_TV = model().logits(model()(tokens_S[None]))[0, begin - 1 : -1]
            if temperature == 0:
                assert logits_TV.argmax(-1).tolist() == tokens_S[begin:].tolist()
                continue
            expected_T = logits_TV.log_softmax(-1).gather(1, tokens_S[begin:, None]).squeeze(1)
            torch.testing.assert_close(rollouts.logprobs_NT[row, :length], expected_T, rtol=1e-4, atol=1e-5)
            assert not rollouts.logprobs_NT[row, length:].any()


@pytest.mark.parametrize("cut", [{}, {"temperature": 0.7, "top_k": 9}, {"top_p": 0.9}])
def test_a_token_is_drawn_by_its_place(context: Context, cut: dict[str, Any]) -> None:
    sampler = Sampler(**cut)
    for ordinal, (rollouts, _) in run(make_engine(context, samples=4, **cut), range(8), weights()).items():
        for row in range(len(rollouts)):
            begin, length = int(rollouts.prompt_lengths_N[row]), int(rollouts.response_lengths_N[row])
            tokens_S = rollouts.tokens_NS[row, : begin + length]
            with torch.no_grad():
                logits_TV = model().logits(model()(tokens_S[None]))[0, begin - 1 : -1]
            key, places_T = torch.tensor(context.key(ordinal, row)), torch.arange(begin, begin + length)
            expected_T, _ = sampler(logits_TV, keyed_uniform(key, places_T))
            assert tokens_S[begin:].tolist() == expected_T.tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_group_is_the_same_bits_whatever_its_neighbours_slots_and_order(context: Context, dtype: str) -> None:
    def engine() -> Engine:
        return make_engine(replace(context, dtype=dtype), samples=5)

    behaviour = weights(dtype=getattr(torch, dtype))
    together, used, between = run(engine(), range(24), behaviour), engine(), engine()
    assert together[0][1].get("mismatch", 0.0) < (1e-5 if dtype == "float32" else 0.05)
    assert_equal(run(engine(), reversed(range(24)), behaviour), together, range(24))
    for ordinal in (3, 7, 12, 20):
        assert_equal(run(used, [ordinal], behaviour), together, [ordinal])
    for ordinals in (range(0, 24, 2), range(1, 24, 2)):  # of two replicas
        assert_equal(run(engine(), ordinals, behaviour), together, ordinals)
    results: dict[Any, Any] = {}
    for ordinal in range(24):
        between.submit(ordinal, {"prompts": prompts(ordinal), "behaviour": behaviour})
        results |= dict(between.step())
    assert_equal(results | drain(between), together, range(24))


@pytest.mark.parametrize("stop", [False, True], ids=["cut", "ended"])
def test_most_responses_cut_at_the_limit_are_warned_about_once(context: Context, stop: bool) -> None:
    """With a stop string for each character, all responses end at their first token."""
    stops = tuple(TOKENIZER.decode([token]) for token in range(CONFIG.vocab_size)) if stop else ()
    engine = make_engine(replace(context, max_tokens=2), samples=8, stop=tuple(filter(None, stops)))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", NodeWarning)
        run(engine, range(7), weights())
        assert not told
        run(engine, range(7, 24), weights())
    assert len(told) == (0 if stop else 1)


@pytest.mark.parametrize("steps", [1, 3, 6])
def test_after_a_failed_step_and_a_reset_groups_are_the_bits_they_would_have_been(context: Context, steps: int) -> None:
    """The failure leaves groups in slots, staged and queued, and a cache and logits full of NaN."""
    expected = run(make_engine(context, samples=5), range(12), weights())
    engine, behaviour = make_engine(context, samples=5), weights()
    for ordinal in range(12):
        engine.submit(("failed", ordinal), {"prompts": prompts(ordinal), "behaviour": behaviour})
    for _ in range(steps):
        engine.step()
    assert engine.memory is not None
    engine.memory.cache.keys.fill_(torch.nan)
    with pytest.raises(FloatingPointError):
        engine.step()
    engine.reset()
    assert not engine.busy()
    again = run(engine, range(12), behaviour)
    assert again.keys() == expected.keys()
    assert_equal(again, expected, range(12))


def counted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each pass of the engine appends its number of tokens."""
    passes, rows = [], engine.slots.rows

    def count(num_rows: int, sampling: Any) -> Any:
        inputs = rows(num_rows, sampling)
        assert inputs.shape[1] <= num_rows
        passes.append(inputs.shape[1])
        return inputs

    monkeypatch.setattr(engine.slots, "rows", count)
    return passes


def test_samples_may_outnumber_the_slots_and_a_prompt_is_computed_once(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except for its last token, from which every sample goes on."""
    engine = make_engine(replace(context, slots=16), samples=40)
    passes = counted(engine, monkeypatch)
    made = run(engine, [1, 4, 5], weights())
    assert len(made[1][0]) == 40
    assert len(set(made[1][0].texts)) > 20
    responses = sum(int(rollouts.response_lengths_N.sum()) for rollouts, _ in made.values())
    assert sum(passes) == sum(len(TEXTS[ordinal]) - 1 for ordinal in (1, 4, 5)) + responses
    assert max(passes) <= WIDE


def test_one_short_prompt_takes_one_pass_more_than_its_response_and_a_long_one_fills_passes(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A pass of torch's operations has a row for each slot. A pass in C has any number of rows, also more than slots.
    for text, invariant in (("1+", False), ("1" * 64, False), ("1" * 64, True)):
        engine = make_engine(replace(context, slots=16, invariant=invariant), samples=1)
        before = 4 if len(text) > 16 and engine.decode is None else 1
        passes = counted(engine, monkeypatch)
        engine.submit(0, {"prompts": prompts(0, text), "behaviour": weights()})
        rollouts = drain(engine)[0][0]
        assert len(passes) == before + int(rollouts.response_lengths_N)
        assert sum(passes[:before]) == len(text) - 1


def test_a_conversation_goes_on_from_what_is_in_its_slots_with_the_bits_of_a_fresh_engine(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds while its weights are live. Otherwise it is recomputed, as by an engine that has not seen it."""
    same = {"prompts": prompts(2), "behaviour": weights()}
    engine = make_engine(context, samples=4)
    engine.submit(0, same)
    first = drain(engine)[0][0]
    heard = Replies(("+1",) * 4, ("user",) * 4, torch.zeros(4, dtype=torch.bool))
    then = {**same, "conversation": first, "replies": heard}
    kept, fresh = engine, make_engine(context, samples=4)
    tokens, results = [], []
    for each, version in ((kept, 0), (fresh, 0), (kept, 1), (make_engine(context, samples=4), 1)):
        passes = counted(each, monkeypatch)
        each.submit(9, {**then, "behaviour": weights(version)})
        results.append(drain(each)[9][0])
        tokens.append(sum(passes))
    assert equal(results[0], results[1])
    assert equal(results[2], results[3])
    said = results[0].response_lengths_N - first.response_lengths_N - 2
    # Each row computes the last token of its first turn, the reply without its last token, and one for each new token.
    assert tokens[0] == int(said.sum()) + 4 * 2
    assert tokens[1] > tokens[0]
    assert tokens[2] == tokens[3]


@pytest.mark.parametrize("segment", [1, 3, 7])
def test_a_response_in_segments_has_the_bits_of_an_unbroken_one(context: Context, segment: int) -> None:
    """Each segment is sampled by another engine; also in a later turn."""

    def sampled(pieces: int, **inputs: Any) -> tuple[Rollouts, Metrics, int]:
        pauses = 0
        while True:
            engine = make_engine(replace(context, segment=pieces), samples=4)
            engine.submit(2, {"prompts": prompts(2), "behaviour": weights(), **inputs})
            made: Any = drain(engine)[2]
            if not isinstance(made, Paused):
                return *made, pauses
            inputs["paused"], pauses = made.value, pauses + 1

    whole, metrics, _ = sampled(0)
    broken, of_pieces, pauses = sampled(segment)
    assert equal(broken, whole)
    assert of_pieces["generated_tokens"] == metrics["generated_tokens"]
    assert pauses == -(-int(whole.response_lengths_N.max()) // segment) - 1
    heard = Replies(("+1",) * 4, ("user",) * 4, torch.tensor([False, True, False, False]))
    then = {"conversation": whole, "replies": heard}
    assert equal(sampled(segment, **then)[0], sampled(0, **then)[0])
    # Called outside of a run, the node goes on by itself.
    engine = make_engine(replace(context, segment=segment), samples=4)
    assert equal(generate.fn(engine, prompts(2), weights(), samples=4)[1], whole)


def test_a_segment_is_sampled_with_the_weights_that_are_live_then(context: Context) -> None:
    engine, new = make_engine(replace(context, segment=2), samples=2), weights(5, seed=2)
    engine.submit(0, {"prompts": prompts(0), "behaviour": weights()})
    paused: Any = drain(engine)[0]
    assert isinstance(paused, Paused)
    engine.submit(0, {"prompts": prompts(0), "behaviour": new, "paused": paused.value})
    while isinstance(made := drain(engine)[0], Paused):
        engine.submit(0, {"prompts": prompts(0), "behaviour": new, "paused": made.value})
    rollouts, metrics = made
    for row, length in enumerate(rollouts.response_lengths_N.tolist()):
        assert rollouts.versions_NT[row, :length].tolist() == ([0, 0] + [5] * length)[:length]
    assert metrics["stale_cache"] == 0  # each segment has a cache of its own


def test_other_keys_give_other_responses_and_the_same_key_the_same(context: Context) -> None:
    first = run(make_engine(context, samples=4), [1], weights())[1][0]
    assert len(set(first.texts)) > 1
    assert equal(first, run(make_engine(context, samples=4), [1], weights())[1][0])
    assert first.texts != run(make_engine(replace(context, seed=4), samples=4), [1], weights())[1][0].texts


def test_a_response_ends_with_a_stop_token_or_at_the_bound(context: Context) -> None:
    results = run(make_engine(context, samples=8), range(24), weights())
    finished = 0
    for rollouts, metrics in results.values():
        for row in range(len(rollouts)):
            begin, length = int(rollouts.prompt_lengths_N[row]), int(rollouts.response_lengths_N[row])
            response = rollouts.tokens_NS[row, begin : begin + length].tolist()
            ended = bool(rollouts.finished_N[row])
            assert ended == (response[-1] == TOKENIZER.eos)
            assert TOKENIZER.eos not in response[:-1]
            assert ended or length == context.max_tokens
            assert rollouts.texts[row] == TOKENIZER.decode(response)
            finished += ended
        assert metrics["response_length"] == pytest.approx(float(rollouts.lengths().mean()))
    assert 0 < finished < 24 * 8


def test_a_response_ends_with_the_token_that_completes_a_stop_string(context: Context) -> None:
    """Up to there it has the bits that it has without a stop string, and it counts as finished."""
    behaviour = weights()
    plain = run(make_engine(context, samples=8), range(16), behaviour)
    longest = max((text for rollouts, _ in plain.values() for text in rollouts.texts), key=len)
    stop = (longest[2:4],)  # of two tokens
    stopped = run(make_engine(context, samples=8, stop=stop), range(16), behaviour)
    found = 0
    for (whole, _), (short, _) in ((plain[ordinal], stopped[ordinal]) for ordinal in plain):
        for row in range(len(short)):
            begin, length = int(short.prompt_lengths_N[row]), int(short.response_lengths_N[row])
            assert torch.equal(
                short.tokens_NS[row, begin : begin + length], whole.tokens_NS[row, begin : begin + length]
            )
            assert torch.equal(short.logprobs_NT[row, :length], whole.logprobs_NT[row, :length])
            ends = [whole.texts[row].find(text) + len(text) for text in stop if text in whole.texts[row]]
            assert short.texts[row] == whole.texts[row][: min(ends, default=999)]
            assert short.finished_N[row] == (bool(ends) or bool(whole.finished_N[row]))
            found += bool(ends)
    assert 0 < found < 16 * 8


@pytest.mark.parametrize("stop", ["to: ", " ", "é", "€2", " b"])
def test_a_stop_string_is_found_with_the_first_token_by_which_the_whole_text_has_it(stop: str) -> None:
    """The tokenizer is like Llama 2's: a word has the space before it, unless it is the first one, and characters
    without a token are bytes."""
    known = {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    known |= {word: 260 + place for place, word in enumerate(("▁", "▁to", "▁b", "▁42", "a", "b", "t", "o", ":", "2"))}
    backend = tokenizers.Tokenizer(BPE(known, [], byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    tokenizer, random = Tokenizer(backend, (0,), 0), Random(0)
    strings, found = StopStrings([stop], tokenizer), 0
    for _ in range(300):
        said = [random.choice([260, 261, 262, 263, *range(264, 270)]) for _ in range(4)]
        said += tokenizer.encode(stop) + [random.randrange(4, 270) for _ in range(2)]
        whole = [stop in tokenizer.decode(said[: step + 1]) for step in range(len(said))]
        first = whole.index(True) if True in whole else len(said)
        assert [strings.end(np.array(said[: step + 1])) for step in range(first + 1)] == whole[: first + 1]
        found += True in whole
    assert found > 100


def test_a_model_may_have_more_words_than_its_tokenizer(context: Context, tmp_path: Path) -> None:
    """Vocabularies are rounded up. The extra words have no text; a response goes on after them, also from a prefix."""
    wide = model(config=replace(CONFIG, vocab_size=CONFIG.vocab_size + 90))
    save(wide, tmp_path)
    TOKENIZER.save(tmp_path)
    given, behaviour = replace(context, model=str(tmp_path)), Weights(0, wide.state_dict())
    rollouts, _ = run(make_engine(given, samples=8, stop=("1",)), [1], behaviour)[1]
    unsaid = [row for row in range(8) if (rollouts.tokens_NS[row] >= TOKENIZER.vocab_size).any()]
    assert unsaid
    prefixes, _ = cut.fn(rollouts.take(unsaid), at=partial(after_tokens, tokens=3), context=given)
    after = run(make_engine(given, samples=2), [1], behaviour, {"after": prefixes})[1][0]
    assert len(after) == 2 * len(prefixes) > 0


def test_after_a_stop_string_the_reply_begins_with_the_end_of_the_turn(context: Context) -> None:
    """The template has that token. The model has not sampled it, as it has when it ends with a stop token."""
    template = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}={% endif %}"
    tokenizer = Tokenizer(TOKENIZER.backend, TOKENIZER.stops, TOKENIZER.pad, template)
    said = run(make_engine(context, samples=16, stop=("4", "a")), [3], weights())[3][0]
    heard = Replies(("77",) * 16, ("user",) * 16, torch.zeros(16, dtype=torch.bool))
    rows = SampledGroup.go_on("tag", prompts(3), 16, said, heard, tokenizer, 1000).rows
    reply, kinds = [*TOKENIZER.encode("77"), TOKENIZER.eos, *TOKENIZER.encode("=")], set()
    for row, length, finished in zip(rows, said.response_lengths_N.tolist(), said.finished_N.tolist(), strict=True):
        last = int(row.before.tokens[length - 1])
        kinds.add((finished, last == TOKENIZER.eos))
        assert row.before.tokens[length:].tolist() == ([] if last == TOKENIZER.eos else [TOKENIZER.eos]) + reply
    assert {(True, True), (True, False)} <= kinds


def test_each_token_records_the_version_that_made_it(context: Context) -> None:
    """If the batch's first group has tokens of two versions, mismatch is measured on the next group."""
    engine, behaviour, new = make_engine(context, samples=2), weights(), weights(5, seed=2)
    engine.submit(0, {"prompts": prompts(0), "behaviour": behaviour})
    results: dict[Any, Any] = dict(engine.step()) | dict(engine.step())
    become(behaviour, new)
    results |= drain(engine)
    rollouts, metrics = results[0]
    lengths = rollouts.response_lengths_N.tolist()
    assert max(lengths) > 2
    for row, length in enumerate(lengths):
        assert rollouts.versions_NT[row, :length].tolist() == ([0, 0] + [5] * length)[:length]
    assert metrics["stale_cache"] == sum(max(0, length - 2) for length in lengths) / sum(lengths)
    assert "mismatch" not in metrics
    after = run(engine, [1, 2], new)
    assert sum("mismatch" in metrics for _, metrics in after.values()) == 1
    assert after[1][1]["stale_cache"] == 0
    assert_equal(after, run(make_engine(context, samples=2), [1, 2], new), [1, 2])


def test_prompts_that_wait_for_a_slot_are_computed_again_with_new_weights(context: Context) -> None:
    engine, behaviour, new = make_engine(replace(context, slots=16), samples=16), weights(), weights(1, seed=2)
    for ordinal in range(8):
        engine.submit(ordinal, {"prompts": prompts(ordinal), "behaviour": behaviour})
    results: dict[Any, Any] = dict(engine.step())
    become(behaviour, new)
    results |= drain(engine)
    fresh = [ordinal for ordinal in range(8) if int(results[ordinal][0].versions_NT[:, 0].min()) == 1]
    assert len(fresh) >= 6
    assert_equal(results, run(make_engine(replace(context, slots=16), samples=16), range(8), new), fresh)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_mismatch_is_measured_of_the_first_group_of_each_batch(context: Context, temperature: float) -> None:
    batches = replace(context, batch=4)
    engine, other = (make_engine(batches, samples=4, temperature=temperature) for _ in range(2))
    for version, ordinals in ((0, range(8)), (1, range(8, 16))):
        made = run(engine, ordinals, weights(version))
        measured = {ordinal: m["mismatch"] for ordinal, (_, m) in made.items() if "mismatch" in m}
        assert measured.keys() == {o for o in ordinals if o % 4 == 0}
        assert max(measured.values()) < 1e-5
        # Another replica, with other groups and another order, measures the same.
        assert run(other, [ordinals[4]], weights(version))[ordinals[4]][1]["mismatch"] == measured[ordinals[4]]
    greedy = run(make_engine(batches, samples=1, temperature=0.0), range(8), weights())
    assert all("mismatch" not in metrics for _, metrics in greedy.values())


@pytest.mark.parametrize(
    ("dtype", "wire", "exact"),
    [
        *(("float32", wire, wire == "") for wire in ("", "bfloat16", "int8")),
        *(("bfloat16", wire, wire != "fp8") for wire in ("", "bfloat16", "fp8")),
    ],
)
def test_weights_that_were_rounded_on_the_wire_have_no_mismatch(
    context: Context, dtype: str, wire: str, exact: bool
) -> None:
    """The trainer's own are not here to compare with."""
    learner = replace(context, dtype=dtype)
    sent = Weights(0, make_policy(replace(learner, node="policy")).weights())
    engine = make_engine(replace(learner, weights={"behaviour": Origin(Policy.maker, learner, wire=wire)}), samples=4)
    assert any("mismatch" in metrics for _, metrics in run(engine, range(2), sent).values()) == exact


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_computes_the_bits_that_mismatch_has_measured(context: Context, dtype: str) -> None:
    """With gradients and without, log π of the same micro-batches is the same; its distance to μ is `mismatch`."""
    learner = make_policy(replace(context, node="policy", dtype=dtype))
    assert isinstance(learner, LanguagePolicy)
    engine = make_engine(replace(context, dtype=dtype), samples=5)
    rollouts, metrics = run(engine, [0], Weights(0, learner.weights()))[0]
    micro_batches = learner.pack(rollouts)

    def loss(model: CausalLM, packed: Packed) -> tuple[Tensor, Tensor]:
        logprobs_P, _ = packed_logprobs(model, packed)
        return logprobs_P.sum(), logprobs_P.detach()

    with torch.no_grad():
        scored = learner.workers.map(lambda model, packed: packed_logprobs(model, packed)[0], micro_batches)
    learnt = learner.backward(micro_batches, loss)
    distances = []
    for packed, with_P, without_P in zip(micro_batches, learnt, scored, strict=True):
        assert torch.equal(with_P, without_P)
        distances.append(with_P - rollouts.logprobs_NT[packed.sequence_P, packed.step_P])
    assert metrics["mismatch"] == pytest.approx(float(torch.cat(distances).abs().mean()), rel=1e-6)


def test_the_node_called_directly_gives_what_the_stream_gives(context: Context) -> None:
    """Also for several prompts at once. Its outputs can be trained on, and it uses weights without a copy."""
    engine, behaviour = make_engine(context, samples=3), weights()
    # Until weights arrive the engine has no memory for any: on a GPU there may be room for those that arrive only.
    assert sum(parameter.untyped_storage().nbytes() for parameter in engine.model.parameters()) < 4096
    both = Prompts.concat([prompts(0), prompts(1)])
    _, rollouts, metrics = generate.fn(engine, both, behaviour, samples=3)
    apart = run(make_engine(context, samples=3), [0, 1], weights())
    assert equal(rollouts, Rollouts.concat([apart[0][0], apart[1][0]]))
    assert metrics["response_length"] > 0
    assert not any(getattr(rollouts, name).is_inference() for name in ("tokens_NS", "logprobs_NT"))
    for name, parameter in engine.model.named_parameters():
        assert parameter.data_ptr() == behaviour.tensors[name].data_ptr()
    with pytest.raises(ValueError, match="needed the options that its engine was made with"):
        generate.fn(engine, prompts(1), weights(), samples=4)


@pytest.mark.parametrize("turns", [1, 2])
def test_equal_prompts_of_one_group_draw_numbers_of_their_own(context: Context, turns: int) -> None:
    """The first prompt of each joined group keeps the draws that it has alone."""
    same = Prompts((4, 4, 5, 4, 5), (TEXTS[2],) * 5, ("0",) * 5)
    engine = make_engine(context, samples=4)
    _, rollouts, _ = generate.fn(engine, same, weights(), samples=4)
    for _ in range(turns - 1):
        on = Replies(("+",) * 20, ("user",) * 20, torch.zeros(20, dtype=torch.bool))
        _, rollouts, _ = generate.fn(engine, same, weights(), rollouts, on, samples=4)
    assert len({rollouts.transcripts[row][-1] for row in range(20)}) == 20
    for ordinal, first in ((4, 0), (5, 8)) if turns == 1 else ():
        alone = generate.fn(engine, prompts(ordinal, TEXTS[2]), weights(), samples=4)[1]
        assert alone.texts == rollouts.texts[first : first + 4]


NAME = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({NAME: torch.zeros(3, 32)}, rf"weights of version 4: {NAME}: given shape \[3, 32\], needed \[40, 32\]"),
        ({NAME: torch.zeros(40, 32).bfloat16()}, r"given dtype torch\.bfloat16, needed torch\.float32"),
        ({NAME: None}, rf"given no {NAME}, needed all"),
        ({NAME: torch.full((40, 32), torch.nan)}, "weights of version 4 give probabilities that are not numbers"),
    ],
)
def test_weights_that_do_not_fit_are_named(context: Context, change: dict[str, Tensor | None], error: str) -> None:
    """The error comes at each try: a retry must not use the old weights as if they were the new ones."""
    changed = {name: tensor for name, tensor in {**weights().tensors, **change}.items() if tensor is not None}
    engine = make_engine(context)
    run(engine, [0], weights())
    for _ in range(2):
        with pytest.raises((ModelError, FloatingPointError), match=error):
            run(engine, [0], Weights(4, changed))
        engine.reset()


@pytest.mark.parametrize(
    ("most", "text", "needed"),
    [(64, "1" * 65, "at most 64 [(]--max-prompt[)]"), (10, "1" * 11, "at most 10"), (64, "", "at least one")],
)
def test_a_prompt_longer_than_its_room_is_an_error(context: Context, most: int, text: str, needed: str) -> None:
    engine = make_engine(replace(context, max_prompt=most))
    given = f"group 9: given a prompt of {len(text)} tokens"
    with pytest.raises(ValueError, match=f"{given}, needed {needed}"):
        engine.submit("x", {"prompts": prompts(9, text), "behaviour": weights()})
    engine.submit("x", {"prompts": prompts(9, "1" * most), "behaviour": weights()})
    assert len(drain(engine)) == 1


@pytest.mark.parametrize(
    ("changes", "samples", "message"),
    [
        ({"max_tokens": 96}, 8, r"--max-tokens \[out-of-range\]\s+given +96\s+needed +1 to 95"),
        ({"slots": 0}, 8, "given samples 8 and 0 slots"),
        ({}, 0, "given samples 0 and 32 slots"),
        ({"slots": 10**10}, 8, r"given 10000000000 slots of 72 positions.* --slots .* --max-prompt .*"),
    ],
)
def test_what_cannot_work_is_an_error(context: Context, changes: dict[str, Any], samples: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(replace(context, **changes), samples=samples)


@pytest.mark.parametrize("text", ["", "<eos>", "no letter of the alphabet"])
def test_a_stop_string_that_the_model_cannot_say_is_an_error(context: Context, text: str) -> None:
    with pytest.raises(ValueError, match=f"option 'stop': given '{text}', needed"):
        make_engine(context, stop=("1", text))


def test_a_stop_string_that_is_longer_than_any_response_is_told(context: Context) -> None:
    tokenizer = byte_tokenizer()
    assert not never_said("xyz", tokenizer, 3)
    assert "at most 3 tokens" in never_said("wxyz", tokenizer, 3)
    assert "at most 3 tokens" in never_said("éé", tokenizer, 3)
    assert not never_said("x" * 9999, tokenizer)
    # A token adds at most the longest word and a space.
    most = 3 * (1 + max(map(len, tokenizer.words)))
    assert f"at most {most} characters" in never_said("x" * (most + 1), tokenizer, 3)


def test_a_stop_string_that_some_tokens_can_say_is_allowed_however_it_is_encoded() -> None:
    """A response may say a text with fewer tokens than its own encoding has, and more around it."""
    words = ["a", "b", "c", "d", "xab", "cd", "bcd", "dax", "ab"]
    backend = tokenizers.Tokenizer(BPE({text: token for token, text in enumerate(words)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend, (0,), None)
    responses = {count: ["".join(said) for said in product(words, repeat=count)] for count in range(1, 5)}
    for text in map("".join, product("abcd", repeat=4)):
        least = next(count for count, texts in responses.items() if any(text in said for said in texts))
        assert (text, tokenizer.fewest(text)) == (text, least)
        assert not never_said(text, tokenizer, least)
    assert len(tokenizer.encode("abcd")) == 4
    assert "at most 1 token" in never_said("abcd", tokenizer, 1)
    # Nothing is known of the words of other decoders.
    backend.decoder = decoders.Fuse()
    assert not never_said("abcd", tokenizer, 1)


@pytest.mark.parametrize(
    ("text", "needed"), [(5, "texts"), ("\ud800", "special tokens"), ("a\udfff", "special tokens")]
)
def test_what_is_no_text_is_no_stop_string(text: Any, needed: str) -> None:
    told = never_said(text, byte_tokenizer())
    assert needed in told
    assert "empty" not in told


def test_an_engine_that_has_released_its_memory_samples_the_same(context: Context) -> None:
    kept, released = (make_engine(context, samples=2) for _ in range(2))
    for ordinals in ((0, 1, 2), (3, 4)):
        first, second = (run(engine, ordinals, weights()) for engine in (kept, released))
        assert_equal(first, second, ordinals)
        released.release()
        assert released.memory is None


# Attention of rows over slots: by a compiled kernel, and without one.


CACHE_CONFIG = ModelConfig(40, 32, 40, 2, 4, 2, 8, 64, initializer_range=0.2)
SLOTS = 16


@pytest.fixture(params=["compiled", "plain"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        for module in (attention, sampling):
            monkeypatch.setattr(module, "compiled", lambda *_: None)
    return str(request.param)


def filled(length: int, dtype: torch.dtype, width: int = 8, heads: int = 4) -> tuple[Tensor, ...]:
    """Return queries, keys and values of a pass, with `heads` over 2 key-value heads, and slots with random entries."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(SLOTS, number, width) for number in (heads, 2, 2)] + [cache_shape(SLOTS, length, 2, width, "cpu")] * 2
    return tuple(torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)


@pytest.mark.parametrize("window", [0, 1, 21])
@pytest.mark.parametrize(("heads", "width"), [(4, 6), (4, 8), (4, 20), (4, 64), (4, 80), (2, 64), (10, 128), (14, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_slots_is_attention(
    kernel: str, dtype: torch.dtype, heads: int, width: int, window: int
) -> None:
    """The rows have several slots; some have the same slot, and some are empty."""
    q_RHK, k_RGK, v_RGK, keys_SBGPK, values_SBGPK = filled(200, dtype, width, heads)
    slots_R, positions_R = torch.arange(SLOTS), torch.arange(SLOTS) * 12 + 3
    slots_R[4:9], positions_R[4:9], positions_R[12] = 5, torch.arange(60, 65), -1
    out_RHK = attend(q_RHK, k_RGK, v_RGK, keys_SBGPK, values_SBGPK, slots_R, positions_R, window)
    own = [x.transpose(1, 2).flatten(2, 3) for x in (keys_SBGPK, values_SBGPK)]
    for row, (slot, position) in enumerate(zip(slots_R.tolist(), positions_R.tolist(), strict=True)):
        if position < 0:
            continue
        assert torch.equal(own[0][slot, :, position], k_RGK[row])
        seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
        keys_HCK, values_HCK = (x[slot, :, seen].float().repeat_interleave(heads // 2, 0) for x in own)
        expected_H1K = F.scaled_dot_product_attention(q_RHK[row, :, None].float(), keys_HCK, values_HCK)
        error_HK = (out_RHK[row].float() - expected_H1K[:, 0]).abs()
        assert error_HK.max() < (2e-6 if dtype == torch.float32 else 0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_beside_others_and_in_another_row(kernel: str, dtype: torch.dtype) -> None:
    q_RHK, k_RGK, v_RGK, keys_SBGPK, values_SBGPK = filled(200, dtype)
    slots_R, positions_R = torch.arange(SLOTS), torch.arange(SLOTS) * 12 + 3
    together = attend(q_RHK, k_RGK, v_RGK, keys_SBGPK.clone(), values_SBGPK.clone(), slots_R, positions_R)
    order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))
    moved = q_RHK[order], k_RGK[order], v_RGK[order]
    other = attend(*moved, keys_SBGPK.clone(), values_SBGPK.clone(), slots_R[order], positions_R[order])
    assert torch.equal(other, together[order])
    for row in (0, 7):
        alone_R = torch.full((SLOTS,), -1)
        alone_R[row] = positions_R[row]
        alone = attend(q_RHK, k_RGK, v_RGK, keys_SBGPK.clone(), values_SBGPK.clone(), slots_R, alone_R)
        assert torch.equal(alone[row], together[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_passes_over_a_cache_are_the_whole_forward_and_a_prompt_has_the_bits_of_single_tokens(
    kernel: str, dtype: torch.dtype
) -> None:
    model = CausalLM(CACHE_CONFIG, dtype)
    model.init_weights(0)
    tokens_SC = torch.randint(0, 40, (SLOTS, 30), generator=torch.Generator().manual_seed(1))

    def step(cache: Cache, slots: list[int], positions: list[int]) -> Tensor:
        slots_R, positions_R = torch.tensor(slots), torch.tensor(positions)
        cache.begin(slots_R, positions_R)
        hidden_R1D: Tensor = model(tokens_SC[slots_R, positions_R][:, None], positions_R[:, None], cache.attend)
        return hidden_R1D[:, 0]

    with torch.no_grad():
        whole_SCD = model(tokens_SC)
    with torch.inference_mode():
        model.pack(SLOTS)
        caches = [Cache(CacheSize(CACHE_CONFIG, SLOTS, 64, 8, dtype, "cpu")) for _ in range(2)]
        for position in range(30):
            step_SD = step(caches[0], list(range(SLOTS)), [position] * SLOTS)
            error_SD = (step_SD - whole_SCD[:, position]).float().abs()
            assert error_SD.max() < (1e-4 if dtype == torch.float32 else 0.15)
            assert error_SD.mean() < (1e-5 if dtype == torch.float32 else 0.02)
        for begin in (0, 8, 16):
            step(caches[1], [3] * 8 + [7] * 8, [*range(begin, begin + 8)] * 2)
        for slot, length in ((1, 24), (2, 16), (4, 5)):
            caches[1].copy(7, torch.tensor([slot]), length)
        for name in ("keys", "values"):
            # Positions in order: [layers, slots, heads, positions, width].
            whole, read = (getattr(cache, name).transpose(2, 3).flatten(3, 4)[:, :, :, :24] for cache in caches)
            assert torch.equal(whole[:, [3, 7]], read[:, [3, 7]])
            for slot, length in ((1, 24), (2, 16), (4, 5)):
                assert torch.equal(whole[:, 7, :, :length], read[:, slot, :, :length])


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations that compute something, without views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(view in str(func) for view in ("view", "split", "select", "unsqueeze", "chunk", "flatten")):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_layer_of_a_pass_is_at_most_sixteen_operations_one_of_them_attention_in_one_graph() -> None:
    counts = []
    for layers in (2, 3):
        model = CausalLM(replace(CACHE_CONFIG, num_hidden_layers=layers))
        model.init_weights(0)
        model.pack(SLOTS)
        cache = Cache(CacheSize(model.config, SLOTS, 64, 8, torch.float32, "cpu"))
        tokens_R1, positions_R = torch.zeros(SLOTS, 1, dtype=torch.long), torch.zeros(SLOTS, dtype=torch.long)
        cache.begin(torch.arange(SLOTS), positions_R)
        with torch.inference_mode(), Operations() as seen:
            expected = model(tokens_R1, positions_R[:, None], cache.attend)
        counts.append(seen.names)
    assert [sum("attend" in name for name in names) for names in counts] == [2, 3]
    assert len(counts[1]) - len(counts[0]) <= 16
    graph = torch.compile(model, backend="eager", fullgraph=True)
    with torch.inference_mode():
        assert torch.equal(graph(tokens_R1, positions_R[:, None], cache.attend), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_that_does_not_fit_is_refused_before_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    size = CacheSize(CACHE_CONFIG, SLOTS, 72, 8, dtype, "cpu")
    cache = DecodeMemory(size).cache
    taken = cache.keys.nbytes + cache.values.nbytes
    for lacks in (0, 1):
        root = tmp_path / str(lacks)
        for name, text in {
            "proc/self/cgroup": "0::/\n",
            "proc/meminfo": f"MemAvailable: {taken >> 8} kB\n",
            "sys/fs/cgroup/memory.max": f"{taken - lacks + 100}\n",
            "sys/fs/cgroup/memory.current": "100\n",
        }.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        monkeypatch.setattr(kv_cache, "free_memory", partial(free_memory, root))
        for use in (DecodeMemory, CacheSize.require_memory):
            with (
                pytest.raises(ValueError, match=r"fewer --slots .* --max-prompt .* below 64")
                if lacks
                else nullcontext()
            ):
                use(size)


@pytest.mark.parametrize("lacks", [0, 1])
def test_an_engine_has_room_for_its_cache_two_versions_of_the_weights_and_its_copies(
    context: Context, monkeypatch: pytest.MonkeyPatch, lacks: int
) -> None:
    engine = make_engine(context, samples=1)
    cache = DecodeMemory(engine.size).cache
    needed = cache.keys.nbytes + cache.values.nbytes + 2 * sum(tensor.nbytes for tensor in weights().tensors.values())
    if engine.decode is not None:
        copied = engine.decode.copied_bytes()
        engine.decode.pack()
        assert engine.decode.weights is not None
        assert copied == engine.decode.weights.nbytes + engine.decode.head.nbytes
        needed += copied
    monkeypatch.setattr(kv_cache, "free_memory", lambda: needed - lacks)
    with pytest.raises(ValueError, match="fewer --slots") if lacks else nullcontext():
        make_engine(context, samples=1)


def test_without_a_compiler_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")
    with pytest.warns(NoCompilerWarning, match="given '/nowhere/cc'.* needed a C compiler"):
        assert attention.compiled.__wrapped__(2, 8, torch.float32) is None


# Draws are keyed, follow the distribution, and the recorded log-probability is that of the distribution used.


MASK = (1 << 64) - 1


def splitmix64(seed: int, index: int) -> int:
    """The generator as published, in exact integers."""
    state = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def logits(rows: int, vocab: int, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(5)) * scale


def test_uniforms_are_those_of_splitmix64() -> None:
    keys = torch.tensor([0, 1, 2**62 + 12345, 2**63 - 1])
    positions = torch.tensor([0, 7, 100_000, 3])
    expected = [(splitmix64(k, p) >> 12) * 2.0**-52 for k, p in zip(keys.tolist(), positions.tolist(), strict=True)]
    assert keyed_uniform(keys, positions).tolist() == expected


def test_uniforms_are_uniform_over_keys_and_over_positions() -> None:
    many = torch.arange(100_000)
    for values in (keyed_uniform(torch.tensor(17), many), keyed_uniform(many, torch.tensor(3))):
        assert float(values.min()) >= 0
        assert float(values.max()) < 1
        counts = torch.histc(values.float(), 20, 0, 1)
        assert ((counts - 5000).abs() < 5 * 5000**0.5).all()


def test_draws_follow_the_distribution(kernel: str) -> None:
    num_draws, sampler = 40_000, Sampler()
    row_V = logits(1, 7)
    tokens, _ = sampler(row_V.expand(num_draws, -1), keyed_uniform(torch.tensor(1), torch.arange(num_draws)))
    expected_V = row_V[0].softmax(0) * num_draws
    counts_V = torch.bincount(tokens, minlength=7)
    assert ((counts_V - expected_V).abs() < 5 * expected_V.sqrt()).all()


def test_the_whole_range_of_uniforms_gives_tokens_of_positive_probability(kernel: str) -> None:
    logits_SV = torch.full((2, 6), -torch.inf)
    logits_SV[:, 2], logits_SV[:, 4] = 0.0, 1.0
    tokens, logprobs = Sampler()(logits_SV, torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64))
    assert tokens.tolist() == [2, 4]
    assert torch.allclose(logprobs.exp().sum(), torch.tensor(1.0))


@pytest.mark.parametrize("words", [1, 7, 16, 500, 512, 513, 1537, 4096])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draw_is_where_the_sum_of_the_probabilities_passes_the_uniform(
    kernel: str, dtype: torch.dtype, temperature: float, words: int
) -> None:
    logits_SV, uniform_S = (4 * logits(256, words)).to(dtype), keyed_uniform(torch.arange(256), torch.tensor(4))
    logits_SV[:, 1::3] = -torch.inf
    tokens_S, logprobs_S = Sampler(temperature)(logits_SV, uniform_S)
    expected_SV = torch.log_softmax(logits_SV.double() / temperature, -1)
    own_S1, upto_SV = tokens_S[:, None], expected_SV.exp().cumsum(-1)
    # The draw lies between both ends of the token's share, within float32's rounding.
    assert (upto_SV.gather(1, own_S1)[:, 0] > uniform_S - 1e-6).all()
    assert ((upto_SV - expected_SV.exp()).gather(1, own_S1)[:, 0] < uniform_S + 1e-6).all()
    torch.testing.assert_close(logprobs_S.double(), expected_SV.gather(1, own_S1)[:, 0], atol=3e-6, rtol=0)
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        again = Sampler(temperature)(logits_SV[:40], uniform_S[:40])
        torch.set_num_threads(before)
        assert torch.equal(again[0], tokens_S[:40])
        assert torch.equal(again[1], logprobs_S[:40])


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_give_no_log_probability(kernel: str, wrong: float) -> None:
    """The engine raises if a log-probability is not finite."""
    for at in (0, 3, 699):
        logits_SV = logits(2, 700)
        logits_SV[1, at] = wrong
        tokens_S, logprobs_S = Sampler()(logits_SV, torch.tensor([0.5, 0.5], dtype=torch.float64))
        assert logprobs_S.isfinite().tolist() == [True, False]
        assert tokens_S.max() < 700


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(0.5), Sampler(1.5, 3), Sampler(1.0, 0, 0.6)])
def test_the_recorded_logprob_is_that_of_the_distribution_used(kernel: str, sampler: Sampler) -> None:
    logits_SV = logits(64, 11)
    tokens, logprobs = sampler(logits_SV, keyed_uniform(torch.arange(64), torch.tensor(0)))
    allowed = sampler.logprobs(logits_SV)
    torch.testing.assert_close(allowed.exp().sum(-1), torch.ones(64))
    torch.testing.assert_close(logprobs, allowed.gather(1, tokens[:, None]).squeeze(1), atol=1e-6, rtol=0)
    kept = (allowed > -torch.inf).sum(-1)
    if sampler.top_k:
        assert set(kept.tolist()) == {sampler.top_k}
    uncut = Sampler(sampler.temperature).logprobs(logits_SV)
    torch.testing.assert_close(uncut, torch.log_softmax(logits_SV / sampler.temperature, -1))


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.5, 2), (0.75, 3), (0.7500001, 4), (0.2499999, 1), (1.0, 4)])
def test_a_token_with_which_top_p_is_reached_exactly_is_the_last_one(top_p: float, kept: int) -> None:
    """With four equal tokens, probabilities and their sums are exact."""
    allowed = Sampler(top_p=top_p).logprobs(torch.zeros(1, 4))[0]
    assert (allowed > -torch.inf).tolist() == [True] * kept + [False] * (4 - kept)
    torch.testing.assert_close(allowed[:kept].exp(), torch.full((kept,), 1 / kept))
    # top_p keeps the fewest tokens that reach it, in the order of their probabilities.
    unequal = Sampler(top_p=0.51).logprobs(torch.tensor([[0.5, 0.1, 0.3, 0.1]]).log())[0]
    assert (unequal > -torch.inf).tolist() == [True, False, True, False]


def test_temperature_zero_takes_the_likeliest_with_probability_one() -> None:
    logits_SV = logits(5, 9)
    tokens, logprobs = Sampler(0.0)(logits_SV, torch.rand(5, dtype=torch.float64))
    assert torch.equal(tokens, logits_SV.argmax(-1))
    assert logprobs.tolist() == [0.0] * 5


def test_a_row_does_not_depend_on_its_neighbours(kernel: str) -> None:
    logits_SV, uniform_S = logits(64, 23), keyed_uniform(torch.arange(64), torch.tensor(9))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    for sampler in (Sampler(), Sampler(0.7, 5, 0.9)):
        tokens, logprobs = sampler(logits_SV, uniform_S)
        other_tokens, other_logprobs = sampler(logits_SV[order], uniform_S[order])
        assert torch.equal(tokens[order], other_tokens)
        assert torch.equal(logprobs[order], other_logprobs)


# Fake nodes are deterministic except for time. tests/gates compares runs of them with plain loops.


class Clock:
    """A clock that moves only in `sleep`: between two steps at most one token is due."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def prompt(ordinal: int) -> Prompts:
    read: Prompts = fake.open_prompts(Context()).read(ordinal)
    return read


def fake_weights(learner: FakePolicy) -> Weights:
    return Weights(learner.version, {"values": learner.weights()["values"].clone()})


def train(updates: int, *, lag: int = 0, jitter_ms: float = 0.0, order: tuple[int, ...] = (0, 1)) -> FakePolicy:
    """Train in a plain loop of two groups per update."""
    learner, versions = FakePolicy(Context()), []
    for update in range(updates):
        versions.append(fake_weights(learner))
        behaviour = versions[max(0, update - lag)]
        parts = [fake_generate.fn(FakeEngine(4, 0.0), prompt(2 * update + i), behaviour)[1] for i in order]
        rewards = [fake_score.fn(part, jitter_ms=jitter_ms) for part in parts]
        fake_update.fn(learner, Rollouts.concat(parts), Rewards.concat(rewards), jitter_ms=jitter_ms)
    return learner


def test_a_run_depends_on_lag_and_order_but_not_on_time() -> None:
    values = train(3).values_W
    assert torch.equal(values, train(3, jitter_ms=2.0).values_W)
    others = train(3, lag=1), train(3, order=(1, 0)), train(0)
    assert not any(torch.equal(values, other.values_W) for other in others)


def test_a_fake_token_keeps_the_version_that_made_it_and_a_reset_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.nodes.fake.time", Clock())
    engine, behaviour = FakeEngine(samples=4, ms=40.0), fake_weights(FakePolicy(Context()))
    old = fake_generate.fn(FakeEngine(4, 0.0), prompt(0), behaviour)[1].logprobs_NT
    engine.submit("lost", {"prompts": prompt(1), "behaviour": behaviour})
    engine.reset()
    assert not engine.busy()
    engine.submit("a", {"prompts": prompt(0), "behaviour": behaviour})
    while not engine.groups["a"].made:
        engine.step()
    become(behaviour, Weights(1, {"values": behaviour.tensors["values"] + 1}))
    finished: list[Any] = []
    while engine.busy():
        finished += engine.step()
    ((tag, rollouts),) = finished
    assert (tag, rollouts.versions_NT[0, 0], rollouts.versions_NT[0, -1]) == ("a", 0, 1)
    assert torch.equal(rollouts.logprobs_NT[:, 0], old[:, 0])
    assert not torch.equal(rollouts.logprobs_NT[:, -1], old[:, -1])


def test_fake_groups_wait_for_slots_as_those_of_a_generator_do() -> None:
    behaviour, engine = fake_weights(FakePolicy(Context())), FakeEngine(samples=4, ms=0.0, slots=8)
    for ordinal in range(5):
        engine.submit(ordinal, {"prompts": prompt(ordinal), "behaviour": behaviour})
    assert [[tag for tag, _ in engine.step()] for _ in range(3)] == [[0, 1], [2, 3], [4]]
    assert not engine.busy()


def test_a_fake_conversation_goes_on_in_the_rows_that_are_not_done() -> None:
    behaviour, engine = fake_weights(FakePolicy(Context())), FakeEngine(8, 0.0)
    _, rollouts = fake_generate.fn(engine, prompt(5), behaviour, samples=8)
    for _ in range(2):
        replies = fake_environment.fn(rollouts)
        assert not replies.done
        _, after = fake_generate.fn(engine, prompt(5), behaviour, rollouts, replies, samples=8)
        for row, done in enumerate(replies.done_N.tolist()):
            assert after.turns()[row] == rollouts.turns()[row] + (not done)
            old = int(rollouts.response_lengths_N[row])
            assert torch.equal(after.tokens_NS[row, : 1 + old], rollouts.tokens_NS[row, : 1 + old])
            if not done:
                assert after.versions_NT[row, old:].tolist() == [-1] + [behaviour.version] * 4
                assert after.tokens_NS[row, 1 + old] == int(replies.texts[row])
        rollouts = after
    assert fake_environment.fn(rollouts).done
    assert sorted(set(rollouts.turns())) == [1, 2, 3]
