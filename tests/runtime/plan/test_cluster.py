"""Clusters from a file or a word, and meshes of pools; errors are reported at once, with the nearest valid input."""

import os
import re
import sys
from itertools import product
from pathlib import Path

import pytest
from pydantic import BaseModel

from penstock.graph import Program, load, trace
from penstock.nodes.model import eight_bit
from penstock.runtime.cluster.cluster import Cluster, ClusterError, Cpu, Host, PoolTable, nearest, read_cluster
from penstock.runtime.cluster.gpus import FP8_SINCE, GPUS, Efficiency, Gpu, HostTime, Tflops, gpu_like, kind_of
from penstock.runtime.cluster.placement import check_pools, place, read_meshes, spelled
from penstock.runtime.cluster.slots import moved
from penstock.runtime.plan.candidates import node_groups

DOCS = Path(__file__).resolve().parents[3] / "docs"
PAGES = "\n".join((DOCS / name).read_text() for name in ("hosts.md", "cluster-file.md"))

GOOD = """
bind = "10.0.0.1:5555"
hosts = [
    { name = "a", address = "10.0.0.1", cores = 16, devices = ["cuda:0", "cpu"] },
    { name = "b", address = "10.0.0.2", agent = "external", cores = 64 },
]
pools.generator = "b"
"""
KINDS = """
hosts = [
    { name = "a", cores = 8, devices = ["cuda:0", "cuda:1"], gpu = "ours" },
    { name = "b", cores = 8, devices = ["cuda:0"], gpu = "B200" },
    { name = "c", cores = 64 },
]
[gpus.ours]
like = "H100"
memory_gib = 96
tflops.bf16 = 800
"""


def _read(folder: Path, text: str) -> Cluster:
    path = folder / "cluster.toml"
    path.write_text(text)
    return Cluster.read(path)


def test_a_host_name_is_an_address(tmp_path: Path) -> None:
    found = _read(tmp_path, GOOD.replace('"10.0.0.2"', '"node-7.cluster.local"').replace("10.0.0.1:5555", "head:5555"))
    assert (found.hosts[1].address, found.bind) == ("node-7.cluster.local", "head:5555")


def test_a_cluster_file_is_read(tmp_path: Path) -> None:
    cluster = _read(tmp_path, GOOD)
    assert cluster.hosts == (
        Host(name="a", cores=16, devices=("cuda:0", "cpu"), address="10.0.0.1"),
        Host(name="b", cores=64, agent="external", address="10.0.0.2"),
    )
    assert cluster.host("a").accelerators == ("cuda:0",)
    assert [[host.name for host in cluster.hosts_of(pool)] for pool in ("generator", "trainer")] == [["b"], ["a"]]
    assert cluster.endpoint(tmp_path) == "tcp://10.0.0.1:5555"


def test_a_file_without_hosts_is_about_this_machine(tmp_path: Path) -> None:
    cluster = _read(tmp_path, f'[pools.generator]\npython = "{sys.executable}"\n')
    assert cluster.hosts == Cluster.local().hosts
    assert cluster.python_of("generator") == sys.executable


