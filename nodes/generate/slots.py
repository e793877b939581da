"""The slots of a generator on the host: who holds which, and what has been sampled in it.

Everything here is numpy, and one step costs the same few operations however many slots there are.
"""

from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.nodes.generate.row import Response

H = TypeVar("H")


class Slots(Generic[H]):
    """`positions` is where each slot's newest token stands in its conversation; `live` says which slots are held.

    The columns of what is sampled are steps, modulo `max_tokens`, the bound on a response's length.
    """

    def __init__(self, num_slots: int, max_tokens: int, stops: NDArray[np.bool_]) -> None:
        self.max_tokens, self.stops, self.now = max_tokens, stops, 0
        self.live = np.zeros(num_slots, dtype=bool)
        self.positions, self._begun = (np.zeros(num_slots, dtype=np.int64) for _ in range(2))
        self._holders: dict[int, H] = {}
        self._tokens = np.zeros((num_slots, max_tokens), dtype=np.int64)
        self._logprobs = np.zeros((num_slots, max_tokens), dtype=np.float32)
        self._versions = np.zeros(max_tokens, dtype=np.int64)
        self.clear()

    def clear(self) -> None:
        """Take all slots from their holders."""
        self.live[:] = False
        self._holders.clear()
        self._free = list(range(len(self)))[::-1]

    def __len__(self) -> int:
        return len(self.live)

    @property
    def any_free(self) -> bool:
        return bool(self._free)

    @property
    def column(self) -> int:
        return self.now % self.max_tokens

    @property
    def reach(self) -> int:
        """One more than the farthest position of a live slot."""
        return int(self.positions[self.live].max()) + 1

    def take(self, holder: H, position: int) -> int:
        """Give a free slot to `holder`, whose first token this step samples for `position`; which slot it is."""
        slot = self._free.pop()
        self._holders[slot] = holder
        self.live[slot], self.positions[slot], self._begun[slot] = True, position, self.now
        return slot

    def record(self, tokens: NDArray[np.int64], logprobs: NDArray[np.float32], version: int) -> None:
        """What this step sampled in every slot, held or not, with weights of `version`."""
        self._tokens[:, self.column], self._logprobs[:, self.column] = tokens, logprobs
        self._versions[self.column] = version
        if not np.isfinite(logprobs[self.live]).all():
            raise FloatingPointError(f"weights of version {version} give probabilities that are not numbers")

    def release(self) -> list[tuple[H, Response]]:
        """End the step: free the slots whose responses ended with it, by a stop token or at the bound."""
        stopped = self.stops[self._tokens[:, self.column]]
        slots = np.flatnonzero(self.live & (stopped | (self.now - self._begun == self.max_tokens - 1)))
        columns = (self._begun[slots, None] + np.arange(self.max_tokens)) % self.max_tokens
        tokens, logprobs = self._tokens[slots[:, None], columns], self._logprobs[slots[:, None], columns]
        versions, lengths = self._versions[columns], (self.now + 1 - self._begun[slots]).tolist()
        ended = []
        for row, (slot, length) in enumerate(zip(slots.tolist(), lengths, strict=True)):
            response = Response(
                tokens[row, :length], logprobs[row, :length], versions[row, :length], bool(stopped[slot])
            )
            ended.append((self._holders.pop(slot), response))
            self._free.append(slot)
        self.live[slots] = False
        self.now += 1
        return ended
