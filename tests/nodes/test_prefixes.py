"""Responses go on from the very tokens of prefixes, each prefix with draws of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from penstock.graph import Context, Policy, Prompts, Rewards, Rollouts, Weights, broadcast, check, program, trace
from penstock.graph.node import Paused
from penstock.graph.types import Prefixes, TokenAdvantages
from penstock.nodes.advantage import group_advantage, leave_one_out_advantage, vine_advantage
from penstock.nodes.data import Made
from penstock.nodes.distill import reference_logprobs
from penstock.nodes.environments.guessing_game import guessing_game
from penstock.nodes.generate import converse, generate, make_engine
from penstock.nodes.generate.engine import Engine
from penstock.nodes.generate.sampling import mismatch
from penstock.nodes.learn.batching import pack, sampled_mask
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.policy import make_reference
from penstock.nodes.prefixes import Said, after_text, after_tokens, cut
from penstock.nodes.reward_model import ends
from penstock.nodes.score import length, score
from tests.nodes.rollouts import random_rollouts
from tests.nodes.test_conversation import row_of
from tests.nodes.test_generate import counted, equal
from tests.nodes.tiny_model import TOKENIZER, model, weights

pytestmark = pytest.mark.timeout(120)
SAMPLES, VINES = 4, 3


def prompts(ordinal: int) -> Prompts:
    return Prompts((ordinal,), (("abc" * 5, "4+4=")[ordinal % 2],), ("8",))


def sampled(engine: Engine, given: Mapping[int, Mapping[str, Any]], behaviour: Weights) -> dict[int, Any]:
    """Sample what follows each group's inputs, all groups together, and go on after pauses."""
    for ordinal, more in given.items():
        engine.submit(ordinal, {"prompts": prompts(ordinal), "behaviour": behaviour, **more})
    results: dict[int, Any] = {}
    while engine.busy():
        for tag, made in engine.step():
            if isinstance(made, Paused):
                more = {**given[tag], "paused": made.value}
                engine.submit(tag, {"prompts": prompts(tag), "behaviour": behaviour, **more})
            else:
                results[tag] = made
    return results


def begin(context: Context, ordinal: int, samples: int = SAMPLES, **options: Any) -> Rollouts:
    rollouts: Rollouts = sampled(make_engine(context, samples=samples, **options), {ordinal: {}}, weights())[ordinal][0]
    return rollouts


def begins(context: Context, rollouts: Rollouts, places: Sequence[int] = (1, 3)) -> Prefixes:
    """Return prefixes of `places` tokens of each row that is longer."""
    prefixes: Prefixes = cut.fn(
        rollouts, at=lambda said: [place for place in places if place < len(said.texts)], context=context
    )[0]
    return prefixes


def further(context: Context, prefixes: Prefixes, ordinal: int, **more: Any) -> Rollouts:
    engine = make_engine(replace(context, node="vines"), samples=VINES, **more)
    rollouts: Rollouts = sampled(engine, {ordinal: {"after": prefixes}}, weights())[ordinal][0]
    return rollouts


def test_a_prefix_keeps_the_tokens_and_what_is_known_of_each(context: Context) -> None:
    rollouts = begin(context, 2)
    prefixes, metrics = cut.fn(rollouts, at=partial(after_tokens, tokens=2), most=8, context=context)
    assert metrics["prefixes"] == len(prefixes) > SAMPLES
    assert prefixes.numbers_N.tolist() == list(range(len(prefixes)))
    for index, (row, kept) in enumerate(zip(prefixes.rows_N.tolist(), prefixes.lengths_N.tolist(), strict=True)):
        whole, prompt = row_of(rollouts, row), int(prefixes.prompt_lengths_N[index])
        assert kept % 2 == 0
        assert prefixes.tokens_NS[index, : prompt + kept].tolist() == whole[0][: prompt + kept]
        assert prefixes.logprobs_NT[index, :kept].tolist() == whole[1][:kept]
        assert prefixes.versions_NT[index, :kept].tolist() == whole[2][:kept]
        assert not prefixes.tokens_NS[index, prompt + kept :].any()


