"""`penstock doctor`: what this machine has and lacks, and what follows from it."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.text import Text

from penstock.runtime.cli.checks import Finding, examine
from penstock.runtime.cli.flags import read_flags
from penstock.runtime.cli.measuring import measure, profile_path
from penstock.runtime.cli.tracing import CommandError
from penstock.runtime.cluster.cluster import THIS
from penstock.runtime.cluster.gpus import Gpu
from penstock.runtime.record.errors import visible

DESCRIPTION = """Say what this machine has and lacks for running Penstock, and what follows from it.

Exit status 1 if something is lacking that a run needs.

With --measure: how fast its GPUs, memory and links are; plans take what it finds of GPUs. That takes less than a
minute; let nothing else run.

Examples:
  penstock doctor
  penstock doctor --measure
  penstock plan aipo --cluster this --model DIR"""

MARKS = {"ok": ("✓", "green"), "note": ("·", "yellow"), "lack": ("✗", "bold red")}


@dataclass(frozen=True)
class DoctorFlags:
    """Flags of doctor"""

    measure: bool = False
    """Measure this machine, for `penstock plan --cluster this`."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: in the cache)")] = ""
    """Where to write what was measured, as a cluster file."""
    json: bool = False
    """The findings, or what was measured, as JSON."""


def main(argv: Sequence[str]) -> int:
    flags = read_flags(DoctorFlags, "doctor", argv, DESCRIPTION)
    if flags.out and not flags.measure:
        raise CommandError(f"--out: given {flags.out!r} without --measure, needed both", 2)
    if flags.measure:
        path = Path(flags.out) if flags.out else profile_path()
        facts = measure(path)
        print(json.dumps({"path": str(path), **facts}) if flags.json else visible(measured_text(facts, path)))
        return 0
    findings = []
    console = Console()
    for finding in examine():
        findings.append(finding)
        if not flags.json:
            console.print(_line(finding), soft_wrap=True)
    lacks = sum(finding.verdict == "lack" for finding in findings)
    if flags.json:
        print(json.dumps({"ok": not lacks, "findings": [dataclasses.asdict(finding) for finding in findings]}))
    else:
        console.print(
            f"\n{lacks} things are lacking." if lacks else "\nThis machine can run Penstock.", highlight=False
        )
    return 1 if lacks else 0


def measured_text(facts: dict[str, Any], path: Path) -> str:
    """The main figures of what was measured, for people."""
    cpu = facts["cpus"][THIS]
    lines = [f"measured in {facts['seconds']:.0f} s, kept in {path}", ""]
    lines.append(f"memory            read {cpu['read_gb_s']:.1f}, copy {cpu['copy_gb_s']:.1f} GB/s")
    links = f"shared memory {cpu['shared_gb_s']:.1f}, loopback {cpu['gloo_gb_s']:.1f} GB/s, {cpu['latency_us']:.0f} us"
    lines.append(f"links             {links}")
    for figures in facts.get("gpus", {}).values():
        gpu = Gpu.model_validate(figures)
        host_gb_s = gpu.pcie_gb_s * gpu.efficiency.link
        rates = f"products {gpu.flops('bf16') / 1e12:.0f} TFLOP/s in bf16, memory {gpu.bandwidth / 1e9:.0f} GB/s"
        lines.append(f"GPUs              {gpu.memory_gib:.0f} GiB, {rates}, from and to the host {host_gb_s:.0f} GB/s")
    return "\n".join(lines)


def _line(finding: Finding) -> Text:
    mark, style = MARKS[finding.verdict]
    line = Text.assemble((f" {mark} ", style), (f"{finding.name:<13}", "bold"), visible(finding.found))
    return line.append(visible(f"  → {finding.follows}"), style=style) if finding.follows else line
