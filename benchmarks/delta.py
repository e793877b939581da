"""One sync of weights of which few elements have changed, dense and as a delta, over a link of a given bandwidth.

    python benchmarks/delta.py [--keep]

Two processes with one thread each share a socket that the sender paces (a token bucket of 1 MiB). A time is from before
the first bucket is encoded until the receiver has acknowledged that the last one is in place. `encode_gb_per_s` and
`apply_gb_per_s` count dense bytes and are measured in the sender's process, one after the other, without the link. The
changed elements are scattered at random, the worst case for the receiver's caches. What the receiver holds at the end
is compared by digest, outside the times. A receiver's second arena is updated after the swap, at the cost of one more
`apply`; a proof of all bytes costs the same for dense and delta. Neither is in the figures.
"""

import argparse
import json
import socket
import subprocess
import sys
import time
from typing import Any

import torch
from report import Keep, publish, spread
from torch import Tensor

from penstock.runtime.tensor.delta import (
    Delta,
    decode,
    encode,
    payload_bytes,
)
from penstock.runtime.tensor.digest import digest
from penstock.runtime.tensor.reshard import BUCKET

ITEMSIZE = 2
HEADER = 8  # bytes: the number of changed elements
CHUNK = 256 << 10
BURST = 1 << 20
TARGETS = {"bytes_ratio": 0.08, "speedup": 2.0}


class Link:
    """A socket that sends at most `rate` bytes per second; every wait ends after 60 s."""

    def __init__(self, end: socket.socket, rate: float = float("inf")) -> None:
        self._end = end
        self._rate = rate
        self._free = 0.0
        end.settimeout(60)

    def send(self, data: memoryview) -> None:
        for first in range(0, len(data), CHUNK):
            part = data[first : first + CHUNK]
            self._free = max(self._free, time.perf_counter() - BURST / self._rate) + len(part) / self._rate
            time.sleep(max(0.0, self._free - time.perf_counter()))
            self._end.sendall(part)

    def receive(self, into: memoryview) -> None:
        filled = 0
        while filled < len(into):
            count = self._end.recv_into(into[filled:])
            if not count:
                raise EOFError(f"the peer has gone after {filled} of {len(into)} bytes")
            filled += count

    def receive_bytes(self, count: int) -> bytes:
        data = bytearray(count)
        self.receive(memoryview(data))
        return bytes(data)


def view(part: Tensor) -> memoryview:
    return part.view(-1).view(torch.uint8).numpy().data


def buckets(part: Tensor) -> tuple[Tensor, ...]:
    """Split the bytes of a contiguous tensor into buckets."""
    return torch.split(part.view(-1).view(torch.uint8), BUCKET)


def break_even(encode_s: float, apply_s: float, fraction: float) -> float:
    """Return the bandwidth B of a link, in bytes per second, below which delta is faster than dense if encoding,
    sending and applying do not overlap. `encode_s` and `apply_s` are seconds per dense byte, `fraction` is the share of
    the dense bytes that is sent. Dense takes 1/B per byte, delta encode_s + fraction/B + apply_s.
    """
    work, saved = encode_s + apply_s, 1 - fraction
    if saved <= 0:
        return 0.0
    return saved / work if work > 0 else float("inf")


def choose(dense_bytes: int, delta_bytes: int, bandwidth: float, encode_s: float, apply_s: float) -> str:
    """Return "dense" or "delta": the faster one over a link of `bandwidth` bytes per second."""
    fraction = delta_bytes / dense_bytes if dense_bytes else 1.0
    return "delta" if bandwidth < break_even(encode_s, apply_s, fraction) else "dense"


def receive(end: socket.socket, elements: int) -> None:
    """Run the receiver's process. A sync is a byte for its kind and then the buckets; one byte acknowledges it."""
    weights, link = torch.zeros(elements, dtype=torch.bfloat16), Link(end)
    own = buckets(weights)
    staging = torch.zeros(max(map(len, own)), dtype=torch.uint8)
    while (kind := link.receive_bytes(1)) != b"e":
        for bucket in own:
            if kind == b"f":
                link.receive(view(bucket))
                continue
            changed = int.from_bytes(link.receive_bytes(HEADER), "little", signed=True)
            payload = staging[: payload_bytes(len(bucket), ITEMSIZE, changed)]
            link.receive(view(payload))
            decode(Delta(changed, payload), bucket, ITEMSIZE)
        end.sendall(b"a")
    end.sendall(json.dumps(digest({"weights": weights})).encode())


def dense_sync(link: Link, current: Tensor) -> int:
    link.send(memoryview(b"f"))
    for bucket in buckets(current):
        link.send(view(bucket))
    return current.nbytes