def test_with_the_key_that_sampled_it_a_response_goes_on_as_it_did(context: Context) -> None:
    """A node's first prefix draws like its prompt: cut at any token, it goes on to the same response."""
    rollouts = begin(context, 1)
    for row in range(SAMPLES):
        for place in range(int(rollouts.response_lengths_N[row]) - 1):
            prefix = begins(context, rollouts.take([row]), [place])
            again = sampled(make_engine(context, samples=SAMPLES), {1: {"after": prefix}}, weights())[1][0]
            assert row_of(again, row) == row_of(rollouts, row)


def test_each_prefix_draws_by_its_own_number_and_by_nothing_else(context: Context) -> None:
    """Other prefixes and groups, order, slots and segments do not matter."""
    whole = {ordinal: begins(context, begin(context, ordinal)) for ordinal in range(4)}
    given = {ordinal: {"after": prefixes} for ordinal, prefixes in whole.items()}
    vines = replace(context, node="vines")
    together = sampled(make_engine(vines, samples=VINES), given, weights())
    for ordinal, prefixes in whole.items():
        made = together[ordinal][0]
        assert made.prefixes_N.tolist() == [n for n in prefixes.numbers_N.tolist() for _ in range(VINES)]
        for segment in (0, 2):
            some = prefixes.take([len(prefixes) - 1, 0])
            alone = sampled(
                make_engine(replace(vines, segment=segment), samples=VINES), {ordinal: {"after": some}}, weights()
            )
            for place, number in enumerate((len(prefixes) - 1, 0)):
                for sample in range(VINES):
                    expected = row_of(made, number * VINES + sample)
                    assert row_of(alone[ordinal][0], place * VINES + sample) == expected
        assert sampled_mask(made).sum() == made.sampled_N.sum()


def test_prefixes_of_equal_tokens_draw_apart(context: Context) -> None:
    one = begins(context, begin(context, 1), [2]).take([0])
    twins = Prefixes.concat([one, replace(one, numbers_N=one.numbers_N + 1)])
    made = further(context, twins, 1)
    first, second = (made.take(made.prefixes_N == number) for number in (0, 1))
    assert len(first) == len(second) == VINES
    assert first.tokens_NS[:, : 4 + 2].tolist() == second.tokens_NS[:, : 4 + 2].tolist()
    assert first.texts != second.texts


@pytest.mark.parametrize("learn_prefix", [False, True])
def test_tokens_of_a_prefix_are_context_unless_they_are_to_be_learnt_from(context: Context, learn_prefix: bool) -> None:
    """Scorers see the whole response in both cases, and tokens keep their version and log μ."""
    prefixes = begins(context, begin(context, 2))
    engine = make_engine(replace(context, batch=1), samples=VINES, learn_prefix=learn_prefix)
    made, metrics = sampled(engine, {2: {"after": prefixes}}, weights(7, seed=2))[2]
    new = int((made.response_lengths_N - prefixes.lengths_N.repeat_interleave(VINES)).sum())
    learnt = int(made.response_lengths_N.sum()) if learn_prefix else new
    assert int(made.sampled_N.sum()) == int(sampled_mask(made).sum()) == learnt
    assert sum(len(packed.targets_P) for packed in pack(made, 64)) == learnt
    assert metrics["generated_tokens"] == new
    for row, (number, text) in enumerate(zip(made.prefixes_N.tolist(), made.texts, strict=True)):
        tokens, logprobs, versions, *_ = row_of(made, row)
        length = int(prefixes.lengths_N[number])
        assert logprobs[:length] == prefixes.logprobs_NT[number, :length].tolist()
        assert versions == [0] * length + [7] * (len(versions) - length)
        said = [token for token in tokens[int(made.prompt_lengths_N[row]) :] if token not in TOKENIZER.stops]
        assert text == TOKENIZER.decode(said)
    if not learn_prefix:
        assert mismatch(model(2), made) < 1e-5
    # Tokens of older weights would differ by more than rounding.
    assert metrics.get("mismatch", 0.0) < 1e-5
    assert ("mismatch" in metrics) == (not learn_prefix)


