"""Sums and maxima over the ranks of a replica, through a group of its own: usable from a transfer's thread."""

import threading
from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store, Work

from penstock.runtime.tensor.crossing import first_line
from penstock.runtime.tensor.group import Group, open_group
from penstock.runtime.tensor.transport import TransportError

Fold = Callable[[Tensor, Tensor], Tensor]


class Adder:
    """Adds over ranks of one host that meet at `store`, which no other group has used; each makes the same calls.

    `adder` is a proof's `Add`, and `adder.maximum` is what quantising ranks agree by. Opened by the first call. Rank 0
    adds up, so that an error can name the rank that did not answer within `timeout` seconds. After an error it stays
    broken.
    """

    def __init__(self, name: str, store: Store, rank: int, ranks: int, timeout: float = 60.0) -> None:
        self._name = name
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._timeout = timeout
        self._lock = threading.Lock()
        self._group: Group | None = None
        self._calls = 0

    def __call__(self, sums: Tensor) -> Tensor:
        """The sum of an int64 CPU tensor over the ranks, mod 2^64, on each. TransportError if shapes differ."""
        return self._reduce(sums, torch.add)

    def maximum(self, magnitudes: Tensor) -> Tensor:
        """The largest of the ranks' float32 numbers, element by element, on each: none is negative or NaN."""
        # Without a sign, floats are ordered as the integers of the same bits.
        bits = magnitudes.contiguous().view(torch.int32).long().cpu()
        largest = self._reduce(bits, torch.maximum).int().view(torch.float32)
        return largest.to(magnitudes.device)

    def close(self) -> None:
        self._group = None

    def _reduce(self, numbers: Tensor, fold: Fold) -> Tensor:
        with self._lock:
            if self._group is None:
                self._group = self._open()
            self._calls += 1
            # The first word tells calls apart that do not belong together.
            own = torch.cat([torch.tensor([self._calls]), numbers.reshape(-1)])
            total = self._lead(self._group, own, fold) if self._rank == 0 else self._follow(self._group, own)
            return total[1:].view(numbers.shape)

    def _lead(self, group: Group, own: Tensor, fold: Fold) -> Tensor:
        answers = [torch.empty_like(own) for _ in range(1, self._ranks)]
        works = [group.receive(answer, peer, 0) for peer, answer in enumerate(answers, 1)]
        total = own.clone()
        for peer, (work, answer) in enumerate(zip(works, answers, strict=True), 1):
            self._wait(group, work, peer)
            if answer[0] != own[0]:
                raise TransportError(f"{self._name}: rank {peer} adds up sum {int(answer[0])}, needed {int(own[0])}")
            total[1:] = fold(total[1:], answer[1:])
        for peer, work in enumerate([group.send(total, peer, 1) for peer in range(1, self._ranks)], 1):
            self._wait(group, work, peer)
        return total

    def _follow(self, group: Group, own: Tensor) -> Tensor:
        total = torch.empty_like(own)
        self._wait(group, group.send(own, 0, 0), 0)
        self._wait(group, group.receive(total, 0, 1), 0)
        return total

    def _wait(self, group: Group, work: Work, peer: int) -> None:
        try:
            group.wait(work)
        except RuntimeError as error:
            text = f"{self._name}: rank {self._rank}: no sum from rank {peer} within {self._timeout} s"
            raise TransportError(f"{text}: {first_line(error)}") from error

    def _open(self) -> Group:
        try:
            return open_group(self._store, self._rank, self._ranks, timeout=self._timeout)
        except RuntimeError as error:
            text = f"{self._name}: rank {self._rank}: not all of {self._ranks} ranks met within {self._timeout} s"
            raise TransportError(f"{text}: {first_line(error)}") from error
