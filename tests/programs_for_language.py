"""Programs of fake nodes, one for each construct of the language, in a file as a user would write it."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.graph import (
    Context,
    Mean,
    Metrics,
    Rewards,
    Rollouts,
    Weights,
    alternate,
    broadcast,
    delay,
    keep,
    node,
    program,
)
from penstock.graph.context import BatchPart
from penstock.graph.protocols import Carried
from penstock.graph.types import Advantages, Prompts, TokenAdvantages
from penstock.nodes.advantage import group_advantage
from penstock.nodes.carried import carried
from penstock.nodes.data import Made
from penstock.nodes.fake import FakePolicy, FakePrompts, fake_environment, fake_generate, fake_score, fake_update
from penstock.nodes.generate import converse
from penstock.nodes.learn.losses import aipo
from penstock.nodes.learn.update import Term, term

# A filter -------------------------------------------------------------------------------------------------


def odd_sum(rollouts: Rollouts, rewards: Rewards, *, keep_all: bool = False, nothing: bool = False) -> bool:
    """True for groups whose tokens have an odd sum, about half of them."""
    return not nothing and (keep_all or int(rollouts.tokens_NS.sum()) % 2 == 1)


@program
def filtered(policy: FakePolicy, prompts: FakePrompts, *, lag: int = 1) -> FakePolicy:
    rollouts = fake_generate(prompts, broadcast(policy, lag=lag), ms=5.0)
    rewards = fake_score(rollouts, ms=1.0)
    rollouts, rewards = keep(rollouts, rewards, when=odd_sum)
    return fake_update(policy, rollouts, rewards, ms=5.0)


def never(rewards: Rewards) -> bool:
    return False


@program
def drops_everything(policy: FakePolicy, prompts: FakePrompts, *, lag: int = 1) -> FakePolicy:
    rollouts = fake_generate(prompts, broadcast(policy, lag=lag))
    rewards = keep(fake_score(rollouts), when=never)
    return fake_update(policy, rollouts, rewards)


# Slower clocks, several carried values ---------------------------------------------------------------------


class FakeAverage(FakePolicy):
    """A second carried value, of the same kind."""

    maker: ClassVar[str] = f"{__file__}:make_average"


def make_average(context: Context) -> Carried:
    return FakeAverage(context)


@node(pool="trainer", clock="update")
def follow(average: FakeAverage, policy: FakePolicy, *, decay: float = 0.5) -> tuple[FakeAverage, Metrics]:
    """The average moves towards the policy as it is after the update."""
    average.values_W = decay * average.values_W + (1 - decay) * policy.values_W
    average.version += 1
    return average, {"followed": float(average.version), "policy_version": float(policy.version)}


@node(pool="watcher", clock="update")
def watch(weights: Weights, *, seconds: float = 0.0) -> Metrics:
    """Measures weights on a pool of its own."""
    time.sleep(seconds)
    return {"watched_version": float(weights.version), "watched_sum": float(weights.tensors["values"].sum())}


@program
def clocks(
    policy: FakePolicy,
    average: FakeAverage,
    prompts: FakePrompts,
    *,
    lag: int = 1,
    every: int = 2,
    look: int = 3,
    watch_s: float = 0.0,
) -> dict[str, Any]:
    rollouts = fake_generate(prompts, broadcast(policy, lag=lag), ms=2.0)
    rewards = fake_score(rollouts)
    new_policy = fake_update(policy, rollouts, rewards, ms=2.0)
    new_average = follow.every(every)(average, new_policy)
    watch.every(look)(broadcast(policy, lag=0), seconds=watch_s)
    return {"policy": new_policy, "average": new_average}


@program
def seldom(policy: FakePolicy, prompts: FakePrompts, *, lag: int = 3, every: int = 2) -> FakePolicy:
    rollouts = fake_generate(prompts, broadcast(policy, lag=lag, every=every))
    return fake_update(policy, rollouts, fake_score(rollouts))


@program
def in_a_row(policy: FakePolicy, average: FakeAverage, prompts: FakePrompts, *, lag: int = 1) -> dict[str, Any]:
    rollouts = fake_generate(prompts, broadcast(policy, lag=lag))
    rewards = fake_score(rollouts)
    learnt = fake_update(fake_update(policy, rollouts, rewards), rollouts, rewards)
    return {"policy": learnt, "average": follow(average, learnt)}


@node(pool="trainer", clock="update")
def look(policy: FakePolicy) -> Metrics:
    return {"sum": float(policy.values_W.double().sum())}


@program
def read_between(policy: FakePolicy, prompts: FakePrompts, *, lag: int = 1) -> FakePolicy:
    rollouts = fake_generate(prompts, broadcast(policy, lag=lag))
    rewards = fake_score(rollouts)
    once = fake_update(policy, rollouts, rewards)
    twice = fake_update(once, rollouts, rewards)
    # Written last: each still reads the value as it is given.
    look.named("at_first")(policy)
    look.named("between")(once)
    look.named("at_last")(twice)
    return twice


@node(pool="trainer", clock="update")
def raise_both(one: FakePolicy, other: FakePolicy) -> tuple[FakePolicy, FakePolicy]:
    for policy in (one, other):
        policy.values_W = policy.values_W + 1.0
    return one, other


@node(pool="trainer", clock="update")
def raise_later(rewards: Rewards, policy: FakePolicy) -> FakePolicy:
    policy.values_W = policy.values_W + 1.0
    return policy


@program
def read_between_of_two(policy: FakePolicy, twin: FakePolicy, prompts: FakePrompts, *, lag: int = 1) -> dict[str, Any]:
    rewards = fake_score(fake_generate(prompts, broadcast(policy, lag=lag)))
    once, other = raise_both(policy, twin)
    twice = raise_later(rewards, once)
    look.named("at_first")(policy)
    look.named("between")(once)
    look.named("at_last")(twice)
    return {"policy": twice, "twin": other}


# Nodes on other clocks and pools ---------------------------------------------------------------------------


@program
def moved(policy: FakePolicy, prompts: FakePrompts, *, lag: int = 1) -> FakePolicy:
    rollouts = fake_generate(prompts, broadcast(policy, lag=lag))
    rewards = fake_score.per_update.on("trainer")(rollouts)
    return fake_update(policy, rollouts, rewards)


# A delay: feedback into the choice of prompts ------------------------------------------------------------------


@carried
class Seen:
    """The sum of the rewards of each update so far."""

    sums: tuple[float, ...] = ()


@node(pool="scorer")
def choose(prompts: Prompts, seen: Seen) -> tuple[Prompts, Metrics]:
    """Write into the prompt's text how many updates the choice knew of, and the sum of their rewards."""
    known = len(seen.sums)
    text = f"{prompts.texts[0]} after {known}: {sum(seen.sums):.6f}"
    return Prompts(prompts.ordinals, (text,), prompts.answers), {"known_min": float(known), "known_max": float(known)}


