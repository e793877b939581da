"""What of this machine this process may use: cores, memory, CUDA devices. Agents report it, and defaults come from it.

A container has the node's CPUs and memory in view, and less of them to use: its control group has a quota of CPU time
and a limit of memory, which neither the CPU affinity nor the size of the physical memory tells. A job may see GPUs in
`/proc` that the cluster manager has not given to it: their device files cannot be opened.

Each function reads files below `root`, `/` but for tests. What cannot be read limits nothing.
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
    """Cores' worth of CPU time, and bytes of memory; infinite where there is no limit."""

    cores: float
    memory: float


def cgroup_limits(root: Path = ROOT) -> MachineLimits:
    """The least of what the control groups of this process and those around them allow, of version 2 and 1."""
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
    """The folders of this process's control groups and of all groups around them, which limit it as well."""
    mounts = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        lines = ["0::/"]
    for line in lines:
        # Its number, the controllers (none: version 2), the path.
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        names = {controllers, *controllers.split(",")}
        if controllers and not names & {"cpu", "memory"}:
            continue
        # A container has its own group at the mount, whatever the path says of the host's folders; ".." is outside.
        inside = Path(path.partition("/..")[0].strip("/"))
        for mount in sorted(mounts / name for name in names):
            for folder in (inside, *inside.parents):
                yield mount / folder


def _numbers(file: Path) -> list[float]:
    """The numbers in a file, "max" as infinity; none if it cannot be read or has others."""
    with suppress(OSError, ValueError):
        return [math.inf if word == "max" else float(word) for word in file.read_text().split()]
    return []


def usable_cores(root: Path = ROOT) -> int:
    """The cores that this process may use at once: those of its CPU affinity, or what a quota leaves, rounded up."""
    return max(1, math.ceil(min(len(os.sched_getaffinity(0)), cgroup_limits(root).cores)))


def usable_memory_gib(root: Path = ROOT) -> float:
    """The memory that this process may use, with all others of its control group: the machine's, or its limit."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(physical, cgroup_limits(root).memory) / 2**30


def free_memory(root: Path = ROOT) -> int:
    """Bytes of memory that this process could take: what the machine has free or can free, or what the limits of its
    control groups leave. The kernel takes a group's cache of files that are not in use for free; so does this."""
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
    """How many processes the kernel of this machine has killed for lack of memory since it started; 0 where it does not
    say."""
    return _named_number(root / "proc/vmstat", "oom_kill")


def _named_number(file: Path, name: str) -> int:
    """The number behind a name in a file with one of them on each line; 0 if it cannot be read."""
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
        # A number, or the driver's name of a card; what is none of these ends the list ("NoDevFiles", of Slurm).
        parts = takewhile(re.compile(r"\s*(\d|GPU-|MIG-)").match, visible.split(","))
        count = min(count, len([*parts]))
    return tuple(f"cuda:{index}" for index in range(count))


def count_gpus(root: Path = ROOT) -> int:
    """GPUs of the driver whose device files this process can open; what `nvidia-smi` lists where that is none."""
    with suppress(OSError):
        gpus = list((root / "proc/driver/nvidia/gpus").iterdir())
        if count := sum(_can_open(root, gpu) for gpu in gpus):
            return count
    # Device files may be missing until something has asked for them, as nvidia-smi does.
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
        # Only an attempt tells: a devices' control group refuses what the file's mode allows.
        os.close(os.open(root / f"dev/nvidia{minor[1]}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return False
    return True
