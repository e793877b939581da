"""A run's agents as one job step of Slurm: within an allocation (sbatch, salloc), one agent on each of its nodes.

`srun` is a child of the launcher. The loss of a node or an agent does not end the others (`--no-kill`,
`--kill-on-bad-exit=0`): the controller decides what follows. srun reports it in a line of its standard error, which
goes to `logs/srun.err` of the run folder together with the output of agents, each line with its task's number.

Slurm's signals: when a job is preempted or cancelled, all tasks of a step get SIGTERM at once, so each agent tells the
controller that it leaves, and lives on. The batch script gets it only at the end of the grace period. srun gets it if
the job is cancelled, forwards it, and waits.
"""

import os
import re
import subprocess
from collections.abc import Callable, Mapping
from itertools import zip_longest
from pathlib import Path
from time import monotonic, sleep
from typing import IO

from penstock.host import module_command
from penstock.runtime.cluster.endpoints import AddressError, own_address, resolved
from penstock.runtime.control.agents import AgentsError
from penstock.runtime.control.process import describe_exit
from penstock.runtime.record.folder import make_folder, open_append

# Seconds for an answer of scontrol.
ANSWER_S = 20.0
# Seconds for agents to end after their goodbye, and for srun to end them.
LEAVE_S, END_S = 5.0, 5.0
# A job's options for its own tasks, as environment variables. They do not apply to this step, which uses whole nodes.
OF_OTHER_TASKS = (
    "CPUS_PER_TASK", "CPUS_PER_GPU", "CPU_BIND", "CPU_BIND_LIST", "CPU_BIND_TYPE", "CPU_BIND_VERBOSE",
    "DISTRIBUTION", "EXACT", "EXCLUSIVE", "GPU_BIND", "GPUS", "GPUS_PER_SOCKET", "GPUS_PER_TASK", "HINT",
    "HOSTFILE", "KILL_BAD_EXIT", "MEM_BIND", "MEM_PER_CPU", "MEM_PER_GPU", "MEM_PER_NODE", "NO_KILL", "NPROCS",
    "NTASKS", "NTASKS_PER_CORE", "NTASKS_PER_GPU", "NTASKS_PER_NODE", "NTASKS_PER_SOCKET", "NTASKS_PER_TRES",
    "OVERCOMMIT", "TASKS_PER_NODE", "THREADS_PER_CORE", "TRES_BIND", "TRES_PER_TASK", "WAIT",
)  # fmt: skip
# srun's lines about ended tasks and failed nodes: "srun: error: n[1-2]: tasks 0-1: Exited with exit code 1".
_TASKS = re.compile(r"srun: error: (?P<nodes>\S+): tasks? \[?(?P<numbers>[\d,-]+)\]?: (?P<why>.+)")
_NODES = re.compile(r"srun: error: (?P<why>Node failure) on (?P<nodes>\S+)")
# A line of a task's output, with the task's number.
_SAID = re.compile(r"\s*(\d+): (.*\S)")


class SlurmError(AgentsError):
    """Slurm's commands are missing, or have failed. The text has their output."""


