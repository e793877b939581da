"""Whether a way of weights fits a plan: refused by name before anything starts."""

import pytest

from penstock.runtime.cluster.placement import Rank, Replica, why_not


def replica(name: str, *places: tuple[str, str]) -> Replica:
    return Replica(name, tuple(Rank(host, device, 1) for host, device in places), 1, ())


TRAINER = replica("trainer/0", ("a", "cuda:0"))
BESIDE = replica("generator/0", ("a", "cuda:0"), ("a", "cuda:1"))
ON_CPU = replica("generator/0", ("a", "cpu"))
FAR = replica("generator/1", ("b", "cuda:0"))


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
    ],
)
def test_a_way_that_a_plan_rules_out_is_named_with_the_rank(
    asked: str, source: Replica, target: Replica, why: str
) -> None:
    assert why_not(asked, source, [target]) == why
