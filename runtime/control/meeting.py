"""The key-value store by which torch's process groups find their ranks, kept on the controller's board.

It goes over the connection that a rank has anyway, authenticated on a Unix socket and on TCP alike. Nothing listens for
it, and hosts need no file system in common.
"""

from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from penstock.runtime.control.heartbeat import Pulse
from penstock.runtime.control.messages import Count, Look, Post

ANSWER_S = 600.0
"""Seconds for the controller to answer what it knows. It may be stopped, which is no rank's fault; one that is gone is
found by its connection, long before that."""


class Meeting(Store):
    """The one store of a rank's process: for several threads, and to be kept for as long as a group made with it lives.

    Raises RuntimeError where the controller does not answer, and for keys that are not there in time.
    """

    timeout: timedelta
    """torch's own; its stubs lack it."""

    def __init__(self, pulse: Pulse) -> None:
        super().__init__()
        self._pulse = pulse

    def of(self, group: str) -> Store:
        """The part of it that is for the ranks of one group. Its name is new: no group is made twice."""
        return PrefixStore(group, self)

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        self._pulse.say(Post(key, data.hex()))

    def get(self, key: str) -> bytes:
        return self._await([key], self.timeout)[key]

    def add(self, key: str, value: int) -> int:
        found = self._pulse.ask(lambda number: Count(number, key, value), ANSWER_S)
        if found is None:
            raise RuntimeError(f"the controller has not counted {key} within {ANSWER_S:g} s")
        return int(bytes.fromhex(found[key]))

    def check(self, keys: Sequence[str]) -> bool:
        found = self._pulse.ask(lambda number: Look(number, tuple(keys), at_once=True), ANSWER_S)
        if found is None:
            raise RuntimeError(f"the controller has not looked for {', '.join(keys)} within {ANSWER_S:g} s")
        return len(found) == len(set(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await(keys, self.timeout if timeout is None else timeout)

    def _await(self, keys: Sequence[str], timeout: timedelta) -> dict[str, bytes]:
        seconds, counted = timeout.total_seconds(), self._pulse.held_up
        found = self._pulse.ask(lambda number: Look(number, tuple(keys)), seconds)
        # Seconds for which the controller itself was stopped count for no rank: its answer says how many they were.
        while found is None and self.check(keys[:1]) is not None and (more := self._pulse.held_up - counted) > 0:
            counted += more
            found = self._pulse.ask(lambda number: Look(number, tuple(keys)), more)
        if found is None:
            raise RuntimeError(f"{', '.join(keys)} not there within {seconds:g} s")
        return {key: bytes.fromhex(value) for key, value in found.items()}