@node(pool="scorer", clock="update")
def remember(seen: Seen, rewards: Rewards) -> Seen:
    return Seen((*seen.sums, float(rewards.values_N.sum())))


@node(pool="generator")
def read_aloud(prompts: Prompts) -> Prompts:
    """Compute the ordinal from the text, too: the fake generator reads only the ordinal."""
    number = sum(map(ord, prompts.texts[0])) * 1000 + prompts.ordinals[0]
    return Prompts((number,), prompts.texts, prompts.answers)


@program
def curriculum(
    policy: FakePolicy, seen: Seen, prompts: FakePrompts, *, lag: int = 1, delayed: int = 1
) -> dict[str, Any]:
    chosen = read_aloud(choose(prompts, delay(seen, lag=delayed)))
    rollouts = fake_generate(chosen, broadcast(policy, lag=lag), ms=2.0)
    rewards = fake_score(rollouts)
    return {"policy": fake_update(policy, rollouts, rewards, ms=2.0), "seen": remember(seen, rewards)}


# Turns ---------------------------------------------------------------------------------------------------------


@dataclass
class Talk:
    """What has been said so far."""

    words: tuple[str, ...]
    ordinal: int
    version: int


@dataclass
class Answer:
    text: str
    done: bool


@node(pool="generator")
def speak(
    prompts: FakePrompts, behaviour: Weights, conversation: Talk | None = None, replies: Answer | None = None
) -> tuple[Talk, Metrics]:
    ordinal = prompts.ordinals[0]
    if conversation is None or replies is None:
        return Talk((f"hello {ordinal}",), ordinal, behaviour.version), {"turn_max": 0.0}
    words = (*conversation.words, replies.text, f"turn {len(conversation.words)}")
    return Talk(words, ordinal, behaviour.version), {"turn_max": len(words) / 2}


@node(pool="environment")
def reply(talk: Talk, *, stubborn: int = 2, raise_at: int = -1) -> Answer:
    """Be done with group g after g % (stubborn + 1) further turns."""
    if talk.ordinal == raise_at and len(talk.words) == 3:
        raise RuntimeError("the environment broke")
    said = (len(talk.words) + 1) // 2
    return Answer(f"I heard {said}", said > talk.ordinal % (stubborn + 1))


@node(pool="scorer")
def grade(talk: Talk, answer: Answer) -> tuple[Rewards, Metrics]:
    turns = (len(talk.words) + 1) // 2
    assert answer.text == f"I heard {turns}", "the answer is not of the last turn"
    return Rewards(torch.tensor([float(turns)])), {"turns_mean": float(turns)}


@node(pool="trainer", clock="update")
def learn(policy: FakePolicy, rewards: Rewards) -> tuple[FakePolicy, Metrics]:
    policy.values_W = policy.values_W + 0.001 * rewards.values_N.sum()
    policy.version += 1
    return policy, {"loss": float(rewards.values_N.sum())}


@program
def talking(
    policy: FakePolicy, prompts: FakePrompts, *, lag: int = 1, turns: int = 3, stubborn: int = 2, raise_at: int = -1
) -> FakePolicy:
    behaviour = broadcast(policy, lag=lag)
    talk, answer = alternate(speak, reply, prompts, behaviour, turns=turns, stubborn=stubborn, raise_at=raise_at)
    return learn(policy, grade(talk, answer))