def test_a_prefix_is_computed_once_and_not_where_a_response_has_it(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except for its last token, from which every sample goes on."""
    engine = make_engine(context, samples=SAMPLES)
    rollouts = sampled(engine, {2: {}}, weights())[2][0]
    longest = int(rollouts.response_lengths_N.argmax())
    prefix = begins(context, rollouts.take([longest]), [6])
    fresh = make_engine(context, samples=SAMPLES)
    computed = []
    for one in (engine, fresh):
        passes = counted(one, monkeypatch)
        made = sampled(one, {2: {"after": prefix}}, weights())[2][0]
        computed.append(sum(passes) - int(made.sampled_N.sum()))
    assert computed == [0, int(prefix.prompt_lengths_N[0]) + 6 - 1]


def test_what_goes_on_may_be_cut_behind_its_prefix(context: Context) -> None:
    """This makes a tree, in which each level has longer prefixes of its own."""
    first = begins(context, begin(context, 2), [2])
    second = further(context, first, 2)
    deeper = begins(context, second, [1, 2, 4])
    assert set(deeper.lengths_N.tolist()) == {4}
    third = further(context, deeper, 2)
    assert third.prefix_lengths_N.tolist() == [4] * len(third)
    batch = Rollouts.concat([begin(context, 1), second, third])
    assert batch.prefixes_N.tolist()[:SAMPLES] == [-1] * SAMPLES
    assert int(batch.sampled_N.sum()) == sum(int(each.sampled_N.sum()) for each in (begin(context, 1), second, third))


def test_each_prefix_of_a_group_of_several_prompts_goes_on_with_its_own(context: Context) -> None:
    one, other = prompts(1), prompts(2)
    both = Prompts((7, 7), one.texts + other.texts, one.answers + other.answers)
    engine = make_engine(context, samples=SAMPLES)
    engine.submit(7, {"prompts": both, "behaviour": weights()})
    ((_, (rollouts, _)),) = until_done(engine)
    prefixes = begins(context, rollouts)
    vines = make_engine(replace(context, node="vines"), samples=VINES)
    vines.submit(7, {"prompts": both, "behaviour": weights(), "after": prefixes})
    ((_, (made, _)),) = until_done(vines)
    of = [rollouts.prompts[row] for row in prefixes.rows_N.tolist() for _ in range(VINES)]
    assert (list(made.prompts), {*of}) == (of, {*both.texts})


def until_done(engine: Engine) -> list[Any]:
    done: list[Any] = []
    while engine.busy():
        done += engine.step()
    return done


def test_a_group_without_a_prefix_has_no_rows(context: Context) -> None:
    prefixes, metrics = cut.fn(begin(context, 1), at=partial(after_text, text="##"), context=context)
    made, _ = sampled(make_engine(context, samples=VINES), {1: {"after": prefixes}}, weights())[1]
    rewards, figures = score.fn(made, by=length_of_five)
    assert (metrics["prefixes"], len(made), len(rewards)) == (0.0, 0, 0)
    assert (metrics["prefix_length"].count, figures["finished"].count) == (0, 0)  # no row has them
    assert len(group_advantage.fn(rewards, made)) == len(leave_one_out_advantage.fn(rewards, made)) == 0
    # Models have nothing to score.
    reference: Any = make_reference(replace(context, node="reference"))
    assert reference_logprobs.fn(reference, made).logprobs_NT.shape == (0, 0)
    assert len(reference.pack(ends(made))) == 0
    batch = Rollouts.concat([made, begin(context, 2)])
    assert batch.tokens_NS.dtype == torch.long
    assert equal(batch, begin(context, 2))


def length_of_five(prompt: str, response: str, answer: str) -> float:
    return length(prompt, response, answer, at_most=5)


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (lambda p: replace(p, ordinals=(9,) * len(p)), {}, "group 2: given a prefix of group 9"),
    (lambda p: Prefixes.concat([p, p]), {}, "group 2: given prefix 0 of group 2 twice"),
    (lambda p: replace(p, numbers_N=-1 - p.numbers_N), {}, "prefix -1: given a negative number"),
    (lambda p: replace(p, tokens_NS=p.tokens_NS + 1), {}, "prefix 0: given a prompt of 15 tokens that are not"),
    (lambda p: with_last(p, 5000), {}, "needed prefixes of this prompt by the model's own tokenizer"),
    (lambda p: with_last(p, TOKENIZER.eos), {}, "prefix 0: given a prefix that has ended: token 3 of 3 is a stop"),
    (lambda p: p, {"max_tokens": 3}, "prefix 0: given a prefix of 3 tokens, needed at most 2"),
    (lambda p: p, {"max_prompt": 10}, "group 2: given a prompt of 15 tokens, needed at most 10"),
    (lambda p: replace(p, lengths_N=p.lengths_N + 50), {}, "prefixes: given prefix 0 of 15 [+] 53 tokens in arrays"),
    (lambda p: replace(p, versions_NT=p.versions_NT[:1]), {}, r"prefixes: given versions_NT of shape \[1, \d"),
    (lambda p: replace(p, logprobs_NT=None), {}, r"prefixes: given logprobs_NT of shape \[\]"),
    (
        lambda p: p,
        {"temperature": 0.5, "learn_prefix": True},
        "given prefixes of temperature 1, needed temperature 0.5",
    ),
]


def with_last(prefixes: Prefixes, token: int) -> Prefixes:
    tokens_NS = prefixes.tokens_NS.clone()
    tokens_NS[:, 15 + 2] = token
    return replace(prefixes, tokens_NS=tokens_NS)


@pytest.mark.parametrize(("change", "options", "error"), WRONG, ids=[error for *_, error in WRONG])
def test_a_prefix_that_nothing_can_follow_is_refused(
    context: Context, change: Any, options: dict[str, Any], error: str
) -> None:
    prefixes = begins(context, begin(context, 2), [3])
    sizes = {name: options.pop(name, getattr(context, name)) for name in ("max_tokens", "max_prompt")}
    engine = make_engine(replace(context, **sizes), samples=VINES, **options)
    with pytest.raises(ValueError, match=error):
        engine.submit(0, {"prompts": prompts(2), "behaviour": weights(), "after": change(prefixes)})
    assert not engine.busy()


def test_a_prefix_that_a_stop_string_has_ended_is_refused(context: Context) -> None:
    prefix = begins(context, begin(context, 2), [3]).take([0])
    said = TOKENIZER.decode(prefix.tokens_NS[0, 15:18].tolist())
    engine = make_engine(context, samples=VINES, stop=(said[1:],))
    with pytest.raises(ValueError, match="a stop string has ended"):
        engine.submit(0, {"prompts": prompts(2), "behaviour": weights(), "after": prefix})


def test_places_are_told_by_texts_and_tokens() -> None:
    said = Said(["1", "+", "2\n", "=", "\n", "\n3", "\n"], [0.0] * 7)
    assert list(after_text(said)) == [3, 5, 6]
    assert list(after_text(said, text="=\n\n")) == [6]
    assert list(after_tokens(said, tokens=3)) == [3, 6]


def test_an_error_of_a_users_places_names_the_group_the_row_and_its_response(context: Context) -> None:
    rollouts = begin(context, 1)
    seen: list[Said] = []

    def places(said: Said) -> list[int]:
        seen.append(said)
        if len(seen) == 2:
            raise KeyError("x")
        return []

    with pytest.raises(KeyError) as raised:
        cut.fn(rollouts, at=places, context=context)
    (note,) = raised.value.__notes__
    assert rollouts.place(1) in note
    assert repr(rollouts.texts[1]) in note


def test_places_that_are_none_and_rollouts_that_nothing_can_be_cut_of_are_refused(context: Context) -> None:
    rollouts = begin(context, 2)
    for places, error in (([99], "given 99 by"), ([-1], "given -1 by"), ([1.5], "given 1.5 by")):
        with pytest.raises(ValueError, match=error):
            cut.fn(rollouts, at=lambda said, places=places: places, context=context)
    with pytest.raises(ValueError, match=r"cut, group 2, row 0: given tokens that do not say"):
        cut.fn(replace(rollouts, texts=("other",) * SAMPLES), context=context)
    with pytest.raises(ValueError, match="given a conversation of 3 texts"):
        cut.fn(replace(rollouts, transcripts=(["a", "b", "c"],) * SAMPLES), context=context)
    most = cut.fn(rollouts, at=partial(after_tokens, tokens=1), most=2, context=context)[0]
    assert max(most.rows_N.tolist().count(row) for row in range(SAMPLES)) == 2


# Advantages of the responses.


def group(samples: int) -> Rollouts:
    """Return responses of 4, 5, … tokens to one prompt."""
    rollouts = random_rollouts([(2, 4 + sample) for sample in range(samples)])
    return replace(rollouts, ordinals=(0,) * samples)


def test_rows_are_compared_with_those_of_their_prefix() -> None:
    rollouts = replace(group(6), prefixes_N=torch.tensor([4, 4, 4, 7, 7, 9]))
    rewards = Rewards(torch.tensor([3.0, 0.0, 0.0, 1.0, 0.0, 1.0]))
    made = group_advantage.fn(rewards, rollouts).values_N
    assert made.tolist() == [2.0, -1.0, -1.0, 0.5, -0.5, 0.0]
    odd = group_advantage.fn(rewards, rollouts, by=lambda r: [row % 2 for row in range(len(r))]).values_N
    assert odd.tolist() == [1.5, 0.0, -1.5, 0.0, 0.0, 0.0]
    assert rollouts.place(3) == f"group {rollouts.ordinals[3]}, prefix 7, row 3"


def test_the_advantage_of_a_step_is_what_it_adds_to_the_value_of_its_state() -> None:
    """By hand: values 0.5 and 1 of the first row's states; the prompt's is the mean of the other rewards."""
    rollouts = group(3)
    lengths = rollouts.response_lengths_N.tolist()
    prefixes = begins_of([0, 0, 2], [1, 2, 0], [0, 1, 2])
    vines = replace(group(6), prefixes_N=torch.tensor([0, 0, 1, 1, 2, 2]))
    outcomes = Rewards(torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0]))
    rewards = Rewards(torch.tensor([1.0, 0.0, 1.0]))
    made, metrics = vine_advantage.fn(rewards, rollouts, prefixes, vines, outcomes)
    assert metrics == {"state_value": pytest.approx(2 / 3)}
    rows = [made.values_N[row, :length].tolist() for row, length in enumerate(lengths)]
    assert rows[0] == [0.0, 0.5, *[0.0] * (lengths[0] - 2)]
    assert rows[1] == [-1.0] * lengths[1]
    assert rows[2] == [0.5] * lengths[2]
    assert not any(made.values_N[row, length:].any() for row, length in enumerate(lengths))
    with pytest.raises(ValueError, match="after each prefix"):
        vine_advantage.fn(rewards, rollouts, prefixes, vines.take([0, 1]), Rewards(outcomes.values_N[:2]))


def test_the_steps_of_a_whole_batch_are_those_of_each_group() -> None:
    """Prefixes and rows are numbered in each group: in a batch the numbers come again."""
    rows, rewards = group(3), [torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.0, 0.0, 1.0])]
    begins = [begins_of([0, 0, 2], [1, 2, 0], [0, 1, 2]), begins_of([1, 2], [2, 1], [0, 1])]
    vines = [
        replace(group(6), prefixes_N=torch.tensor([0, 0, 1, 1, 2, 2])),
        replace(group(3), prefixes_N=torch.tensor([1, 0, 1])),
    ]
    outcomes = [torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0]), torch.tensor([1.0, 1.0, 0.0])]
    groups: list[list[Any]] = [
        [Rewards(rewards[n]), *(replace(each, ordinals=(n + 7,) * len(each)) for each in (rows, begins[n], vines[n]))]
        for n in (0, 1)
    ]
    apart = [vine_advantage.fn(*given, Rewards(outcomes[n]))[0] for n, given in enumerate(groups)]
    joined = [type(parts[0]).concat(parts) for parts in zip(*groups, strict=True)]
    made = vine_advantage.fn(*joined, Rewards(torch.cat(outcomes)))[0]
    assert made.values_N.tolist() == TokenAdvantages.concat(apart).values_N.tolist()


def begins_of(rows: list[int], lengths: list[int], numbers: list[int]) -> Prefixes:
    """Return prefixes of which only the place matters."""
    none_NT, one_N = torch.zeros(len(rows), 1), torch.ones(len(rows), dtype=torch.long)
    return Prefixes(
        ordinals=(0,) * len(rows),
        numbers_N=torch.tensor(numbers),
        rows_N=torch.tensor(rows),
        tokens_NS=none_NT.long(),
        prompt_lengths_N=one_N,
        lengths_N=torch.tensor(lengths),
        logprobs_NT=none_NT,
        versions_NT=none_NT.long(),
        temperature_N=one_N,
        cut_N=one_N > 1,
    )


# What `check` refuses.


@program
def no_rollouts(policy: Policy, prompts: Prompts) -> Policy:
    behaviour = broadcast(policy)
    rollouts = generate(prompts, behaviour)
    prefixes = cut(rollouts, at=after_text)
    vines = generate.named("vines")(prompts, behaviour, after=prefixes, samples=4)
    return aipo_update(policy, vines, group_advantage(score(vines, by=length_of_five)))


@program
def single_vine(policy: Policy, prompts: Prompts) -> Policy:
    behaviour = broadcast(policy)
    prefixes = cut(generate(prompts, behaviour), at=after_text)
    vines = generate.named("vines")(prompts, behaviour, after=prefixes, samples=1)
    return aipo_update(policy, vines, group_advantage(score(vines, by=length_of_five), vines))


@program
def none_learnt(policy: Policy, prompts: Prompts) -> Policy:
    rollouts = generate(prompts, broadcast(policy), learn_prefix=True)
    return aipo_update(policy, rollouts, group_advantage(score(rollouts, by=length_of_five)))


@program
def otherwise_learnt(policy: Policy, prompts: Prompts) -> Policy:
    behaviour = broadcast(policy)
    prefixes = cut(generate(prompts, behaviour, temperature=0.8), at=after_text)
    vines = generate.named("vines")(prompts, behaviour, after=prefixes, learn_prefix=True)
    return aipo_update(policy, vines, group_advantage(score(vines, by=length_of_five), vines))


@program
def cut_talk(policy: Policy, prompts: Prompts) -> Policy:
    behaviour = broadcast(policy)
    rollouts, _ = converse(prompts, behaviour, environment=guessing_game, turns=2)
    vines = generate.named("vines")(prompts, behaviour, after=cut(rollouts, most=0), samples=4)
    return aipo_update(policy, vines, group_advantage(score(vines, by=length_of_five), vines))


@program
def talk_after(policy: Policy, prompts: Prompts) -> Policy:
    behaviour = broadcast(policy)
    prefixes = cut(generate(prompts, behaviour), at=after_text)
    vines, _ = converse(prompts, behaviour, after=prefixes, environment=guessing_game.named("answers"), turns=2)
    return aipo_update(policy, vines, group_advantage(score(vines, by=length_of_five), vines))


@program
def learnt_from_others(policy: Policy, prompts: Prompts) -> Policy:
    """The advantages are those of the continuations, the rollouts those that were cut."""
    behaviour = broadcast(policy)
    rollouts = generate(prompts, behaviour)
    vines = generate.named("vines")(prompts, behaviour, after=cut(rollouts, at=after_text), samples=4)
    return aipo_update(policy, rollouts, group_advantage(score(vines, by=length_of_five), vines))


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        (learnt_from_others, {"unmet-requirement"}),
        (no_rollouts, {"missing-rollouts"}),
        (single_vine, {"too-few-samples"}),
        (none_learnt, {"missing-input"}),
        (otherwise_learnt, {"unmet-requirement"}),
        (cut_talk, {"prefix-in-conversation", "out-of-range"}),
        (talk_after, {"prefix-in-conversation"}),
    ],
)
def test_check_refuses_what_cannot_go_on(name: Any, codes: set[str]) -> None:
    assert {fault.code for fault in check(trace(name))} == codes


@program
def compared(policy: Policy, prompts: Prompts) -> Policy:
    rollouts = generate(prompts, broadcast(policy))
    return aipo_update(policy, rollouts, group_advantage(score(rollouts, by=length_of_five)))


@pytest.mark.parametrize(("texts", "codes"), [(("1+1=", "1+2="), ["missing-rollouts"]), (("1+1=",), [])])
def test_groups_of_several_prompts_are_compared_by_their_rollouts(texts: tuple[str, ...], codes: list[str]) -> None:
    source = Made(lambda ordinal: Prompts((ordinal,) * len(texts), texts, ("",) * len(texts)))
    assert [fault.code for fault in check(trace(compared), sources={"prompts": source})] == codes