class SlurmAgents:
    """The agents of the first `slots` nodes of the allocation that this process is in."""

    def __init__(self, count: int | None, environment: Mapping[str, str] = os.environ) -> None:
        self._job = environment.get("SLURM_JOB_ID", "")
        nodes = environment.get("SLURM_JOB_NODELIST", "")
        if not (self._job and nodes):
            needed = "needed `sbatch` or `salloc` around this command, or --submit, which writes the batch script"
            raise AgentsError(f"--on slurm: given no allocation of Slurm (SLURM_JOB_ID is not set), {needed}")
        if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
            given = f"given {environment['SLURM_STEP_NUM_TASKS']} launchers by srun"
            raise AgentsError(f"--on slurm: {given}, needed one: without srun before this command, which starts agents")
        self._nodes = hostnames(nodes)
        if count is not None and count > len(self._nodes):
            given = f"given --agents {count}, but job {self._job} has {len(self._nodes)} nodes ({nodes})"
            raise AgentsError(f"--on slurm: {given}; needed one for each agent (--nodes {count}), or fewer agents")
        self.slots = count or len(self._nodes)
        self._own = environment.get("SLURMD_NODENAME", "")
        others = {f"{prefix}_{name}" for prefix in ("SLURM", "SRUN") for name in OF_OTHER_TASKS}
        self._environment = {name: value for name, value in environment.items() if name not in others}
        self._srun: subprocess.Popen[bytes] | None = None
        # The output of srun and its agents, read up to the file's position. Kept open: the run folder may be moved.
        self._said: IO[bytes] | None = None
        self._over = False
        self._waits = ""  # srun's last message about itself
        # The last line of each task; the nodes whose ends have been reported.
        self._last, self._told = dict[int, str](), set[str]()

    @property
    def address(self) -> str:
        """The address of this machine in the network of the allocation's nodes."""
        # Ask for another node: a machine may resolve its own name only to a loopback address.
        others = [node for node in self._nodes if node != self._own] or self._nodes
        said = answer("scontrol", "show", "node", "--oneliner", others[0])
        found = re.search(r"\bNodeAddr=(\S+)", said)
        to = found[1] if found else others[0]
        try:
            return own_address(f"tcp://{resolved(to)}:1")
        except (AddressError, OSError) as error:
            needed = "needed --bind HOST:PORT, where the nodes reach this machine"
            raise AgentsError(f"--on slurm: no route to node {others[0]} at {to} ({error}); {needed}") from None

    def start(self, ticket: Path, tell: Callable[[str], None]) -> None:
        log = make_folder(ticket.parent / "logs") / "srun.err"
        nodes = self._nodes[: self.slots]
        command = ["srun", "--overlap", f"--nodes={self.slots}", f"--ntasks={self.slots}", "--ntasks-per-node=1"]
        command += [f"--nodelist={','.join(nodes)}", "--kill-on-bad-exit=0", "--no-kill", "--wait=0", "--export=ALL"]
        command += ["--job-name=penstock", "--mem=0", "--cpu-bind=none", "--mpi=none", "--input=none", "--label"]
        command += module_command("penstock.agent", "--ticket", ticket)
        try:
            with os.fdopen(open_append(log), "ab") as said:
                self._said = log.open("rb")
                self._said.seek(0, os.SEEK_END)  # skip the output of the run's earlier parts
                # In its own session: Ctrl-C is for the launcher.
                self._srun = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    env=self._environment,
                    start_new_session=True,
                )
        except FileNotFoundError:
            raise AgentsError("--on slurm: given no srun in PATH, needed Slurm's commands") from None
        tell(f"agents on {', '.join(nodes)} of job {self._job}, by srun; what they say is in {log}")

    def poll(self) -> list[tuple[str, str]]:
        if self._srun is None or self._said is None or self._over:
            return []
        self._over = self._srun.poll() is not None
        found, last = list[tuple[str, str]](), ""
        for last in whole_lines(self._said).decode(errors="replace").splitlines():
            if said := _SAID.match(last):
                self._last[int(said[1])] = said[2]
            elif told := _TASKS.search(last) or _NODES.search(last):
                numbers = _numbers(told.groupdict().get("numbers", ""))
                words = [f": {self._last[number]}" if number in self._last else "" for number in numbers]
                # Each node has one task, in the same order.
                for node, why in zip_longest(_unfolded(told["nodes"]), words, fillvalue=""):
                    found += [(node, f"{told['why']}{why}")] if node not in self._told else []
            elif last.startswith("srun:"):
                self._waits = last
        self._told |= {node for node, _ in found}
        # srun's status is that of the worst task: report it only if no task was reported.
        if self._over and self._srun.returncode and not self._told:
            found.append(("", f"srun, {describe_exit(self._srun)}: {last or 'it has said nothing'}"))
        return found

    def lacking(self) -> str:
        return self._waits

    def stop(self) -> None:
        self._over = True
        if self._said is not None:
            self._said.close()
        if self._srun is None:
            return
        # The agents have got their goodbye. On SIGTERM srun ends those that are left, finally with SIGKILL.
        for seconds, end in ((LEAVE_S, self._srun.terminate), (END_S, self._srun.kill), (END_S, None)):
            until = monotonic() + seconds
            while self._srun.poll() is None and monotonic() < until:
                sleep(0.05)
            if self._srun.poll() is not None:
                return
            if end is not None:
                end()


def hostnames(nodes: str) -> list[str]:
    """The nodes of a list as Slurm writes it, such as n[1-3,7]. Raises SlurmError."""
    if "[" not in nodes:
        return [node for node in nodes.split(",") if node]
    return answer("scontrol", "show", "hostnames", nodes).split()


def _unfolded(nodes: str) -> list[str]:
    """As `hostnames`, but return the list itself if Slurm does not answer: a run must not end for that."""
    try:
        return hostnames(nodes)
    except SlurmError:
        return [nodes]


def _numbers(text: str) -> list[int]:
    """The numbers of a list such as 0-2,5."""
    bounds = (part.partition("-") for part in text.split(",") if part)
    return [number for low, _, high in bounds for number in range(int(low), int(high or low) + 1)]


def answer(*words: str, seconds: float = ANSWER_S) -> str:
    """The output of a Slurm command. Raises SlurmError."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=seconds)
    except FileNotFoundError:
        needed = "needed Slurm's commands (a login node has them), or --submit --dry-run"
        raise SlurmError(f"--on slurm: given no {words[0]} in PATH, {needed}") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"--on slurm: {' '.join(words)} has not answered within {seconds:.0f} s") from None
    if done.returncode:
        said = " ".join(done.stderr.split())
        raise SlurmError(f"--on slurm: {' '.join(words)} ended with exit status {done.returncode}: {said}")
    return done.stdout


def whole_lines(file: IO[bytes]) -> bytes:
    """Read a growing file from its position to its last complete line, and leave the position after that line."""
    begin = file.tell()
    lines, newline, _ = file.read().rpartition(b"\n")
    file.seek(begin + len(lines) + len(newline))
    return lines + newline