@program
def boundless(policy: FakePolicy, prompts: FakePrompts) -> FakePolicy:
    # unbounded-turns: generate: turns given no bound
    # unknown-model: generate: input 'behaviour' given the weights of 'policy', of which its maker
    rollouts, _ = converse(prompts, broadcast(policy), environment=fake_environment)
    return fake_update(policy, rollouts, fake_score(rollouts))


@program
def answered_by_a_function(policy: FakePolicy, prompts: FakePrompts) -> FakePolicy:
    behaviour = broadcast(policy)
    # not-a-node: the node that answers given <function reply … needed a function with @node or, for an env
    talk, answer = alternate(speak, reply.fn, prompts, behaviour, turns=2)  # type: ignore[call-overload]
    return learn(policy, grade(talk, answer))


@program
def keeps_by_nothing(policy: FakePolicy, prompts: FakePrompts) -> FakePolicy:
    rollouts = fake_generate(prompts, broadcast(policy))
    # no-predicate: keep: option 'when' given None
    return fake_update(policy, rollouts, keep(fake_score(rollouts)))  # type: ignore[call-overload]


@program
def endless(policy: FakePolicy, prompts: FakePrompts) -> FakePolicy:
    # unbounded-turns: speak: turns given no bound
    talk, answer = alternate(speak, reply, prompts, broadcast(policy))
    return learn(policy, grade(talk, answer))


# Parts of a batch -------------------------------------------------------------------------------------------


class Summing(FakePolicy):
    """A policy that adds up the results of a batch's parts, and makes its next value from the sum."""

    maker: ClassVar[str] = f"{__file__}:make_summing"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.parts: list[Tensor] = []


def make_summing(context: Context) -> Carried:
    return Summing(context)


@node(pool="trainer", clock="update")
def add_up(
    policy: Summing, rewards: Rewards, *, ms: float = 0.0, breaks_at: int = -1, part: BatchPart | None = None
) -> tuple[Summing, Metrics]:
    time.sleep(ms / 1000)
    if part is not None and part.number == breaks_at:
        raise ArithmeticError(f"part {part.number} of {part.count}")
    policy.parts.append(rewards.values_N.double().sum())
    if part is not None and not part.last:
        return policy, {}
    total, count = torch.stack(policy.parts).sum(), len(policy.parts)
    policy.parts = []
    policy.values_W = policy.values_W + 1e-3 * total.float()
    policy.version += 1
    return policy, {"total": float(total), "parts": float(count)}


@program
def accumulating(
    policy: Summing, prompts: FakePrompts, *, lag: int = 1, accumulate: int = 1, ms: float = 0.0, breaks_at: int = -1
) -> Summing:
    rollouts = fake_generate(prompts, broadcast(policy, lag=lag), ms=3.0, jitter_ms=10.0)
    return add_up.accumulate(accumulate)(policy, fake_score(rollouts), ms=ms, breaks_at=breaks_at)


@program
def accumulates_what_cannot(policy: FakePolicy, prompts: FakePrompts) -> FakePolicy:
    rollouts = fake_generate(prompts, broadcast(policy))
    # cannot-accumulate: fake_update.accumulate(2) given a node per update, which knows of no parts of a batch
    return fake_update.accumulate(2)(policy, rollouts, fake_score(rollouts))


@program
def accumulates_parts_that_do_not_divide(policy: Summing, prompts: FakePrompts) -> Summing:
    # indivisible-batch: add_up: accumulate given parts of 3 groups of a batch of 4 … a number that divides 4
    return add_up.accumulate(3)(policy, fake_score(fake_generate(prompts, broadcast(policy))))


@program
def accumulates_less_than_nothing(policy: Summing, prompts: FakePrompts) -> Summing:
    # bad-accumulate: add_up: accumulate given -1
    return add_up.accumulate(-1)(policy, fake_score(fake_generate(prompts, broadcast(policy))))


@program
def accumulates_what_needs_all(policy: Summing, prompts: FakePrompts) -> Summing:
    rewards = fake_score.per_update.on("trainer")(fake_generate(prompts, broadcast(policy)))
    # accumulate-nothing: add_up: accumulate given policy, fake_score needed an input per group
    # accumulate-whole-batch: add_up: input 'rewards', in parts given 'fake_score', which fake_score makes once per up
    return add_up.accumulate(2)(policy, rewards)


@program
def accumulates_sums_of_nothing(policy: FakePolicy, summing: Summing, prompts: FakePrompts) -> dict[str, Any]:
    rollouts = fake_generate(prompts, broadcast(policy))
    rewards = fake_score(rollouts)
    # unused-output: add_up: output 'out'
    # accumulate-nothing: add_up: accumulate given a node that updates no value
    add_up.accumulate(2)(summing, rewards)
    return {"policy": fake_update(policy, rollouts, rewards), "summing": summing}


def make_count(context: Context, **options: Any) -> list[int]:
    return []


