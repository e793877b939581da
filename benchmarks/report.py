"""The record that every benchmark prints last and can keep: one JSON object with machine, date and commit."""

import argparse
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# Limits the instructions of oneDNN's products, for example on a processor with AMX as if it had none.
# `CC="cc -mno-amx-tile -mno-amx-bf16"` does the same for the code that this project compiles.
LIMIT = os.environ.get("ONEDNN_MAX_CPU_ISA", "")


def machine() -> dict[str, Any]:
    """Describe the machine: CPU model, cores this process may use, memory in GiB, GPU if there is one, Python."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    model += f" up to {LIMIT}" if LIMIT else ""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    found = {"cpu": model, "cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory), "gpu": _gpu()}
    return {**found, "python": platform.python_version()}


def _gpu() -> str | None:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def changed() -> list[str]:
    """Return the files that are not as they were committed, those that git neither has nor ignores included, except
    what is written from measurements: results, pictures and pages."""
    files = [":/", ":!benchmarks/results", ":!docs/img", ":!*.md"]
    found: list[str] = []
    for command in (["diff", "--name-only", "HEAD"], ["ls-files", "--others", "--exclude-standard"]):
        try:
            listed = subprocess.run(["git", *command, "--", *files], cwd=ROOT, capture_output=True, text=True)
        except OSError:
            return []
        found += listed.stdout.splitlines()
    return found


def commit() -> str:
    """Return the measured commit, with "+" at the end if files are `changed`."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return head.stdout.strip() + ("+" if changed() else "") or "unknown"


class Keep(argparse.Action):
    """The flag `--keep`, which is refused if files are `changed`: no checkout could repeat such a result."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, default=False, help=help)

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: Any) -> None:
        if files := changed():
            given = f"{len(files)} changed or not committed ({', '.join(files[:3])}{', …' if files[3:] else ''})"
            parser.error(f"{self.option_strings[0]}: given {given}, needed all files as they are committed")
        setattr(namespace, self.dest, True)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median with the smallest and the largest value: on a shared machine one figure says little."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "repeats": len(values)}


def cpu_flags() -> set[str]:
    """Return the processor's features according to Linux."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    return set(text.partition("flags")[2].partition("\n")[0].split())


def by_processor(name: str) -> str:
    """Return the name under which to keep figures that differ in kind on a processor with AMX, whose products are ten
    times as fast, on one whose AMX is switched off (`LIMIT`), and on one without AVX-512."""
    if "amx_tile" in cpu_flags():
        return f"{name}_amx" if not LIMIT or "AMX" in LIMIT else f"{name}_amx_off"
    return name if "avx512f" in cpu_flags() else f"{name}_avx2"


def publish(name: str, figures: dict[str, Any], keep: bool) -> None:
    """Print the figures as the last line; with `keep`, also write them to `benchmarks/results/NAME.json`."""
    record = {
        "benchmark": name,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "machine": machine(),
        **figures,
    }
    if keep:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record))
