"""`penstock doctor`: what this machine has and lacks, what follows from it, and how fast it is.

Each check yields findings, with the consequence if something is lacking. `measure` measures the machine in a child that
imports torch, and writes a cluster file for `penstock plan --cluster this`.
"""

import dataclasses
import json
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any, Literal

import tyro
import zmq
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.graph.machine import cgroup_limits, free_memory, usable_cores, usable_memory_gib
from penstock.host import cache_folder, install_command
from penstock.runtime.cli.base_model import PROFILE
from penstock.runtime.cli.flags import OutputFlags, read_flags
from penstock.runtime.cli.tracing import CommandError, ask_child
from penstock.runtime.cluster.cluster import THIS, Cluster, Cpu
from penstock.runtime.cluster.gpus import Gpu, HostTime, Tflops, gpu_like
from penstock.runtime.plan.calibrate import fit_steps
from penstock.runtime.record.errors import disk_fault, visible
from penstock.runtime.record.folder import write_atomic
from penstock.runtime.record.trackers import NAMES, lacks

Verdict = Literal["ok", "note", "lack"]
MARKS = {"ok": ("✓", "green"), "note": ("·", "yellow"), "lack": ("✗", "bold red")}


@dataclass(frozen=True)
class DoctorFlags(OutputFlags):
    """Say what this machine has and lacks for running Penstock, and what follows from it.

    Exit status 1 if something is lacking that a run needs.

    With --measure: measure the speed of its GPUs, memory and links; plans use the results for GPUs. This takes less
    than a minute. Run nothing else meanwhile.

    Examples:
      penstock doctor
      penstock doctor --measure
      penstock plan aipo --cluster this --model DIR"""

    measure: bool = False
    """Measure this machine, for `penstock plan --cluster this`."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: in the cache)")] = ""
    """With --measure: the cluster file to write."""


def main(argv: Sequence[str]) -> int:
    flags = read_flags(DoctorFlags, "doctor", argv)
    if flags.out and not flags.measure:
        raise CommandError(f"--out: given {flags.out!r} without --measure, needed both")
    if flags.measure:
        path = Path(flags.out) if flags.out else cache_folder() / PROFILE
        facts = measure(path)
        print(json.dumps({"path": str(path), **facts}) if flags.json else visible(measured_text(facts, path)))
        return 0
    findings, console = [], Console()
    for finding in (finding for check in CHECKS for finding in check()):
        findings.append(finding)
        if not flags.json:
            mark, style = MARKS[finding.verdict]
            name = Text.assemble((f" {mark} ", style), (f"{finding.name:<13}", "bold"))
            said = Text(visible(finding.found))
            said.append(visible(f"  → {finding.follows}") if finding.follows else "", style=style)
            # On a terminal, lines are wrapped under the words; for a program, they are not wrapped.
            row = Table.grid()
            row.add_row(name, said)
            # Print each finding at once: torch takes seconds.
            console.print(row if console.is_terminal else Text.assemble(name, said), soft_wrap=not console.is_terminal)
    lacks = sum(finding.verdict == "lack" for finding in findings)
    if flags.json:
        print(json.dumps({"ok": not lacks, "findings": [dataclasses.asdict(finding) for finding in findings]}))
    else:
        end = f"{lacks} thing{'s are' if lacks > 1 else ' is'} lacking." if lacks else "This machine can run Penstock."
        console.print(f"\n{end}", highlight=False)
    return 1 if lacks else 0


SHM_NEEDED = 256 << 20
FILES_NEEDED = 1024
GIB = float(1 << 30)
# Seconds for a child to import torch, and to measure a device; on an idle machine they take less than 30.
TORCH_DEADLINE, DEADLINE = 120.0, 600.0


@dataclass(frozen=True)
class Finding:
    """One result of a check. `follows` says what the user must expect or do; empty if all is well."""

    name: str
    found: str
    verdict: Verdict = "ok"
    follows: str = ""


def _judge(name: str, found: str, fine: bool, follows: str, otherwise: Verdict = "note") -> Finding:
    """A finding that is ok if `fine`; else it has the verdict `otherwise` and says what follows."""
    return Finding(name, found) if fine else Finding(name, found, otherwise, follows)


def check_torch() -> Iterator[Finding]:
    """Check Python, torch, and the GPUs that torch sees."""
    version = f"{platform.python_version()} ({sys.executable})"
    yield _judge("python", version, sys.version_info >= (3, 11), "needed 3.11 or newer", "lack")
    try:
        # In a child: this process does not import torch, and survives a child that crashes or hangs.
        what = "the process that imports torch"
        facts = ask_child("penstock.nodes.calibrate:installed", what=what, deadline=TORCH_DEADLINE)
    except CommandError as error:
        follows = "nothing can be trained: pip install 'torch>=2.11,<2.14'"
        yield Finding("torch", str(error).rpartition("\n")[2], "lack", follows)
        return
    release = tuple(int(part) for part in facts["version"].split("+")[0].split(".")[:2])
    found = f"{facts['version']} (CPU code: {facts['cpu']}, {facts['threads']} threads by default)"
    yield _judge("torch", found, (2, 11) <= release < (2, 14), "tested with 2.11 to 2.13 only")
    if not facts["gloo"]:
        yield Finding("gloo", "not in this build", "lack", "weights cannot be sent between processes")
    if not facts["gpus"]:
        built = f"built for CUDA {facts['cuda']}, sees none" if facts["cuda"] else "a CPU build"
        driver = shutil.which("nvidia-smi") is not None
        follows = "a driver is here: install a CUDA build, or see that it matches" if driver else "runs on the CPU"
        yield Finding("GPUs", f"none ({built})", "note", follows)
    for index, (kind, gib, major, minor) in enumerate(facts["gpus"]):
        found = f"{kind}, {gib:.1f} GiB, sm_{major}{minor}"
        yield _judge(f"cuda:{index}", found, major >= 8, "no bfloat16: use --dtype float32")
    if facts["gpus"]:
        found = f"lacks {facts['triton']}" if facts["triton"] else "can make kernels for the GPUs"
        follows = "no model computes on a GPU: apt install gcc python3-dev, or --device cpu"
        yield _judge("Triton", found, not facts["triton"], follows, "lack")


def check_cpu() -> Iterator[Finding]:
    """Check cores, the CPU's instructions, and memory."""
    usable, limits = len(os.sched_getaffinity(0)), cgroup_limits()
    quota = f", {limits.cores:g} by the container's quota" if limits.cores < usable else ""
    found = f"{usable} of {os.cpu_count() or 1} usable{quota}"
    yield _judge("cores", found, min(usable, limits.cores) >= 2, "generator and trainer take turns: lag brings little")
    flags: set[str] = set()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags |= set(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())
    fast = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8") if name in flags]
    follows = "bfloat16 halves the memory here, but is no faster than float32"
    bf16 = bool({"amx_bf16", "avx512_bf16"} & flags)
    yield _judge("CPU flags", ", ".join(fast) or "none of AVX2, AVX-512, AMX", bf16, follows)
    free, usable_gib = free_memory(), usable_memory_gib()
    limit = ", by the container's limit" if limits.memory <= usable_gib * GIB else ""
    found = f"{free / GIB:.1f} of {usable_gib:.1f} GiB available{limit}"
    yield _judge("memory", found, free > 2 * GIB, "each process takes about 0.4 GiB")


