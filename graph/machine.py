"""The cores, memory and CUDA devices that this process may use. Agents report them, and defaults come from them.

A container sees all CPUs and memory of the node, but may use less: its control group has a quota of CPU time and a
limit of memory, which neither the CPU affinity nor the size of the physical memory shows. A job may see GPUs in `/proc`
that the cluster manager has not given to it: their device files cannot be opened.

Each function reads files below `root`, which is `/` except in tests. A file that cannot be read limits nothing.
"""

import math
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")


class MachineLimits(NamedTuple):
    """CPU time in cores, and bytes of memory; infinite without a limit."""

    cores: float
    memory: float


def cgroup_limits(root: Path = ROOT) -> MachineLimits:
    """The lowest limits of the control groups of this process and of their parents, of versions 2 and 1."""
    cores = memory = math.inf
    for folder in _groups(root):
        # Version 2 has both in one file, "max 100000" without a quota; version 1 has -1 for none. Microseconds.
        for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            match [number for file in files for number in _numbers(folder / file)]:
                case [quota, period] if quota > 0 and period > 0:
                    cores = min(cores, quota / period)
        for file in ("memory.max", "memory.limit_in_bytes"):
            for limit in _numbers(folder / file):
                memory = min(memory, limit) if limit > 0 else memory
    return MachineLimits(cores, memory)


def _groups(root: Path) -> Iterator[Path]:
    """The folders of this process's control groups and of their parents, which limit it, too."""
    mounts = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        lines = ["0::/"]
    for line in lines:
        # A line has a number, the controllers (none: version 2) and the path.
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        names = {controllers, *controllers.split(",")}
        if controllers and not names & {"cpu", "memory"}:
            continue
        # A container's own group is at the mount, whatever path the host has for it; ".." is outside.
        inside = Path(path.partition("/..")[0].strip("/"))
        for mount in sorted(mounts / name for name in names):
            for folder in (inside, *inside.parents):
                yield mount / folder


def _numbers(file: Path) -> list[float]:
    """The numbers in a file, "max" as infinity; [] if it cannot be read or has other words."""
    with suppress(OSError, ValueError):
        return [math.inf if word == "max" else float(word) for word in file.read_text().split()]
    return []


def usable_cores(root: Path = ROOT) -> int:
    """The cores that this process may use at once: those of its CPU affinity, or fewer by a quota, rounded up."""
    return max(1, math.ceil(min(len(os.sched_getaffinity(0)), cgroup_limits(root).cores)))


def usable_memory_gib(root: Path = ROOT) -> float:
    """The memory in GiB that this process and all others of its control group may use: the machine's, or the limit."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(physical, cgroup_limits(root).memory) / 2**30


def free_memory(root: Path = ROOT) -> int:
    """Bytes of memory that this process could allocate: what the machine has free or can free, or less by the limits of
    its control groups. A group's inactive file cache counts as free, as for the kernel."""
    free = 1024 * _named_number(root / "proc/meminfo", "MemAvailable:")
    for folder in _groups(root):
        # Versions 2 and 1.
        for most, used, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            match [*_numbers(folder / most), *_numbers(folder / used)]:
                case [limit, taken] if 0 < limit < math.inf:
                    free = min(free, int(limit - taken) + _named_number(folder / "memory.stat", cache))
    return max(0, free)


def memory_kills(root: Path = ROOT) -> int:
    """The number of processes that this machine's kernel has killed for lack of memory since boot; 0 if unknown."""
    return _named_number(root / "proc/vmstat", "oom_kill")


def _named_number(file: Path, name: str) -> int:
    """The number after a name in a file with a name and a number per line; 0 if it cannot be read."""
    with suppress(OSError, ValueError, IndexError):
        for line in file.read_text().splitlines():
            words = line.split()
            if words[:1] == [name]:
                return int(words[1])
    return 0


def cuda_devices() -> tuple[str, ...]:
    """The NVIDIA devices that this process may use, as torch numbers them; without importing torch."""
    # torch numbers what is visible from 0, whatever the driver calls it.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = count_gpus()
    if visible is not None:
        # Anything but a number or the driver's name of a GPU ends the list, such as Slurm's "NoDevFiles".
        parts = takewhile(re.compile(r"\s*(\d|GPU-|MIG-)").match, visible.split(","))
        count = min(count, len([*parts]))
    return tuple(f"cuda:{index}" for index in range(count))


def count_gpus(root: Path = ROOT) -> int:
    """The number of the driver's GPUs whose device files this process can open; if 0, of those in `nvidia-smi -L`."""
    with suppress(OSError):
        gpus = list((root / "proc/driver/nvidia/gpus").iterdir())
        if count := sum(_can_open(root, gpu) for gpu in gpus):
            return count
    # Device files may be missing until a program such as nvidia-smi has created them.
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def _can_open(root: Path, gpu: Path) -> bool:
    try:
        minor = re.search(r"^Device Minor:\s*(\d+)\s*$", (gpu / "information").read_text(), re.M)
    except (OSError, UnicodeDecodeError):
        minor = None
    if minor is None:
        return True
    try:
        # Only an attempt shows it: a control group may refuse a device that the file's mode allows.
        os.close(os.open(root / f"dev/nvidia{minor[1]}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return False
    return True
