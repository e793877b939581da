"""The SkyPilot task among the examples: its shell commands on each node are valid commands of penstock."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from penstock.graph import load
from penstock.graph.program import Program
from penstock.runtime.cli.flags import AgentFlags, read_flags
from penstock.runtime.cli.parse import parse

TASK = Path(__file__).resolve().parents[3] / "docs" / "examples" / "skypilot.yaml"
INSTRUMENT = '''#!{python}
"""A test instrument, not penstock: writes down the words that it is given."""
import json, os, sys
with open({calls!r}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
'''


def commands(task: dict[str, Any], folder: Path, rank: int) -> list[list[str]]:
    """Return the arguments of each call of penstock by the task's script on one node."""
    calls, program = folder / f"calls-{rank}", folder / "penstock" / "bin" / "penstock"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(INSTRUMENT.format(python=sys.executable, calls=str(calls)))
    program.chmod(0o700)
    node = {
        "HOME": str(folder),
        "PATH": os.environ["PATH"],
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_TASK_ID": "sky-managed-2026-penstock_1-0",
    }
    # The launcher replaces the shell and does not wait for the agent; the pipe closes when the last process ends.
    subprocess.run(["bash", "-eu", "-c", task["run"]], env=node, check=True, stdout=subprocess.PIPE, timeout=30)
    return [json.loads(line) for line in calls.read_text().splitlines()]


def test_the_commands_of_the_skypilot_task_have_flags_that_parse_and_meet_at_one_ticket(tmp_path: Path) -> None:
    task = yaml.safe_load(TASK.read_text())
    [[first, *agent]] = commands(task, tmp_path, 1)
    assert first == "agent"
    there = read_flags(AgentFlags, "agent", agent)
    own = {words[0]: words[1:] for words in commands(task, tmp_path, 0)}
    assert own["agent"] == agent
    program = load(own["run"][0])
    assert isinstance(program, Program)
    flags = parse(program, "run", own["run"][0], own["run"][1:]).flags
    assert there.ticket == f"{flags.out}/ticket.json"
    [volume] = task["volumes"]
    assert flags.out.startswith(f"{volume}/")
    assert (flags.on, flags.agents, flags.bind) == ("agents", task["num_nodes"], "10.0.0.1:5555")
    assert flags.resume == "auto"
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
