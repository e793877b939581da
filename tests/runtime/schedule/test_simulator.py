"""The simulated schedule: its period and the bound, its invariants, its accounting, and keyed verdicts."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from penstock.graph.analysis import Bound, period_bound
from penstock.graph.ir import Firing, Graph
from penstock.runtime.cluster.placement import Plan
from penstock.runtime.schedule.compile import Rules, Tables
from penstock.runtime.schedule.simulator import Duration, Durations, LognormalSeconds, Simulation, Verdicts, simulate

from .checker import Checker
from .graphs import aipo, alternate, broadcast, call, evaluate, graph, keep, place, sft
from .random_settings import random_setting

SECONDS = {"generate": 1.0, "score": 0.1, "advantage": 0.0, "update": 2.0}


def simulated(
    graph: Graph, plan: Plan, rules: Rules, seconds: Mapping[str, float], sync: tuple[float, float, float] = (0, 0, 0)
) -> Simulation:
    return simulate(Tables(graph, plan), rules, Durations(seconds, *sync))


def bound(graph: Graph, plan: Plan, rules: Rules, seconds: Mapping[str, float], sync: float = 0.0) -> Bound:
    broadcasts = [n for n in graph.nodes if n.construct == "broadcast"]
    pools = {name: pool.name for pool in plan.pools for name in pool.holds}
    pools |= {n.name: plan.pool_of(n.inputs[0].ref.node).name for n in broadcasts}
    servers = {pool.name: sum(r.capacity for r in pool.replicas) for pool in plan.pools}
    return period_bound(graph, {**seconds, **{n.name: sync for n in broadcasts}}, rules.batch, servers, pools)


# The period -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1, 2, 4])
def test_the_period_equals_the_bound_where_each_pool_runs_one_node(lag: int) -> None:
    for generate, update, score, capacity, batch in product([1, 3], [1, 2, 7], [0, 0.5], [1, 4], [1, 4]):
        seconds = {"generate": generate, "score": score, "advantage": 0, "update": update}
        graph, rules = aipo(lag), Rules(batch, end=40)
        plan = place(graph, capacity={"generator": capacity})
        expected = bound(graph, plan, rules, seconds)
        assert simulated(graph, plan, rules, seconds).period_s == pytest.approx(expected.seconds), f"{seconds}, {batch}"


SEEDS = [range(20), pytest.param(range(20, 100), marks=pytest.mark.slow)]


@pytest.mark.parametrize("seeds", SEEDS)
def test_the_period_never_beats_the_bound(seeds: range) -> None:
    for seed in seeds:
        rng = Random(seed)
        setting = random_setting(rng)
        rules = Rules(setting.rules.batch, end=40, versions=setting.rules.versions)
        seconds = {n.name: rng.choice([0, 0.1, 1, 3]) for n in setting.graph.nodes if n.fires}
        sync = (rng.choice([0, 0.5]), rng.choice([0, 0.5]), rng.choice([0, 0.1]))
        result = simulated(setting.graph, setting.plan, rules, seconds, sync)
        lowest = bound(setting.graph, setting.plan, rules, seconds, sum(sync))
        assert result.period_s >= lowest.seconds * (1 - 1e-9), f"seed {seed}: {lowest}"


def test_lag_zero_takes_the_sum_and_a_lag_the_slowest_pool() -> None:
    seconds = {"generate": 3.0, "score": 1.0, "advantage": 0.0, "update": 2.0}
    plan = place(aipo(), capacity={"generator": 1})
    assert [simulated(aipo(lag), plan, Rules(1, 60), seconds).period_s for lag in (0, 1)] == pytest.approx([6.0, 3.0])


def test_a_steady_part_is_at_least_as_long_as_a_cycle_and_a_run_without_one_tells_its_mean() -> None:
    plan = place(aipo(), capacity={"generator": 16})
    runs = {updates: simulated(aipo(1), plan, Rules(4, updates), SECONDS) for updates in (4, 6, 7, 8, 9)}
    assert [run.steady for run in runs.values()] == [None, None, (2, 4), (2, 4), (2, 6)]
    assert runs[4].period_s == pytest.approx(runs[4].wall_s / 4)


@pytest.mark.parametrize(("lag", "seconds"), [(1, 2.5), (2, 5 / 3), (3, 1.25)])
def test_updates_that_come_in_bursts_are_counted_in_whole_ones(lag: int, seconds: float) -> None:
    """A generator has room for all batches at once: 1 + lag updates run in a burst, then none for a while."""
    plan, bursts = place(aipo(), capacity={"generator": 64}), {**SECONDS, "generate": 4.0, "score": 0.0, "update": 1.0}
    for updates in range(3 * lag + 4, 3 * lag + 20):
        found = simulated(aipo(lag), plan, Rules(4, updates), bursts)
        assert found.steady_s == pytest.approx(seconds)


# The schedule -----------------------------------------------------------------------------------------------


def test_the_simulated_scheduler_keeps_its_invariants() -> None:
    for seed in range(25):
        rng = Random(seed)
        setting = random_setting(rng)
        nodes = [n.name for n in setting.graph.nodes if n.fires]
        rules = replace(setting.rules, drops=99)
        filters = {n.name: rng.choice([0.2, 0.6]) for n in setting.graph.nodes if n.construct == "keep"}
        again = {n.name: setting.again[n.name] for n in setting.graph.nodes if n.answers}
        seconds = {n: LognormalSeconds(rng.choice([0.1, 1]), 1.0, seed) for n in nodes}
        checker = Checker(setting.graph, setting.plan, rules)
        result = simulate(
            Tables(setting.graph, setting.plan),
            rules,
            Durations(seconds, wire=rng.choice([0, 2])),
            observe=lambda now, event, commands, checker=checker: checker.see(event, commands),  # type: ignore[misc]
            verdicts=Verdicts(filters, again, seed),
        )
        assert len(result.ends) == rules.end
        assert result.dropped == list(checker.books.fates.values()).count("dropped")


def test_a_firing_that_pauses_takes_as_long_in_pieces() -> None:
    tables, rules = Tables(aipo(), place(aipo(), capacity={"generator": 1})), Rules(1, 2)
    whole, pieces = (
        simulate(tables, rules, Durations({**SECONDS, "generate": 2.5}, segments=segments))
        for segments in ({}, {"generate": 1.0})
    )
    assert (pieces.wall_s, pieces.busy) == (whole.wall_s, whole.busy)
    lasted = [bar.end - bar.start for bar in pieces.bars if bar.name == "generate"]
    assert lasted == [1.0, 1.0, 0.5] * 2


def test_the_same_durations_give_the_same_schedule() -> None:
    tables, rules = Tables(aipo(2), place(aipo(), {"generator": 2})), Rules(4, 20)
    drawn = [Durations({**SECONDS, "generate": LognormalSeconds(1.0, 0.8, seed)}, 0.1, 0.2, 0.01) for seed in (0, 0, 1)]
    first, second, other = (simulate(tables, rules, durations) for durations in drawn)
    assert first == second != other


def test_busy_and_idle_add_up_to_the_wall_time() -> None:
    result = simulated(aipo(1), place(aipo(), {"generator": 2}), Rules(4, 10), SECONDS, (0.1, 0.2, 0.0))
    assert set(result.busy) == set(result.idle) == {"generator/0", "generator/1", "scorer/0", "trainer/0"}
    for replica, busy in result.busy.items():
        assert busy + sum(result.idle[replica].values()) == pytest.approx(result.wall_s)


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_every_consumed_group_has_a_lag_within_the_bound(lag: int) -> None:
    result = simulated(aipo(lag), place(aipo()), Rules(4, 30), SECONDS)
    assert sum(result.lags.values()) == 4 * 30
    assert 0 <= min(result.lags) <= max(result.lags) <= lag


def test_bars_say_what_ran_where_and_with_which_version() -> None:
    result = simulated(aipo(0), place(aipo()), Rules(1, 2), SECONDS, (0.5, 0.25, 0.125))
    bars = {(b.kind, b.label): b for b in result.bars}
    generate = bars["group", "generate[1]"]
    assert (generate.lane, generate.version) == ("generator/0", 1)
    assert generate.seconds == pytest.approx(1.0)
    assert bars["publish", "policy>generator[1]"].lane == "trainer/0"
    assert bars["send", "policy>generator[1]"].lane == "policy>generator/0"
    assert bars["swap", "swap[1]"].end == pytest.approx(generate.start)
    assert [b.end for b in result.bars if b.kind == "update"] == result.ends


def test_ready_groups_wait_where_the_trainer_is_the_bottleneck() -> None:
    slow = simulated(aipo(2), place(aipo(), capacity={"generator": 16}), Rules(4, 20), {**SECONDS, "update": 9.0})
    assert max(slow.depths["update"]) > 4
    assert max(simulated(aipo(0), place(aipo()), Rules(4, 20), SECONDS).depths["update"]) <= 4


def test_graphs_without_weights_and_evaluations_are_simulated() -> None:
    assert simulated(sft(), place(sft()), Rules(2, 9), {"pack": 0.1, "update": 1.0}).period_s == pytest.approx(1.0)
    seconds = {"evaluate.generate": 1.0, "evaluate.score": 0.5, "evaluate.accuracy": 0.0}
    result = simulated(evaluate(), place(evaluate()), Rules(8, end=31, start=30), seconds)
    assert result.wall_s == pytest.approx(2.5)


# Durations and verdicts -------------------------------------------------------------------------------------


def conversed(turns: int, updates: int, verdicts: Verdicts, speak: Duration = 1.0) -> Simulation:
    """Simulate turns followed by a filter, one group at a time."""
    nodes = (
        broadcast("broadcast", "policy", 0),
        *alternate("speak", "answer", ["prompts", "broadcast"], turns),
        keep("keep", ["answer"]),
        call("update", ["policy", "keep"], "trainer", "update"),
    )
    made = graph("conversing", {"policy": "update"}, ["prompts"], nodes)
    tables = Tables(made, place(made, capacity={"generator": 1}))
    durations = Durations({"speak": speak, "answer": 0.5, "update": 2.0})
    return simulate(tables, Rules(1, updates), durations, verdicts=verdicts)


def test_all_turns_are_taken_and_nothing_is_dropped_unless_it_is_said() -> None:
    result = conversed(3, 20, Verdicts())
    assert result.period_s == pytest.approx(3 * (1.0 + 0.5) + 2.0)
    assert result.dropped == 0
    # Each turn has its own duration.
    result = conversed(3, 1, Verdicts(), LognormalSeconds(1.0, 0.8))
    assert len({bar.seconds for bar in result.bars if bar.name == "speak"}) == 3


def test_a_filter_drops_its_share_and_an_answer_ends_the_turns_by_its() -> None:
    full, short = (conversed(3, 200, Verdicts(again={"answer": share})) for share in (1.0, 0.5))
    turns = sum(bar.name == "answer" for bar in short.bars) / sum(bar.name == "update" for bar in short.bars)
    assert turns == pytest.approx(1 + 0.5 + 0.25, rel=0.1)
    assert short.wall_s < full.wall_s
    dropping = conversed(1, 200, Verdicts(drops={"keep": 0.25}))
    assert dropping.dropped / (dropping.dropped + 200) == pytest.approx(0.25, rel=0.2)
    assert conversed(1, 5, Verdicts(again={"answer": 0.0})) == conversed(3, 5, Verdicts(again={"answer": 0.0}))
    with pytest.raises(ValueError, match=r"simulation: given 16 groups dropped for update 0, the last by keep\[15\]"):
        conversed(1, 5, Verdicts(drops={"keep": 1.0}))


def test_verdicts_depend_on_seed_node_group_and_turn() -> None:
    def drawn(seed: int, node: str, turn: int = 0) -> tuple[bool, ...]:
        verdicts = Verdicts({"a": 0.5, "b": 0.5}, {"a": 0.5, "b": 0.5}, seed)
        return tuple(f(Firing(node, g, turn)) for f in (verdicts.dropped, verdicts.goes_on) for g in range(40))

    assert drawn(0, "a") == drawn(0, "a")
    assert len({drawn(0, "a"), drawn(1, "a"), drawn(0, "b"), drawn(0, "a", 1)}) == 4
    assert drawn(0, "a")[:40] != drawn(0, "a")[40:]


def test_a_keyed_duration_has_the_given_mean() -> None:
    draw = LognormalSeconds(mean=2.0, sigma=0.5, seed=3)
    values = [draw("generate", i) for i in range(20000)]
    assert sum(values) / len(values) == pytest.approx(2.0, rel=0.02)
    assert draw("generate", 7) == values[7] != draw("score", 7)


@pytest.mark.parametrize(
    ("verdicts", "message"),
    [
        (Verdicts(drops={"answer": 0.1}), "drops: given answer; needed names of keep"),
        (Verdicts(again={"speak": 0.1}), "again: given speak; needed names of answer"),
        (Verdicts(drops={"keep": 1.5}), "drops: given keep=1.5; needed shares from 0 to 1"),
    ],
)
def test_verdicts_are_checked(verdicts: Verdicts, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        conversed(2, 1, verdicts)
    durations = Durations({"pack": 0, "update": 0})
    with pytest.raises(ValueError, match="needed none, since no node of the graph decides it"):
        simulate(Tables(sft(), place(sft())), Rules(1, 1), durations, verdicts=verdicts)


@pytest.mark.parametrize(
    ("durations", "message"),
    [
        (Durations({"generate": 1.0}), "given generate; needed one for each node of prompts, generate, score"),
        (Durations({"judge": 1.0, **SECONDS}), "given judge, generate"),
        (Durations({**SECONDS, "score": -2.0}, wire=-1), r"given wire=-1, score=-2\.0; needed seconds, 0 or more"),
    ],
)
def test_durations_are_checked(durations: Durations, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(Tables(aipo(), place(aipo())), Rules(1, 1), durations)