def check_processes() -> Iterator[Finding]:
    """Check the means of communication between the processes of a run."""
    try:
        shm = shutil.disk_usage("/dev/shm")
        found = f"{shm.free / GIB:.2f} of {shm.total / GIB:.2f} GiB free"
        follows = "large batches will not fit (in Docker: --shm-size=2g)"
        yield _judge("/dev/shm", found, shm.free >= SHM_NEEDED, follows, "lack")
    except OSError as error:
        yield Finding("/dev/shm", error.strerror or "missing", "lack", "samples cannot pass between processes")
    curve = bool(zmq.has("curve"))
    follows = "runs on one machine work; agents on other machines are refused (needs libsodium)"
    yield _judge("ZeroMQ", f"{zmq.zmq_version()}, CURVE {'yes' if curve else 'no'}", curve, follows)
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield Finding("loopback", f"can listen (tried port {server.getsockname()[1]})")
    except OSError as error:
        yield Finding("loopback", error.strerror or str(error), "lack", "the processes of a run cannot meet")
    weights = "commands and samples: CURVE; weights: neither encrypted nor authenticated (gloo)"
    yield Finding("other hosts", weights, "note", "agents on several machines need a network that you trust")


def check_sandbox() -> Iterator[Finding]:
    """Check whether code that a model writes can run isolated; if not, it does not run unless asked for."""
    isolated, found = False, ""
    try:
        what = "the process that looks for a sandbox"
        isolated, found = ask_child(
            "penstock.nodes.environments.sandbox:described_isolation", what=what, deadline=TORCH_DEADLINE
        )
    except CommandError as error:
        found = str(error).rpartition("\n")[2]
    follows = "tools that run a model's code are refused without --no-sandbox: apt install bubblewrap"
    yield _judge("sandbox", found[:200], isolated, follows)


