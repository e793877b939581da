"""A cluster in a word or with kinds of GPUs of its own; what is wrong is said with the nearest name."""

from pathlib import Path

import pytest

from penstock.runtime.cluster.cluster import Cluster, ClusterError, read_cluster
from penstock.runtime.cluster.gpus import GPUS
from penstock.runtime.plan.candidates import node_groups
from penstock.runtime.plan.collectives import gather_s

OWN = """
[[hosts]]
name = "a"
cores = 8
devices = ["cuda:0", "cuda:1"]
gpu = "ours"
[[hosts]]
name = "b"
cores = 8
devices = ["cuda:0"]
gpu = "B200"
[[hosts]]
name = "c"
cores = 64
[gpus.ours]
like = "H100"
memory_gib = 96
tflops.bf16 = 800
"""


def test_a_word_makes_hosts_of_gpus_of_a_kind() -> None:
    cluster = read_cluster("32x8xH100")
    assert len(cluster.hosts) == 32
    assert all(len(host.accelerators) == 8 for host in cluster.hosts)
    assert cluster.gpu_of(cluster.hosts[31]) == GPUS["H100"]


@pytest.mark.parametrize(
    ("given", "joined"), [("2x8xH100", 8), ("2x4xH100", 4), ("8x1xA100", 1), ("1x16xH100", 8), ("18x4xGB200", 72)]
)
def test_nvlink_ends_with_the_host_unless_more_gpus_are_joined_than_a_host_has(given: str, joined: int) -> None:
    (nodes,) = node_groups(read_cluster(given))
    assert nodes.gpu.nvlink_gpus == joined


def test_a_gather_over_hosts_of_four_gpus_takes_longer_than_in_one_of_eight() -> None:
    (one,), (two,) = (node_groups(read_cluster(given)) for given in ("1x8xH100", "2x4xH100"))
    took = [gather_s(nodes.gpu, 1e9, 8) for nodes in (one, two)]
    assert took[1] > 2 * took[0]


def test_kinds_are_mixed_with_a_plus_and_names_differ() -> None:
    cluster = read_cluster("2x8xH100+1x4xB200")
    assert [(h.name, h.gpu, len(h.devices)) for h in cluster.hosts] == [
        ("host0", "H100", 8),
        ("host1", "H100", 8),
        ("host2", "B200", 4),
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("32x8xH10", "--cluster 32x8xH10: given GPUs of kind 'H10'; did you mean 'H100'?"),
        ("8xH100", "given '8xH100', needed hosts x GPUs x kind such as 32x8xH100"),
        ("0x8xH100", "given 0 hosts of 8 GPUs, needed at least 1 of each"),
        ("2x0xH100", "given 2 hosts of 0 GPUs"),
        ("9999999x8xH100", "given 79999992 GPUs in 9999999x8xH100, needed at most 100000"),
        ("none.toml", "none.toml: cannot be read"),
    ],
)
def test_a_word_that_is_no_cluster_is_refused(given: str, message: str) -> None:
    with pytest.raises(ClusterError) as caught:
        read_cluster(given)
    assert message in str(caught.value)


def test_a_file_may_have_kinds_of_its_own_beside_others(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(OWN)
    cluster = read_cluster(str(path))
    ours, b200, none = (cluster.gpu_of(host) for host in cluster.hosts)
    assert ours is not None
    assert (ours.memory_gib, ours.tflops.bf16, ours.tflops.fp8) == (96, 800, GPUS["H100"].tflops.fp8)
    assert b200 == GPUS["B200"]
    assert none is None
    assert Cluster.model_validate(cluster.model_dump()) == cluster


@pytest.mark.parametrize(
    ("change", "into", "message"),
    [
        ('gpu = "B200"', 'gpu = "B20"', "hosts: b: given gpu 'B20'; did you mean 'B200'?"),
        ('gpu = "B200"', 'gpus = "B200"', "unknown key 'hosts.1.gpus'; did you mean 'gpu'?"),
        ("memory_gib = 96", "memroy_gib = 96", "unknown key 'gpus.ours.memroy_gib'; did you mean 'memory_gib'?"),
        ("tflops.bf16", "tflops.bf61", "unknown key 'gpus.ours.tflops.bf61'; did you mean 'bf16'?"),
        ("memory_gib = 96", "memory_gib = 0", "gpus.ours.memory_gib: given 0"),
        ('like = "H100"', 'like = "H1000"', "ours.like: given 'H1000'; did you mean 'H100'?"),
        ('like = "H100"', "", "gpus.ours.memory_gb_s: missing"),
    ],
)
def test_faults_of_kinds_are_named(tmp_path: Path, change: str, into: str, message: str) -> None:
    path = tmp_path / "cluster.toml"
    assert change in OWN
    path.write_text(OWN.replace(change, into, 1))
    with pytest.raises(ClusterError) as caught:
        Cluster.read(path)
    assert message in str(caught.value)


def test_gpus_without_a_kind_run_but_cannot_be_planned(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(OWN.replace('gpu = "B200"', ""))
    cluster = Cluster.read(path)
    with pytest.raises(ClusterError, match="hosts: b: given 1 CUDA devices, needed the kind of its GPUs"):
        cluster.gpu_of(cluster.hosts[1])
