"""Has this machine measured in a child that imports torch, and keeps what came out as a cluster file."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import psutil

from penstock.runtime.cli.cache import cache_folder
from penstock.runtime.cli.traced import CommandError
from penstock.runtime.plan.cluster import Cluster
from penstock.runtime.plan.measured import cluster_facts, cpu_of, gpu_of, toml
from penstock.runtime.record.faults import disk_fault
from penstock.runtime.record.folder import write_atomic

DEADLINE = 600.0
"""Seconds for the child to measure one device; on an idle machine it takes less than 90."""
CHILD = "penstock.nodes.calibrate"


def profile_path() -> Path:
    """Where `--cluster this` looks."""
    return cache_folder() / "machine.toml"


def measure(path: Path) -> dict[str, Any]:
    """Measure, write the cluster file, and return its content. Raises CommandError for a child that fails, and before
    it measures for a file that cannot be written."""
    _require_place(path)
    cores = len(os.sched_getaffinity(0))
    raw = _asked("cpu", cores)
    cpu = cpu_of(raw, psutil.virtual_memory().total / 2**30)
    kinds = {device: gpu_of(_asked(device, cores)) for device in Cluster.local().hosts[0].devices}
    facts = cluster_facts(kinds, cpu)
    Cluster.model_validate(facts)
    about = f"# Measured by `penstock doctor --measure` in {raw['seconds']:.0f} s, with torch {raw['torch']}.\n"
    write_atomic(path, (about + toml(facts)).encode(), "--out FILE")
    return facts | {"seconds": raw["seconds"]}


def _require_place(path: Path) -> None:
    """Raises CommandError unless a file can be made there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise CommandError(f"--out {path}: given a folder, needed a file", 2)
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise CommandError(str(disk_fault(path, error, choice="--out FILE")), 2) from error


def _asked(device: str, cores: int) -> dict[str, Any]:
    command = [sys.executable, "-m", CHILD, device, str(cores)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=True)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit status {error.returncode}"])[-1]
        raise CommandError(f"{device} could not be measured: {last}") from None
    except subprocess.TimeoutExpired:
        raise CommandError(f"{device} was not measured within {DEADLINE:.0f} s: is the machine busy?") from None
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