def delta_sync(link: Link, previous: Tensor, current: Tensor) -> int:
    link.send(memoryview(b"d"))
    total = 0
    for before, bucket in zip(buckets(previous), buckets(current), strict=True):
        delta = encode(before, bucket, ITEMSIZE)
        link.send(memoryview(delta.changed.to_bytes(HEADER, "little", signed=True) + view(delta.payload)))
        total += HEADER + delta.payload.nbytes
    return total


def alone(previous: Tensor, current: Tensor) -> dict[str, float]:
    """Measure encoding and applying without a link, in dense bytes per second, and the resulting `break_even`."""
    target = previous.clone()
    pairs = list(zip(buckets(previous), buckets(current), strict=True))
    start = time.perf_counter()
    deltas = [encode(before, bucket, ITEMSIZE) for before, bucket in pairs]
    encoded = time.perf_counter()
    for delta, bucket in zip(deltas, buckets(target), strict=True):
        decode(delta, bucket, ITEMSIZE)
    applied = time.perf_counter()
    assert torch.equal(target.view(torch.int16), current.view(torch.int16))
    encode_s, apply_s = (encoded - start) / current.nbytes, (applied - encoded) / current.nbytes
    fraction = sum(HEADER + delta.payload.nbytes for delta in deltas) / current.nbytes
    return {
        "encode_gb_per_s": 1e-9 / encode_s,
        "apply_gb_per_s": 1e-9 / apply_s,
        "break_even_gb_per_s": break_even(encode_s, apply_s, fraction) / 1e9,
    }


def change(tensor: Tensor, share: float, generator: torch.Generator) -> None:
    """Flip the last bit of about this share of the elements, drawn at random, as a small step does."""
    words = tensor.view(torch.int16)
    places = torch.randint(len(words), (round(share * len(words)),), generator=generator)
    words[places] ^= 1


def measured(args: argparse.Namespace) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    elements = args.mb * 1_000_000 // ITEMSIZE
    current = torch.empty(elements, dtype=torch.bfloat16).normal_(generator=generator)
    previous = current.clone()
    here, there = socket.socketpair()
    command = [sys.executable, __file__, "--receive", str(there.fileno()), str(elements)]
    rows: list[dict[str, float]] = []
    with here, subprocess.Popen(command, pass_fds=[there.fileno()]) as process:
        there.close()
        link, acknowledged = Link(here, args.gb_per_s * 1e9), Link(here)
        try:
            for version in range(2 * args.repeats + 1):
                previous.copy_(current)
                change(current, args.share, generator)
                start = time.perf_counter()
                dense = version % 2 == 0
                nbytes = dense_sync(link, current) if dense else delta_sync(link, previous, current)
                acknowledged.receive_bytes(1)
                taken = (time.perf_counter() - start) * 1e3
                if not dense:
                    changed = int((previous.view(torch.int16) != current.view(torch.int16)).sum()) / elements
                    rows.append({"delta_ms": taken, "bytes_ratio": nbytes / current.nbytes, "share_changed": changed})
                    rows[-1] |= alone(previous, current)
                elif version:  # the receiver's memory is touched for the first time by version 0
                    rows[-1] |= {"dense_ms": taken, "speedup": taken / rows[-1]["delta_ms"]}
            here.sendall(b"e")
            same = json.loads(here.recv(4096)) == digest({"weights": current})
        finally:
            process.kill()
    figures = {name: spread([row[name] for row in rows]) for name in rows[0]}
    return {"dense_bytes": current.nbytes, "bit_equal": same, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=402, help="dense bytes, in millions")
    parser.add_argument("--share", type=float, default=0.015, help="share of the elements that change")
    parser.add_argument("--gb-per-s", type=float, default=1.0, help="bandwidth of the link")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--keep", action=Keep, help="write benchmarks/results/delta.json")
    parser.add_argument("--receive", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.receive:
        with socket.socket(fileno=args.receive[0]) as end:
            receive(end, args.receive[1])
        return
    figures = measured(args)
    fraction, even = figures["bytes_ratio"]["median"], figures["break_even_gb_per_s"]["median"] * 1e9
    work = (1 - fraction) / even / 2
    sizes = figures["dense_bytes"], round(fraction * figures["dense_bytes"])
    chosen = {f"{rate} GB/s": choose(*sizes, rate * 1e9, work, work) for rate in (0.5, 1, 2, 4, 12.5, 50)}
    publish("delta", {"link_gb_per_s": args.gb_per_s, "targets": TARGETS, **figures, "chosen": chosen}, args.keep)


if __name__ == "__main__":
    main()
