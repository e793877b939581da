"""Programs of nodes that do nothing, most with one fault: the comment above its line has what `check` finds."""

from typing import Any

from penstock.graph import (
    Advantages,
    Logprobs,
    Metrics,
    Policy,
    Prompts,
    Rewards,
    Rollouts,
    Weights,
    broadcast,
    node,
    program,
)
from penstock.graph.types import Reference


class Better(Rewards): ...


class Riddles: ...


@node(pool="generator")
def generate(prompts: Prompts, behaviour: Weights, *, samples: int = 4) -> Rollouts: ...
@node(pool="scorer")
def score(rollouts: Rollouts) -> Rewards: ...
@node(pool="scorer")
def advise(rewards: Rewards) -> Advantages: ...
@node(pool="scorer")
def split(rewards: Rewards) -> tuple[Rewards, Advantages]: ...
@node
def improve(rollouts: Rollouts) -> Better: ...
@node
def pick(rewards: Better) -> Rewards: ...
@node
def note(anything: Any) -> Metrics: ...
@node(pool="generator")
def dream(behaviour: Weights) -> Rollouts: ...
@node(pool="generator")
def conjure() -> Rollouts: ...
@node(pool="generator")
def ask(riddles: Riddles) -> Prompts: ...
@node(pool="trainer")
def measure(policy: Policy, rollouts: Rollouts) -> Logprobs: ...
@node(pool="reference")
def measure_reference(policy: Reference, rollouts: Rollouts) -> Logprobs: ...
@node(pool="trainer")
def watch(policy: Policy, rollouts: Rollouts) -> Metrics: ...
@node(pool="trainer")
def adapt(weights: Weights, rollouts: Rollouts) -> Policy: ...
@node(pool="trainer", clock="update")
def tick() -> Metrics: ...
@node(pool="trainer", clock="update")
def learn(policy: Policy, rollouts: Rollouts, rewards: Rewards) -> Policy: ...
@node(pool="trainer", clock="update")
def learn_from(policy: Policy, logprobs: Logprobs) -> Policy: ...
@node(pool="trainer", clock="update")
def learn_beside(policy: Policy, other: Policy, rollouts: Rollouts) -> Policy: ...
@node(pool="trainer", clock="update")
def merge(first: Policy, second: Policy) -> Policy: ...
@node(pool="trainer", clock="update")
def compare(old: Policy, new: Policy) -> Metrics: ...
@node(pool="trainer", clock="update")
def norm(policy: Policy) -> Metrics: ...
@node(pool="trainer", clock="update")
def snapshot(policy: Policy) -> Policy: ...
@node(pool="trainer", clock="update")
def distil(policy: Policy, rewards: Rewards) -> Rewards: ...


def sampled(prompts: Prompts, policy: Policy) -> tuple[Rollouts, Rewards]:
    rollouts = generate(prompts, broadcast(policy))
    return rollouts, score(rollouts)


# Without a fault ------------------------------------------------------------------------------------------


@program
def sound(policy: Policy, prompts: Prompts, *, lag: Any = 1, samples: Any = 4) -> Any:
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=samples)
    return learn(policy, rollouts, score(rollouts))


@program
def updates_in_a_row_and_an_average(policy: Policy, mean: Policy, prompts: Prompts) -> Any:
    rollouts, rewards = sampled(prompts, policy)
    note(rollouts)
    second = learn(learn(policy, rollouts, rewards), rollouts, rewards)
    return {"policy": second, "mean": merge(mean, policy)}


@program
def updates_that_take_turns(policy: Policy, critic: Policy, prompts: Prompts) -> Any:
    rollouts = generate(prompts, broadcast(policy))
    first = learn_beside(policy, critic, rollouts)
    return {"policy": first, "critic": learn_beside(critic, first, rollouts)}


@program
def subclass_for_its_base(policy: Policy, prompts: Prompts) -> Any:
    rollouts = generate(prompts, broadcast(policy))
    better = improve(rollouts)
    return learn(learn(policy, rollouts, better), rollouts, pick(better))


# Edges and types ------------------------------------------------------------------------------------------


@program
def mistyped(policy: Policy, prompts: Prompts) -> Any:
    rollouts = generate(prompts, broadcast(policy))
    # wrong-type: score_2: input 'rollouts' … given Advantages (from advise) needed Rollouts
    rewards = score(advise(score(rollouts)))  # type: ignore[arg-type]
    return learn(policy, rollouts, rewards)


@program
def base_for_its_subclass(policy: Policy, prompts: Prompts) -> Any:
    rollouts, rewards = sampled(prompts, policy)
    # wrong-type: pick: input 'rewards' … given Rewards (from score) needed Better
    return learn(policy, rollouts, pick(rewards))  # type: ignore[arg-type]


