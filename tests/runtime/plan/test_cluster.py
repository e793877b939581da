"""A cluster file says what is wrong with it, all at once; without one, this machine is the cluster."""

import os
import re
from pathlib import Path

import pytest

from penstock.graph import Program, load, trace
from penstock.runtime.cluster import cluster as module
from penstock.runtime.cluster.cluster import Cluster, ClusterError, Host, cuda_devices
from penstock.runtime.cluster.gpus import GPUS, Efficiency, Gpu, Tflops
from penstock.runtime.cluster.placement import place

PAGES = [Path(__file__).resolve().parents[3] / "docs" / name for name in ("hosts.md", "cluster-file.md")]

GOOD = """
bind = "10.0.0.1:5555"
[[hosts]]
name = "a"
address = "10.0.0.1"
cores = 16
devices = ["cuda:0", "cpu"]
[[hosts]]
name = "b"
address = "10.0.0.2"
agent = "external"
cores = 64
[pools]
generator = "b"
"""


def _read(folder: Path, text: str) -> Cluster:
    path = folder / "cluster.toml"
    path.write_text(text)
    return Cluster.read(path)


def test_a_cluster_file_is_read(tmp_path: Path) -> None:
    cluster = _read(tmp_path, GOOD)
    assert cluster.hosts == (
        Host(name="a", cores=16, devices=("cuda:0", "cpu"), address="10.0.0.1"),
        Host(name="b", cores=64, agent="external", address="10.0.0.2"),
    )
    assert cluster.host("a").accelerators == ("cuda:0",)
    assert [[host.name for host in cluster.hosts_of(pool)] for pool in ("generator", "trainer")] == [["b"], ["a"]]
    assert cluster.endpoint(tmp_path) == "tcp://10.0.0.1:5555"


@pytest.mark.parametrize(
    ("change", "into", "message"),
    [
        ("bind =", "bnd =", "unknown key 'bnd'; did you mean 'bind'?"),
        ("cores = 16", "core = 16", "unknown key 'hosts.0.core'; did you mean 'cores'?"),
        ("cores = 16", "", "hosts.0.cores: missing"),
        ("cores = 16", "cores = 0", "hosts.0.cores: given 0; input should be greater than or equal to 1"),
        ('"cuda:0"', '"gpu0"', "hosts.0.devices.0: given 'gpu0', needed 'cpu' or 'cuda:<number>'"),
        ('"cuda:0"', '"cuda:0", "cuda:0"', "hosts.0.devices: cuda:0 is there twice"),
        ('"external"', '"extern"', "hosts.1.agent: given 'extern'"),
        ('name = "b"', 'name = "b/c"', "hosts.1.name: given 'b/c', needed letters"),
        ('name = "b"', 'name = "a"', "hosts: a is there twice"),
        ('generator = "b"', 'generator = "bb"', "pools.generator: given host 'bb'; did you mean 'b'?"),
        ('generator = "b"', 'generator = ["a", "c"]', "pools.generator: given host 'c'; known: a, b"),
        ('generator = "b"', 'generator = ["b", "b"]', "pools.generator: given ['b', 'b'], needed the name of a host"),
        ('generator = "b"', "generator = [2]", "pools.generator: given [2], needed the name of a host, or of several"),
        ('"10.0.0.2"', '"eth0"', "hosts.1.address: given 'eth0', needed an IP address, such as 10.0.0.2"),
        ('"10.0.0.2"', '"*"', "hosts.1.address: given '*:0', every interface"),
        ('"10.0.0.2"', '"10.0.0.2:70"', "hosts.1.address: given '10.0.0.2:70', needed an address without a port"),
        ('address = "10.0.0.2"', "", "hosts: bind is 10.0.0.1:5555, and hosts b have no `address` but of loopback"),
        ('"10.0.0.2"', '"127.0.0.1"', "hosts: bind is 10.0.0.1:5555, and hosts b have no `address` but of loopback"),
        ('"10.0.0.2"', '"[fd00::2]"', "hosts: given an `address` of IPv4 and one of IPv6"),
        ('bind = "10.0.0.1:5555"', "", "bind: given none, and the agent of b is on another machine; needed where"),
        ("10.0.0.1", "0.0.0.0", "bind: given '0.0.0.0:5555', every interface"),
        ("[pools]", "[pools", "not TOML"),
    ],
)
def test_a_fault_is_named_with_the_file_and_what_is_needed(
    tmp_path: Path, change: str, into: str, message: str
) -> None:
    assert change in GOOD
    with pytest.raises(ClusterError) as caught:
        _read(tmp_path, GOOD.replace(change, into, 1))
    assert f"{tmp_path / 'cluster.toml'}: {message}" in str(caught.value)


