"""Which way weights go: what all ranks of a bridge can do, or what was asked for; else who cannot, and why."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import FileStore

from penstock.runtime.tensor import link
from penstock.runtime.tensor.link import TRANSPORTS, ReplicaLink, TransportChoice, writable_kinds
from penstock.runtime.tensor.one_sided import OneSidedTransport, SharedMemory, WritableMemory
from penstock.runtime.tensor.process_group import Transport, TransportError
from penstock.runtime.tensor.send_recv import MessageTransport
from penstock.runtime.tensor.shm import sweep

pytestmark = pytest.mark.timeout(300)
RUN = f"testways{os.getpid()}"
SHM, IPC = 0, 1
"""The ways by number."""


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    found = SharedMemory(RUN, "destination")
    found(4096)
    yield found
    sweep(RUN)


def opened(path: Path, choice: TransportChoice, memory: WritableMemory | None) -> list[Future[Transport]]:
    """Both sides of a bridge, each in its thread."""
    bridge = ReplicaLink("policy>generator", FileStore(str(path)), timeout=20, transport=choice)
    with ThreadPoolExecutor(2) as threads:
        return [
            threads.submit(bridge.open, "source"),
            threads.submit(bridge.open, "destination", 0, memory),
        ]


@pytest.mark.parametrize(
    ("choice", "kind"), [("auto", OneSidedTransport), ("shm", OneSidedTransport), ("messages", MessageTransport)]
)
def test_both_sides_go_the_way_that_is_asked_for(
    tmp_path: Path, memory: Any, choice: TransportChoice, kind: type
) -> None:
    assert {type(side.result()) for side in opened(tmp_path / "bridge", choice, memory)} == {kind}


def test_a_way_that_a_rank_cannot_go_is_refused_on_both_sides_with_its_name(tmp_path: Path, memory: Any) -> None:
    asked: list[tuple[TransportChoice, WritableMemory | None, str]] = [
        ("cuda_ipc", memory, "source rank 0 has its weights on no GPU"),
        ("shm", None, "destination rank 0 has no arena in shared memory"),
    ]
    for number, (choice, own, why) in enumerate(asked):
        for side in opened(tmp_path / str(number), choice, own):
            with pytest.raises(TransportError, match=f"given the transport {choice}, needed auto or messages: {why}"):
                side.result()


def test_what_a_rank_can_do_follows_from_where_its_weights_lie(memory: SharedMemory) -> None:
    assert writable_kinds("destination", memory, "cpu") == ("shm",)
    assert (
        writable_kinds("destination", None, "cuda:0")
        == writable_kinds("destination", SharedMemory(RUN, "none"), "cpu")
        == ()
    )
    assert writable_kinds("source", None, torch.device("cpu")) == ("shm",)
    assert set(writable_kinds("source", None, "cuda:1")) == {"shm", "cuda_ipc"}


HERE, BOTH = [5, 9], 0b11


@pytest.mark.parametrize(
    ("said", "choice", "verdict"),
    [
        ([[*HERE, BOTH], [*HERE, 0b10]], "auto", (IPC, 0, 0)),
        ([[*HERE, BOTH], [*HERE, 0b01]], "auto", (SHM, 0, 0)),
        ([[*HERE, BOTH], [*HERE, 0b10]], "messages", (-1, 0, 0)),
        ([[*HERE, BOTH], [*HERE, 0b10], [*HERE, 0b01]], "auto", (-1, 2, 2)),
        ([[*HERE, BOTH], [*HERE, 0b10]], "shm", (-1, 1, 2)),
        ([[*HERE, 0b01], [*HERE, 0b10]], "cuda_ipc", (-1, 0, 2)),
        ([[*HERE, BOTH], [6, 9, 0b10]], "cuda_ipc", (-1, 1, 0)),
        ([[*HERE, BOTH], [5, 8, 0b10]], "cuda_ipc", (-1, 1, 1)),
        ([[*HERE, BOTH], [5, 8, 0b10]], "auto", (-1, 1, 1)),
        ([[*HERE, BOTH], [5, 0, 0b01]], "auto", (SHM, 0, 0)),
    ],
)
def test_a_way_needs_all_ranks_on_one_host_and_for_a_gpu_the_same_gpus(said: Any, choice: Any, verdict: Any) -> None:
    assert link._verdict(said, choice) == verdict


def test_a_way_that_is_none_is_refused(tmp_path: Path) -> None:
    make: Callable[..., ReplicaLink] = ReplicaLink
    for given in ({"transport": "gloo"}, {"transport": "shm", "backend": "nccl"}):
        with pytest.raises(ValueError, match=r"policy: given transport .*needed one of auto, messages"):
            make("policy", tmp_path / "bridge", **given)
    assert TRANSPORTS == ("auto", "messages", "shm", "cuda_ipc")
