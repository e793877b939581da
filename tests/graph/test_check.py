"""Each fault is found, with what was given, what is needed and the line; and all of them at once."""

from pathlib import Path
from typing import Any

import pytest

from penstock.graph import (
    Advantages,
    Fault,
    Graph,
    Metrics,
    Policy,
    Prompts,
    Rewards,
    Rollouts,
    Weights,
    broadcast,
    check,
    load,
    node,
    program,
    trace,
)

NODES = Path(__file__).with_name("nodes_for_tests.py")
PROGRAMS = Path(__file__).with_name("programs_for_tests.py")

generate, score, advise, learn, measure, learn_from, samples_of = (
    load(f"{NODES}:{name}") for name in ("generate", "score", "advise", "learn", "measure", "learn_from", "samples_of")
)


def line(mark: str) -> str:
    """ "file:line" of the line that ends with `# mark`."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{1 + next(i for i, text in enumerate(lines) if text.endswith(f'# {mark}'))}"


def only(graph: Graph, *words: str, mark: str = "", **settings: Any) -> None:
    """The graph has one fault, which holds all the words, at the marked line."""
    faults = check(graph, **settings)
    assert len(faults) == 1, "\n".join(map(str, faults))
    for word in words:
        assert word in str(faults[0])
    if mark:
        assert faults[0].where == line(mark)


@program
def sound(policy: Policy, prompts: Prompts, *, lag: int = 1) -> Any:
    rollouts, rewards = samples_of(prompts, policy, lag)
    return learn(policy, rollouts, rewards)


@pytest.mark.parametrize("name", ["aipo", "actor_critic", "anchored", "evaluate"])
def test_sound_programs_have_no_faults(name: str) -> None:
    assert check(trace(load(f"{PROGRAMS}:{name}")), batch=4) == []


def test_a_fault_reads_well() -> None:
    fault = Fault("wrong-type", "score: input 'rollouts'", "Prompts (from prompts)", "Rollouts", "my.py:7")
    assert str(fault) == ("my.py:7: score: input 'rollouts'\n    given   Prompts (from prompts)\n    needed  Rollouts")


def test_a_mistyped_input() -> None:
    @program
    def mistyped(policy: Policy, prompts: Prompts) -> Any:
        rollouts = generate(prompts, broadcast(policy))
        rewards = score(advise(score(rollouts)))  # mistyped
        return learn(policy, rollouts, rewards)

    words = ("score_2: input 'rollouts'", "given   Advantages (from advise)", "needed  Rollouts")
    only(trace(mistyped), *words, mark="mistyped")


def test_a_subclass_is_accepted_where_its_base_is_needed_but_not_the_reverse() -> None:
    class Better(Rewards): ...

    @node
    def better(rollouts: Rollouts) -> Better:
        raise NotImplementedError

    @node
    def picky(rewards: Better) -> Rewards:
        raise NotImplementedError

    @program
    def accepted(policy: Policy, prompts: Prompts) -> Any:
        rollouts, _ = samples_of(prompts, policy)
        return learn(policy, rollouts, picky(better(rollouts)))

    @program
    def refused(policy: Policy, prompts: Prompts) -> Any:
        rollouts, rewards = samples_of(prompts, policy)
        return learn(policy, rollouts, picky(rewards))

    assert [f.what for f in check(trace(accepted))] == ["score: output 'out'"]
    only(trace(refused), "picky: input 'rewards'", "given   Rewards (from score)", "needed  Better")


def test_any_accepts_every_type() -> None:
    @node
    def note(anything: Any) -> Metrics:
        raise NotImplementedError

    @program
    def noted(policy: Policy, prompts: Prompts) -> Any:
        rollouts, rewards = samples_of(prompts, policy)
        note(rollouts)
        return learn(policy, rollouts, rewards)

    assert check(trace(noted)) == []


def test_an_output_that_nobody_uses() -> None:
    @program
    def unused(policy: Policy, prompts: Prompts) -> Any:
        rollouts, rewards = samples_of(prompts, policy)
        advise(rewards)  # unused
        return learn(policy, rollouts, rewards)

    only(trace(unused), "advise: output 'out'", "advise (Advantages), which no node reads", mark="unused")


def test_one_of_several_outputs_that_nobody_uses() -> None:
    @node(pool="scorer")
    def split(rewards: Rewards) -> tuple[Rewards, Advantages]:
        raise NotImplementedError

    @program
    def half(policy: Policy, prompts: Prompts) -> Any:
        rollouts, rewards = samples_of(prompts, policy)
        good, _ = split(rewards)  # half
        return learn(policy, rollouts, good)

    only(trace(half), "split: output '1'", "split.1 (Advantages)", mark="half")


def test_a_broadcast_that_nobody_reads() -> None:
    @program
    def deaf(policy: Policy, prompts: Prompts) -> Any:
        broadcast(policy, lag=2)  # deaf
        return learn(policy, *samples_of(prompts, policy))

    only(trace(deaf), "broadcast: output 'out'", "which no node reads", mark="deaf")


def test_an_argument_that_nobody_reads() -> None:
    @program
    def idle(policy: Policy, prompts: Prompts, hints: Prompts) -> Any:
        return learn(policy, *samples_of(prompts, policy))

    only(trace(idle), "source 'hints'", "no node that reads it")


def test_a_per_group_node_without_a_group() -> None:
    @node(pool="generator")
    def dream(behaviour: Weights) -> Rollouts:
        raise NotImplementedError

    @node(pool="generator")
    def conjure() -> Rollouts:
        raise NotImplementedError

    @program
    def dreaming(policy: Policy) -> Any:
        rollouts = dream(broadcast(policy))  # dreaming
        return learn(policy, rollouts, score(conjure()))

    faults = check(trace(dreaming))
    assert [f.what for f in faults] == ["dream fires per group", "conjure fires per group"]
    assert [f.given for f in faults] == ["broadcast", "no input"]
    assert faults[0].where == line("dreaming")


def test_an_update_without_input() -> None:
    @node(clock="update")
    def tick() -> Metrics:
        raise NotImplementedError

    @program
    def ticking(policy: Policy, prompts: Prompts) -> Any:
        tick()  # ticking
        return learn(policy, *samples_of(prompts, policy))

    only(trace(ticking), "tick", "no input", mark="ticking")


@pytest.mark.parametrize("lag", [-1, 1.5, True, None, "2"])
def test_lags_that_cannot_work(lag: Any) -> None:
    words = ("broadcast: lag", f"given   {lag!r}", "a whole number of updates, at least 0")
    row = 1 + next(i for i, text in enumerate(NODES.read_text().splitlines()) if "broadcast(policy, lag=lag)" in text)
    only(trace(sound, {"lag": lag}), f"{NODES}:{row}: ", *words)


@pytest.mark.parametrize("samples", [0, -3, 2.5, None])
def test_samples_that_cannot_work(samples: Any) -> None:
    @program
    def sampled(policy: Policy, prompts: Prompts) -> Any:
        rollouts = generate(prompts, broadcast(policy), samples=samples)  # sampled
        return learn(policy, rollouts, score(rollouts))

    only(trace(sampled), "generate: option 'samples'", f"given   {samples!r}", "at least 1", mark="sampled")


@pytest.mark.parametrize("batch", [0, -1, 2.0, True])
def test_batches_that_cannot_work(batch: Any) -> None:
    only(trace(sound), "batch", f"given   {batch!r}", "at least 1", batch=batch)


def test_a_type_without_a_maker() -> None:
    class Riddles: ...

    @node(pool="generator")
    def ask(riddles: Riddles) -> Prompts:
        raise NotImplementedError

    @program
    def riddled(policy: Policy, riddles: Riddles) -> Any:
        return learn(policy, *samples_of(ask(riddles), policy))

    only(trace(riddled), "source 'riddles'", "Riddles, without a maker", "class attribute `maker`")


def test_all_faults_are_found_at_once_in_the_order_of_their_lines() -> None:
    @program
    def many(policy: Policy, prompts: Prompts, hints: Prompts) -> Any:
        rollouts = generate(prompts, broadcast(policy, lag=-1), samples=0)  # many 1
        rewards = score(prompts)  # many 2
        advise(rewards)  # many 3
        logprobs = measure(policy, rollouts)  # many 4
        return learn_from(policy, logprobs)

    faults = check(trace(many), batch=0)
    assert [f.what for f in faults] == [
        "source 'hints'",
        "batch",
        "broadcast: lag",
        "generate: option 'samples'",
        "score: input 'rollouts'",
        "advise: output 'out'",
        "measure: input 'policy'",
    ]
    assert [f.where for f in faults[2:]] == [line(f"many {i}") for i in (1, 1, 2, 3, 4)]
