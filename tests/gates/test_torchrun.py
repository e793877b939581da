"""Agents that torchrun starts, and starts again, on hosts in network namespaces."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from .network import Network
from .running import (
    DEADLINE_S,
    HELD,
    assert_all_consumed,
    assert_equal_bits,
    delays,
    final_state,
    holding,
    make_run,
    num_rows,
    rows,
    run_here,
    summary,
    toy_flags,
    until,
)

pytestmark = [pytest.mark.timeout(480), pytest.mark.slow]
UPDATES, BATCH = 6, 4
# A generator is killed in the middle of the first group of update 3. No update is about to read its values then, which
# are lost with its host.
HALF = f"group {3 * BATCH}"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--max-restarts", "2", "--monitor-interval", "0.2")


@contextmanager
def started(words: Sequence[str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    with log.open("ab") as file, subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT) as process:
        try:
            yield process
        finally:
            process.kill()


class Job:
    """A run of the program toy with its launcher on host a, and agents on b (the trainer's) and c."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder, self.run = network, folder, folder / "r"
        self.ticket, self.holds = self.run / "ticket.json", holding(folder / "holds", HALF)
        self._stack = ExitStack()
        # torchrun resolves the names of hosts, its own included.
        names = "".join(f"{address} {host}\n" for host, address in network.address.items())
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")

    def launch(self) -> "subprocess.Popen[bytes]":
        flags = ["--holds", str(self.holds), "--lag", "0", "--updates", str(UPDATES), "--batch", str(BATCH)]
        flags += ["--slots", "16", "--versions", "pinned", "--lost-replica", "replace", "--device", "cpu"]
        flags += ["--grace", "20", "--plain"]
        flags += ["--on", "agents", "--agents", "2", "--bind", "a:5555"]
        flags += ["--out", str(self.run), "--resume", "auto"]
        command = [sys.executable, "-m", "penstock.runtime.cli.main", "run", HELD, *flags]
        return self.start("a", command, "launcher")

    def agent(self, host: str, *flags: str) -> "subprocess.Popen[bytes]":
        """Start torchrun with an agent on a host."""
        words = [*TORCHRUN, *flags, "-m", "penstock.agent", "--ticket", str(self.ticket)]
        return self.start(host, words, host)

    def start(self, host: str, command: Sequence[str], name: str) -> "subprocess.Popen[bytes]":
        named = ("sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(self.folder / "hosts"))
        words = [*self.network.on(host), *named, *command]
        return self._stack.enter_context(started(words, self.folder / f"{name}.log"))

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def until(self, look: Callable[[], object], what: str, *processes: "subprocess.Popen[bytes]") -> None:
        def looked() -> object:
            found = look()
            assert found or all(process.poll() is None for process in processes), f"{what}\n{self.logs()}"
            return found

        until(looked, what)

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self.folder.glob("*.log")))

    def assert_as_if_nothing_had_happened(self) -> None:
        assert_all_consumed(self.run, UPDATES * BATCH)
        assert [row["update"] for row in rows(self.run)] == list(range(UPDATES))
        flags = toy_flags(updates=UPDATES, batch=BATCH, versions="pinned")
        whole = run_here(make_run(self.folder / "whole", "toy", {**delays(), "lag": 0}, flags))
        assert_equal_bits(final_state(self.run, UPDATES), final_state(whole, UPDATES))


def kill_agent(torchrun: "subprocess.Popen[bytes]") -> None:
    """Send SIGKILL to the worker of a torchrun, which is the agent."""
    below = psutil.Process(torchrun.pid).children(recursive=True)
    [worker] = [one for one in below if one.cmdline()[1:4] == ["-u", "-m", "penstock.agent"]]
    worker.kill()


@pytest.fixture
def job(network: Network, tmp_path: Path) -> Iterator[Job]:
    with Job(network, tmp_path) as found:
        yield found


def test_an_agent_that_dies_is_started_again_by_its_hosts_torchrun_and_enrols_again_while_the_run_goes_on(
    job: Job,
) -> None:
    launcher = job.launch()
    agents = [job.agent(host, "--standalone") for host in ("b", "c")]
    job.until(lambda: num_rows(job.run) >= 3, "three updates", launcher, *agents)
    kill_agent(agents[1])
    (job.holds / HALF).unlink()
    assert launcher.wait(DEADLINE_S) == 0, job.logs()
    assert [agent.wait(DEADLINE_S) for agent in agents] == [0, 0], job.logs()
    came = [(one["replica"], one["event"]) for one in summary(job.run)["replicas"]]
    assert came == [("generator/0", "lost"), ("generator/0", "joined")]
    job.assert_as_if_nothing_had_happened()


def test_nodes_of_one_torchrun_start_again_together_and_the_run_goes_on_with_all_of_them(job: Job) -> None:
    """If a worker dies, torchelastic starts the workers of all nodes again. It sends the others SIGTERM, as cluster
    managers do in a preemption."""
    launcher = job.launch()
    meet = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "b:29400")
    agents = [job.agent(host, *meet) for host in ("b", "c")]
    job.until(lambda: num_rows(job.run) >= 3, "three updates", launcher, *agents)
    kill_agent(agents[1])
    assert launcher.wait(DEADLINE_S) == 75, job.logs()
    (job.holds / HALF).unlink()
    launcher = job.launch()
    assert launcher.wait(DEADLINE_S) == 0, job.logs()
    assert [agent.wait(DEADLINE_S) for agent in agents] == [0, 0], job.logs()
    job.assert_as_if_nothing_had_happened()
