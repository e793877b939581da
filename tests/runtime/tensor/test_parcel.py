"""How pieces become messages: each once, in order, in few buffers."""

from typing import Any

import pytest
import torch

from penstock.runtime.tensor.buffers import Shard
from penstock.runtime.tensor.layout import Copy, Region
from penstock.runtime.tensor.reshard import BUCKET, LARGE
from penstock.runtime.tensor.send_recv import Staging, buckets_of, bundle, pack, unpack

CPU = torch.device("cpu")
SHAPE = (3000, 2000)
WHOLE = Region((0, 0), SHAPE)
LEFT = Region((0, 0), (3000, 1000))
"""Half of the columns: strided in the whole, contiguous in a part of its own."""


def test_a_large_piece_is_cut_alike_on_both_sides_whichever_has_it_strided() -> None:
    source = {"t": Shard(WHOLE, torch.arange(6e6).view(SHAPE))}
    target = {"t": Shard(LEFT, torch.zeros(LEFT.shape))}
    copies = [Copy("t", 0, 0, LEFT)]
    sent, received = (buckets_of(copies, parts, CPU, Staging(2)) for parts in (source, target))
    assert [p.copies for p in sent] == [p.copies for p in received]
    assert [p.slot for p in sent] == [k % 2 for k in range(len(sent))]
    assert not any(p.staged for p in received)
    assert all(p.buffer.nbytes <= BUCKET for p in sent)
    for out, into in zip(sent, received, strict=True):
        pack(out)
        into.buffer.copy_(out.buffer)
    assert torch.equal(target["t"].tensor, source["t"].tensor[:, :1000])


@pytest.mark.parametrize(("limit", "needed"), [(2, 2 * BUCKET), (None, LEFT.size * 4)])
def test_staging_buffers_take_turns_up_to_a_limit(limit: Any, needed: int) -> None:
    parts, staging = {"t": Shard(WHOLE, torch.zeros(SHAPE))}, Staging(limit)
    for _ in range(2):
        made = buckets_of([Copy("t", 0, 0, LEFT)], parts, CPU, staging)
    for bucket in made:
        bucket.buffer.view(torch.float32).fill_(7.0)
        unpack(bucket)
    assert sum(buffer.nbytes for buffer in staging.buffers.values()) == needed
    assert (parts["t"].tensor[:, :1000] == 7.0).all()
    assert (parts["t"].tensor[:, 1000:] == 0.0).all()


def test_messages_hold_every_piece_once_in_order_and_large_ones_alone() -> None:
    sizes = [10, LARGE, 20, 30, LARGE - 1, LARGE - 1, LARGE - 1, LARGE - 1, LARGE - 1, 5, LARGE * 9, LARGE]
    spans = bundle(sizes)
    assert [i for span in spans for i in range(span.start, span.stop)] == list(range(len(sizes)))
    for span in spans:
        group = sizes[span]
        assert len(group) == 1 or max(group) < LARGE
        assert len(group) == 1 or sum(group[:-1]) < BUCKET
    assert bundle([]) == []
