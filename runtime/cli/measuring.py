"""Has this machine measured in a child that imports torch, and keeps what came out as a cluster file."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import psutil

from penstock.runtime.cli.base_model import cache_folder
from penstock.runtime.cli.tracing import CommandError
from penstock.runtime.cluster.cluster import THIS, Cluster, Cpu
from penstock.runtime.cluster.gpus import GPUS, Gpu, Tflops
from penstock.runtime.record.errors import disk_fault
from penstock.runtime.record.folder import write_atomic

DEADLINE = 600.0
"""Seconds for the child to measure one device; on an idle machine it takes less than 30."""
CHILD = "penstock.nodes.calibrate"


def profile_path() -> Path:
    """Where `--cluster this` looks."""
    return cache_folder() / "machine.toml"


def measure(path: Path) -> dict[str, Any]:
    """Measure, write the cluster file, and return its content. Raises CommandError for a child that fails, and before
    it measures for a file that cannot be written."""
    _require_place(path)
    raw = _asked("cpu")
    cpu = cpu_of(raw, psutil.virtual_memory().total / 2**30)
    kinds = {device: gpu_of(_asked(device)) for device in Cluster.local().hosts[0].devices}
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


def _asked(device: str) -> dict[str, Any]:
    command = [sys.executable, "-m", CHILD, device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=True)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit status {error.returncode}"])[-1]
        raise CommandError(f"{device} could not be measured: {last}") from None
    except subprocess.TimeoutExpired:
        raise CommandError(f"{device} was not measured within {DEADLINE:.0f} s: is the machine busy?") from None
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def cpu_of(raw: Mapping[str, Any], memory_gib: float) -> Cpu:
    """`raw` is what the measuring child printed for the host."""
    memory = raw["memory"]
    return Cpu(
        memory_gib=memory_gib,
        read_gb_s=memory["read"],
        copy_gb_s=memory["copy"],
        cached_gb_s=memory["cached"],
        call_us=raw["launch_us"],
        **raw["links"],
    )


def gpu_of(raw: Mapping[str, Any]) -> Gpu:
    """The same of a CUDA device: the best of the measured rates of each precision are what it reaches. Its links to
    other GPUs are those of the known kind that its name has in it, else of none."""
    known = next((gpu for name, gpu in GPUS.items() if name in raw["name"]), None)
    base = (known or GPUS["A100"].model_copy(update={"nvlink_gb_s": 0.0})).model_dump()
    share = base["efficiency"]["matmul"]
    rates = {name: max(rate for _, _, rate in found) / 1e12 / share for name, found in raw["products"].items()}
    return Gpu.model_validate(
        {
            **base,
            "memory_gib": raw["memory_gib"],
            "tflops": Tflops(**{**base["tflops"], **rates}),
            "memory_gb_s": raw["memory"]["copy"] / base["efficiency"]["memory"],
            "pcie_gb_s": raw["host_gb_s"] / base["efficiency"]["link"],
            "launch_us": raw["launch_us"],
        }
    )


def cluster_facts(kinds: Mapping[str, Gpu], cpu: Cpu) -> dict[str, Any]:
    """The cluster file's content; `kinds` by CUDA device, of which the first one's stands for all."""
    host: dict[str, Any] = {"name": "local", "cores": len(os.sched_getaffinity(0)), "cpu": THIS}
    found: dict[str, Any] = {"hosts": [host], "cpus": {THIS: cpu.model_dump()}}
    if kinds:
        host |= {"devices": list(kinds), "gpu": THIS}
        found["gpus"] = {THIS: next(iter(kinds.values())).model_dump()}
    return found


def toml(facts: Mapping[str, Any], prefix: str = "") -> str:
    """TOML of nested dicts of numbers, strings and lists."""
    plain, tables = [], []
    for name, value in facts.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            tables.append(f"\n[{path}]\n{toml(value, f'{path}.')}")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            tables += [f"\n[[{path}]]\n{toml(item, f'{path}.')}" for item in value]
        else:
            plain.append(f"{name} = {_toml_value(value)}\n")
    return "".join(plain + tables)


def _toml_value(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml_value(item) for item in value)}]"
    return f"{value:.5g}" if isinstance(value, float) else str(value)
