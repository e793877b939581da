"""Where nodes run: pools by label, replicas, and the division of each host's cores and devices; which transports of
weights this allows, and when trainer and generator take turns."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.graph import load, trace
from penstock.graph.ir import Argument, Graph, Input, Node, Output, Ref
from penstock.graph.protocols import Axes
from penstock.runtime.cluster.cluster import Cluster, ClusterError, Host
from penstock.runtime.cluster.placement import (
    GROUPS_AHEAD,
    SMALL_CAPACITY,
    STREAM_CAPACITY,
    Plan,
    Pool,
    Rank,
    Replica,
    place,
    slots_overrun,
    why_no_turns,
    why_not,
)

TYPE = "penstock.graph.types:Rollouts"


def _node(name: str, pool: str, *reads: str, update: bool = False, samples: int = 0) -> Node:
    inputs = tuple(Input(read, TYPE, Ref(read)) for read in reads)
    options = (("samples", samples),) if samples else ()
    return Node(name, name, inputs, (Output("out", TYPE),), options, pool, "update" if update else "group")


def _graph(prefix: str = "", samples: int = 8, trains: bool = True, learner: str = "trainer") -> Graph:
    """policy, prompts -> generate -> score -> update; the update is optional."""
    sent = Node(f"{prefix}broadcast", "broadcast", (Input("value", TYPE, Ref("policy")),), (Output("out", TYPE),), (),
                "generator", "update", "broadcast", lag=1)  # fmt: skip
    nodes = [
        sent,
        _node(f"{prefix}generate", "generator", f"{prefix}prompts", f"{prefix}broadcast", samples=samples),
        _node(f"{prefix}score", "scorer", f"{prefix}generate"),
    ]
    if trains:
        nodes.append(_node("update", learner, "policy", f"{prefix}score", update=True))
    arguments = (
        Argument("policy", "carried", TYPE, "m:policy", learner if trains else "trainer"),
        Argument(f"{prefix}prompts", "source", TYPE, "m:prompts", "generator"),
    )
    result = Ref("update") if trains else Ref("policy")
    return Graph("g", "m:g", arguments, tuple(nodes), (("policy", result),))


TWO: dict[str, Axes] = {"trainer": (("fsdp", 2),)}
TRAIN, EVALUATE = _graph(), _graph("evaluate.", samples=1, trains=False)


def _cluster(cores: int = 8, *devices: str) -> Cluster:
    return Cluster(hosts=(Host(name="a", cores=cores, devices=devices),))


def _threads(plan: Plan) -> dict[str, int]:
    return {r.name: r.ranks[0].threads for r in plan.replicas}


def test_a_pool_holds_the_arguments_and_nodes_of_its_label_over_all_graphs_and_generators_are_replicated() -> None:
    plan = place([TRAIN, EVALUATE], _cluster(), generators=3)
    assert {p.name: p.holds for p in plan.pools} == {
        "trainer": ("policy", "update"),
        "generator": ("prompts", "generate", "evaluate.prompts", "evaluate.generate"),
        "scorer": ("score", "evaluate.score"),
    }
    assert [r.name for r in plan.replicas] == ["trainer/0", *(f"generator/{n}" for n in range(3)), "scorer/0"]
    assert plan == place([TRAIN, EVALUATE], _cluster(), generators=3) == Plan.from_json(plan.to_json())


def test_a_value_is_held_where_the_first_graph_says() -> None:
    plan = place([_graph(learner="learner"), EVALUATE], _cluster())
    assert [p.name for p in plan.pools] == ["learner", "generator", "scorer"]
    assert plan.pool_of("policy").name == "learner"


def test_a_generator_takes_the_groups_that_fill_its_slots_and_some_ahead() -> None:
    def capacities(*graphs: Graph) -> dict[str, int]:
        return {r.name: r.capacity for r in place(graphs, _cluster(), slots=60).replicas}

    assert capacities(TRAIN) == {"trainer/0": 1, "generator/0": 8 + GROUPS_AHEAD, "scorer/0": SMALL_CAPACITY}
    assert capacities(TRAIN, EVALUATE)["generator/0"] == 60 + GROUPS_AHEAD


def test_a_node_that_works_on_several_groups_at_once_is_given_more_of_them() -> None:
    nodes = tuple(replace(node, stream=node.name == "score") for node in TRAIN.nodes)
    streaming = {r.name: r.capacity for r in place([TRAIN.replace(nodes=nodes)], _cluster()).replicas}
    assert streaming["scorer/0"] == STREAM_CAPACITY > SMALL_CAPACITY
    measuring = tuple(replace(node, clock="update") if node.stream else node for node in nodes)
    plan = place([TRAIN.replace(nodes=measuring)], _cluster())
    assert {r.name: r.capacity for r in plan.replicas}["scorer/0"] == SMALL_CAPACITY


def test_a_pool_of_small_work_takes_more_groups_at_once_where_many_generators_make_them() -> None:
    def small(generators: int) -> int:
        plan = place([TRAIN], _cluster(), generators=generators)
        return {r.name: r.capacity for r in plan.replicas}["scorer/0"]

    assert [small(generators) for generators in (1, 16, 19, 64)] == [SMALL_CAPACITY, 4, 4, 16]


@pytest.mark.parametrize(
    ("cores", "generators", "threads"),
    [(1, 1, (1, 1)), (2, 1, (2, 1)), (2, 3, (2, 1)), (8, 1, (8, 4)), (9, 2, (9, 2)), (64, 4, (64, 8))],
)
def test_the_trainer_has_all_cores_and_generators_share_half_of_them(
    cores: int, generators: int, threads: tuple[int, int]
) -> None:
    found = _threads(place([TRAIN], _cluster(cores), generators=generators))
    assert (found["trainer/0"], found["generator/0"], found["scorer/0"]) == (*threads, 1)


def test_without_a_lag_generators_take_turns_with_the_trainer_and_have_all_cores_too() -> None:
    def at_once(node: Node) -> Node:
        return replace(node, lag=0) if node.construct == "broadcast" else node

    graph = TRAIN.replace(nodes=tuple(map(at_once, TRAIN.nodes)))
    assert _threads(place([graph], _cluster(8))) == {"trainer/0": 8, "generator/0": 8, "scorer/0": 1}
    assert _threads(place([graph], _cluster(8), generators=2))["generator/1"] == 4


def test_replicas_take_turns_over_the_hosts_of_their_pool() -> None:
    """Replicas share the cores of their host: two generators on b, and one on a, next to the trainer."""
    hosts = (Host(name="a", cores=8, devices=("cuda:0", "cuda:1")), Host(name="b", cores=8, devices=("cuda:0",)))
    cluster = Cluster(hosts=hosts, pools={"generator": ("b", "a")})
    plan = place([TRAIN], cluster, generators=3, device="cuda")
    placed = {r.name: (r.ranks[0].host, r.ranks[0].device, r.ranks[0].threads) for r in plan.replicas}
    assert placed == {
        "trainer/0": ("a", "cuda:0", 8),
        "generator/0": ("b", "cuda:0", 4),
        "generator/1": ("a", "cuda:1", 4),
        "generator/2": ("b", "cuda:0", 4),
        "scorer/0": ("a", "cpu", 1),
    }


MESHES: dict[str, Axes] = {"trainer": (("pp", 2), ("fsdp", 2), ("tp", 2)), "generator": (("tp", 2),)}


def test_a_replica_of_fewer_than_its_pools_hosts_has_its_ranks_on_several_in_blocks() -> None:
    """The trainer has four hosts, of which two have two generators each."""
    devices = tuple(f"cuda:{index}" for index in range(6))
    cluster = Cluster(
        hosts=tuple(Host(name=name, cores=8 - number, devices=devices) for number, name in enumerate("abcd")),
        pools={"trainer": tuple("abcd"), "generator": ("b", "d")},
    )
    plan = place([TRAIN], cluster, generators=4, device="cuda", meshes=MESHES)
    assert [(rank.host, rank.device) for rank in plan.replica("trainer/0").ranks] == [
        (host, device) for host in "abcd" for device in ("cuda:0", "cuda:1")
    ]
    # Each rank has as many threads as fit on the host with the fewest cores.
    assert {rank.threads for rank in plan.replica("trainer/0").ranks} == {5 // 2}
    placed = [[(rank.host, rank.device) for rank in plan.replica(f"generator/{n}").ranks] for n in range(4)]
    assert placed == [
        [("b", "cuda:2"), ("b", "cuda:3")],
        [("d", "cuda:2"), ("d", "cuda:3")],
        [("b", "cuda:4"), ("b", "cuda:5")],
        [("d", "cuda:4"), ("d", "cuda:5")],
    ]


def test_tensor_parallel_ranks_stay_within_a_host_unless_it_is_asked_for() -> None:
    hosts = tuple(Host(name=name, cores=8) for name in "abcd")
    cluster = Cluster(hosts=hosts, pools={"generator": tuple("abcd")})
    meshes: dict[str, Axes] = {"generator": (("tp", 4),)}
    with pytest.raises(ClusterError, match="--tp-over-hosts"):
        place([TRAIN], cluster, generators=2, meshes=meshes)
    plan = place([TRAIN], cluster, generators=2, meshes=meshes, tp_over_hosts=True)
    assert ["".join(rank.host for rank in plan.replica(f"generator/{n}").ranks) for n in (0, 1)] == ["aabb", "ccdd"]


@pytest.mark.parametrize(
    ("pools", "devices", "options", "fault"),
    [
        (
            {"trainer": ("a", "b")},
            (),
            {},
            r"pools\.trainer: given 2 hosts \(a, b\) for each replica of 1 rank, .*fsdp2",
        ),
        ({"scorer": ("a", "b")}, (), {}, r"pools\.scorer: given 2 hosts .* of 1 rank, needed one host"),
        (
            {"generator": ("a", "b", "c")},
            (),
            {"generators": 2},
            r"pools\.generator: given 3 hosts for 2 replicas, .* \(--generators\)",
        ),
        ({}, (), {"meshes": {"trainer": (("fsdp", 99999),)}}, "given 99999 ranks on a host of 8 cores, needed at most"),
        (
            {"trainer": ("a", "b")},
            (),
            {"meshes": {"trainer": (("fsdp", 1), ("tp", 4))}},
            r"trainer=fsdp1xtp4 \[mesh-hosts\]: .* --tp-over-hosts",
        ),
        (
            {"trainer": ("a", "b")},
            (),
            {"meshes": {"trainer": (("tp", 2), ("fsdp", 2))}},
            "mesh-hosts",
        ),
        (
            {"trainer": ("a", "d")},
            (),
            {"meshes": TWO},
            r"pools\.trainer \[no-network\]: .*a \(no address\), d \(10\.0\.0\.4\)",
        ),
        ({"generators": "a"}, (), {}, r"pools\.generators.*did you mean 'generator'"),
        ({}, (), {"generators": 0}, "given 0"),
        ({}, (), {"device": "cuda"}, "given 'cuda' for pool trainer; host a has no device"),
        ({}, ("cuda:0",), {"device": "cuda:7"}, r"given 'cuda:7' .* host a has cuda:0"),
        (
            {},
            ("cuda:0",),
            {"device": "cuda", "meshes": TWO},
            r"--mesh trainer=fsdp2: given 2 ranks for cuda:0 of",
        ),
        ({}, ("cuda:0", "cuda:1"), {"device": "cuda:0", "meshes": TWO}, "given 2 ranks for cuda:0 of host a, needed a"),
    ],
)
def test_what_cannot_be_placed_is_refused(
    pools: dict[str, Any], devices: tuple[str, ...], options: dict[str, Any], fault: str
) -> None:
    hosts = (Host(name="a", cores=8, devices=devices), *(Host(name=name, cores=8) for name in "bc"))
    hosts = (*hosts, Host(name="d", cores=8, address="10.0.0.4"))
    with pytest.raises(ClusterError, match=fault):
        place([TRAIN], Cluster(hosts=hosts, pools=pools), **options)


def test_a_pool_that_holds_everything_has_one_replica_and_room_to_generate() -> None:
    nodes = tuple(replace(node, pool="all") for node in TRAIN.nodes)
    arguments = tuple(replace(argument, pool="all") for argument in TRAIN.arguments)
    plan = place([TRAIN.replace(nodes=nodes, arguments=arguments)], _cluster(), generators=2, slots=16)
    (replica,) = plan.replicas
    assert (replica.capacity, replica.ranks[0].threads) == (2 + GROUPS_AHEAD, 8)


@pytest.mark.parametrize(
    ("devices", "device", "placed"),
    [
        (1, "cuda", ["cuda:0", "cuda:0", "cuda:0", "cpu"]),
        (2, "cuda", ["cuda:0", "cuda:1", "cuda:0", "cpu"]),
        (3, "cuda", ["cuda:0", "cuda:1", "cuda:2", "cpu"]),
        (2, "cuda:1", ["cuda:1", "cuda:1", "cuda:1", "cpu"]),
        (2, "cpu", ["cpu"] * 4),
    ],
)
def test_devices_are_taken_in_turn_and_shared_where_there_are_too_few(
    devices: int, device: str, placed: list[str]
) -> None:
    """One device may be named; "cpu" uses no GPU."""
    cluster = _cluster(8, *(f"cuda:{index}" for index in range(devices)))
    assert [r.ranks[0].device for r in place([TRAIN], cluster, generators=2, device=device).replicas] == placed


def test_a_model_that_never_changes_is_on_a_gpu_too() -> None:
    reference = Argument("reference", "carried", TYPE, "m:reference", "reference")
    results = (*TRAIN.results, ("reference", Ref("reference")))
    graph = replace(TRAIN, arguments=(*TRAIN.arguments, reference), results=results)
    plan = place([graph], _cluster(8, "cuda:0", "cuda:1"), device="cuda")
    found = {r.name: r.ranks[0].device for r in plan.replicas}
    assert found == {"trainer/0": "cuda:0", "generator/0": "cuda:1", "reference/0": "cuda:1", "scorer/0": "cpu"}


def test_each_replica_has_the_ranks_of_its_pools_mesh_and_they_share_its_cores_and_devices() -> None:
    cluster = _cluster(16, *(f"cuda:{i}" for i in range(8)))
    meshes: dict[str, Axes] = {"trainer": (("fsdp", 2), ("tp", 2)), "generator": (("tp", 2),)}
    plan = place([TRAIN, EVALUATE], cluster, generators=2, device="cuda", meshes=meshes)
    trainer, *generators = (r for r in plan.replicas if not r.name.startswith("scorer"))
    assert [rank.device for rank in trainer.ranks] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert [[rank.device for rank in r.ranks] for r in generators] == [["cuda:4", "cuda:5"], ["cuda:6", "cuda:7"]]
    assert (trainer.mesh, generators[0].mesh) == (meshes["trainer"], meshes["generator"])
    assert [rank.threads for rank in trainer.ranks] == [4] * 4
    assert Plan.from_json(plan.to_json()) == plan


def test_a_rank_is_named_with_its_host_where_there_are_several() -> None:
    def plan(*hosts: str) -> Plan:
        return Plan(tuple(Pool(f"p{n}", (), (Replica(f"p{n}/0", (Rank(host),)),)) for n, host in enumerate(hosts)))

    assert plan("a", "a").spelled("p1/0", 0) == "p1/0 rank 0"
    assert [plan("a", "b").spelled(f"p{n}/0", 0) for n in (0, 1)] == ["p0/0 rank 0 on host a", "p1/0 rank 0 on host b"]


def replica(name: str, *places: tuple[str, str]) -> Replica:
    return Replica(name, tuple(Rank(host, device, 1) for host, device in places), 1, ())


TRAINER = replica("trainer/0", ("a", "cuda:0"))
BESIDE = replica("generator/0", ("a", "cuda:0"), ("a", "cuda:1"))
ON_CPU = replica("generator/0", ("a", "cpu"))
FAR = replica("generator/1", ("b", "cuda:0"))
ONE_EACH = "needed a GPU of its own: NCCL joins no two ranks on one"


@pytest.mark.parametrize(
    ("asked", "source", "target", "why"),
    [
        ("auto", TRAINER, FAR, ""),
        ("messages", TRAINER, FAR, ""),
        ("cuda_ipc", TRAINER, BESIDE, ""),
        ("shm", TRAINER, ON_CPU, ""),
        ("cuda_ipc", TRAINER, ON_CPU, "generator/0 rank 0 is on the CPU, needed a GPU"),
        ("cuda_ipc", ON_CPU, BESIDE, "generator/0 rank 0 is on the CPU, needed a GPU"),
        ("cuda_ipc", TRAINER, FAR, "generator/1 rank 0 is on host b, needed host a with trainer/0"),
        ("shm", TRAINER, BESIDE, "generator/0 rank 0 is on cuda:0, needed the CPU to receive in the host's memory"),
        ("nccl", TRAINER, FAR, ""),
        ("nccl", TRAINER, ON_CPU, "generator/0 rank 0 is on the CPU, needed a GPU"),
        ("nccl", ON_CPU, FAR, "generator/0 rank 0 is on the CPU, needed a GPU"),
        ("nccl", TRAINER, BESIDE, f"generator/0 rank 0 is on cuda:0 with trainer/0 rank 0, {ONE_EACH}"),
        ("nccl", BESIDE, FAR, ""),
        (
            "nccl",
            replica("trainer/0", *[("a", "cuda:1")] * 2),
            FAR,
            f"trainer/0 rank 1 is on cuda:1 with trainer/0 rank 0, {ONE_EACH}",
        ),
    ],
)
def test_a_way_that_a_plan_rules_out_is_named_with_the_rank(
    asked: str, source: Replica, target: Replica, why: str
) -> None:
    assert why_not(asked, source, [target]) == why
    if asked == "nccl" and not why:
        assert (
            why_not(asked, source, [target], delta=4) == "--delta 4 is made and applied on the hosts, needed messages"
        )


@pytest.mark.parametrize(
    ("program", "devices", "device", "generators", "options", "reason"),
    [
        ("aipo", 1, "cuda", 1, {"lag": 0}, ""),
        ("aipo", 1, "cuda:0", 1, {"lag": 0}, ""),
        ("aipo", 2, "cuda:1", 1, {"lag": 0}, ""),
        ("aipo", 2, "cuda", 2, {"lag": 0}, ""),  # the second generator shares the trainer's device
        ("aipo", 2, "cuda", 1, {"lag": 0}, "trainer and generator have devices of their own"),
        ("aipo", 1, "cuda", 1, {"lag": 1}, "with a lag of 1 trainer and generator work at the same time"),
        ("aipo", 1, "cpu", 1, {"lag": 0}, "work on the CPU, where a device's memory is the host's"),
        ("sft", 1, "cuda", 1, {}, "sft has no generator"),
        ("evaluate", 1, "cuda", 1, {}, "evaluate has no trainer"),
    ],
)
def test_at_lag_zero_on_one_gpu_trainer_and_generator_take_turns(
    program: str, devices: int, device: str, generators: int, options: dict[str, int], reason: str
) -> None:
    graph, cluster = trace(load(program), options), _cluster(4, *(f"cuda:{index}" for index in range(devices)))
    why = why_no_turns(graph, place([graph], cluster, device=device, generators=generators))
    assert why.endswith(reason) if reason else not why


@pytest.mark.parametrize(("slots", "share"), [(16, 2 / 4), (40, 2 / 10), (256, 0.0)])
def test_what_waits_for_a_slot_is_told_where_it_is_much(slots: int, share: float) -> None:
    """Of 4 samples each: 2 groups wait beside those that fill the slots, and the simulator does not let them wait."""
    graph = trace(load("toy"), {})
    plan = place([graph], _cluster(), slots=slots)
    assert slots_overrun(graph, plan, "generator") == pytest.approx(share)
    assert slots_overrun(graph, plan, "trainer") == 0.0
