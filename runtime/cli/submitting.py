"""A run that is submitted to a cluster manager as a job (`penstock run PROGRAM --on MANAGER …`): nothing of it runs
here.

`SUBMITTERS` has the managers, by the word of --on. A manager's `submit` takes a `Submission`, and returns the exit
status:

- with --dry-run it prints what it would submit, and returns 0;
- else it submits the job and follows its log: 0 if the run is done, 1 if it has failed. Ctrl-C only ends the following:
  the job stays, and the user is told how to look at it and how to end it.

The words of a command line are of three kinds: PROGRAM and the flags of the run, which the job's command repeats
(`Submission.words`); flags of the job; and words after a `--`, which go to the manager's own command.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from secrets import token_hex

from penstock.runtime.cli.enrolling import tell
from penstock.runtime.cli.flags import AgentsFlags, RunFlags, SubmitFlags
from penstock.runtime.cli.tracing import CommandError, Traced, usage_errors
from penstock.runtime.control.security import DeskKeys
from penstock.runtime.control.signals import DONE, FAILED
from penstock.runtime.managers import kubernetes, slurm_jobs
from penstock.runtime.managers.slurm import SlurmError
from penstock.runtime.record.errors import disk_fault, visible
from penstock.runtime.record.folder import absolute, default_path

# Flags about where and how this command works; the job's command has its own.
HERE = {
    "config",  # its words are already among the others
    "plain",
    "resume",
    *(field.name for field in fields(SubmitFlags)),
    *(field.name for field in fields(AgentsFlags) if field.name not in ("place", "json")),
}
# Seconds for a controller to start in a cluster, and then for its agents to join: nodes may have to be started, and
# images of several GB pulled.
STARTUP_S = 900.0
# The default of seconds from a job's first signal to its end.
GRACE_S = 60.0


@dataclass(frozen=True)
class Submission:
    """A run to submit. `called` is PROGRAM as the user typed it; `manager_args` are the words after a "--"."""

    traced: Traced
    called: str
    manager_args: tuple[str, ...] = ()

    @property
    def flags(self) -> RunFlags:
        flags: RunFlags = self.traced.flags
        return flags

    def words(self, *without: str) -> tuple[str, ...]:
        """PROGRAM and the flags of the run, as the user gave them, also by --config; `without` these fields."""
        typed = self.traced.typed
        kept = (words for name, words in typed.items() if name not in HERE and name not in without)
        return self.called, *(word for words in kept for word in words)


@dataclass(frozen=True)
class Manager:
    """A cluster manager on the command line. `submit` submits a run, and returns the exit status. `flags` are the job
    flags that it accepts. `needed` are its required flags, each with its meaning. `owned` are flags that the user must
    not give, each with its owner. `manager_args`: it takes the words after a "--". With `by`, it submits only runs with
    this flag; else all runs with its word of --on."""

    submit: Callable[[Submission], int]
    flags: tuple[str, ...]
    needed: Mapping[str, str]
    owned: Mapping[str, str] = field(default_factory=dict)
    manager_args: bool = False
    by: str = ""

    def wants(self, flags: RunFlags) -> bool:
        return not self.by or bool(getattr(flags, self.by))


def submitter(flags: RunFlags, manager_args: Sequence[str]) -> Manager | None:
    """The manager to which the run is submitted; None if this command runs it. `manager_args` are the words after a
    "--". Raises CommandError for job flags without a job or for another manager, and for missing ones."""
    manager = SUBMITTERS.get(flags.on)
    found = manager if manager is not None and manager.wants(flags) else None
    on = f"with --on {flags.on}" if flags.on else "without --on"
    for each in fields(SubmitFlags):
        meant = [f"--on {word}{f' {_flag(one.by)}' * bool(one.by)}" for word, one in SUBMITTERS.items()
                 if each.name in one.flags]  # fmt: skip
        if getattr(flags, each.name) != each.default and (found is None or each.name not in found.flags):
            raise CommandError(f"given {_flag(each.name)} {on}, needed {' or '.join(meant)}")
    if manager_args and (found is None or not found.manager_args):
        raise CommandError(f"given {' '.join(manager_args)!r} behind a -- {on}, needed flags of the run alone")
    if found is None:
        return None
    for name, whose in found.owned.items():
        if getattr(flags, name):
            raise CommandError(f"given {_flag(name)} {on}, needed none: {whose} has its own")
    if lacking := [name for name in found.needed if not getattr(flags, name)]:
        rows = [f"  {_flag(name)}: {found.needed[name]}" for name in lacking]
        head = f"--on {flags.on}: given no {', '.join(map(_flag, lacking))}, needed:"
        raise CommandError("\n".join([head, *rows]))
    return found


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# Kubernetes -----------------------------------------------------------------------------------------------


def on_kubernetes(asked: Submission) -> int:
    """Submit a JobSet: see `managers/kubernetes.py`."""
    asked.traced.sound()
    workload = _workload(asked)
    keys = DeskKeys.make(workload.name)
    secrets = {kubernetes.TICKET: keys.ticket(workload.endpoint).text(), kubernetes.DESK: keys.text()}
    if asked.flags.dry_run:
        made = kubernetes.manifests(workload, secrets)
        whole = {"apiVersion": "v1", "kind": "List", "items": list(made)}
        print(json.dumps(whole) if asked.flags.json else kubernetes.as_yaml(made), end="")
        return DONE
    goes_on = ""
    try:
        kubernetes.create(workload, secrets)
        goes_on = f"the JobSet {workload.name} goes on; {kubernetes.hints(workload)}"
        tell(f"the JobSet {workload.name} is created, its run folder is {workload.folder} of {workload.claim}")
        done = kubernetes.follow(workload, _startup_deadline(asked), tell)
    except kubernetes.KubernetesError as error:
        raise CommandError(f"{error}; {goes_on}" if goes_on and not error.gone else str(error), 1) from None
    except KeyboardInterrupt:
        tell(f"the JobSet {workload.name} goes on; {kubernetes.hints(workload)}")
        raise
    if not done:
        tell(f"the JobSet {workload.name} has failed; {kubernetes.hints(workload)}")
    return DONE if done else FAILED


def _startup_deadline(asked: Submission) -> float:
    return asked.flags.startup_deadline if "startup_deadline" in asked.traced.typed else STARTUP_S


def _workload(asked: Submission) -> kubernetes.KubernetesRun:
    flags = asked.flags
    starts = ("--startup-deadline", f"{_startup_deadline(asked):g}")
    with usage_errors():
        return kubernetes.KubernetesRun(
            name=kubernetes.job_name(asked.called, token_hex(3)),
            image=flags.image,
            agents=flags.agents or 0,
            claim=flags.claim,
            words=(*asked.words("out", "grace", "startup_deadline"), *starts),
            out=flags.out,
            namespace=flags.namespace,
            environment=flags.env_secret,
            gpus=flags.gpus_per_agent,
            cpus=flags.cpus_per_agent,
            memory=flags.memory_per_agent,
            grace=flags.grace if "grace" in asked.traced.typed else GRACE_S,
            wait=_startup_deadline(asked),
        )


# Slurm ----------------------------------------------------------------------------------------------------


def on_slurm(asked: Submission) -> int:
    """Submit a batch job: see `managers/slurm_jobs.py`."""
    asked.traced.sound()
    job = _job(asked)
    if asked.flags.dry_run:
        said = {"script": job.text(), "file": str(job.script)}
        print(json.dumps(said) if asked.flags.json else said["script"], end="")
        return DONE
    try:
        number = slurm_jobs.submit(job)
    except SlurmError as error:
        raise CommandError(str(error), 1) from None
    except OSError as error:
        raise disk_fault(job.folder, error, choice="--out DIR") from error
    hints = slurm_jobs.hints(job, number)
    try:
        tell(f"job {number} is submitted, its script is {job.script}; {hints}")
        done = slurm_jobs.follow(job, number, tell, lambda text: print(visible(text), end="", flush=True))
    except SlurmError as error:
        raise CommandError(f"{error}; job {number} goes on: {hints}", 1) from None
    except (KeyboardInterrupt, OSError):  # OSError: the pipe or terminal of this command is closed
        tell(f"job {number} goes on; {hints}")
        raise
    if not done:
        tell(f"job {number} has not ended well; what it said is in {job.folder}")
    return DONE if done else FAILED


def _job(asked: Submission) -> slurm_jobs.Job:
    flags, typed = asked.flags, asked.traced.typed
    grace = flags.grace if "grace" in typed else GRACE_S
    agents = ("--agents", str(flags.agents)) if flags.agents else ()
    how = ("--plain", "--resume", "auto", "--grace", f"{grace:g}", "--on", "slurm", *agents)
    out = flags.out or default_path(asked.traced.name, datetime.now())
    with usage_errors():
        job = slurm_jobs.Job(
            name=asked.traced.name,
            words=("run", *asked.words("out", "grace"), *how),
            folder=absolute(out),
            options=asked.manager_args,
            nodes=flags.agents,
            grace=grace,
        )
    if job.array and "seed" in typed:
        raise CommandError("given --seed and --array, needed one of them: a task's seed is its number")
    return job


SUBMITTERS = {
    "kubernetes": Manager(
        on_kubernetes,
        (
            "dry_run",
            "image",
            "claim",
            "namespace",
            "env_secret",
            "gpus_per_agent",
            "cpus_per_agent",
            "memory_per_agent",
        ),
        needed={
            "image": "a container image that has penstock",
            "claim": "a PersistentVolumeClaim that all Pods can mount: the run folder is in it",
            "agents": "how many Pods with an agent there are to be",
        },
        owned={"bind": "the controller's Pod", "ticket_keys": "the JobSet"},
    ),
    "slurm": Manager(
        on_slurm,
        ("submit", "dry_run"),
        needed={},
        owned={"bind": "the job", "ticket_keys": "the job"},
        manager_args=True,
        by="submit",
    ),
}