FAULTS = (
    ("bind =", "bnd =", "unknown key 'bnd'; did you mean 'bind'?"),
    ("cores = 16", "core = 16", "unknown key 'hosts.0.core'; did you mean 'cores'?"),
    ("cores = 16, ", "", "hosts.0: given name, address, devices, needed cores, too"),
    ("cores = 16", "cores = 0", "hosts.0.cores: given 0, needed at least 1"),
    ("cores = 16", "cores = 1.5", "hosts.0.cores: given 1.5, needed a whole number"),
    ("cores = 16", "cores = [16]", "hosts.0.cores: given [16], needed a whole number"),
    ('["cuda:0", "cpu"]', '"cuda:0"', "hosts.0.devices: given 'cuda:0', needed a list: [\"cuda:0\"]"),
    ('name = "b"', "name = 7", "hosts.1.name: given 7, needed a text in quotes"),
    ('"cuda:0"', '"gpu0"', "hosts.0.devices.0: given 'gpu0', needed 'cpu' or 'cuda:<number>'"),
    ('"cuda:0"', '"cuda:0", "cuda:0"', "hosts.0.devices: cuda:0 is there twice"),
    ('"external"', '"extern"', "hosts.1.agent: given 'extern', needed 'local' or 'external'"),
    ('name = "b"', 'name = "b/c"', "hosts.1.name: given 'b/c', needed letters"),
    ('name = "b"', 'name = "a"', "hosts: a is there twice"),
    ('generator = "b"', 'generator = "bb"', "pools.generator: given host 'bb'; did you mean 'b'?"),
    ('generator = "b"', 'generator = ["a", "c"]', "pools.generator: given host 'c'; known: a, b"),
    ('generator = "b"', 'generator = ["b", "b"]', "pools.generator: given ['b', 'b'], needed the name of a host"),
    ('generator = "b"', "generator = [2]", "pools.generator: given [2], needed the name of a host, or of several"),
    (
        'generator = "b"',
        'generator.hots = "b"',
        "pools.generator: its table: unknown key 'hots'; did you mean 'hosts'?",
    ),
    ('generator = "b"', 'generator.hosts = "bb"', "pools.generator: given host 'bb'; did you mean 'b'?"),
    (
        'generator = "b"',
        'generator.python = "python3"',
        "pools.generator: its table: python: given 'python3', needed the",
    ),
    ('"10.0.0.2"', '"two words"', "hosts.1.address: given 'two words', needed a host name or an IP address, such as"),
    ('"10.0.0.2"', '"*"', "hosts.1.address: given '*:0', every interface"),
    ('"10.0.0.2"', '"10.0.0.2:70"', "hosts.1.address: given '10.0.0.2:70', needed an address"),
    ('address = "10.0.0.2", ', "", "hosts: bind is 10.0.0.1:5555, and hosts b have no `address` but of loopback"),
    ('"10.0.0.2"', '"127.0.0.1"', "hosts: bind is 10.0.0.1:5555, and hosts b have no `address` but of loopback"),
    ('"10.0.0.2"', '"[fd00::2]"', "hosts: given an `address` of IPv4 and one of IPv6"),
    ('bind = "10.0.0.1:5555"', "", "bind: given none, and the agent of b is on another machine"),
    ("10.0.0.1", "0.0.0.0", "bind: given '0.0.0.0:5555', every interface"),
    ("hosts = [", "hosts = ", "not TOML"),
    (GOOD, "hosts = []", "hosts: given [], needed at least 1: [[hosts]] for each host"),
    (GOOD, '[hosts]\nname = "a"', "hosts: given {'name': 'a'}, needed a list: [[hosts]] for each host"),
    (GOOD, 'hosts = ["a"]', "hosts.0: given 'a', needed a table: [[hosts]] for each host"),
    (GOOD, "gpus = 3", "gpus: given 3, needed a table: [gpus.NAME]"),
    ('gpu = "B200"', 'gpu = "B20"', "hosts: b: given gpu 'B20'; did you mean 'B200'?"),
    ('gpu = "B200"', 'gpus = "B200"', "unknown key 'hosts.1.gpus'; did you mean 'gpu'?"),
    ("memory_gib = 96", "memroy_gib = 96", "unknown key 'gpus.ours.memroy_gib'; did you mean 'memory_gib'?"),
    ("tflops.bf16", "tflops.bf61", "unknown key 'gpus.ours.tflops.bf61'; did you mean 'bf16'?"),
    ("memory_gib = 96", "memory_gib = 0", "gpus.ours.memory_gib: given 0, needed a number above 0"),
    ("memory_gib = 96", "memory_gib = [96]", "gpus.ours.memory_gib: given [96], needed a number"),
    ("memory_gib = 96", "efficiency.link = 2", "gpus.ours.efficiency.link: given 2, needed at most 1"),
    ("memory_gib = 96", "engine.eager = 5.5", "gpus.ours.engine.eager: given 5.5, needed true or false"),
    ("tflops.bf16 = 800", "tflops = 800", "gpus.ours.tflops: given 800, needed a table: { bf16 = 800 }"),
    ('like = "H100"', 'like = "H1000"', "gpus: ours.like: given 'H1000'; did you mean 'H100'?"),
    ('like = "H100"', 'like = ["H100"]', "gpus: ours.like: given ['H100']; did you mean 'H100'?"),
    ('like = "H100"', 'like = { kind = "H100" }', "gpus: ours.like: given {'kind': 'H100'}; known: A100, "),
    ('like = "H100"', "", "gpus.ours: given memory_gib, tflops, needed memory_gb_s, too"),
)


