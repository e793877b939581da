"""Each fault is found, with its code, what was given and the line; and all of them at once."""

from dataclasses import replace
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
from penstock.graph.ir import Argument, Input, Node, Output, Ref
from penstock.graph.types import Reference

NODES = Path(__file__).with_name("nodes_for_tests.py")


PROGRAMS = Path(__file__).with_name("programs_for_tests.py")


generate, score, advise, learn, measure, learn_from, samples_of = (
    load(f"{NODES}:{name}") for name in ("generate", "score", "advise", "learn", "measure", "learn_from", "samples_of")
)


def line(mark: str) -> str:
    """ "file:line" of the line that ends with `# mark`."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{1 + next(i for i, text in enumerate(lines) if text.endswith(f'# {mark}'))}"


def only(graph: Graph, code: str, *words: str, mark: str = "", **settings: Any) -> None:
    """The graph has one fault, of this code, which holds all the words, at the marked line."""
    faults = check(graph, **settings)
    assert [fault.code for fault in faults] == [code], "\n".join(map(str, faults))
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
    assert str(fault) == (
        "my.py:7: score: input 'rollouts' [wrong-type]\n    given   Prompts (from prompts)\n    needed  Rollouts"
    )


def test_a_mistyped_input() -> None:
    @program
    def mistyped(policy: Policy, prompts: Prompts) -> Any:
        rollouts = generate(prompts, broadcast(policy))
        rewards = score(advise(score(rollouts)))  # mistyped
        return learn(policy, rollouts, rewards)

    words = ("score_2: input 'rollouts'", "given   Advantages (from advise)", "needed  Rollouts")
    only(trace(mistyped), "wrong-type", *words, mark="mistyped")


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
    only(trace(refused), "wrong-type", "picky: input 'rewards'", "given   Rewards (from score)", "needed  Better")


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

    only(
        trace(unused),
        "unused-output",
        "advise: output 'out'",
        "advise (Advantages), which no node reads",
        mark="unused",
    )


def test_one_of_several_outputs_that_nobody_uses() -> None:
    @node(pool="scorer")
    def split(rewards: Rewards) -> tuple[Rewards, Advantages]:
        raise NotImplementedError

    @program
    def half(policy: Policy, prompts: Prompts) -> Any:
        rollouts, rewards = samples_of(prompts, policy)
        good, _ = split(rewards)  # half
        return learn(policy, rollouts, good)

    only(trace(half), "unused-output", "split: output '1'", "split.1 (Advantages)", mark="half")


def test_a_broadcast_that_nobody_reads() -> None:
    @program
    def deaf(policy: Policy, prompts: Prompts) -> Any:
        broadcast(policy, lag=2)  # deaf
        return learn(policy, *samples_of(prompts, policy))

    only(trace(deaf), "unused-output", "broadcast: output 'out'", mark="deaf")


def test_an_argument_that_nobody_reads() -> None:
    @program
    def idle(policy: Policy, prompts: Prompts, hints: Prompts) -> Any:
        return learn(policy, *samples_of(prompts, policy))

    only(trace(idle), "unused-argument", "source 'hints'")


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

    only(trace(ticking), "no-input", "tick", "no input", mark="ticking")


@pytest.mark.parametrize("lag", [-1, 1.5, True, None, "2"])
def test_lags_that_cannot_work(lag: Any) -> None:
    words = ("broadcast: lag", f"given   {lag!r}", "a whole number of updates, at least 0")
    row = 1 + next(i for i, text in enumerate(NODES.read_text().splitlines()) if "broadcast(policy, lag=lag)" in text)
    only(trace(sound, {"lag": lag}), "bad-lag", f"{NODES}:{row}: ", *words)


@pytest.mark.parametrize("samples", [0, -3, 2.5, None])
def test_samples_that_cannot_work(samples: Any) -> None:
    @program
    def sampled(policy: Policy, prompts: Prompts) -> Any:
        rollouts = generate(prompts, broadcast(policy), samples=samples)  # sampled
        return learn(policy, rollouts, score(rollouts))

    only(
        trace(sampled),
        "bad-samples",
        "generate: option 'samples'",
        f"given   {samples!r}",
        "at least 1",
        mark="sampled",
    )


@pytest.mark.parametrize("batch", [0, -1, 2.0, True])
def test_batches_that_cannot_work(batch: Any) -> None:
    only(trace(sound), "bad-batch", "batch", f"given   {batch!r}", "at least 1", batch=batch)


def test_a_type_without_a_maker() -> None:
    class Riddles: ...

    @node(pool="generator")
    def ask(riddles: Riddles) -> Prompts:
        raise NotImplementedError

    @program
    def riddled(policy: Policy, riddles: Riddles) -> Any:
        return learn(policy, *samples_of(ask(riddles), policy))

    only(trace(riddled), "no-maker", "source 'riddles'", "Riddles, without a maker")


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


generate, score, learn, measure, learn_from, merge, norm, samples_of = (
    load(f"{NODES}:{name}")
    for name in ("generate", "score", "learn", "measure", "learn_from", "merge", "norm", "samples_of")
)


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
    only(trace(cyclic), "cycle-without-lag", *words, mark="cyclic")


def test_a_changing_value_that_a_per_group_node_reads_off_the_cycle() -> None:
    @node(pool="trainer")
    def watch(policy: Policy, rollouts: Rollouts) -> Metrics:
        raise NotImplementedError

    @program
    def watched(policy: Policy, prompts: Prompts) -> Any:
        rollouts, rewards = samples_of(prompts, policy)
        watch(policy, rollouts)  # watched
        return learn(policy, rollouts, rewards)

    only(trace(watched), "changing-input", "watch: input 'policy'", "'policy', which changes", mark="watched")


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
    only(trace(mutual), "update-cycle", *words, mark="mutual")
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

    only(trace(compared), "update-cycle", "learn waits for itself", "learn → compare → learn")


def test_a_value_given_to_two_updates() -> None:
    @program
    def forked(policy: Policy, prompts: Prompts) -> Any:
        rollouts, rewards = samples_of(prompts, policy)
        first = learn(policy, rollouts, rewards)
        second = learn(policy, rollouts, rewards)  # forked
        return merge(first, second)

    words = ("learn_2 updates a value", "'policy', which learn (", "updates too", "the second takes what learn returns")
    only(trace(forked), "updated-twice", *words, mark="forked")


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
    only(trace(shared), "shared-result", *words, mark="shared")


def test_another_argument_as_the_next_value() -> None:
    @program
    def shifted(policy: Policy, previous: Policy, prompts: Prompts) -> Any:
        norm(previous)
        return {"policy": learn(policy, *samples_of(prompts, policy)), "previous": policy}

    only(trace(shifted), "other-argument", "the next 'previous'", "another argument, 'policy'")


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

    only(
        trace(grouped), "result-per-group", "the next 'policy'", "'each', which is made once per group", mark="grouped"
    )
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

    only(trace(endless), "no-update", "endless", "none that fires at each update")


def test_a_next_value_of_another_type() -> None:
    @node(clock="update", pool="trainer")
    def distil(policy: Policy, rewards: Rewards) -> Rewards:
        raise NotImplementedError

    @program
    def retyped(policy: Policy, prompts: Prompts) -> Any:
        _, rewards = samples_of(prompts, policy)
        return distil(policy, rewards)  # retyped

    only(
        trace(retyped),
        "wrong-type",
        "the next 'policy'",
        "given   Rewards (from distil)",
        "needed  Policy",
        mark="retyped",
    )


def test_a_carried_value_that_nobody_reads() -> None:
    @node(clock="update", pool="trainer")
    def snapshot(policy: Policy) -> Policy:
        raise NotImplementedError

    @program
    def written(policy: Policy, old: Policy, prompts: Prompts) -> Any:
        return {"policy": learn(policy, *samples_of(prompts, policy)), "old": snapshot(policy)}

    only(trace(written), "unused-argument", "carried 'old'")


def test_a_per_group_node_that_reads_a_per_update_output() -> None:
    @program
    def early(policy: Policy, prompts: Prompts) -> Any:
        rollouts, rewards = samples_of(prompts, policy)
        fresh = learn(policy, rollouts, rewards)
        return learn_from(fresh, measure(fresh, rollouts))  # early

    words = ("measure: input 'policy' of a per-group node", "'learn', which learn makes once per update", "broadcast(")
    only(trace(early), "slower-input", *words, mark="early")


def test_a_broadcast_of_what_is_not_carried() -> None:
    @program
    def relay(policy: Policy, prompts: Prompts) -> Any:
        rollouts = generate(prompts, broadcast(prompts))  # relay
        return learn(policy, rollouts, score(rollouts))

    @program
    def eager(policy: Policy, prompts: Prompts) -> Any:
        fresh = learn(policy, *samples_of(prompts, policy))
        return learn(fresh, *samples_of(prompts, fresh))

    only(trace(relay), "not-carried", "'prompts', which is a source", mark="relay")
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


learn, samples_of = load(f"{NODES}:learn"), load(f"{NODES}:samples_of")


def edited(graph: Graph, name: str, **changes: Any) -> Graph:
    return graph.replace(nodes=tuple(replace(n, **changes) if n.name == name else n for n in graph.nodes))


def test_a_reference_to_nothing() -> None:
    graph = trace(sound)
    inputs = (Input("rollouts", graph["score"].inputs[0].type, Ref("genrate")),)
    words = ("score: input 'rollouts'", "'genrate', which is nowhere in the graph", "the nearest: generate")
    only(edited(graph, "score", inputs=inputs), "unknown-input", *words)
    inputs = (Input("rollouts", graph["score"].inputs[0].type, Ref("generate", "1")),)
    only(edited(graph, "score", inputs=inputs), "unknown-output", "'generate.1', an output that generate does not have")


def test_a_result_that_is_nowhere() -> None:
    graph = trace(sound).replace(results=(("policy", Ref("lern")),))
    faults = check(graph)
    assert sorted(f.what for f in faults) == ["learn: output 'out'", "the next 'policy'"]
    assert "'lern', which is nowhere in the graph" in [f.given for f in faults]


def test_two_things_of_one_name() -> None:
    graph = trace(sound)
    twice = graph.replace(nodes=(*graph.nodes, graph["score"]))
    only(twice, "duplicate-name", "score", "the name a second time")


def test_two_results_for_one_carried_value() -> None:
    graph = trace(sound)
    only(graph.replace(results=graph.results * 2), "two-results", "the next 'policy'", "two producers of one value")


def test_results_for_what_is_not_carried() -> None:
    graph = trace(sound)
    faults = check(graph.replace(results=(*graph.results, ("prompts", Ref("prompts")), ("polcy", Ref("learn")))))
    assert [(f.given, f.needed) for f in faults if "the next" in f.what] == [
        ("'prompts', which is a source", "a carried value; there are: policy"),
        ("'polcy', which is no argument", "a carried value; the nearest: policy"),
    ]


def test_a_carried_value_without_a_next_one() -> None:
    graph = trace(sound).replace(results=())
    whats = [(f.what, f.given) for f in check(graph)]
    assert ("carried 'policy'", "no next value") in whats


def test_a_cycle_of_data() -> None:
    graph = trace(sound)
    loop = (*graph["generate"].inputs, Input("rewards", "penstock.graph.types:Rewards", Ref("score")))
    only(
        edited(graph, "generate", inputs=loop),
        "cycle-without-lag",
        "generate waits for itself",
        "generate → score → generate",
    )
    own = (*graph["score"].inputs, Input("again", "penstock.graph.types:Rewards", Ref("score")))
    only(edited(graph, "score", inputs=own), "cycle-without-lag", "score waits for itself", "score → score")


def test_words_that_the_language_does_not_have() -> None:
    graph = trace(sound)
    only(edited(graph, "score", clock="weekly"), "unknown-clock", "score: clock", "'weekly'")
    only(edited(graph, "score", construct="goto"), "unknown-construct", "score: construct", "'goto'")
    only(edited(graph, "score", lag=1), "bad-construct", "score: lag")
    only(edited(graph, "learn", every=0), "bad-every", "learn: every", "given   0")
    twice = edited(graph, "broadcast", inputs=graph["broadcast"].inputs * 2)
    only(twice, "bad-construct", "broadcast", "2 inputs")


def test_any_graph_can_be_checked() -> None:
    inputs = (Input("x", "m:X", Ref("a", "no")), Input("y", "", Ref("")))
    nonsense = Node("a", "", inputs, (Output("out", ""),), clock="update")
    nobody = Argument("", "carried", "", "", "")
    graph = Graph("", "", (nobody, nobody), (nonsense, nonsense), (("", Ref("a")), ("b", Ref(""))))
    assert len(check(graph, batch=0)) > 5
    assert check(Graph("empty", "", (), (), ())) == []