@program
def next_value_of_another_type(policy: Policy, prompts: Prompts) -> Any:
    _, rewards = sampled(prompts, policy)
    # wrong-type: the next 'policy' … given Rewards (from distil) needed Policy
    return distil(policy, rewards)


@program
def unused(policy: Policy, prompts: Prompts) -> Any:
    rollouts, rewards = sampled(prompts, policy)
    # unused-output: advise: output 'out' … advise (Advantages), which no node reads
    advise(rewards)
    # unused-output: split: output '1' … split.1 (Advantages)
    good, _ = split(rewards)
    # unused-output: broadcast_2: output 'out'
    broadcast(policy, lag=2)
    return learn(policy, rollouts, good)


# unused-argument: source 'hints'
@program
def idle(policy: Policy, prompts: Prompts, hints: Prompts) -> Any:
    return learn(policy, *sampled(prompts, policy))


# unused-argument: carried 'old'
@program
def only_written(policy: Policy, old: Policy, prompts: Prompts) -> Any:
    return {"policy": learn(policy, *sampled(prompts, policy)), "old": snapshot(policy)}


# no-maker: source 'riddles' … Riddles, without a maker
@program
def riddled(policy: Policy, riddles: Riddles) -> Any:
    return learn(policy, *sampled(ask(riddles), policy))


# Clocks and pools -----------------------------------------------------------------------------------------


@program
def dreaming(policy: Policy) -> Any:
    # no-group-input: dream fires per group given broadcast needed
    rollouts = dream(broadcast(policy))
    # no-group-input: conjure fires per group given no input needed
    return learn(policy, rollouts, score(conjure()))


@program
def ticking(policy: Policy, prompts: Prompts) -> Any:
    # no-input: tick given no input
    tick()
    return learn(policy, *sampled(prompts, policy))


# no-update: endless … none that fires at each update
@program
def endless(policy: Policy, prompts: Prompts) -> Policy:
    note(generate(prompts, broadcast(policy)))
    return policy


@program
def early(policy: Policy, prompts: Prompts) -> Any:
    rollouts, rewards = sampled(prompts, policy)
    fresh = learn(learn(policy, rollouts, rewards), rollouts, rewards)
    # slower-input: measure: input 'policy' of a per-group node … 'learn_2', which learn_2 makes … broadcast(
    return learn_from(fresh, measure(fresh, rollouts))


@program
def afar(policy: Policy, reference: Reference, prompts: Prompts) -> Any:
    rollouts = generate(prompts, broadcast(policy))
    close = measure_reference(reference, rollouts)
    # other-pool: measure: input 'policy' … 'reference', which pool 'reference' holds … of its own pool 'trainer'
    logprobs = measure(reference, rollouts)
    return {"policy": learn_from(learn_from(policy, close), logprobs), "reference": reference}


# Carried values -------------------------------------------------------------------------------------------


@program
def relay_of_a_source(policy: Policy, prompts: Prompts) -> Any:
    # not-carried: broadcast given 'prompts', which is a source
    rollouts = generate(prompts, broadcast(prompts))
    return learn(policy, rollouts, score(rollouts))


@program
def relay_of_an_output(policy: Policy, prompts: Prompts) -> Any:
    rollouts, rewards = sampled(prompts, policy)
    fresh = learn(policy, rollouts, rewards)
    # not-carried: broadcast_2 given 'learn', which is the output of a node
    again = generate(prompts, broadcast(fresh))
    return learn(fresh, again, rewards)


@program
def cyclic(policy: Policy, prompts: Prompts) -> Any:
    rollouts, rewards = sampled(prompts, policy)
    fresh = learn(policy, rollouts, rewards)
    # cycle-without-lag: measure: input 'policy' … policy → measure → learn_from → policy needed broadcast(
    return learn_from(fresh, measure(policy, rollouts))


@program
def watched(policy: Policy, prompts: Prompts) -> Any:
    rollouts, rewards = sampled(prompts, policy)
    # changing-input: watch: input 'policy' … 'policy', which changes
    watch(policy, rollouts)
    return learn(policy, rollouts, rewards)


@program
def mutual(policy: Policy, critic: Policy, prompts: Prompts) -> Any:
    rollouts = generate(prompts, broadcast(policy))
    # update-cycle: learn_beside waits for itself … learn_beside → learn_beside_2 → learn_beside needed an end of the
    first = learn_beside(policy, critic, rollouts)
    return {"policy": first, "critic": learn_beside(critic, policy, rollouts)}


