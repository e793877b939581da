"""Meshes as users write them, and their ranks in a plan."""

import pytest

from penstock.runtime.cluster.cluster import Cluster, ClusterError, Host
from penstock.runtime.cluster.placement import Plan, check_pools, check_ranks, place, read_meshes, spelled
from tests.runtime.plan.test_place import EVALUATE, TRAIN

MESHES = {"trainer": (("fsdp", 2), ("tp", 2)), "generator": (("tp", 2),)}


def test_a_mesh_is_read_as_it_is_spelled() -> None:
    words = ["trainer=fsdp2xtp2", "generator=tp2", "critic=1"]
    found = read_meshes(words)
    assert found == {**MESHES, "critic": ()}
    assert [f"{pool}={spelled(axes)}" for pool, axes in found.items()] == words


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["fsdp2"], "given 'fsdp2', needed POOL=MESH"),
        (["trainer=fdsp2"], "--mesh trainer=fdsp2: given 'fdsp2', needed axes with their sizes"),
        (["trainer=fsdp0"], "given 'fsdp0', needed axes"),
        (["trainer=fsdp2xfsdp2"], "given an axis twice"),
        (["trainer=tp2", "trainer=tp4"], "given trainer twice"),
    ],
)
def test_a_mesh_that_is_none_is_refused(words: list[str], given: str) -> None:
    with pytest.raises(ClusterError, match=given):
        read_meshes(words)


def test_a_mesh_of_an_unknown_pool_or_of_one_without_a_model_is_refused() -> None:
    with pytest.raises(ClusterError, match="--mesh trainor=tp2: no such pool, needed one of: trainer, scorer"):
        check_pools({"trainor": (("tp", 2),)}, ["trainer"], ["trainer", "scorer"])
    with pytest.raises(ClusterError, match="--mesh scorer=tp2: given a pool without a model, needed one of: trainer"):
        place([TRAIN], Cluster(hosts=(Host(name="a", cores=4),)), meshes={"scorer": (("tp", 2),)})


def test_more_ranks_than_a_host_could_start_are_refused() -> None:
    with pytest.raises(ClusterError, match="--mesh trainer=fsdp99999: given 99999 ranks on a host of 2 cores"):
        check_ranks({"trainer": (("fsdp", 99999),)}, {"trainer": 2})
    check_ranks(MESHES, {"trainer": 2, "generator": 2})


def test_each_replica_has_the_ranks_of_its_pools_mesh_and_they_share_its_cores_and_devices() -> None:
    cluster = Cluster(hosts=(Host(name="a", cores=16, devices=tuple(f"cuda:{i}" for i in range(8))),))
    plan = place([TRAIN, EVALUATE], cluster, generators=2, device="cuda", meshes=MESHES)
    trainer, *generators = (r for r in plan.replicas if not r.name.startswith("scorer"))
    assert [rank.device for rank in trainer.ranks] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert [[rank.device for rank in r.ranks] for r in generators] == [["cuda:4", "cuda:5"], ["cuda:6", "cuda:7"]]
    assert (trainer.mesh, generators[0].mesh) == (MESHES["trainer"], MESHES["generator"])
    assert [rank.threads for rank in trainer.ranks] == [4] * 4
    assert Plan.from_json(plan.to_json()) == plan
