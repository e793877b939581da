"""What a process may use of a machine: the minimum of CPU affinity, control groups and openable GPU device files."""

import os
from collections.abc import Mapping
from math import inf
from pathlib import Path

import pytest

from penstock.graph import machine
from penstock.graph.machine import (
    cgroup_limits,
    count_gpus,
    cuda_devices,
    free_memory,
    memory_kills,
    usable_cores,
    usable_memory_gib,
)
from penstock.runtime.control.enrolment import facts

GIB = 1 << 30
V1_LINES = "12:memory:/kubepods/pod1/c1\n4:cpu,cpuacct:/kubepods/pod1/c1\n1:name=systemd:/kubepods/pod1/c1\n"


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / (name if name.startswith("proc/") else f"sys/fs/cgroup/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("groups", "files", "limits"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n", "memory.max": f"{GIB}\n"}, (1.5, GIB)),
        ("0::/\n", {"cpu.max": "max 100000\n", "memory.max": "max\n"}, (inf, inf)),
        # A path of the host; in the container only its own folder exists.
        ("0::/docker/ab\n", {"cpu.max": "200000 100000\n", "memory.max": f"{GIB}\n"}, (2, GIB)),
        ("0::/../../other\n", {"cpu.max": "200000 100000\n"}, (2, inf)),
        # Parent groups limit the process, too.
        (
            "0::/job/step\n",
            {
                "job/cpu.max": "400000 100000\n",
                "job/memory.max": f"{GIB}\n",
                "job/step/cpu.max": "max 100000\n",
                "job/step/memory.max": f"{2 * GIB}\n",
                "other/cpu.max": "1000 100000\n",
            },
            (4, GIB),
        ),
        (
            V1_LINES,
            {
                "cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
                "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
                "memory/memory.limit_in_bytes": f"{3 * GIB}\n",
            },
            (2.5, 3 * GIB),
        ),
        (
            V1_LINES,
            {
                "cpu/kubepods/pod1/c1/cpu.cfs_quota_us": "-1\n",
                "cpu/kubepods/pod1/c1/cpu.cfs_period_us": "100000\n",
                "memory/kubepods/pod1/memory.limit_in_bytes": f"{GIB}\n",
                "memory/kubepods/pod1/c1/memory.limit_in_bytes": f"{9223372036854771712}\n",
            },
            (inf, GIB),
        ),
        # Both versions: version 2 without controllers, and version 1.
        (f"{V1_LINES}0::/\n", {"memory/memory.limit_in_bytes": f"{GIB}\n", "unified/cgroup.procs": ""}, (inf, GIB)),
        ("0::/\n", {"cpu.max": "no numbers\n", "memory.max": ""}, (inf, inf)),
        ("0::/\n", {"cpu.max": "100000 0\n", "memory.max": "0\n"}, (inf, inf)),
    ],
)
def test_the_least_limit_of_a_control_group_and_those_around_it_holds(
    tmp_path: Path, groups: str, files: dict[str, str], limits: tuple[float, float]
) -> None:
    write(tmp_path, {"proc/self/cgroup": groups, **files})
    assert cgroup_limits(tmp_path) == limits


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max", 3), ("400000", 3), ("250000", 3), ("200000", 2), ("110000", 2), ("50000", 1), ("1000", 1)],
)
def test_cores_are_those_of_the_affinity_or_of_the_quota_rounded_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 6})
    assert usable_cores(tmp_path / "none") == 3
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "cpu.max": f"{quota} 100000\n"})
    assert usable_cores(tmp_path) == cores