@pytest.mark.parametrize(("change", "into", "message"), FAULTS)
def test_a_fault_is_named_with_the_file_and_what_is_needed(
    tmp_path: Path, change: str, into: str, message: str
) -> None:
    with pytest.raises(ClusterError) as caught:
        _read(tmp_path, (GOOD if change in GOOD else KINDS).replace(change, into, 1))
    assert f"{tmp_path / 'cluster.toml'}: {message}" in str(caught.value)


# A value of each kind that TOML has, and numbers outside of any range.
VALUES = ('"x"', f'"{"9" * 5000}"', "-1", "1.5", "inf", "nan", "true", "[]", "[1]", "{}", "{ a = 1 }", "1979-05-27")
PLACES: dict[str, type[BaseModel]] = {
    "{} = {}": Cluster,
    "hosts = [{{ name = 'a', cores = 1 }}, {{ {} = {} }}]": Host,
    "pools.a.{} = {}": PoolTable,
    "gpus.a.{} = {}": Gpu,
    "gpus.a.tflops.{} = {}": Tflops,
    "gpus.a.efficiency.{} = {}": Efficiency,
    "gpus.a.engine.{} = {}": HostTime,
    "cpus.a.{} = {}": Cpu,
}


@pytest.mark.parametrize("place", PLACES)
def test_every_wrong_value_is_told_in_words_of_toml(tmp_path: Path, place: str) -> None:
    said = ""
    for key, value in product(PLACES[place].model_fields, VALUES):
        try:
            _read(tmp_path, place.format(key, value))
        except ClusterError as error:
            said += str(error).lower()
    assert "needed" in said
    assert not re.search(r"tuple|dictionary|instance|input", said)


def test_all_faults_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ClusterError) as caught:
        _read(tmp_path, GOOD.replace("bind", "bnd").replace("cores = 16", "core = 16").replace("external", "x"))
    assert len(str(caught.value).splitlines()) == 4


def test_the_nearest_name_is_offered_or_all_of_them() -> None:
    assert nearest("generater", ["trainer", "generator"]) == "did you mean 'generator'?"
    assert nearest("xyz", ["b", "a"]) == "known: a, b"


def test_this_machine_is_one_host_with_the_cores_this_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1})
    (host,) = Cluster.local().hosts
    assert (host.name, host.cores, host.agent) == ("local", 1, "local")
    assert Cluster.local().endpoint(tmp_path) == f"ipc://{tmp_path}/control.sock"
    # An external agent needs TCP; the default address is loopback.
    far = Cluster(hosts=(Host(name="a", cores=1, agent="external"),))
    assert far.endpoint(tmp_path) == "tcp://127.0.0.1:0"


def test_the_documented_files_are_clusters(tmp_path: Path) -> None:
    files = re.findall(r"(?ms)^```toml[^\n]*\n(.*?)^```", PAGES)
    # The other TOML blocks show single keys.
    far, own = (_read(tmp_path, text) for text in files if "[[hosts]]" in text)
    program = load("aipo")
    assert isinstance(program, Program)
    plan = place([trace(program, {})], far)
    ranks = {made.name: {rank.host for replica in made.replicas for rank in replica.ranks} for made in plan.pools}
    assert ranks == {name: {"b" if name == "generator" else "a"} for name in ("generator", "scorer", "trainer")}
    assert [host.agent for host in far.hosts] == ["local", "external"]
    kind = own.gpu_of(own.hosts[0])
    assert kind is not None
    assert (kind.memory_gib, kind.tflops.bf16, kind.tflops.fp8) == (96, 800, 1979)


def test_all_keys_are_documented() -> None:
    rows = [line for line in PAGES.splitlines() if line.startswith("| ")]
    words = {word for row in rows for key in re.findall(r"`([^`]+)`", row) for word in re.findall(r"\w+", key)}
    models = (Cluster, Host, Gpu, Tflops, Efficiency, HostTime)
    assert {key for model in models for key in model.model_fields} - words == set()
    assert [kind for kind in GPUS if kind not in PAGES] == []


