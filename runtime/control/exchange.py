"""What ranks of different hosts say to each other about values: a question for a part of a block, and its answer.

A question is one frame, MessagePack of [EXCHANGE, number, Ask]. The answer repeats the number: [EXCHANGE, number,
Part] with the bytes in a second frame, or [EXCHANGE, number, Refused] alone. Asking changes nothing, so that a
question may be asked twice.
"""

from typing import Literal

from penstock.runtime.control.codec import Codec
from penstock.runtime.packable import Packable
from penstock.runtime.tensor.handle import Handle

EXCHANGE: Literal[1] = 1
"""The version of these messages."""
CHUNK = 1 << 20
"""Bytes of a block that one answer holds at most."""
WINDOW = 8
"""Questions that may be under way to one owner: enough for a chunk to be on its way while others are copied."""
MAX_QUESTION = 4096
"""Bytes of a question: a handle and two numbers."""


class Ask(Packable, frozen=True):
    """`length` bytes of the block of `handle`, beginning with byte `start` of it."""

    handle: Handle
    start: int
    length: int


class Part(Packable, frozen=True):
    """The bytes asked for are in the next frame."""


class Refused(Packable, frozen=True):
    """There is no such block, or no such part of it; `reason` is for the user."""

    reason: str


QUESTION: Codec[tuple[int, int, Ask]] = Codec(tuple[Literal[1], int, Ask], "question")
ANSWER: Codec[tuple[int, int, Part | Refused]] = Codec(tuple[Literal[1], int, Part | Refused], "answer")
