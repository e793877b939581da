"""What `penstock doctor` looks at. Each check says what it found, and what follows where something is lacking."""

import importlib.util
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal

import psutil
import zmq

from penstock.runtime.cli.base_model import cache_folder

Verdict = Literal["ok", "note", "lack"]

SHM_NEEDED = 256 << 20
FILES_NEEDED = 1024
GIB = float(1 << 30)
TORCH_DEADLINE = 120.0
"""Seconds for a child to import torch."""

ASK_TORCH = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
gpus = [torch.cuda.get_device_properties(i) for i in range(count)]
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "threads": torch.get_num_threads(),
    "cpu": torch.backends.cpu.get_cpu_capability(), "gloo": torch.distributed.is_gloo_available(),
    "gpus": [{"name": g.name, "gib": round(g.total_memory / 2**30, 1), "capability": [g.major, g.minor]} for g in gpus],
}))
"""


@dataclass(frozen=True)
class Finding:
    """`follows` says what a user has to expect or to do; empty where all is well."""

    name: str
    found: str
    verdict: Verdict = "ok"
    follows: str = ""


def _judge(name: str, found: str, fine: bool, follows: str, otherwise: Verdict = "note") -> Finding:
    """A finding that is ok if it is fine, and else says what follows."""
    return Finding(name, found) if fine else Finding(name, found, otherwise, follows)


def examine() -> Iterator[Finding]:
    """All findings, one by one as they are made."""
    for check in CHECKS:
        yield from check()


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    fine = sys.version_info >= (3, 11)
    yield _judge("python", f"{version} ({sys.executable})", fine, "needed 3.11 or newer", "lack")


def _torch() -> Iterator[Finding]:
    try:
        command = [sys.executable, "-c", ASK_TORCH]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_DEADLINE, check=True)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or [f"exit status {error.returncode}"])[-1]
        yield Finding("torch", last, "lack", "nothing can be trained: pip install 'torch>=2.11,<2.14'")
        return
    except subprocess.TimeoutExpired:
        yield Finding("torch", f"no answer within {TORCH_DEADLINE:.0f} s", "lack", "its import hangs; reinstall it")
        return
    facts = json.loads(done.stdout)
    yield _torch_version(facts)
    if not facts["gloo"]:
        yield Finding("gloo", "not in this build", "lack", "weights cannot be sent between processes")
    if not facts["gpus"]:
        built = f"built for CUDA {facts['cuda']}, sees none" if facts["cuda"] else "a CPU build"
        driver = shutil.which("nvidia-smi") is not None
        follows = "a driver is here: install a CUDA build, or see that it matches" if driver else "runs on the CPU"
        yield Finding("GPUs", f"none ({built})", "note", follows)
    for index, gpu in enumerate(facts["gpus"]):
        fine = tuple(gpu["capability"]) >= (8, 0)
        name = f"{gpu['name']}, {gpu['gib']} GiB, sm_{gpu['capability'][0]}{gpu['capability'][1]}"
        yield Finding(
            f"cuda:{index}", name, "ok" if fine else "note", "" if fine else "no bfloat16: use --dtype float32"
        )


def _torch_version(facts: dict[str, Any]) -> Finding:
    release = tuple(int(part) for part in facts["version"].split("+")[0].split(".")[:2])
    fine = (2, 11) <= release < (2, 14)
    found = f"{facts['version']} (CPU code: {facts['cpu']}, {facts['threads']} threads by default)"
    return _judge("torch", found, fine, "tested with 2.11 to 2.13 only")


def _cores() -> Iterator[Finding]:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota = _cgroup_cores()
    found = f"{usable} of {present} usable" + (f", {quota:g} by the container's quota" if quota else "")
    cores = min(usable, quota or usable)
    yield _judge("cores", found, cores >= 2, "generator and trainer take turns: lag brings little")
    flags = _cpu_flags()
    fast = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8") if name in flags]
    follows = "bfloat16 is slow here: keep --dtype float32 on the CPU"
    bf16 = bool({"amx_bf16", "avx512_bf16"} & flags)
    yield _judge("CPU flags", ", ".join(fast) or "none of AVX2, AVX-512, AMX", bf16, follows)


def _memory() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    found = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    yield _judge("memory", found, memory.available > 2 * GIB, "each process takes about 0.4 GiB")
    try:
        shm = shutil.disk_usage("/dev/shm")
    except OSError as error:
        yield Finding("/dev/shm", error.strerror or "missing", "lack", "samples cannot pass between processes")
        return
    fine = shm.free >= SHM_NEEDED
    follows = "" if fine else "large batches will not fit (in Docker: --shm-size=2g)"
    yield Finding(
        "/dev/shm", f"{shm.free / GIB:.2f} of {shm.total / GIB:.2f} GiB free", "ok" if fine else "lack", follows
    )


def _sockets() -> Iterator[Finding]:
    curve = bool(zmq.has("curve"))
    follows = "" if curve else "runs on one machine work; agents on other machines are refused (needs libsodium)"
    yield Finding(
        "ZeroMQ", f"{zmq.zmq_version()}, CURVE {'yes' if curve else 'no'}", "ok" if curve else "note", follows
    )
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield Finding("loopback", f"can listen (tried port {server.getsockname()[1]})")
    except OSError as error:
        yield Finding("loopback", error.strerror or str(error), "lack", "the processes of a run cannot meet")
    yield Finding(
        "other hosts",
        "commands and samples: CURVE; weights: neither encrypted nor authenticated (gloo)",
        "note",
        "agents on several machines need a network that you trust",
    )


def _sandbox() -> Iterator[Finding]:
    """Code that a model writes runs isolated or, unless asked for, not at all."""
    command = [sys.executable, "-m", "penstock.nodes.environments.sandbox"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_DEADLINE, check=False)
    found = (done.stdout.strip() or done.stderr.strip().rpartition("\n")[2])[:200]
    follows = "tools that run a model's code are refused without --no-sandbox: apt install bubblewrap"
    yield _judge("sandbox", found, done.returncode == 0, follows)


def _files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    follows = f"many replicas will fail: ulimit -n {min(hard, 4096) if hard > 0 else 4096}"
    yield _judge("open files", f"{soft} (up to {hard})", soft >= FILES_NEEDED, follows)
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=cache):
            pass
        free = shutil.disk_usage(cache).free
        yield _judge("cache", f"{cache} ({free / GIB:.1f} GiB free)", free > GIB / 4, "the disk is nearly full")
    except OSError as error:
        follows = "the base model cannot be kept: set PENSTOCK_CACHE to a folder you can write to"
        yield Finding("cache", f"{cache}: {error.strerror}", "lack", follows)
    board = importlib.util.find_spec("tensorboard") is not None
    follows = "metrics.jsonl only; pip install 'penstock[track]' for TensorBoard"
    yield _judge("TensorBoard", "installed" if board else "not installed", board, follows)


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    lines = (line for line in text.splitlines() if line.startswith(("flags", "Features")))
    return set(next(lines, "").partition(":")[2].split())


def _cgroup_cores() -> float | None:
    """The container's CPU quota in cores; None without one."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (_python, _torch, _cores, _memory, _sockets, _sandbox, _files)