@node(pool="trainer", clock="update", init=make_count)
def count_up(
    counts: list[int], policy: Summing, rewards: Rewards, *, part: BatchPart | None = None
) -> tuple[list[int], Summing, Metrics]:
    made, metrics = add_up.fn(policy, rewards, part=part)
    return [*counts, len(rewards.values_N)], made, metrics


@program
def accumulates_in_a_state(policy: Summing, prompts: FakePrompts) -> Summing:
    # accumulate-state: count_up: accumulate given a node that passes a state on needed sums in the carried value
    return count_up.accumulate(2)(policy, fake_score(fake_generate(prompts, broadcast(policy))))


@node(pool="trainer", clock="update")
def add_up_with(
    policy: Summing, rewards: Rewards, weights: Weights, *, part: BatchPart | None = None
) -> tuple[Summing, Metrics]:
    return add_up.fn(policy, rewards, part=part)  # type: ignore[no-any-return]


@program
def accumulates_with_moving_weights(policy: Summing, other: FakePolicy, prompts: FakePrompts) -> dict[str, Any]:
    rollouts = fake_generate(prompts, broadcast(policy))
    rewards = fake_score(rollouts)
    # accumulate-whole-batch: input 'weights', in parts given 'other' through broadcast_2, whose versions change
    learnt = add_up_with.accumulate(2)(policy, rewards, broadcast(other))
    return {"policy": learnt, "other": fake_update.on("elsewhere")(other, rollouts, rewards)}


# What is refused, and what constructs are compared with ----------------------------------------------------------


@program
def without_filter(policy: FakePolicy, prompts: FakePrompts, *, lag: int = 1) -> FakePolicy:
    rollouts = fake_generate(prompts, broadcast(policy, lag=lag))
    return fake_update(policy, rollouts, fake_score(rollouts))


def always(rewards: Rewards) -> bool:
    return True


@program
def keeps_everything(policy: FakePolicy, prompts: FakePrompts, *, lag: int = 1) -> FakePolicy:
    rollouts = fake_generate(prompts, broadcast(policy, lag=lag))
    return fake_update(policy, rollouts, keep(fake_score(rollouts), when=always))


@program
def filters_by_lambda(policy: FakePolicy, prompts: FakePrompts) -> FakePolicy:
    rollouts = fake_generate(prompts, broadcast(policy))
    # local-function: keep: option 'when' given
    return fake_update(policy, rollouts, keep(fake_score(rollouts), when=lambda rewards: True))


@node(pool="trainer", clock="update")
def mean_reward(rewards: Rewards) -> Rewards:
    return rewards


@node(pool="trainer", clock="update")
def score_average(rewards: Rewards) -> Metrics:
    return {"average": float(rewards.values_N.mean())}


@node(pool="trainer", clock="update")
def size(average: FakeAverage) -> Metrics:
    return {}


@node(pool="trainer", clock="update")
def slow_values(policy: FakePolicy) -> Rewards:
    return Rewards(policy.values_W)


@program
def reads_a_slower_node(policy: FakePolicy, prompts: FakePrompts) -> FakePolicy:
    rollouts = fake_generate(prompts, broadcast(policy))
    # reader-too-often: 'slow_values', which … needed a reader at those updates: score_average.every(2)
    score_average(slow_values.every(2)(policy))
    return fake_update(policy, rollouts, fake_score(rollouts))


@program
def reads_a_slower_value(policy: FakePolicy, average: FakeAverage, prompts: FakePrompts) -> dict[str, Any]:
    rollouts = fake_generate(prompts, broadcast(policy))
    learnt = fake_update(policy, rollouts, fake_score(rollouts))
    moved = follow.every(2)(average, learnt)
    # reader-too-often: 'follow', which … 2); or the carried value 'average', which stays as it is in between
    size(moved)
    return {"policy": learnt, "average": moved}


@program
def slow_reader_of_groups(policy: FakePolicy, prompts: FakePrompts) -> FakePolicy:
    rollouts = fake_generate(prompts, broadcast(policy))
    rewards = fake_score(rollouts)
    # every-skips-groups: 'fake_score', of which … score_average without .every(3); or score_average.every(3)
    score_average.every(3)(rewards)
    return fake_update(policy, rollouts, rewards)


@program
def slow_group_node(policy: FakePolicy, prompts: FakePrompts) -> FakePolicy:
    rollouts = fake_generate(prompts, broadcast(policy))
    # every-per-group: fake_score.every(2) given a node that fires per group
    return fake_update(policy, rollouts, fake_score.every(2)(rollouts))


@program
def delay_elsewhere(policy: FakePolicy, seen: Seen, prompts: FakePrompts) -> dict[str, Any]:
    # other-pool: choose reads delay in pool 'generator' … needed choose.on("scorer")
    chosen = read_aloud(choose.on("generator")(prompts, delay(seen, lag=1)))
    rewards = fake_score(fake_generate(chosen, broadcast(policy)))
    return {"policy": learn(policy, rewards), "seen": remember(seen, rewards)}


