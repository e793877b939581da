"""Runs over several hosts, which have nothing in common but a network and, where a test says so, a file system."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.control.run_config import RunOptions
from penstock.runtime.record.folder import RunFolder, latest_checkpoint

from .network import Network, why_not
from .plain import toy_loop
from .running import Line, Running, assert_equal_bits, final_state, make_run, rows, run_here, summary, with_updates
from .test_chain import passed_on
from .test_exchange import figures

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]
HOSTS = "a", "b", "c"
GONE_S = 60.0
"""Seconds for an agent to give up on a controller that it cannot reach."""


@pytest.fixture
def network() -> Iterator[Network]:
    if reason := why_not():
        pytest.skip(reason)
    with Network(*HOSTS) as found:
        yield found


def cluster_of(network: Network, *hosts: str) -> Cluster:
    """The trainer and all else on the first host, generators in turn on the others, whose agents others start."""
    first, *others = (
        Host(name=name, cores=1, address=network.address[name], agent="external" if number else "local")
        for number, name in enumerate(hosts)
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
def agents_of(network: Network) -> Iterator[Agents]:
    """Whatever a failed test has left is ended."""
    agents = Agents(network)
    try:
        yield agents
    finally:
        agents.close()


@contextmanager
def spread(network: Network, folder: Path) -> Iterator[tuple[Running, Agents]]:
    """A run whose launcher is on the first host, with agents on all."""
    with Running(folder, network.on("a")) as running, agents_of(network) as agents:
        for host in HOSTS[1:]:
            agents.start(asked_for(running, host))
        yield running, agents


def asked_for(running: Running, host: str) -> Line:
    return running.until_line(lambda line: line.get("host") == host, f"the agent of host {host} was asked for")


UPDATES, BATCH, GENERATORS = 3, 6, 3


def learning(path: Path, **options: Any) -> Path:
    flags = RunOptions(updates=UPDATES, batch=BATCH, max_tokens=8, slots=16, seed=3, deadline=60.0)
    return make_run(path, "aipo", {"lag": 0}, flags, generators=GENERATORS, **options)


def test_a_run_over_three_hosts_has_the_bits_of_one_on_a_single_host(network: Network, tmp_path: Path) -> None:
    """Weights go from a to b, from there to c and from there to b again; rollouts go to a, prompts from b to c."""
    alone = run_here(learning(tmp_path / "alone"))
    folder = learning(tmp_path / "apart", cluster=cluster_of(network, *HOSTS))
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


def go_on(folder: Path, updates: int, network: Network, hidden: Path, own: Path) -> str:
    """Run up to so many updates on a and b, where `hidden` is empty and the run folder is `own`; the errors."""
    with Running(with_updates(folder, updates), network.on("a")) as running, agents_of(network) as agents:
        line = asked_for(running, "b")
        join = own.with_suffix(".json")
        join.touch(0o600)
        join.write_bytes(Path(line["join"]).read_bytes())
        agents.start({**line, "join": str(join)}, "--folder", str(own), hidden=(hidden,))
        assert agents.ended("b") == (0, "")
        running.wait()
        return running.errors


def test_a_host_that_shares_no_files_keeps_its_part_of_a_checkpoint_and_goes_on_from_it(
    network: Network, tmp_path: Path
) -> None:
    shared, own, other = tmp_path / "shared", tmp_path / "own", tmp_path / "other"
    shared.mkdir()
    quick = {"lag": 0, **{f"{name}_ms": 1.0 for name in ("generate", "score", "update", "sync")}}
    flags = RunOptions(batch=4, slots=16, deadline=60.0)
    folder = make_run(shared / "r", "toy", quick, flags, cluster=cluster_of(network, "a", "b"))
    assert go_on(folder, 2, network, shared, own) == ""
    missing = go_on(folder, 4, network, shared, other)
    assert "generator/0 rank 0 on host b could not start" in missing
    assert f"{other}/checkpoints/00000002/generator-0-0.safetensors" in missing
    assert go_on(folder, 4, network, shared, own) == ""
    assert_equal_bits(final_state(folder, 4), toy_loop(4, 4))
    saved = latest_checkpoint(RunFolder(folder))
    assert saved is not None
    assert saved.folder.name == "00000004"
    parts = [
        {path.name for path in (at / "checkpoints" / name).glob("*.safetensors")}
        for at, name in ((own, saved.written), (folder, saved.folder.name))
    ]
    assert parts == [{"generator-0-0.safetensors"}, {"trainer-0-0.safetensors", "scorer-0-0.safetensors"}]


def test_a_host_that_goes_away_ends_the_run_and_is_named_and_nothing_is_left(network: Network, tmp_path: Path) -> None:
    flags = RunOptions(updates=100_000, batch=4, max_tokens=8, slots=16, seed=3, deadline=12.0)
    folder = make_run(tmp_path / "r", "aipo", {"lag": 0}, flags, generators=2, cluster=cluster_of(network, *HOSTS))
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
