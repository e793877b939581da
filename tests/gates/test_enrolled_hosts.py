"""Runs on agents that are not named in advance, over hosts in network namespaces: which agents a ticket admits, which
it does not, and which connection is named when a network blocks it.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import Popen

import psutil
import pytest

from penstock.runtime.control.desk import TICKET
from penstock.runtime.control.security import DeskKeys, Ticket
from penstock.runtime.control.signals import FAILED, PREEMPTED

from .agents import HOSTS, Commands, ended, terminate
from .network import Network
from .plain import toy_loop
from .running import (
    FAULTS,
    HELD,
    assert_equal_bits,
    final_state,
    holding,
    make_run,
    rows,
    run_to_end,
    summary,
    toy_flags,
    until,
)

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
UPDATES, BATCH, GENERATORS = 3, 4, 2
TOY = ("toy", "--lag", "0", "--generate-ms", "10", "--score-ms", "1", "--update-ms", "10", "--plain")
LEARNING = (f"{FAULTS}digits", "--lag", "0", "--max-tokens", "8", "--model", "new", "--eval-groups", "0", "--plain")


def amounts(updates: int) -> tuple[str, ...]:
    return "--updates", str(updates), "--batch", str(BATCH), "--slots", "16", "--seed", "3"


def on_agents(network: Network, agents: int, port: int, address: str = "") -> tuple[str, ...]:
    where = address or network.address["a"]
    return "--on", "agents", "--agents", str(agents), "--bind", f"{where}:{port}"


@dataclass
class Opened:
    """A launcher on host a whose desk is open."""

    launcher: "Popen[str]"
    folder: Path
    commands: Commands

    @property
    def ticket(self) -> Path:
        return self.folder / TICKET

    def join(self, *hosts: str) -> list["Popen[str]"]:
        return [self.commands.agent(host, self.ticket) for host in hosts]

    def wait(self, status: int = 0) -> str:
        """Wait until the launcher ends with this status, and return its stderr."""
        found, said = ended(self.launcher)
        assert found == status, said
        return said


@contextmanager
def opened(network: Network, folder: Path, *words: str) -> Iterator[Opened]:
    with Commands(network) as commands:
        launcher = commands.start("a", "run", *words, "--out", str(folder))
        made = Opened(launcher, folder, commands)
        until(lambda: made.ticket.exists() or launcher.poll() is not None, "the ticket was written")
        yield made


def test_three_hosts_with_a_ticket_have_the_bits_of_one_and_whoever_has_none_is_refused_while_they_wait(
    network: Network, tmp_path: Path
) -> None:
    port, folder = 7000, tmp_path / "shared" / "r"
    private = tmp_path / "private"
    for path in (folder.parent, private):
        path.mkdir()
    ticket = {name: private / f"{name}.json" for name in ("public", "token", "old", "other", "unshared")}
    command = (*on_agents(network, len(HOSTS), port), *amounts(UPDATES))
    # A launch that ends before its agents come. One agent keeps a copy of its ticket.
    with opened(network, folder, *TOY, *command) as first:
        Ticket.read(first.ticket).write(ticket["old"])
        terminate(first.launcher)
        first.wait(PREEMPTED)
    assert not folder.exists()
    with opened(network, folder, *LEARNING, *command) as run:
        right = Ticket.read(run.ticket)
        right.write(ticket["public"])
        ticket["public"].chmod(0o644)
        replace(right, token="0" * 32).write(ticket["token"])
        DeskKeys.make("another run").ticket(right.endpoint).write(ticket["other"])
        right.write(ticket["unshared"])
        torch = private / "modules" / "torch-1.0.0.dist-info"
        torch.mkdir(parents=True)
        (torch / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0.0\n")
        late = "import time\nclock = time.time\ntime.time = lambda: clock() - 3600"
        other = "import penstock\npenstock.__version__ = '9.9.9'"
        agent = run.commands.agent
        strangers = [
            (agent("b", ticket["public"]), "chmod 600"),
            (agent("b", ticket["token"]), "a token that is not this run's"),
            (agent("b", ticket["old"]), "an old ticket, or another run's"),
            (agent("c", ticket["other"]), "an old ticket, or another run's"),
            (agent("c", ticket["unshared"], hidden=(folder.parent,)), f"given no {folder} here"),
            (agent("c", run.ticket, path=torch.parent), "given torch 1.0.0, needed "),
            # 3600 s, and the seconds until the request arrives.
            (agent("b", run.ticket, before=late), "given a clock that is 36"),
            (agent("c", run.ticket, before=other), "given Penstock 9.9.9 here, needed "),
        ]
        for stranger, said in strangers:
            status, found = ended(stranger)
            assert status in (1, 2), found
            assert said in found
        agents = run.join(*HOSTS)
        told = run.wait()
        assert [(status, "left" in said) for status, said in map(ended, agents)] == [(0, False)] * len(HOSTS)
    # The user's terminal shows who was refused, and why.
    for _, said in [strangers[index] for index in (1, 4, 5, 6)]:
        assert said in told
    assert "given Penstock 9.9.9, needed" in told
    assert summary(folder)["warnings"] == []
    assert not run.ticket.exists()
    flags = toy_flags(updates=UPDATES, batch=BATCH, max_tokens=8, seed=3)
    alone = make_run(tmp_path / "alone", f"{FAULTS}digits", {}, flags, generators=GENERATORS)
    assert_equal_bits(final_state(folder, UPDATES), final_state(run_to_end(alone), UPDATES))


def test_agents_that_a_firewall_keeps_apart_are_told_before_a_rank_is_started(network: Network, tmp_path: Path) -> None:
    # So neither host gets an answer from the other.
    network.close("b", "1024-65534", sender="c")
    folder = tmp_path / "r"
    with opened(network, folder, *TOY, *on_agents(network, len(HOSTS), 7000), *amounts(UPDATES)) as run:
        agents = run.join(*HOSTS)
        said = run.wait(FAILED)
        found = [ended(agent) for agent in agents]
    for here, there in (("b", "c"), ("c", "b")):
        to = re.escape(network.address[there])
        assert re.search(rf"from {here} \({re.escape(network.address[here])}\) to {to}:\d+ timed out", said), said
    assert "from a" not in said
    assert "hosts do not reach each other" in said
    assert [status for status, _ in found] == [1, 1, 1]
    assert not folder.exists()


@pytest.mark.parametrize("closed", ["desk", "controller"])
def test_a_port_of_the_launcher_that_a_firewall_closes_is_named_with_the_host_that_tried(
    network: Network, tmp_path: Path, closed: str
) -> None:
    port, folder, address = 7000, tmp_path / "r", network.address
    shut = port if closed == "desk" else port + 1
    network.close("a", str(shut))
    lack = f"the connection from b ({address['b']}) to {address['a']}:{shut} timed out"
    with opened(network, folder, *TOY, *on_agents(network, 2, port), *amounts(UPDATES)) as run:
        own, other = run.join("a", "b")
        if closed == "desk":
            assert other.stderr is not None
            assert any(lack in line for line in other.stderr)
            terminate(run.launcher)
            terminate(other)
            run.wait(PREEMPTED)
        else:
            assert lack in run.wait(FAILED)
            assert lack in ended(other)[1]
        ended(own)


def public(process: int) -> str:
    """Return what other users of a host see of a process, and its environment."""
    found = ""
    for name in ("cmdline", "environ"):
        with suppress(OSError):  # it has ended
            found += Path(f"/proc/{process}/{name}").read_text(errors="replace")
    return found


def test_hosts_of_ipv6_addresses_run_and_nothing_listens_beyond_them_nor_is_a_secret_seen(
    network: Network, tmp_path: Path
) -> None:
    hosts, updates, folder = ("a", "b"), 4, tmp_path / "r"
    holds = holding(tmp_path / "holds", 2)
    words = (HELD, "--holds", str(holds), "--lag", "0", "--plain", *amounts(updates))
    with opened(network, folder, *words, *on_agents(network, len(hosts), 7000, network.ipv6["a"])) as run:
        agents = run.join(*hosts)
        until(lambda: len(rows(folder)) >= 2 or run.launcher.poll() is not None, "two updates are done")
        listening = {host: network.listening(host) for host in hosts}
        keys = [json.loads(path.read_text()) for path in (run.ticket, *(folder / "keys").glob("*.json"))]
        secrets = {key[name] for key in keys for name in ("token", "secret") if key.get(name)}
        processes = [
            p.pid for each in run.commands.processes for p in psutil.Process(each.pid).children(recursive=True)
        ]
        seen = "".join(map(public, processes))
        (holds / "2").unlink()
        run.wait()
        assert [ended(agent)[0] for agent in agents] == [0, 0]
    assert len(secrets) >= 5  # the ticket's token, the run's, and a key of the controller and of each agent
    assert str(run.ticket) in seen
    assert [secret for secret in secrets if secret in seen] == []
    assert listening == {host: {network.ipv6[host]} for host in hosts}
    assert_equal_bits(final_state(folder, updates), toy_loop(updates, BATCH))