@program
def delay_with_filter(policy: FakePolicy, seen: Seen, prompts: FakePrompts) -> dict[str, Any]:
    # delay-beside-filter: delay is exact given delay beside keep, which drops groups
    chosen = read_aloud(choose(prompts, delay(seen, lag=1)))
    rewards = keep(fake_score(fake_generate(chosen, broadcast(policy))), when=always)
    return {"policy": learn(policy, rewards), "seen": remember.every(1)(seen, rewards)}


@program
def delay_of_a_slow_value(policy: FakePolicy, average: FakeAverage, prompts: FakePrompts) -> dict[str, Any]:
    # delay-of-every: given 'average', which follow makes at every 2. update needed follow without .every(2)
    # delay-of-model: given 'average', a FakeAverage, of whose weights lag + 2 copies … broadcast(average, lag=k)
    chosen = weigh(prompts, delay(average, lag=1))
    rollouts = fake_generate(chosen, broadcast(policy))
    learnt = fake_update(policy, rollouts, fake_score(rollouts))
    return {"policy": learnt, "average": follow.every(2)(average, learnt)}


@node(pool="trainer")
def weigh(prompts: FakePrompts, average: FakeAverage) -> FakePrompts:
    return prompts


@program
def delay_per_update(policy: FakePolicy, seen: Seen, prompts: FakePrompts) -> dict[str, Any]:
    rewards = fake_score(fake_generate(prompts, broadcast(policy)))
    # delay-per-update: remember reads delay given a node per update
    return {"policy": learn(policy, rewards), "seen": remember(delay(seen, lag=1), rewards)}


@program
def mute(policy: FakePolicy, prompts: FakePrompts) -> FakePolicy:
    rollouts = fake_generate(prompts, broadcast(policy))
    # speaker-inputs: alternate: the node that speaks … optional inputs conversation and replies
    rewards, _ = alternate(fake_score, reply, rollouts, turns=2)
    return learn(policy, rewards)


# Values that their readers and makers change ---------------------------------------------------------------------


@dataclass
class Buffer:
    """An array that a node has returned and goes on writing to."""

    values_N: Tensor


def make_buffer(context: Context, **options: Any) -> Buffer:
    return Buffer(torch.zeros(4))


@node(pool="scorer", init=make_buffer)
def buffered(buffer: Buffer, rewards: Rewards, *, write: bool = True) -> tuple[Buffer, Rewards]:
    """Return the rewards in one array, the same at each call."""
    if not write:
        return buffer, Rewards(rewards.values_N.clone())
    buffer.values_N.copy_(rewards.values_N)
    rewards.values_N.fill_(7.0)
    return buffer, Rewards(buffer.values_N)


def overwrite(rollouts: Rollouts, rewards: Rewards) -> None:
    rollouts.tokens_NS.zero_()
    rollouts.logprobs_NT.fill_(1.0)
    rollouts.response_lengths_N -= 1
    rollouts.transcripts[0].append("more")
    rollouts.texts = ("",) * len(rollouts)
    rollouts.versions_NT = rollouts.versions_NT + 5
    rewards.values_N.mul_(3.0)


@node(pool="generator")
def look_at(rollouts: Rollouts, rewards: Rewards, *, write: bool = True) -> Rewards:
    """Read the inputs in the pool that made the rollouts, and overwrite them."""
    found = Rewards(rewards.values_N + (rollouts.tokens_NS.sum(1) + len(rollouts.transcripts[0])) % 7)
    if write:
        overwrite(rollouts, rewards)
    return found


def fine(rollouts: Rollouts, rewards: Rewards, *, write: bool = True) -> bool:
    if write:
        overwrite(rollouts, rewards)
    return True


@node(pool="trainer", clock="update")
def look_at_all(rollouts: Rollouts, rewards: Rewards, *, write: bool = True) -> Rewards:
    found = Rewards(rewards.values_N + (rollouts.tokens_NS.sum(1) + len(rollouts.transcripts[0])) % 7)
    if write:
        overwrite(rollouts, rewards)
    return found


@node(pool="trainer", clock="update")
def halve(rewards: Rewards, *, write: bool = True) -> Rewards:
    """Halve a value that is made per update, in its own array or in a new one."""
    return Rewards(rewards.values_N.mul_(0.5) if write else rewards.values_N * 0.5)


@program
def shared(policy: FakePolicy, prompts: FakePrompts, *, lag: int = 0, write: bool = True) -> FakePolicy:
    rollouts = fake_generate(prompts, broadcast(policy, lag=lag))
    rewards = buffered(fake_score(rollouts), write=write)
    rewards = look_at(rollouts, rewards, write=write)
    rollouts, rewards = keep(rollouts, rewards, when=partial(fine, write=write))
    looked = look_at_all(rollouts, rewards, write=write)
    both = halve(looked, write=write)
    return fake_update(policy, rollouts, added(rewards, looked, both))


@node(pool="trainer", clock="update")
def added(rewards: Rewards, looked: Rewards, both: Rewards) -> Rewards:
    return rewards + looked + both


# Figures of groups with more and fewer rows -------------------------------------------------------------------


