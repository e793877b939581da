"""A run as a batch job of Slurm: its script, as plain text, and `sbatch` and `scontrol`, which submit and follow it.

The script runs `penstock run … --on slurm --resume auto` on the first node of the job, and

- forwards the signals that Slurm sends only to the script: SIGUSR1 some seconds before the time limit (`--signal=B:`),
  and SIGTERM;
- requeues the job if the run ends with 75 (it was stopped for Slurm: start me again), or has lost a host or a process,
  which another start may mend. After `MOST_RESTARTS` restarts, a start that makes no new checkpoint is the last. A job
  that its user cancels is not requeued, since it is not in the state RUNNING any more;
- excludes the node that lost something from the job's next starts, if Slurm says (`sbatch --test-only`) that the job
  can do without it: otherwise it would be held forever. This sets `ExcNodeList`, which a job's owner may change while
  the job is pending.

An array has a task for each seed: a run in its own folder, whose name is the seed.
"""

import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from time import monotonic, sleep

from penstock.host import module_command
from penstock.runtime.control.failure import MENDABLE
from penstock.runtime.control.signals import PREEMPTED
from penstock.runtime.managers.slurm import SlurmError, answer, whole_lines
from penstock.runtime.record.folder import JOB, write_atomic

# The script, and the job's output, in the run folder.
SCRIPT, OUTPUT = JOB
# Seconds that a run needs beyond its grace period, from Slurm's signal to its end.
AFTER_S = 20
# After so many restarts, a start without a new checkpoint is the last: the time limit may be shorter than a start.
MOST_RESTARTS = 20
# Seconds between two looks at a job; for an answer of Slurm; without an answer until `follow` gives up.
LOOK_S, ANSWER_S, DEAF_S = 2.0, 60.0, 600.0
# States of a job that has ended.
WELL = "COMPLETED"
ENDED = {WELL, "BOOT_FAIL", "CANCELLED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}
# Options of sbatch that the script sets itself, or that do not fit a job that is followed.
_OWNED = re.compile(r"--(output|error|open-mode|wrap|parsable|test-only|wait)(=|$)|-[oeQW]")


@dataclass(frozen=True)
class Job:
    """What a run asks of Slurm. `words` are the arguments of `penstock` in the job's command, without --out and --seed;
    `options` are the user's options of sbatch; `grace` is in seconds. Raises ValueError."""

    name: str
    words: tuple[str, ...]
    folder: Path
    options: tuple[str, ...] = ()
    nodes: int | None = None
    grace: float = 60.0

    def __post_init__(self) -> None:
        if self.options and not self.options[0].startswith("-"):
            given = f"given {self.options[0]!r} first behind the --"
            raise ValueError(f"{given}, needed options of sbatch, such as --nodes 4 --gpus-per-node 8")
        for option in self.options:
            if _OWNED.match(option):
                needed = f"needed options without it: what the job says is in the run folder, in {OUTPUT}"
                raise ValueError(f"given {option} behind the --, {needed}")
        if any(re.search(r"[\n\r]", word) for word in (*self.options, str(self.folder))):
            raise ValueError("given a line break in a path or an option of sbatch, needed none")

    @property
    def array(self) -> bool:
        return self._has("array", "a")

    @property
    def script(self) -> Path:
        return self.folder / SCRIPT

    def outputs(self, tasks: Sequence[str] = ("",)) -> dict[str, Path]:
        """The file of the job's output, for each of its `tasks`."""
        return {task: self.folder / (f"{task}.out" if task else OUTPUT) for task in tasks}

    def _has(self, name: str, letter: str) -> bool:
        return any(re.match(rf"--{name}(=|$)|-{letter}", option) for option in self.options)

    def text(self) -> str:
        """The batch script."""
        own = ["--job-name", self.name, "--output", str(self.folder / ("%a.out" if self.array else OUTPUT))]
        own += ["--open-mode", "append", "--requeue", "--signal", f"B:USR1@{ceil(self.grace) + AFTER_S}"]
        own += ["--ntasks-per-node", "1"]
        if self.nodes and not self._has("nodes", "N"):
            own += ["--nodes", str(self.nodes)]
        folder = shlex.quote(str(self.folder)) + '"/$SLURM_ARRAY_TASK_ID"' * self.array
        seed = ' --seed "$SLURM_ARRAY_TASK_ID"' if self.array else ""
        command = shlex.join(module_command("penstock.runtime.cli.main", *self.words))
        return SCRIPT_TEXT.format(
            options="\n".join(f"#SBATCH {line}" for line in _lines([*own, *self.options])),
            folder=folder,
            script=shlex.quote(str(self.script)),
            command=f'{command} --out "$folder"{seed}',
            requeue=PREEMPTED,
            mendable="|".join(MENDABLE),
            most=MOST_RESTARTS,
        )


SCRIPT_TEXT = """#!/bin/bash
{options}

# Written by `penstock run … --on slurm --submit`; `sbatch` with this file goes on with the run.
folder={folder}
job=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
job=${{job:-$SLURM_JOB_ID}}
restarts=${{SLURM_RESTART_COUNT:-0}}
newest() {{ ls "$folder/checkpoints" 2>/dev/null | grep -E '^[0-9]{{8}}$' | tail -n 1; }}
before=$(newest)
summary=$(cat "$folder/summary.json" 2>/dev/null)
echo "job $job on $SLURM_JOB_NODELIST, start $((restarts + 1))"

{command} &
run=$!
# Slurm signals this shell alone, before the time limit and at the end of a grace.
trap 'kill -USR1 $run' USR1
trap 'kill -TERM $run' TERM
# A signal that is trapped ends a wait.
while kill -0 $run 2>/dev/null; do wait $run; done
wait $run
status=$?
# Of what ends this shell from here on, as a requeue does, nobody has to hear.
trap '' USR1 TERM

# 75: it was stopped, with a checkpoint if there was time. It goes on, perhaps on other nodes, as when it has lost one.
again=no
if [ $status = {requeue} ]; then
    again=yes
# A start that is refused leaves the summary of the one before, whose cause is not its own.
elif [ $status = 1 ] && [ "$(cat "$folder/summary.json" 2>/dev/null)" != "$summary" ]; then
    grep -qsE '"cause": *"({mendable})"' "$folder/summary.json" && again=yes
fi
if [ $again = yes ] && [ "$restarts" -ge {most} ] && [ "$(newest)" = "$before" ]; then
    echo "job $job is not requeued: start $((restarts + 1)) has come to no new checkpoint; is its time limit too short?"
    again=no
fi
# A job that its user has cancelled is not running any more; other tasks of its array may be, on lines of their own.
state=$(scontrol show job --oneliner "$job" | grep "^JobId=$SLURM_JOB_ID .* JobState=RUNNING ")
if [ $again = yes ] && [ -n "$state" ]; then
    # The node of which something was lost is left out, if Slurm says that the job can do without it.
    lost= without=
    [ $status = 1 ] && lost=$(sed -nE 's/.*"lost_host": *"([^"]+)".*/\\1/p' "$folder/summary.json")
    if [ -n "$lost" ]; then
        excluded=$(sed -nE 's/.* ExcNodeList=([^( ]+) .*/\\1,/p' <<< "$state")$lost
        timeout 60 sbatch --test-only --exclude "$excluded" {script} &>/dev/null && without=$excluded
    fi
    scontrol requeue "$job" && echo "job $job is requeued"
    # Slurm takes no such change while a job is running. This shell lives on for a moment (KillWait).
    if [ -n "$without" ] && scontrol update "JobId=$job" "ExcNodeList=$without"; then
        echo "job $job does without $without from now on; to undo: scontrol update JobId=$job ExcNodeList="
    fi
fi
exit $status
"""


def _lines(options: Sequence[str]) -> list[str]:
    """Lines with one option and its value each, quoted as sbatch reads them."""
    lines: list[list[str]] = []
    for option in options:
        if option.startswith("-") or not lines:
            lines.append([])
        lines[-1].append(option)
    return [shlex.join(line) for line in lines]


def submit(job: Job) -> str:
    """Write the script, submit it, and return the number of the job. Raises SlurmError, after removing a new folder;
    OSError or RecordError for a folder that cannot be written."""
    answer("sbatch", "--version", seconds=ANSWER_S)  # before there is a folder
    new = not job.folder.exists()
    job.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(job.script, job.text().encode())
    try:
        return answer("sbatch", "--parsable", str(job.script), seconds=ANSWER_S).strip().partition(";")[0]
    except SlurmError:
        if new:
            job.script.unlink()
            job.folder.rmdir()
        raise


def follow(job: Job, number: str, tell: Callable[[str], None], show: Callable[[str], None]) -> bool:
    """`tell` the states of a job and `show` its output until it has ended. Return whether it was successful. Raises
    SlurmError if Slurm does not answer for `DEAF_S`; the job goes on."""
    shown: dict[Path, int] = {}
    states, over, until = dict[str, str](), 0, monotonic() + DEAF_S
    # Do not show the output of earlier jobs again.
    for path in job.outputs().values():
        shown[path] = path.stat().st_size if path.exists() else 0
    while True:
        try:
            now = _states(number)
            until = monotonic() + DEAF_S
        except SlurmError:
            if monotonic() > until:
                raise
            sleep(LOOK_S)
            continue
        for task, state in now.items():
            if state != states.get(task):
                tell(f"job {task} is {state}")
        # slurmctld forgets jobs some minutes after their end (MinJobAge), such as the first tasks of an array.
        states = {task: state for task, state in (states | now).items() if task in now or state.split()[0] in ENDED}
        # The tasks of an array write too much at once to show: it stays in their files.
        for path in () if job.array else job.outputs().values():
            with suppress(FileNotFoundError), path.open("rb") as output:
                output.seek(shown[path])
                lines = whole_lines(output)
                shown[path] = output.tell()
                if lines:
                    show(lines.decode(errors="replace"))
        # A requeued job may look ended for a moment.
        over = over + 1 if all(state.split()[0] in ENDED for state in states.values()) else 0
        if over > 1:
            return all(state.split()[0] == WELL for state in states.values())
        sleep(LOOK_S)


def hints(job: Job, number: str) -> str:
    """Commands to look at a job, and to end it."""
    output = job.folder / ("*.out" if job.array else OUTPUT)
    return f"squeue -j {number} (its state), tail -f {output} (what it says), scancel {number} (end it)"


def _states(number: str) -> dict[str, str]:
    """The state of a job, or of each task of an array, as text."""
    found = {}
    for line in answer("scontrol", "show", "job", "--oneliner", number, seconds=ANSWER_S).splitlines():
        facts = dict(word.split("=", 1) for word in line.split() if "=" in word)
        task = facts.get("ArrayTaskId", "")
        state, reason, nodes = facts["JobState"], facts.get("Reason", "None"), facts.get("NodeList", "(null)")
        why = f" ({reason})" if state == "PENDING" and reason != "None" else ""
        found[f"{number}_{task}" if task else number] = f"{state}{why}{f' on {nodes}' * (state == 'RUNNING')}"
    return found