def test_a_kind_may_lack_each_precision_but_bf16(tmp_path: Path) -> None:
    lacking = _read(tmp_path, KINDS + "tflops.fp32 = 0\ntflops.fp8 = 0\ntflops.fp4 = 0\n").gpus["ours"].tflops
    assert (lacking.bf16, lacking.fp32, lacking.fp8, lacking.fp4) == (800, 0, 0, 0)
    with pytest.raises(ClusterError, match=r"gpus\.ours\.tflops\.bf16: given 0, needed a number above 0"):
        _read(tmp_path, KINDS.replace("800", "0"))
    (row,) = [line for line in PAGES.splitlines() if line.startswith("| `tflops`")]
    assert "`bf16`, above 0;" in row


def test_a_word_makes_hosts_of_gpus_of_kinds_whose_names_differ() -> None:
    cluster = read_cluster("32x8xH100")
    assert len(cluster.hosts) == 32
    assert all(len(host.accelerators) == 8 for host in cluster.hosts)
    assert cluster.gpu_of(cluster.hosts[31]) == GPUS["H100"]
    mixed = [(h.name, h.gpu, len(h.devices)) for h in read_cluster("2x8xH100+1x4xB200").hosts]
    assert mixed == [("host0", "H100", 8), ("host1", "H100", 8), ("host2", "B200", 4)]


@pytest.mark.parametrize(
    ("given", "joined"), [("2x8xH100", 8), ("2x4xH100", 4), ("8x1xA100", 1), ("1x16xH100", 8), ("18x4xGB200", 72)]
)
def test_nvlink_ends_with_the_host_unless_more_gpus_are_joined_than_a_host_has(given: str, joined: int) -> None:
    (nodes,) = node_groups(read_cluster(given))
    assert nodes.gpu.nvlink_gpus == joined


def test_a_word_without_hosts_is_one_host() -> None:
    assert read_cluster("8xH100") == read_cluster("1x8xH100")
    assert [host.name for host in read_cluster("8xH100+2x4xA100").hosts] == ["host0", "host1", "host2"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("32x8xH10", "--cluster 32x8xH10: given GPUs of kind 'H10'; did you mean 'H100'?"),
        ("H100", "given 'H100', needed hosts x GPUs x kind such as 32x8xH100, GPUs x kind of one host such as 8xH100"),
        ("0xH100", "--cluster 0xH100: given '0xH100', needed at least 1 host, and at least 1 GPU in it"),
        ("32x8xH100+", "given '32x8xH100+', needed hosts x GPUs x kind"),
        ("0x8xH100", "given '0x8xH100', needed at least 1 host, and at least 1 GPU"),
        ("9999999x8xH100", "given 79999992 GPUs in 9999999x8xH100, needed at most 100000"),
        ("none.toml", "none.toml: given no file there"),
    ],
)
def test_a_word_that_is_no_cluster_is_refused(given: str, message: str) -> None:
    with pytest.raises(ClusterError) as caught:
        read_cluster(given)
    assert message in str(caught.value)


def test_a_file_may_have_kinds_of_its_own_beside_others(tmp_path: Path) -> None:
    cluster = _read(tmp_path, KINDS)
    ours, b200, none = (cluster.gpu_of(host) for host in cluster.hosts)
    assert ours is not None
    assert (ours.memory_gib, ours.tflops.bf16, ours.tflops.fp8) == (96, 800, GPUS["H100"].tflops.fp8)
    assert (b200, none) == (GPUS["B200"], None)
    assert Cluster.model_validate(cluster.model_dump()) == cluster
    # A run can use GPUs without a kind, but they cannot be planned for.
    unknown = _read(tmp_path, KINDS.replace(', gpu = "B200"', ""))
    with pytest.raises(ClusterError, match="hosts: b: given 1 CUDA devices, needed the kind of its GPUs"):
        unknown.gpu_of(unknown.hosts[1])