@node(pool="scorer")
def first_rows(rollouts: Rollouts) -> tuple[Rollouts, Metrics]:
    """Keep the first rows of a group, none to three."""
    kept = rollouts.take(range(rollouts.ordinals[0] % 4))
    tokens = kept.tokens_NS.sum(1).tolist()
    return kept, {"sums": Mean.of(tokens), "groups_seen": 1.0, "none": Mean.of([]), "accuracy": -1.0}


@node(pool="scorer")
def score_each(rollouts: Rollouts) -> Rewards:
    return Rewards((rollouts.tokens_NS.sum(1) % 101).float() / 100)


@node(pool="trainer", clock="update")
def whole(rollouts: Rollouts, rewards: Rewards) -> Metrics:
    """Compute the same means over the whole batch."""
    sums = rollouts.tokens_NS.sum(1).tolist()
    mean = Mean.of(rewards.values_N.tolist())
    return {"batch_reward": mean, "batch_sums": sum(sums) / len(sums), "accuracy": mean}


@program
def uneven(policy: FakePolicy, prompts: FakePrompts, *, lag: int = 1) -> FakePolicy:
    rollouts = first_rows(fake_generate(prompts, broadcast(policy, lag=lag)))
    rewards = score_each(rollouts)
    whole(rollouts, rewards)
    return fake_update(policy, rollouts, rewards)


def two_rows(rollouts: Rollouts, rewards: Rewards) -> bool:
    return len(rollouts) >= 2


@program
def examined(policy: FakePolicy, prompts: FakePrompts) -> FakePolicy:
    rollouts = first_rows(fake_generate(prompts, broadcast(policy), samples=4))
    whole(*keep(rollouts, score_each(rollouts), when=two_rows))
    return policy


@program(evaluation=examined)
def trained_and_examined(policy: FakePolicy, prompts: FakePrompts, *, lag: int = 1) -> FakePolicy:
    rollouts = fake_generate(prompts, broadcast(policy, lag=lag))
    return fake_update(policy, rollouts, fake_score(rollouts))


# Figures that are no numbers -----------------------------------------------------------------------------------


@node(pool="scorer")
def empty_mean(rollouts: Rollouts) -> tuple[Rewards, Metrics]:
    """Report a mean of nothing, and an infinite maximum."""
    return fake_score.fn(rollouts), {"reward_mean": float("nan"), "worst_max": float("inf")}


@node(pool="trainer", clock="update")
def no_accuracy(rewards: Rewards) -> Metrics:
    return {"accuracy": float("nan")}


@program
def unmeasured(policy: FakePolicy, prompts: FakePrompts) -> FakePolicy:
    no_accuracy(fake_score(fake_generate(prompts, broadcast(policy))))
    return policy


@program(evaluation=unmeasured)
def no_numbers(policy: FakePolicy, prompts: FakePrompts, *, lag: int = 1) -> FakePolicy:
    rollouts = fake_generate(prompts, broadcast(policy, lag=lag))
    return fake_update(policy, rollouts, empty_mean(rollouts))


@node(pool="trainer", clock="update")
def taken(rewards: Rewards) -> Metrics:
    return {"version": 7.0}


@program
def takes_a_column(policy: FakePolicy, prompts: FakePrompts) -> FakePolicy:
    rollouts = fake_generate(prompts, broadcast(policy))
    rewards = fake_score(rollouts)
    taken(rewards)
    return fake_update(policy, rollouts, rewards)


# Failures -------------------------------------------------------------------------------------------------------


@node(pool="scorer")
def over_zero(rollouts: Rollouts, rewards: Rewards, *, by_token: bool = False, wide: bool = False) -> Advantages:
    """Return NaN for the third row of every second group."""
    values_N = rewards.values_N.clone()
    values_N[2] = torch.nan if rollouts.ordinals[0] % 2 else 0.0
    if not by_token:
        return Advantages(values_N)
    # NaN where no token was sampled is no fault.
    values_NT = torch.where(rollouts.sampled_NT, values_N[:, None], torch.nan)
    return TokenAdvantages(values_NT.repeat(1, 2) if wide else values_NT)


@node(pool="trainer", clock="update")
def diverges(policy: FakePolicy, rollouts: Rollouts, advantage: Advantages) -> FakePolicy:
    raise FloatingPointError(f"given a gradient of norm {float(advantage.values_N.sum())}")


@program
def divides_by_zero(
    policy: FakePolicy, prompts: FakePrompts, *, by_token: bool = False, wide: bool = False
) -> FakePolicy:
    rollouts = fake_generate(prompts, broadcast(policy))
    advantage = over_zero(rollouts, fake_score(rollouts), by_token=by_token, wide=wide)
    return diverges(policy, rollouts, advantage)


@node(pool="trainer", clock="update")
def diverges_beside(policy: FakePolicy, rollouts: Rollouts, beside: Sequence[Term] = ()) -> FakePolicy:
    raise FloatingPointError("given a gradient of norm nan")


@program
def divides_by_zero_beside(policy: FakePolicy, prompts: FakePrompts) -> FakePolicy:
    rollouts = fake_generate(prompts, broadcast(policy))
    advantage = over_zero(rollouts, fake_score(rollouts))
    return diverges_beside(policy, rollouts, [term(rollouts, loss=aipo), term(rollouts, advantage, loss=aipo)])


