"""Faults of carried values: cycles, and updates that get into each other's way."""

from pathlib import Path
from typing import Any

from penstock.graph import (
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
from penstock.graph.types import Reference

NODES = Path(__file__).with_name("nodes_for_tests.py")
PROGRAMS = Path(__file__).with_name("programs_for_tests.py")

generate, score, learn, measure, learn_from, merge, norm, samples_of = (
    load(f"{NODES}:{name}")
    for name in ("generate", "score", "learn", "measure", "learn_from", "merge", "norm", "samples_of")
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


def test_a_cycle_without_a_lag() -> None:
    @program
    def cyclic(policy: Policy, prompts: Prompts) -> Any:
        rollouts, rewards = samples_of(prompts, policy)
        fresh = learn(policy, rollouts, rewards)
        logprobs = measure(policy, rollouts)  # cyclic
        return learn_from(fresh, logprobs)

    words = (
        "measure: input 'policy'",
        "the cycle without a lag policy → measure → learn_from → policy",
        "needed  broadcast(policy, lag=k)",
    )
    only(trace(cyclic), *words, mark="cyclic")


def test_a_changing_value_that_a_per_group_node_reads_off_the_cycle() -> None:
    @node(pool="trainer")
    def watch(policy: Policy, rollouts: Rollouts) -> Metrics:
        raise NotImplementedError

    @program
    def watched(policy: Policy, prompts: Prompts) -> Any:
        rollouts, rewards = samples_of(prompts, policy)
        watch(policy, rollouts)  # watched
        return learn(policy, rollouts, rewards)

    only(trace(watched), "watch: input 'policy'", "'policy', which changes", "broadcast(policy", mark="watched")


def test_updates_that_wait_for_each_other() -> None:
    @node(pool="trainer", clock="update")
    def beside(policy: Policy, other: Policy, rollouts: Rollouts) -> Policy:
        raise NotImplementedError

    @program
    def mutual(policy: Policy, critic: Policy, prompts: Prompts) -> Any:
        rollouts = generate(prompts, broadcast(policy))
        first = beside(policy, critic, rollouts)  # mutual
        return {"policy": first, "critic": beside(critic, policy, rollouts)}

    @program
    def in_turn(policy: Policy, critic: Policy, prompts: Prompts) -> Any:
        rollouts = generate(prompts, broadcast(policy))
        first = beside(policy, critic, rollouts)
        return {"policy": first, "critic": beside(critic, first, rollouts)}

    words = (
        "beside waits for itself",
        "beside → beside_2 → beside",
        "give one of these nodes the next value that another returns",
    )
    only(trace(mutual), *words, mark="mutual")
    assert check(trace(in_turn)) == []


def test_a_reader_of_both_the_old_and_the_next_value() -> None:
    @node(pool="trainer", clock="update")
    def compare(old: Policy, new: Policy) -> Metrics:
        raise NotImplementedError

    @program
    def compared(policy: Policy, prompts: Prompts) -> Any:
        fresh = learn(policy, *samples_of(prompts, policy))
        compare(policy, fresh)
        return fresh

    only(trace(compared), "learn waits for itself", "learn → compare → learn")


def test_a_value_given_to_two_updates() -> None:
    @program
    def forked(policy: Policy, prompts: Prompts) -> Any:
        rollouts, rewards = samples_of(prompts, policy)
        first = learn(policy, rollouts, rewards)
        second = learn(policy, rollouts, rewards)  # forked
        return merge(first, second)

    words = ("learn_2 updates a value", "'policy', which learn (", "updates too", "the second takes what learn returns")
    only(trace(forked), *words, mark="forked")


def test_updates_in_a_row_and_averages_are_no_forks() -> None:
    @node(pool="trainer", clock="update")
    def average(mean: Policy, policy: Policy) -> Policy:
        raise NotImplementedError

    @program
    def in_a_row(policy: Policy, mean: Policy, prompts: Prompts) -> Any:
        rollouts, rewards = samples_of(prompts, policy)
        second = learn(learn(policy, rollouts, rewards), rollouts, rewards)
        return {"policy": second, "mean": average(mean, policy)}

    assert check(trace(in_a_row)) == []


def test_one_value_for_two_carried_ones() -> None:
    @program
    def shared(policy: Policy, twin: Policy, prompts: Prompts) -> Any:
        rollouts, rewards = samples_of(prompts, policy)
        norm(twin)
        fresh = learn(policy, rollouts, rewards)  # shared
        return {"policy": fresh, "twin": fresh}

    words = (
        "the next 'twin'",
        "'learn', which is the next 'policy' too",
        "an output of its own for each carried value",
    )
    only(trace(shared), *words, mark="shared")


def test_another_argument_as_the_next_value() -> None:
    @program
    def shifted(policy: Policy, previous: Policy, prompts: Prompts) -> Any:
        norm(previous)
        return {"policy": learn(policy, *samples_of(prompts, policy)), "previous": policy}

    only(trace(shifted), "the next 'previous'", "another argument, 'policy'", "a copy needs a node")


def test_a_next_value_that_is_not_made_once_per_update() -> None:
    @node(pool="trainer")
    def each(weights: Weights, rollouts: Rollouts) -> Policy:
        raise NotImplementedError

    @program
    def grouped(policy: Policy, prompts: Prompts) -> Any:
        weights = broadcast(policy)
        return each(weights, generate(prompts, weights))  # grouped

    @program
    def relayed(policy: Policy, prompts: Prompts) -> Any:
        score(generate(prompts, broadcast(policy)))
        return broadcast(policy)

    only(trace(grouped), "the next 'policy'", "'each', which is made once per group", 'clock="update"', mark="grouped")
    assert any("which is a broadcast" in f.given for f in check(trace(relayed)))


def test_a_program_whose_updates_would_never_end() -> None:
    """Such as an evaluation that measures each group by itself."""

    @node(pool="scorer")
    def each(rollouts: Rollouts) -> Metrics:
        raise NotImplementedError

    @program
    def endless(policy: Policy, prompts: Prompts) -> Policy:
        each(generate(prompts, broadcast(policy)))
        return policy

    only(trace(endless), "endless", "none that fires at each update", 'clock="update"')


def test_a_next_value_of_another_type() -> None:
    @node(clock="update", pool="trainer")
    def distil(policy: Policy, rewards: Rewards) -> Rewards:
        raise NotImplementedError

    @program
    def retyped(policy: Policy, prompts: Prompts) -> Any:
        _, rewards = samples_of(prompts, policy)
        return distil(policy, rewards)  # retyped

    only(trace(retyped), "the next 'policy'", "given   Rewards (from distil)", "needed  Policy", mark="retyped")


def test_a_carried_value_that_nobody_reads() -> None:
    @node(clock="update", pool="trainer")
    def snapshot(policy: Policy) -> Policy:
        raise NotImplementedError

    @program
    def written(policy: Policy, old: Policy, prompts: Prompts) -> Any:
        return {"policy": learn(policy, *samples_of(prompts, policy)), "old": snapshot(policy)}

    only(trace(written), "carried 'old'", "no node that reads it")


def test_a_per_group_node_that_reads_a_per_update_output() -> None:
    @program
    def early(policy: Policy, prompts: Prompts) -> Any:
        rollouts, rewards = samples_of(prompts, policy)
        fresh = learn(policy, rollouts, rewards)
        return learn_from(fresh, measure(fresh, rollouts))  # early

    words = ("measure: input 'policy' of a per-group node", "'learn', which learn makes once per update", "broadcast(")
    only(trace(early), *words, mark="early")


def test_a_broadcast_of_what_is_not_carried() -> None:
    @program
    def relay(policy: Policy, prompts: Prompts) -> Any:
        rollouts = generate(prompts, broadcast(prompts))  # relay
        return learn(policy, rollouts, score(rollouts))

    @program
    def eager(policy: Policy, prompts: Prompts) -> Any:
        fresh = learn(policy, *samples_of(prompts, policy))
        return learn(fresh, *samples_of(prompts, fresh))

    only(trace(relay), "'prompts', which is a source", "a carried value", mark="relay")
    assert "'learn', which is the output of a node" in [f.given for f in check(trace(eager))]


def test_a_carried_value_read_in_another_pool() -> None:
    @program
    def afar(policy: Policy, reference: Reference, prompts: Prompts) -> Any:
        rollouts, _ = samples_of(prompts, policy)
        close = load(f"{PROGRAMS}:reference_logprobs")(reference, rollouts)
        logprobs = measure(reference, rollouts)  # afar
        return {"policy": learn_from(learn_from(policy, close), logprobs), "reference": reference}

    graph = trace(afar)
    words = ("measure: input 'policy'", "'reference', which pool 'reference' holds", "of its own pool 'trainer'")
    assert [f.what for f in check(graph)] == ["score: output 'out'", "measure: input 'policy'"]
    assert all(word in str(check(graph)[1]) for word in words)
    assert check(graph)[1].where == line("afar")
    together = dict.fromkeys(("policy", "reference", *(n.name for n in graph.nodes)), "one")
    assert [f.what for f in check(graph, pools=together)] == ["score: output 'out'"]
