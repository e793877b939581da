"""A bound on the period that no schedule beats and simple ones reach."""

import heapq
from dataclasses import replace
from pathlib import Path

import networkx as nx  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.graph import Graph, GraphError, load, trace
from penstock.graph.analysis import Bound, cycles, period_bound
from penstock.graph.ir import Argument, Input, Node, Output, Ref

PROGRAMS = Path(__file__).with_name("programs_for_tests.py")
AIPO = load(f"{PROGRAMS}:aipo")
ACTOR_CRITIC = load(f"{PROGRAMS}:actor_critic")
CHAIN = ("broadcast", "generate", "score", "group_advantage", "aipo_update")


def durations(**seconds: float) -> dict[str, float]:
    return dict.fromkeys(CHAIN, 0.0) | seconds


def test_lag_zero_pays_every_stage_in_turn() -> None:
    seconds = durations(generate=2.0, score=0.5, aipo_update=1.0, broadcast=0.25)
    bound = period_bound(trace(AIPO, {"lag": 0}), seconds, 1)
    assert bound.seconds == 3.75
    assert bound.cycle == ("policy", *CHAIN)
    assert str(bound).startswith("3.75 s per update: the cycle policy → broadcast → generate → ")
    assert str(bound).endswith("→ policy, which spans 1 update")


def test_a_growing_lag_divides_the_cycle_until_one_pool_is_the_limit() -> None:
    seconds = durations(generate=2.0, score=0.5, aipo_update=1.0, broadcast=0.25)
    bounds = [period_bound(trace(AIPO, {"lag": lag}), seconds, 1) for lag in range(3)]
    assert [bound.seconds for bound in bounds] == [3.75, 2.0, 2.0]
    assert [bound.pool for bound in bounds] == ["", "generator", "generator"]
    assert bounds[1].cause == "the work of pool generator"


def test_a_batch_queues_at_its_slowest_stage() -> None:
    graph = trace(AIPO, {"lag": 0})
    seconds = durations(generate=2.0, score=0.5, aipo_update=1.0)
    # 8 groups through 4 slots: two rounds.
    assert period_bound(graph, seconds, 8, {"generator": 4}).seconds == 2.0 + 0.5 + 1.0 + max(2.0, 7 * 0.5)
    assert period_bound(graph, seconds, 8, {"generator": 4, "scorer": 8}).seconds == 2.0 + 0.5 + 1.0 + 2.0


def test_bursts_of_one_stage_queue_at_the_next() -> None:
    # Groups leave `generate` three at a time, at 4 s and 8 s; `score` takes two at a time, for 3 s: 14 s.
    graph = trace(AIPO, {"lag": 0})
    bound = period_bound(graph, durations(generate=4.0, score=3.0), 6, {"generator": 3, "scorer": 2})
    assert bound.seconds == 14.0


def test_a_pool_that_runs_two_nodes_does_the_work_of_both() -> None:
    seconds = durations(score=0.5, group_advantage=0.25)
    bound = period_bound(trace(AIPO, {"lag": 9}), seconds, 4, {"scorer": 2})
    assert (bound.pool, bound.seconds) == ("scorer", 1.5)
    together = dict.fromkeys(CHAIN, "all")
    merged = period_bound(trace(AIPO, {"lag": 9}), durations(generate=1.0, aipo_update=1.0), 4, pools=together)
    assert (merged.pool, merged.seconds) == ("all", 5.0)


def test_updates_that_read_each_others_values_follow_one_another() -> None:
    graph = trace(ACTOR_CRITIC)
    seconds = {n.name: 0.0 for n in graph.nodes} | {"critic_update": 1.0, "aipo_update": 2.0}
    assert period_bound(graph, seconds, 1).seconds == 2.0


def test_a_node_that_keeps_a_state_has_one_server() -> None:
    graph = trace(AIPO, {"lag": 0})
    nodes = tuple(replace(n, stateful=n.name == "score") for n in graph.nodes)
    bound = period_bound(graph.replace(nodes=nodes), durations(score=1.0), 4, {"scorer": 4})
    assert bound.seconds == 4.0


def test_sources_and_graphs_without_updates_cost_nothing() -> None:
    assert period_bound(trace(AIPO), durations(), 4) == Bound(0.0)
    assert Bound(0.0).cause == "nothing takes time"
    evaluate = trace(load(f"{PROGRAMS}:evaluate"))
    seconds = {n.name: 1.0 for n in evaluate.nodes}
    assert period_bound(evaluate, seconds, 4, {"generator": 2}).pool == "scorer"


def test_durations_name_nodes_and_cover_them() -> None:
    with pytest.raises(GraphError, match=r"'scoer'\n.*needed.*nearest: score"):
        period_bound(trace(AIPO), durations(scoer=1.0), 1)
    with pytest.raises(GraphError, match="none of generate, score"):
        period_bound(trace(AIPO), {"group_advantage": 0.0, "aipo_update": 0.0}, 1)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), count=st.integers(1, 6), carried=st.integers(1, 3))