@pytest.mark.parametrize(
    ("name", "memory_gib", "kind", "figures"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "H100", (3350, 450, 1979)),
        ("NVIDIA H100 PCIe", 79.1, "NVIDIA-H100-PCIe", (2000, 0, 1513)),
        ("NVIDIA A100-SXM4-40GB", 39.4, "NVIDIA-A100-SXM4-40GB", (1555, 300, 0)),
        ("NVIDIA A100-SXM4-80GB", 79.3, "A100", (2039, 300, 0)),
        ("NVIDIA GH200 480GB", 94.5, "NVIDIA-GH200-480GB", (4000, 0, 1979)),
        ("NVIDIA GB200", 184.0, "GB200", (8000, 900, 5000)),
        # A MIG slice of a card.
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.5, "NVIDIA-H100-80GB-HBM3-MIG-1g-10gb", (3350, 450, 1979)),
    ],
)
def test_a_gpu_has_the_figures_of_what_its_driver_calls_it_and_its_own_memory(
    name: str, memory_gib: float, kind: str, figures: tuple[float, ...]
) -> None:
    gpu = gpu_like(name, memory_gib)
    assert kind_of(name, memory_gib) == kind
    assert (gpu.memory_gb_s, gpu.nvlink_gb_s, gpu.tflops.fp8, gpu.memory_gib) == (*figures, memory_gib)


def test_plans_and_ranks_have_one_bound_for_fp8() -> None:
    assert FP8_SINCE == eight_bit.FP8_SINCE


def test_a_mesh_is_read_as_it_is_spelled() -> None:
    words = ["trainer=fsdp2xtp2", "generator=tp2", "critic=1"]
    found = read_meshes(words)
    assert found == {"trainer": (("fsdp", 2), ("tp", 2)), "generator": (("tp", 2),), "critic": ()}
    assert [f"{pool}={spelled(axes)}" for pool, axes in found.items()] == words


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["fsdp2"], "given 'fsdp2', needed POOL=MESH"),
        (["trainer=fdsp2"], "--mesh trainer=fdsp2: given 'fdsp2', needed axes with their sizes"),
        (["trainer=fsdp0"], "given 'fsdp0', needed axes"),
        (["trainer=xx2"], "given 'xx2', needed axes"),
        (["trainer=dp2x"], "given 'dp2x', needed axes"),
        (["trainer="], "given no mesh, needed axes"),
        (["trainer=fsdp2xfsdp2"], "given an axis twice"),
        (["trainer=tp2", "trainer=tp4"], "given trainer twice"),
        (["trainor=tp2"], "--mesh trainor=tp2: no such pool, needed one of: trainer, scorer"),
        (["scorer=tp2"], "--mesh scorer=tp2: given a pool without a model, needed one of: trainer"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(words: list[str], given: str) -> None:
    with pytest.raises(ClusterError, match=given):  # noqa: PT012 - each of them refuses some
        meshes = read_meshes(words)
        check_pools(meshes, ["trainer"], ["trainer", "scorer"])


GPU_HOSTS = """
hosts = [
    { name = "a", cores = 8, devices = ["cuda:0", "cuda:1"], gpu = "H100" },
    { name = "b", cores = 8, devices = ["cuda:0", "cuda:1"], gpu = "H100" },
]
pools.generator = "b"
"""


def test_a_plan_moves_to_hosts_of_equal_shape_with_their_devices_and_what_is_not_said_of_them(tmp_path: Path) -> None:
    program = load("aipo")
    assert isinstance(program, Program)
    before = _read(tmp_path, GPU_HOSTS)
    plan = place([trace(program, {})], before, device="cuda", meshes=read_meshes(["trainer=fsdp2"]))
    now = _read(
        tmp_path,
        'hosts = [{ name = "n3", cores = 8, devices = ["cuda:4", "cuda:6"] }, '
        '{ name = "n4", cores = 8, devices = ["cuda:0", "cuda:1"], gpu = "H100" }, { name = "n5", cores = 2 }]',
    )
    on = moved(plan, before, now)
    assert on.lacks == ()
    places = {pool.name: pool.places for pool in on.plan.pools}
    assert places["trainer"] == [("n3", "cuda:4"), ("n3", "cuda:6")]
    assert [host for host, _ in places["generator"]] == ["n4"]
    assert (on.cluster.host("n3").gpu, on.cluster.hosts_of("generator")[0].name) == ("H100", "n4")
    other = _read(
        tmp_path, GPU_HOSTS.replace('"b", cores = 8', '"b", cores = 4').replace('gpu = "H100"', 'gpu = "B200"')
    )
    found = moved(plan, before, other)
    assert found.plan == plan
    assert found.lacks == (
        "host a: GPUs of the kind: given B200, needed H100",
        "host b: cores: given 4, needed 8",
        "host b: GPUs of the kind: given B200, needed H100",
    )
