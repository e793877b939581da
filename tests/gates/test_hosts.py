"""Runs over several hosts, which have nothing in common but a network and, where a test says so, a file system."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.control.config import Flags
from penstock.runtime.plan.cluster import Cluster, Host

from .network import Network, why_not
from .running import Line, Running, assert_equal_bits, final_state, make_run, rows, run_here, summary
from .test_chain import passed_on
from .test_exchange import figures

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]
GONE_S = 60.0
"""Seconds for an agent to give up on a controller that it cannot reach."""


@pytest.fixture
def network() -> Iterator[Network]:
    if reason := why_not():
        pytest.skip(reason)
    with Network("a", "b", "c") as found:
        yield found


def cluster_of(network: Network) -> Cluster:
    """The trainer and all else on the first host, generators in turn on the others, whose agents others start."""
    first, *others = (
        Host(name=name, cores=1, address=address, agent="external" if number else "local")
        for number, (name, address) in enumerate(network.address.items())
    )
    names = tuple(host.name for host in others)
    return Cluster(hosts=(first, *others), bind=f"{first.address}:0", pools={"generator": names})


class Agents:
    """The agents of other hosts, each of which takes its join file from the shared run folder or from a copy."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, line: Line, *flags: str, hidden: tuple[Path, ...] = ()) -> None:
        where = self.network.on(line["host"], hidden=hidden)
        command = [*where, sys.executable, "-m", "penstock.runtime.cli.main", "agent", line["join"], *flags]
        pipe = subprocess.PIPE
        self.processes[line["host"]] = subprocess.Popen(command, stderr=pipe, text=True, start_new_session=True)

    def ended(self, host: str) -> tuple[int, str]:
        """The exit status of a host's agent, and what it said: what was left there among it."""
        _, said = self.processes[host].communicate(timeout=GONE_S)
        return self.processes[host].returncode, said

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.communicate()


@contextmanager
def spread(network: Network, folder: Path) -> Iterator[tuple[Running, Agents]]:
    """A run whose launcher is on the first host, with agents on all."""
    with ExitStack() as stack:
        running = stack.enter_context(Running(folder, network.on("a")))
        agents = Agents(network)
        stack.callback(agents.close)
        for host in network.address.keys() - {"a"}:
            agents.start(asked_for(running, host))
        yield running, agents


def asked_for(running: Running, host: str) -> Line:
    return running.until_line(lambda line: line.get("host") == host, f"the agent of host {host} was asked for")


UPDATES, BATCH, GENERATORS = 3, 6, 3


def learning(path: Path, **options: Any) -> Path:
    flags = Flags(updates=UPDATES, batch=BATCH, max_tokens=8, slots=16, seed=3, deadline=60.0)
    return make_run(path, "aipo", {"lag": 0}, flags, generators=GENERATORS, **options)


def test_a_run_over_three_hosts_has_the_bits_of_one_on_a_single_host(network: Network, tmp_path: Path) -> None:
    """Weights go from a to b, from there to c and from there to b again; rollouts go to a, prompts from b to c."""
    alone = run_here(learning(tmp_path / "alone"))
    folder = learning(tmp_path / "apart", cluster=cluster_of(network))
    with spread(network, folder) as (running, agents):
        assert running.wait() == 0, running.errors
        assert [agents.ended(host) for host in ("b", "c")] == [(0, ""), (0, "")]
    assert_equal_bits(final_state(folder, UPDATES), final_state(alone, UPDATES))
    assert summary(folder)["warnings"] == []
    first, second, third = passed_on(folder)
    assert first > 0
    assert second > 0
    assert third == 0
    ranks = ["trainer-0-0", "scorer-0-0", *(f"generator-{index}-0" for index in range(GENERATORS))]
    said = {rank: figures(folder, rank) for rank in ranks}
    served = [one["answered"]["served"] for one in said.values() if "answered" in one]
    assert sum(served) == sum(one["asked"].get("asked", 0) for one in said.values())
    assert [said[rank]["asked"] for rank in ("scorer-0-0", "trainer-0-0")] == [{"asked": UPDATES * BATCH}] * 2
    assert [one["blocks"] for one in said.values()] == [0] * len(ranks)


def test_a_host_that_goes_away_ends_the_run_and_is_named_and_nothing_is_left(network: Network, tmp_path: Path) -> None:
    flags = Flags(updates=100_000, batch=4, max_tokens=8, slots=16, seed=3, deadline=12.0)
    folder = make_run(tmp_path / "r", "aipo", {"lag": 0}, flags, generators=2, cluster=cluster_of(network))
    with spread(network, folder) as (running, agents):
        running.until_update(2)
        assert {host: network.listening(host) for host in network.address} == {
            host: {address} for host, address in network.address.items()
        }
        network.cut("b")
        status, said = agents.ended("b")
        assert agents.ended("c") == (0, "")
        assert running.wait() == 1
    assert re.search(r"generator[/.]0.* on host b\b", running.errors)  # whoever waits for it finds out first
    assert re.search(r"rank 0\b", running.errors)
    assert status == 1
    assert said.startswith(f"penstock agent: the controller at tcp://{network.address['a']}:")
    assert "left" not in said
    assert len(rows(folder)) >= 2