def test_cycles_through_carried_values_are_those_that_networkx_finds(
    data: st.DataObject, count: int, carried: int
) -> None:
    nodes, starts = [f"n{i}" for i in range(count)], [f"c{i}" for i in range(carried)]
    possible = [(tail, head) for i, tail in enumerate(nodes) for head in nodes[i + 1 :]]
    possible += [pair for node in nodes for start in starts for pair in ((node, start), (start, node))]
    edges = data.draw(st.sets(st.sampled_from(possible)))
    flow = {tail: {head: 0 for other, head in sorted(edges) if other == tail} for tail in (*starts, *nodes)}
    expected = []
    for cycle in nx.simple_cycles(nx.DiGraph(edges)):
        first = cycle.index(min({*cycle} & {*starts}))
        expected.append((*cycle[first:], *cycle[:first]))
    assert sorted(cycles(flow, starts)) == sorted(expected)


def test_branches_that_never_come_back_are_not_followed() -> None:
    class Counted(dict[str, dict[str, int]]):
        lookups = 0

        def __getitem__(self, name: str) -> dict[str, int]:
            self.lookups += 1
            assert self.lookups <= 1000, "more lookups than nodes"
            return super().__getitem__(name)

    flow = Counted(policy={"m0": 0}, m0={"update": 0}, update={"policy": 1})
    for i in range(300):
        flow[f"m{i}"] = {**flow.get(f"m{i}", {}), f"left{i}": 0, f"right{i}": 0}
        flow |= {f"left{i}": {f"m{i + 1}": 0}, f"right{i}": {f"m{i + 1}": 0}, f"m{i + 1}": {}}
    assert list(cycles(flow, ["policy"])) == [("policy", "m0", "update")]


def chain(stages: list[tuple[int, int]], update: int, lag: int) -> Graph:
    """prompts → stage 0 → stage 1 → … → update, each in a pool of its own."""
    weights, value = (Output("out", "m:W"),), (Input("value", "typing:Any", Ref("policy")),)
    nodes = [Node("broadcast", "broadcast", value, weights, clock="update", construct="broadcast", lag=lag)]
    for i in range(len(stages)):
        before = [Ref("prompts"), Ref("broadcast")] if i == 0 else [Ref(f"stage{i - 1}")]
        inputs = tuple(Input(str(j), "m:X", ref) for j, ref in enumerate(before))
        nodes.append(Node(f"stage{i}", "m:f", inputs, (Output("out", "m:X"),), pool=f"pool{i}"))
    last = (Input("policy", "m:P", Ref("policy")), Input("x", "m:X", Ref(nodes[-1].name)))
    nodes.append(Node("update", "m:u", last, (Output("out", "m:P"),), pool="trainer", clock="update"))
    policy = Argument("policy", "carried", "m:P", "m:p", "trainer")
    prompts = Argument("prompts", "source", "m:X", "m:s", "pool0")
    return Graph("chain", "m:chain", (policy, prompts), tuple(nodes), (("policy", Ref("update")),))


def simulated(stages: list[tuple[int, int]], update: int, lag: int, batch: int, updates: int) -> list[float]:
    """Return when each update ends. Groups pass the stages (servers, seconds) first come, first served."""
    free = [[0.0] * servers for servers, _ in stages]
    ends: list[float] = []
    for u in range(updates):
        live, arrived = (ends[u - lag - 1] if u > lag else 0.0), 0.0
        for _ in range(batch):
            time = live
            for servers, (_, seconds) in zip(free, stages, strict=True):
                time = max(time, heapq.heappop(servers)) + seconds
                heapq.heappush(servers, time)
            arrived = max(arrived, time)
        ends.append(max(arrived, ends[-1] if ends else 0.0) + update)
    return ends


@settings(max_examples=40, deadline=None)
@given(
    stages=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=3),
    update=st.integers(0, 5),
    lag=st.integers(0, 3),
    batch=st.integers(1, 6),
)
def test_one_node_in_each_pool_reaches_the_bound_exactly(
    stages: list[tuple[int, int]], update: int, lag: int, batch: int
) -> None:
    seconds = {f"stage{i}": float(d) for i, (_, d) in enumerate(stages)} | {"update": float(update)}
    servers = {f"pool{i}": s for i, (s, _) in enumerate(stages)}
    bound = period_bound(chain(stages, update, lag), seconds, batch, servers).seconds
    # The steady state is periodic: its period is at most 8 updates, a number that divides 840.
    ends = simulated(stages, update, lag, batch, 1680)
    assert (ends[-1] - ends[839]) / 840 == pytest.approx(bound, abs=1e-9)