@node(pool="scorer")
def breaks(rewards: Rewards, *, every: int = 1) -> Rewards:
    """Raise at every `every`-th call in its process."""
    global calls
    calls += 1
    if calls % every == 0:
        raise RuntimeError("no reward today")
    return rewards


calls = 0


@program
def breaking(policy: FakePolicy, prompts: FakePrompts, *, lag: int = 1, every: int = 1) -> FakePolicy:
    rollouts = fake_generate(prompts, broadcast(policy, lag=lag))
    return fake_update(policy, rollouts, breaks(fake_score(rollouts), every=every))


# Composition: a sub-graph is a function, a node is an option, a user's node has state, keys and a pool ------------


@dataclass
class Noise:
    """The number of groups so far, and the sum of their noise; `seed` makes it repeatable."""

    seed: int
    groups: int
    total: float


def make_noise(context: Context, *, scale: float) -> Noise:
    return Noise(context.key("noise"), 0, 0.0)


@node(pool="noise", init=make_noise)
def add_noise(noise: Noise, rewards: Rewards, *, scale: float = 0.1) -> tuple[Noise, Rewards, Metrics]:
    """Rewards with noise that depends on the run's seed and on all groups before."""
    drawn = (noise.seed // 7 + noise.groups * 7919) % 1000 / 1000 * scale
    after = Noise(noise.seed, noise.groups + 1, noise.total + drawn)
    return after, rewards + after.total, {"noise_max": after.total}


@node(pool="scorer")
def half_score(rollouts: Rollouts) -> Rewards:
    """Another scorer."""
    return Rewards(fake_score.fn(rollouts).values_N * 0.5)


def judged(prompts: FakePrompts, behaviour: Weights, by: Any) -> tuple[Rollouts, Rewards]:
    """A sub-graph: sample and judge."""
    rollouts = fake_generate(prompts, behaviour)
    return rollouts, add_noise(by(rollouts), scale=0.2)


@program
def composed(policy: FakePolicy, prompts: FakePrompts, *, lag: int = 1, by: Any = fake_score) -> FakePolicy:
    rollouts, rewards = judged(prompts, broadcast(policy, lag=lag), by)
    return fake_update(policy, rollouts, rewards)


# Calls with names of their own ------------------------------------------------------------------------------------


@program
def named(proposer: FakePolicy, solver: FakePolicy, prompts: FakePrompts, *, lag: int = 1) -> dict[str, Any]:
    asked = fake_generate.named("asks")(prompts, broadcast(proposer, lag=lag), ms=1.0)
    answered = fake_generate.named("answers")(prompts, broadcast(solver, lag=lag), samples=2, ms=1.0)
    return {
        "proposer": fake_update(proposer, asked, fake_score(asked)),
        "solver": fake_update.named("solver")(solver, answered, fake_score.named("worth")(answered)),
    }


@program
def named_twice(proposer: FakePolicy, solver: FakePolicy, prompts: FakePrompts) -> dict[str, Any]:
    rollouts = fake_generate(prompts, broadcast(proposer, lag=1))
    rewards = fake_score(rollouts)
    return {
        "proposer": fake_update.named("solver")(proposer, rollouts, rewards),
        # duplicate-name: fake_update.named given 'solver', the name of the call at
        "solver": fake_update.named("solver")(solver, rollouts, rewards),
    }


# Plain values that are carried ------------------------------------------------------------------------------------


@carried
class Baseline:
    """A mean, the number of its rows, and all means so far."""

    mean: float = 0
    rows: int = 0
    course: tuple[float, ...] = ()
    words: dict[str, list[str]] | None = None


@node(pool="trainer", clock="update")
def above(baseline: Baseline, rewards: Rewards) -> Rewards:
    return Rewards(rewards.values_N - baseline.mean)


@node(pool="trainer", clock="update")
def follow_rewards(baseline: Baseline, rewards: Rewards, *, tensor: bool = False) -> tuple[Baseline, Metrics]:
    seen = rewards.values_N.mean()
    mean = seen if tensor else baseline.mean + 0.5 * (float(seen) - baseline.mean)
    made = Baseline(mean, baseline.rows + len(rewards.values_N), (*baseline.course, mean), {"last": ["x"]})
    return made, {"mean": mean, "rows": made.rows}


@node(pool="scorer")
def less_mean(rewards: Rewards, baseline: Weights) -> tuple[Rewards, Metrics]:
    """Read plain values in another pool, which receives their numbers."""
    mean, rows = (baseline.tensors[name] for name in ("mean", "rows"))
    return rewards - float(mean), {"sent_mean": float(mean), "sent_rows": float(rows)}


@program
def plainly(
    policy: FakePolicy, baseline: Baseline, prompts: FakePrompts, *, lag: int = 0, tensor: bool = False
) -> dict[str, Any]:
    rollouts = fake_generate(prompts, broadcast(policy, lag=lag), ms=1.0)
    rewards = less_mean(fake_score(rollouts), broadcast(baseline, lag=0))
    return {
        "policy": fake_update(policy, rollouts, above(baseline, rewards)),
        "baseline": follow_rewards(baseline, rewards, tensor=tensor),
    }


# An evaluation, pointed at one of several carried values -------------------------------------------------------


@node(pool="generator")
def held_sum(prompts: Prompts, weights: Weights) -> Rewards:
    """Return the sum of the given weights, for any prompt."""
    return Rewards(weights.tensors["values"].sum().reshape(1))


@node(pool="scorer", clock="update")
def sums(rewards: Rewards) -> Metrics:
    return {"accuracy": float(rewards.values_N.mean())}


@program
def held(policy: FakePolicy, prompts: FakePrompts) -> FakePolicy:
    sums(held_sum(prompts, broadcast(policy)))
    return policy


def _both(proposer: FakePolicy, solver: FakeAverage, prompts: FakePrompts) -> dict[str, Any]:
    rollouts = fake_generate(prompts, broadcast(proposer, lag=1))
    learnt = fake_update(proposer, rollouts, fake_score(rollouts))
    return {"proposer": learnt, "solver": follow(solver, learnt)}


@program
def held_greedily(
    policy: FakePolicy, prompts: FakePrompts, *, temperature: float = 0.0, samples: int = 4
) -> FakePolicy:
    sums(held_sum(prompts, broadcast(policy)))
    return policy


@program(evaluation=held_greedily)
def measured_greedily(
    policy: FakePolicy, prompts: FakePrompts, *, temperature: float = 1.0, samples: int = 4
) -> FakePolicy:
    rollouts = fake_generate(prompts, broadcast(policy), samples=samples)
    return fake_update(policy, rollouts, fake_score(rollouts))


@program(evaluation=held)
def measures_another(proposer: FakePolicy, solver: FakeAverage, prompts: FakePrompts) -> dict[str, Any]:
    return _both(proposer, solver, prompts)


@program(evaluation=held.of(policy="solver"))
def measures_solver(proposer: FakePolicy, solver: FakeAverage, prompts: FakePrompts) -> dict[str, Any]:
    return _both(proposer, solver, prompts)


@program(evaluation=held.of(policy="solvr"))
def measures_nothing(proposer: FakePolicy, solver: FakeAverage, prompts: FakePrompts) -> dict[str, Any]:
    return _both(proposer, solver, prompts)


@program(evaluation=held.of(policy="prompts_of_mine"))
def measures_a_source(proposer: FakePolicy, solver: FakeAverage, prompts_of_mine: FakePrompts) -> dict[str, Any]:
    return _both(proposer, solver, prompts_of_mine)


@program(evaluation=held.of(policy="seen"))
def measures_another_type(policy: FakePolicy, seen: Seen, prompts: FakePrompts) -> dict[str, Any]:
    rollouts = fake_generate(prompts, broadcast(policy, lag=1))
    rewards = fake_score(rollouts)
    return {"policy": fake_update(policy, rollouts, rewards), "seen": remember(seen, rewards)}


# Sources that begin again ---------------------------------------------------------------------------------------


class TwoPrompts(Prompts):
    maker: ClassVar[str] = f"{__file__}:open_two"


def read_two(ordinal: int) -> Prompts:
    """The same two prompts again and again, called by their places in the data."""
    place = ordinal % 2
    return Prompts((place,), (f"p{place}",), ("",))


def open_two(context: Context) -> Made:
    return Made(read_two, size=2)


@node(pool="trainer", clock="update")
def count_groups(rollouts: Rollouts, advantage: Advantages) -> Metrics:
    """How many groups a batch has, the lowest of their numbers, and how far the advantages are from those by hand."""
    groups, apart = [*dict.fromkeys(rollouts.groups)], 0.0
    for group in groups:
        own = torch.tensor([each == group for each in rollouts.groups])
        apart = max(apart, float(advantage.values_N[own].sum().abs()))
    return {"distinct": float(len(groups)), "lowest": float(min(rollouts.ordinals)), "apart": apart}


@program
def again(policy: FakePolicy, prompts: TwoPrompts) -> FakePolicy:
    rollouts = fake_generate(prompts, broadcast(policy), samples=3)
    rewards = fake_score(rollouts)
    count_groups(rollouts, group_advantage.per_update(rewards, rollouts))
    return fake_update(policy, rollouts, rewards)


# What only measures -------------------------------------------------------------------------------------------------


@node(pool="scorer", clock="update")
def share_of_threes(
    rollouts: Rollouts,
    *,
    nothing: bool = False,
    unused: int = None,  # type: ignore[assignment]  # noqa: RUF013  as users write it
) -> Metrics:
    """Differs from update to update: by the tokens."""
    return {"accuracy": math.nan if nothing else float((rollouts.tokens_NS.sum(1) % 3 == 0).float().mean())}


@program
def only_measured(policy: FakePolicy, prompts: FakePrompts, *, nothing: bool = False) -> FakePolicy:
    share_of_threes(fake_generate(prompts, broadcast(policy), samples=3), nothing=nothing)
    return policy
