"""How weights go between two replicas, given what their ranks have: all combinations, compared with the rules."""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from penstock.runtime.tensor import link
from penstock.runtime.tensor.link import TRANSPORTS, RankFacts, choose_transport
from penstock.runtime.tensor.one_sided import SharedMemory
from penstock.runtime.tensor.process_group import Connection, TransportError

SHM, IPC, BOTH = 0b01, 0b10, 0b11
NCCL = 2_027_003
# Where a rank is: (host, GPU); GPU 0 means the CPU.
PLACES = [(host, gpu) for host in (1, 3) for gpu in (0, 11 + 10 * host, 13 + 10 * host)]


def source(place: tuple[int, int], sees: int = 7) -> RankFacts:
    host, gpu = place
    return RankFacts(host, sees if gpu else 0, BOTH if gpu else SHM, gpu, NCCL if gpu else 0)


def destination(place: tuple[int, int], memory: bool, sees: int = 7) -> RankFacts:
    host, gpu = place
    can = (IPC if gpu else SHM) if memory else 0
    return RankFacts(host, sees if can == IPC else 0, can, gpu, NCCL if gpu else 0)


def possible(places: list[tuple[int, int]], memory: bool, sees_alike: bool) -> dict[str, bool]:
    """The rules; `places` are those of one source rank and the destination ranks."""
    one_host = len({host for host, _ in places}) == 1
    gpus = [gpu for _, gpu in places]
    on_gpus = all(gpus)
    return {
        "shm": one_host and memory and not any(gpus[1:]),
        "cuda_ipc": one_host and memory and on_gpus and sees_alike,
        "nccl": on_gpus and len(set(places)) == len(places),
        "messages": True,
    }


@pytest.mark.parametrize("asked", TRANSPORTS)
def test_a_link_uses_the_first_transport_that_all_its_ranks_can(asked: Any) -> None:
    """For all hosts and devices of one source rank and two destination ranks, with and without writable memory, with
    equal and different visible GPUs, and with deltas."""
    seen = set()
    for places in itertools.product(PLACES, repeat=3):
        for memory, alike, delta in itertools.product((True, False), (True, False), (0, 4)):
            ranks = [source(places[0]), *(destination(p, memory, 7 if alike else 8) for p in places[1:])]
            can = possible(list(places), memory, alike)
            if delta:
                can["nccl"] = False
            wanted = [kind for kind in ("shm", "cuda_ipc", "nccl", "messages") if asked in ("auto", kind)]
            expected = next((kind for kind in wanted if can[kind]), None)
            found = choose_transport(ranks, asked, delta)
            assert found.transport == expected, (places, memory, alike, delta)
            # The rank named is at fault: without it and later ranks, the transport is possible.
            if expected is None and found.reason:
                rest = choose_transport(ranks[: found.culprit], asked, delta) if found.culprit else None
                assert rest is None or rest.transport == asked
            seen.add(found.transport)
    assert seen == {"auto": {"shm", "cuda_ipc", "nccl", "messages"}, "messages": {"messages"}}.get(asked, {asked, None})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpu": 0}, "has its weights on no GPU"),
        ({"nccl": 0}, "has a torch that is built without NCCL"),
        ({"nccl": NCCL + 1}, "has another version of NCCL than source rank 0"),
        ({"gpu": 21}, "is on the GPU of source rank 0, and NCCL joins no two ranks on one"),
    ],
)
def test_a_rank_that_nccl_cannot_join_is_named_on_both_sides_and_auto_says_why_it_is_slower(
    change: dict[str, int], reason: str
) -> None:
    """Two hosts with a GPU each, except for the change."""
    own = [RankFacts(1, 0, 0, 21, NCCL), RankFacts(3, 0, 0, 41, NCCL)._replace(**change)]

    def agreed(asked: Any, warn: Callable[[str], object]) -> list[Any]:
        store, names = HashStore(), ["source rank 0", "destination rank 0"]

        def side(rank: int) -> Any:
            connection = Connection("policy", names, store, rank, sources=1, timeout=20)
            try:
                return link.agree_on_transport(connection, own[rank], asked, 0, warn)
            except TransportError as error:
                return str(error)

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(side, (0, 1)))

    refused = f"policy: given the transport nccl, needed auto or messages: destination rank 0 {reason}"
    assert agreed("nccl", pytest.fail) == [refused] * 2
    told: list[str] = []
    assert agreed("auto", told.append) == ["messages"] * 2
    # A rank on the CPU is not reported; other reasons against NCCL are.
    assert len(told) == (change != {"gpu": 0})
    assert all(f"destination rank 0 {reason}; weights go as messages" in text for text in told)


def test_what_a_rank_has_follows_from_where_its_weights_lie() -> None:
    cpu, none = torch.device("cpu"), SharedMemory("none", "none")
    here = RankFacts.here("source", None, cpu)
    assert here == RankFacts(here.host, 0, SHM, 0, 0)
    assert RankFacts.here("destination", None, cpu) == RankFacts.here("destination", none, cpu) == here._replace(can=0)
    assert RankFacts.here("source", None, cpu, direct=False) == here._replace(can=0)