def test_memory_is_the_machines_or_its_limit(tmp_path: Path) -> None:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert usable_memory_gib(tmp_path / "none") == physical / GIB
    write(tmp_path, {"memory.max": f"{GIB // 2}\n"})
    assert usable_memory_gib(tmp_path) == 0.5
    write(tmp_path, {"memory.max": f"{2 * physical}\n"})
    assert usable_memory_gib(tmp_path) == physical / GIB


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 8 * GIB),
        ({"memory.max": "max\n", "memory.current": f"{GIB}\n"}, 8 * GIB),
        ({"memory.max": f"{4 * GIB}\n", "memory.current": f"{GIB}\n"}, 3 * GIB),
        ({"memory.max": f"{4 * GIB}\n"}, 8 * GIB),
        # The kernel can drop inactive page cache, so it counts as free.
        (
            {
                "memory.max": f"{4 * GIB}\n",
                "memory.current": f"{3 * GIB}\n",
                "memory.stat": f"anon 7\ninactive_file {GIB}\n",
            },
            2 * GIB,
        ),
        ({"memory.max": f"{GIB}\n", "memory.current": f"{2 * GIB}\n"}, 0),
        (
            {
                "memory/memory.limit_in_bytes": f"{4 * GIB}\n",
                "memory/memory.usage_in_bytes": f"{3 * GIB}\n",
                "memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n",
            },
            2 * GIB,
        ),
    ],
)
def test_free_memory_is_the_machines_or_what_a_limit_leaves(tmp_path: Path, files: dict[str, str], free: int) -> None:
    groups = V1_LINES if any(name.startswith("memory/") for name in files) else "0::/\n"
    meminfo = f"MemTotal: 1 kB\nMemAvailable:   {8 * GIB >> 10} kB\n"
    write(tmp_path, {"proc/self/cgroup": groups, "proc/meminfo": meminfo, **files})
    assert free_memory(tmp_path) == free


@pytest.mark.parametrize(("said", "kills"), [("pgfault 7\noom_kill 3\n", 3), ("oom_kill x\n", 0), ("pgfault 7\n", 0)])
def test_the_kernel_says_how_many_processes_it_has_killed_for_lack_of_memory(
    tmp_path: Path, said: str, kills: int
) -> None:
    assert memory_kills(tmp_path) == 0
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/vmstat").write_text(said)
    assert memory_kills(tmp_path) == kills


def test_an_agent_reports_what_its_container_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(machine, "cgroup_limits", lambda root: machine.MachineLimits(3.5, GIB / 4))
    said = facts("token", "127.0.0.1")
    assert (said.cores, said.memory_gib) == (4, 0.25)


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        (None, ("cuda:0", "cuda:1")),
        ("1", ("cuda:0",)),
        ("", ()),
        ("-1", ()),
        ("0,1,2", ("cuda:0", "cuda:1")),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", ("cuda:0",)),
        ("NoDevFiles", ()),
        ("1,-1,0", ("cuda:0",)),
    ],
)
def test_cuda_devices_are_those_that_are_visible(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, devices: tuple[str, ...]
) -> None:
    monkeypatch.setattr(machine, "count_gpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert cuda_devices() == devices


def test_gpus_are_counted_in_proc_or_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
    assert count_gpus(tmp_path) == 2  # from a driver that does not report device numbers
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: H200 (UUID: x)'\necho '  MIG 1g'\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    tool.chmod(0o755)
    assert count_gpus(tmp_path / "none") == 1
    tool.unlink()
    assert count_gpus(tmp_path / "none") == 0


def test_gpus_whose_device_files_cannot_be_opened_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "dev").mkdir()
    for minor in range(4):
        gpu = tmp_path / f"proc/driver/nvidia/gpus/0000:0{minor}:00.0"
        gpu.mkdir(parents=True)
        # In the driver's format; the folders are not in the order of the device files.
        (gpu / "information").write_text(f"Model: \t\t NVIDIA H100\nDevice Minor: \t {3 - minor}\nGPU Firmware: \t 1\n")
    # None of these can be opened by any user: a missing file, a folder, a dangling link, a link to itself.
    (tmp_path / "dev/nvidia1").mkdir()
    (tmp_path / "dev/nvidia2").symlink_to("nothing")
    (tmp_path / "dev/nvidia3").symlink_to("nvidia3")
    assert count_gpus(tmp_path) == 0
    (tmp_path / "dev/nvidia0").touch()
    assert count_gpus(tmp_path) == 1
    # nvidia-smi may create device files only when it runs: if none can be opened, its answer counts.
    (tmp_path / "dev/nvidia0").unlink()
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: H100 (UUID: x)'\n")
    tool.chmod(0o755)
    assert count_gpus(tmp_path) == 1