@program
def old_and_new(policy: Policy, prompts: Prompts) -> Any:
    rollouts, rewards = sampled(prompts, policy)
    # update-cycle: learn waits for itself … learn → compare → learn
    fresh = learn(policy, rollouts, rewards)
    compare(policy, fresh)
    return fresh


@program
def updated_twice(policy: Policy, prompts: Prompts) -> Any:
    rollouts, rewards = sampled(prompts, policy)
    first = learn(policy, rollouts, rewards)
    # updated-twice: learn_2 updates a value given 'policy', which learn ( … the second takes what learn returns
    return merge(first, learn(policy, rollouts, rewards))


@program
def next_value_updated(policy: Policy, prompts: Prompts) -> Any:
    rollouts, rewards = sampled(prompts, policy)
    fresh = learn(policy, rollouts, rewards)
    # updated-twice: learn_2 updates a value given 'learn', which is the next 'policy' needed what learn_2 returns as
    watch.per_update(learn(fresh, rollouts, rewards), rollouts)
    return fresh


@program
def step_updated_twice(policy: Policy, prompts: Prompts) -> Any:
    rollouts, rewards = sampled(prompts, policy)
    first = learn(policy, rollouts, rewards)
    # updated-twice: learn_3 updates a value given 'learn', which learn_2 ( … learn_2 returns, or 'learn' after
    return merge(learn(first, rollouts, rewards), learn(first, rollouts, rewards))


@program
def step_and_its_next(policy: Policy, prompts: Prompts) -> Any:
    rollouts, rewards = sampled(prompts, policy)
    first = learn(policy, rollouts, rewards)
    # update-cycle: learn_2 waits for itself … learn_2 → compare → learn_2
    second = learn(first, rollouts, rewards)
    compare(first, second)
    return second


@program
def one_for_two(policy: Policy, twin: Policy, prompts: Prompts) -> Any:
    rollouts, rewards = sampled(prompts, policy)
    norm(twin)
    # shared-result: the next 'twin' given 'learn', which is the next 'policy' too
    fresh = learn(policy, rollouts, rewards)
    return {"policy": fresh, "twin": fresh}


# other-argument: the next 'previous' given another argument, 'policy'
@program
def shifted(policy: Policy, previous: Policy, prompts: Prompts) -> Any:
    norm(previous)
    return {"policy": learn(policy, *sampled(prompts, policy)), "previous": policy}


@program
def grouped(policy: Policy, prompts: Prompts) -> Any:
    weights = broadcast(policy)
    # result-per-group: the next 'policy' given 'adapt', which is made once per group
    return adapt(weights, generate(prompts, weights))


@program
def relayed(policy: Policy, prompts: Prompts) -> Any:
    note(generate(prompts, broadcast(policy)))
    # wrong-type: the next 'policy' given Weights
    # result-per-group: which is a broadcast
    return broadcast(policy)


# Weights of eight bits -------------------------------------------------------------------------------------


@program
def too_narrow(policy: Policy, prompts: Prompts) -> Any:
    # bad-precision: broadcast: option 'precision' given 'int4'
    rollouts = generate(prompts, broadcast(policy, precision="int4"))  # type: ignore[arg-type]
    return {"policy": learn(policy, rollouts, score(rollouts))}


@program
def not_computed(policy: Policy, prompts: Prompts) -> Any:
    behaviour = broadcast(policy, precision="fp8")
    # no-precision: generate reads broadcast given weights in fp8
    rollouts = generate(prompts, behaviour)
    return {"policy": learn(policy, rollouts, score(rollouts))}


@program
def two_formats(policy: Policy, prompts: Prompts) -> Any:
    rollouts = generate(prompts, broadcast(policy))
    # bad-precision: broadcast_2: option 'precision' given 'int8' beside broadcast
    # no-precision: generate_2 reads broadcast_2
    note(generate(prompts, broadcast(policy, precision="int8")))
    return {"policy": learn(policy, rollouts, score(rollouts))}


# All at once, in the order of the lines -------------------------------------------------------------------


# unused-argument: source 'hints'
@program
def many(policy: Policy, prompts: Prompts, hints: Prompts) -> Any:
    # bad-lag: broadcast: lag
    # bad-samples: generate: option 'samples'
    rollouts = generate(prompts, broadcast(policy, lag=-1), samples=0)
    # wrong-type: score: input 'rollouts'
    rewards = score(prompts)  # type: ignore[arg-type]
    # unused-output: advise: output 'out'
    advise(rewards)
    # cycle-without-lag: measure: input 'policy'
    return learn_from(policy, measure(policy, rollouts))
