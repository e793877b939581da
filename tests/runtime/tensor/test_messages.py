"""Messages over a bridge of several ranks on both sides."""

import queue
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import FileStore

from penstock.runtime.tensor.buffers import Shard
from penstock.runtime.tensor.layout import Layout, ListedRegions, Region, TensorLayout
from penstock.runtime.tensor.link import ReplicaLink
from penstock.runtime.tensor.reshard import BUCKET, reshard


@pytest.mark.parametrize("bucket", [BUCKET, 1 << 16])
def test_boxes_are_resharded_between_two_and_three_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bucket: int
) -> None:
    """Rows on two ranks to columns on three, large and strided pieces among them: each rank a thread here. Small
    buckets make more messages than there are staging buffers."""
    monkeypatch.setattr("penstock.runtime.tensor.send_recv.BUCKET", bucket)
    shapes = {"big": (1200, 600), "small": (5, 6), "tall": (9, 1)}
    wholes = {n: torch.arange(s[0] * s[1], dtype=torch.float32).view(s) for n, s in shapes.items()}
    src = Layout(tuple(TensorLayout(n, s, "float32", _split(s, 0, 2)) for n, s in shapes.items()))
    dst = Layout(tuple(TensorLayout(n, s, "float32", _split(s, 1, 3)) for n, s in shapes.items()))
    plan = reshard(src, dst)
    bridge = ReplicaLink("test", FileStore(str(tmp_path / "bridge")), sources=2, destinations=3, timeout=30)
    got: list[dict[str, Shard]] = [_parts(dst, rank) for rank in range(3)]
    errors: queue.Queue[BaseException] = queue.Queue()

    def source(rank: int) -> None:
        parts = _parts(src, rank)
        for name, part in parts.items():
            part.tensor.copy_(wholes[name][part.region.slices(Region.whole(shapes[name]))])
        transport = bridge.open("source", rank)
        for version in (0, 1):
            transport.send(version, plan.sends(rank), parts)

    def destination(rank: int) -> None:
        transport = bridge.open("destination", rank)
        for version in (0, 1):
            transport.receive(version, plan.receives(rank), got[rank])

    def guarded(role: Any, rank: int) -> None:
        try:
            role(rank)
        except BaseException as error:
            errors.put(error)

    roles = [(source, 0), (source, 1), (destination, 0), (destination, 1), (destination, 2)]
    threads = [threading.Thread(target=guarded, args=role, daemon=True) for role in roles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors.empty(), errors.get()
    for parts in got:
        for name, part in parts.items():
            assert torch.equal(part.tensor, wholes[name][part.region.slices(Region.whole(shapes[name]))])


def _split(shape: tuple[int, int], dim: int, ranks: int) -> ListedRegions:
    whole = Region.whole(shape)
    edges = [shape[dim] * r // ranks for r in range(ranks + 1)]
    return ListedRegions(
        tuple(
            (
                r,
                Region(
                    (*whole.start[:dim], edges[r], *whole.start[dim + 1 :]),
                    (*whole.stop[:dim], edges[r + 1], *whole.stop[dim + 1 :]),
                ),
            )
            for r in range(ranks)
        )
    )


def _parts(layout: Layout, rank: int) -> dict[str, Shard]:
    regions = {t.name: t.held_by(rank) for t in layout.tensors}
    return {name: Shard(held[0], torch.zeros(held[0].shape)) for name, held in regions.items() if held}