def test_all_faults_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ClusterError) as caught:
        _read(tmp_path, GOOD.replace("bind", "bnd").replace("cores = 16", "core = 16").replace("external", "x"))
    assert len(str(caught.value).splitlines()) == 4


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"none\.toml: cannot be read: No such file"):
        Cluster.read(tmp_path / "none.toml")


def test_no_hosts_are_no_cluster(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="hosts"):
        _read(tmp_path, "hosts = []")


def test_this_machine_is_one_host_with_the_cores_this_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 6})
    (host,) = Cluster.local().hosts
    assert (host.name, host.cores, host.agent) == ("local", 3, "local")
    assert Cluster.local().endpoint(tmp_path) == f"ipc://{tmp_path}/control.sock"


def test_an_external_agent_needs_tcp_and_loopback_is_the_default(tmp_path: Path) -> None:
    cluster = Cluster(hosts=(Host(name="a", cores=1, agent="external"),))
    assert cluster.endpoint(tmp_path) == "tcp://127.0.0.1:0"


@pytest.mark.parametrize(
    ("visible", "devices"),
    [(None, ("cuda:0", "cuda:1")), ("1", ("cuda:0",)), ("", ()), ("-1", ()), ("0,1,2", ("cuda:0", "cuda:1"))],
)
def test_cuda_devices_are_those_that_are_visible(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, devices: tuple[str, ...]
) -> None:
    monkeypatch.setattr(module, "_count_gpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert cuda_devices() == devices


def test_gpus_are_counted_in_proc_or_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / name).mkdir(parents=True)
    assert module._count_gpus(tmp_path / "gpus") == 2
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: H200 (UUID: x)'\necho '  MIG 1g'\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    tool.chmod(0o755)
    assert module._count_gpus(tmp_path / "none") == 1
    tool.unlink()
    assert module._count_gpus(tmp_path / "none") == 0


def _pages() -> str:
    return "\n".join(page.read_text() for page in PAGES)


def _documented(folder: Path) -> list[Cluster]:
    """The files of the pages, in their order."""
    return [_read(folder, text) for text in re.findall(r"(?ms)^```toml[^\n]*\n(.*?)^```", _pages())]


def test_the_documented_files_are_clusters(tmp_path: Path) -> None:
    far, near, own = _documented(tmp_path)
    program = load("aipo")
    assert isinstance(program, Program)
    for cluster in (far, near):
        plan = place([trace(program, {})], cluster)
        ranks = {made.name: {rank.host for replica in made.replicas for rank in replica.ranks} for made in plan.pools}
        assert ranks == {name: {"b" if name == "generator" else "a"} for name in ("generator", "scorer", "trainer")}
        assert [host.agent for host in cluster.hosts] == ["local", "external"]
    kind = own.gpu_of(own.hosts[0])
    assert kind is not None
    assert (kind.memory_gib, kind.tflops.bf16, kind.tflops.fp8) == (96, 800, 1979)


def test_all_keys_are_documented() -> None:
    """Those of [cpus] are measured, and not for people."""
    rows = [line for line in _pages().splitlines() if line.startswith("| ")]
    words = {word for row in rows for key in re.findall(r"`([^`]+)`", row) for word in re.findall(r"\w+", key)}
    models = (Cluster, Host, Gpu, Tflops, Efficiency)
    assert {key for model in models for key in model.model_fields} - words == set()
    assert [kind for kind in GPUS if kind not in _pages()] == []
