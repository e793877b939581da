"""A trainer whose ranks are on two hosts, in network namespaces: it has the bits, and the end, of one on one host."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock.runtime.cluster.cluster import Cluster, Host

from .agents import spread
from .network import Network
from .running import DEADLINE_S, ENDLESS, FAULTS, make_run, rows, run_to_end, summary, toy_flags

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
UPDATES, BATCH = 3, 4
FLAGS = toy_flags(updates=UPDATES, batch=BATCH, max_tokens=8, seed=3)


def over(network: Network, *hosts: str, **pools: str | tuple[str, ...]) -> Cluster:
    """Return a cluster with the trainer on all hosts; pools that are not in `pools` are on the first one."""
    made = tuple(
        Host(name=name, cores=1, address=network.address[name], agent="external" if number else "local")
        for number, name in enumerate(hosts)
    )
    return Cluster(hosts=made, bind=f"{made[0].address}:0", pools={"trainer": hosts, **pools})


def learning(path: Path, *meshes: str, **options: Any) -> Path:
    return make_run(path, f"{FAULTS}digits", {}, FLAGS, meshes=meshes, **options)


def assert_equal_parts(first: Path, second: Path, ranks: int) -> None:
    """Compare weights and optimizer of each of the trainer's ranks."""
    for rank in range(ranks):
        name = f"checkpoints/{UPDATES:08d}/trainer-0-{rank}.safetensors"
        own, other = load_file(first / name), load_file(second / name)
        assert own.keys() == other.keys()
        assert [key for key in own if not torch.equal(own[key], other[key])] == []


@pytest.mark.parametrize(
    ("mesh", "generator"), [("fsdp4", "tp1"), ("fsdp2xtp2", "tp2"), ("pp2xfsdp2", "tp1"), ("dp2xfsdp2", "tp1")]
)
def test_a_trainer_on_two_hosts_has_the_bits_of_one_on_a_single_host(
    network: Network, tmp_path: Path, mesh: str, generator: str
) -> None:
    meshes = f"trainer={mesh}", f"generator={generator}"
    alone = run_to_end(learning(tmp_path / "alone", *meshes))
    folder = learning(tmp_path / "apart", *meshes, cluster=over(network, "a", "b"))
    with spread(network, folder, ("a", "b")) as (running, agents):
        assert running.wait() == 0, running.errors
        assert agents.ended("b") == (0, "")
    assert_equal_parts(folder, alone, ranks=4)
    assert summary(folder)["warnings"] == []
    assert len(rows(folder)) == UPDATES


@pytest.mark.parametrize(("lost", "killed"), [("b", True), ("c", False)])
def test_a_host_of_a_replica_that_goes_away_ends_the_run_and_is_named_and_nothing_is_left(
    network: Network, tmp_path: Path, lost: str, killed: bool
) -> None:
    """The trainer is on a and b, the generator on b and c. If all processes of a host are killed, collectives on the
    other hosts break at once, without a known cause; if its cable is pulled, they wait."""
    # This deadline never passes: the host's missing heartbeats end the run.
    flags = replace(FLAGS, updates=ENDLESS, deadline=10 * DEADLINE_S, tp_over_hosts=True)
    cluster = over(network, "a", "b", "c", trainer=("a", "b"), generator=("b", "c"))
    meshes = "trainer=fsdp2", "generator=tp2"
    folder = make_run(tmp_path / "r", "aipo", {"lag": 0}, flags, meshes=meshes, cluster=cluster)
    with spread(network, folder, ("a", "b", "c")) as (running, agents):
        running.until_update(2)
        assert {host: network.listening(host) for host in network.address} == {
            host: {address} for host, address in network.address.items()
        }
        (agents.kill if killed else network.cut)(lost)
        running.until(lambda: bool(running.errors), "the run said why it ends")
        ended = {host: agents.ended(host) for host in ("b", "c")}
        assert running.wait() == 1
    assert re.search(rf"host {lost}\b", running.errors), running.errors
    assert "left" not in "".join(said for _, said in ended.values())
    assert ended[lost][0] == (137 if killed else 1)
