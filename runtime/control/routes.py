"""Where a replica gets a version of weights from, and where it passes it on to. Pure, and the same on every rank.

A chain (`tensor/broadcast_chain`) relieves the trainers' network cards, so it is for weights that cross a network: for
replicas on other hosts than the trainers, or for all replicas if the transport is messages or NCCL. Otherwise a sender
on the same host writes directly into the receivers' memory. Deltas have no chain, either: they are small, a hop cannot
pass on a part before it has the whole, and a receiver whose version is not the predecessor needs a different delta.

A replica gets a version from the one before it in the chain if both are sent it at once, and from the trainers
otherwise, so that no replica waits for one whose shadow buffer is not free yet.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.runtime.cluster.placement import Replica
from penstock.runtime.schedule.compile import Channel
from penstock.runtime.tensor.layout import Mesh
from penstock.runtime.tensor.reshard import chain
from penstock.runtime.tensor.wire_format import SyncLayouts

# Transports that are sent as messages even between ranks of one host.
BY_MESSAGES = ("messages", "nccl")
# The share of the timeout by which the last link of a chain waits longer than the first: the replica next to one that
# hangs times out before the others, and names it.
GRACE = 0.25


class Routes:
    """The routes of one channel. They depend on the layouts, which come with the first version: call `settle` before
    any other method. `alone`: there is no chain, since replicas may be lost.
    """

    def __init__(self, channel: Channel, transport: str, delta: int, *, alone: bool = False) -> None:
        chained = () if alone or delta or transport not in ("auto", *BY_MESSAGES) else channel.replicas
        self._replicas = [r for r in chained if transport in BY_MESSAGES or len(hosts(r, channel.source)) > 1]
        self._depths: dict[str, int] = {}
        self._sources: dict[str, str] = {}
        # A single replica gets its weights from the trainers, whatever the layouts are.
        self._settled = len(self._replicas) < 2

    def settle(self, description: Mapping[str, Any]) -> None:
        """Compute the routes from the sender's `description` of its weights (`WeightPublisher.description`)."""
        if self._settled:
            return
        first, names = self._replicas[0], [replica.name for replica in self._replicas]
        plan = SyncLayouts.of(description, Mesh.of(first.mesh or None, len(first.ranks))).plan
        for destination, source in enumerate(chain(plan, len(names))):
            if source is not None:
                self._sources[names[destination]] = names[source]
            self._depths[names[destination]] = 0 if source is None else self._depths[names[source]] + 1
        self._settled = True

    def chained(self, replica: str) -> bool:
        """True if a replica may be in a chain, so that it gets weights as messages."""
        return bool(self._sources) and replica in self._depths

    def source(self, replica: str, together: Sequence[str]) -> str:
        """The replica that passes a version on to this one, if it is sent to the replicas `together` at once; "" if the
        trainers send it."""
        source = self._sources.get(replica, "")
        return source if source in together else ""

    def next(self, replica: str, together: Sequence[str]) -> str:
        """The replica that this one passes the version on to; "" for none."""
        return next((name for name in together if self._sources.get(name) == replica), "")

    def patience(self, replica: str) -> float:
        """The factor by which the timeout of the link to a replica is longer than that of a link from the trainers."""
        return 1 + GRACE * self._depths.get(replica, 0) / max([1, *self._depths.values()])


def hosts(*replicas: Replica) -> set[str]:
    """The hosts of replicas, by their names in the cluster file."""
    return {host for replica in replicas for host in replica.hosts}