def check_files() -> Iterator[Finding]:
    """Check open files, the cache, and trackers."""
    # Each rank has sockets and shared memory with every rank with which it exchanges weights.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    follows = f"many replicas will fail: ulimit -n {min(hard, 4096) if hard > 0 else 4096}"
    yield _judge("open files", f"{soft} (up to {hard})", soft >= FILES_NEEDED, follows)
    cache = Path()
    try:
        cache = cache_folder()
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=cache):
            pass
        free = shutil.disk_usage(cache).free
        yield _judge("cache", f"{cache} ({free / GIB:.1f} GiB free)", free > GIB / 4, "the disk is nearly full")
    except OSError as error:
        follows = "the base model cannot be kept: set PENSTOCK_CACHE to a folder you can write to"
        given = f"{cache}: {error.strerror}" if error.strerror else str(error)
        yield Finding("cache", given, "lack", follows)
    missing = [name for name in NAMES if lacks(name)]
    present = ", ".join(name for name in NAMES if name not in missing) or "none"
    follows = f"no --track {', '.join(missing)}: {install_command(*missing)}"
    yield _judge("trackers", present, len(missing) < len(NAMES), follows)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_torch,
    check_cpu,
    check_processes,
    check_sandbox,
    check_files,
)


def measure(path: Path) -> dict[str, Any]:
    """Measure, write the cluster file, and return its content. Raises CommandError for a child that fails, and, before
    measuring, for a file that cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise CommandError(f"--out {path}: given a folder, needed a file")
        # Try this first: measuring takes a minute, which would be lost.
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise CommandError(str(disk_fault(path, error, choice="--out FILE"))) from error
    raw = _asked("cpu", usable_cores())
    facts = cluster_facts(raw, {device: _asked("cuda", device) for device in Cluster.local().hosts[0].devices})
    Cluster.model_validate(facts)
    about = f"# Measured by `penstock doctor --measure` in {raw['seconds']:.0f} s, with torch {raw['torch']}.\n"
    kinds = [(f"{group}.{THIS}", facts[group][THIS]) for group in ("cpus", "gpus") if group in facts]
    lines = [f"{name} = {toml(value)}\n" for name, value in [("hosts", facts["hosts"]), *kinds]]
    write_atomic(path, "".join([about, *lines]).encode(), "--out FILE")
    return facts | {"seconds": raw["seconds"]}


def _asked(kind: Literal["cpu", "cuda"], given: int | str) -> Any:
    """Have a child measure the CPU with `given` threads, or the CUDA device `given`."""
    what = f"{given if kind == 'cuda' else kind} could not be measured: the process that does"
    return ask_child(f"penstock.nodes.calibrate:{kind}", given, what=what, deadline=DEADLINE)


def gpu_of(raw: Mapping[str, Any]) -> Gpu:
    """A kind of GPU from the measurements of a CUDA device: the best rate of each precision is its attainable rate, and
    the host's time is that of this project's engine. Links to other GPUs are those of the known kind in its name, if
    there is one."""
    major, minor = raw["capability"]
    base = gpu_like(raw["name"], raw["memory_gib"], (major, minor)).model_dump()
    # Measured rates are attainable rates. A cluster file has peak rates, of which efficiency is a share.
    share = base["efficiency"]["matmul"]
    rates = {name: max(rate for _, _, rate in found) / 1e12 / share for name, found in raw["products"].items()}
    return Gpu.model_validate(
        {
            **base,
            "tflops": Tflops(**{**base["tflops"], **rates}),
            "memory_gb_s": raw["memory"]["copy"] / base["efficiency"]["memory"],
            "pcie_gb_s": raw["host_gb_s"] / base["efficiency"]["link"],
            "launch_us": raw["launch_us"],
            "engine": fit_steps(raw["steps"], HostTime.model_validate(base["engine"])).model_dump(),
        }
    )


def cluster_facts(raw: Mapping[str, Any], gpus: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The cluster file's content. `raw` and `gpus` are the measurements of the host and of each CUDA device; the first
    device stands for all."""
    memory = {f"{name}_gb_s": raw["memory"][name] for name in ("read", "copy", "cached")}
    cpu = Cpu(memory_gib=usable_memory_gib(), call_us=raw["launch_us"], **memory, **raw["links"])
    host: dict[str, Any] = {"name": "local", "cores": usable_cores(), "cpu": THIS}
    found: dict[str, Any] = {"hosts": [host], "cpus": {THIS: cpu.model_dump()}}
    if gpus:
        # In a cluster file, a host has one kind of GPU.
        host |= {"devices": list(gpus), "gpu": THIS}
        found["gpus"] = {THIS: gpu_of(next(iter(gpus.values()))).model_dump()}
    return found


def toml(value: Any) -> str:
    """A value as TOML: numbers, strings, lists, and dicts, which become inline tables."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{name} = {toml(item)}' for name, item in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    return f"{value:.5g}" if isinstance(value, float) else json.dumps(value)


def measured_text(facts: dict[str, Any], path: Path) -> str:
    """The main results of the measurements, for people."""
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
        engine = gpu.engine
        host = f"{engine.step_ms:.2g} ms, {engine.row_us:.2g} us a row, {engine.eager_us:.2g} us an operation"
        lines.append(f"host in a step    {host}")
    return "\n".join(lines)
