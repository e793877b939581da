"""When trainer and generator take turns with a device: at lag 0, on the same one, that has memory of its own."""

import pytest

from penstock.graph import Graph, Program, load, trace
from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.cluster.placement import place, why_no_turns

ONE = Cluster(hosts=(Host(name="a", cores=4, devices=("cuda:0",)),))
TWO = Cluster(hosts=(Host(name="a", cores=4, devices=("cuda:0", "cuda:1")),))


def graph_of(program: str, **options: int) -> Graph:
    found = load(program)
    assert isinstance(found, Program)
    return trace(found, options)


def why(program: str, cluster: Cluster, device: str = "cuda", generators: int = 1, **options: int) -> str:
    graph = graph_of(program, **options)
    return why_no_turns(graph, place([graph], cluster, device=device, generators=generators))


def test_at_lag_zero_on_one_gpu_they_do() -> None:
    assert why("aipo", ONE, lag=0) == ""
    assert why("aipo", ONE, device="cuda:0", lag=0) == ""
    assert why("aipo", TWO, device="cuda:1", lag=0) == ""


def test_a_generator_that_wraps_round_to_the_trainers_device_is_enough() -> None:
    assert why("aipo", TWO, lag=0) == "trainer and generator have devices of their own"
    assert why("aipo", TWO, generators=2, lag=0) == ""


@pytest.mark.parametrize(
    ("program", "device", "options", "reason"),
    [
        ("aipo", "cuda", {"lag": 1}, "with a lag of 1 trainer and generator work at the same time"),
        ("aipo", "cpu", {"lag": 0}, "work on the CPU, where a device's memory is the host's"),
        ("sft", "cuda", {}, "sft has no generator"),
        ("evaluate", "cuda", {}, "evaluate has no trainer"),
    ],
)
def test_what_keeps_them_from_it_is_said(program: str, device: str, options: dict[str, int], reason: str) -> None:
    assert why(program, ONE, device, **options).endswith(reason)
