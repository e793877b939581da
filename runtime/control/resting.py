"""What leaves a rank's device between updates, and when: the memory that trainer and generator have by turns.

A value that updates change (`Offloadable`) leaves in the background after the update that made it, while the next
weights are published. Their publication is answered when it is away: whoever samples with them has its memory. It
comes back when the next update is asked for, while that one's inputs are fetched. A stream (`Releasing`) gives up its
memory before it answers its last firing.
"""

from collections import Counter

from penstock.graph.ir import Firing
from penstock.graph.protocols import Offloadable, Releasing
from penstock.runtime.control.holdings import Held, Holdings
from penstock.runtime.tensor.offload import Offload, give_back


class Resting:
    """All of it is on the device, for ever, where the run does not offload.

    Raises ValueError for a rank that must offload and makes values of which no part can leave.
    """

    def __init__(self, holdings: Holdings) -> None:
        setup = holdings.setup
        self._carried, self._patience, self._releases = holdings.carried, setup.patience, setup.offload != "off"
        self._offloads: dict[str, Offload] = {}
        self._read: dict[str, tuple[str, ...]] = {}
        self._made: dict[str, int] = {}
        self._told: set[str] = set()
        self._makes = {node: tuple(setup.makes.get(node, ())) for node in holdings.nodes}
        made = {name: holdings.carried[name] for names in self._makes.values() for name in names}
        if not self._releases:
            return
        where = f"{setup.replica} rank {setup.rank}"
        leaving = [name for name, value in made.items() if isinstance(value, Offloadable)]
        if made and not leaving and setup.offload == "on":
            kinds = ", ".join(f"{name}, a {type(value).__name__}" for name, value in made.items())
            raise ValueError(f"--offload on: {where}: given {kinds}, needed a value that can leave its device")
        self._offloads = {name: Offload(f"{name} of {where}") for name in leaving}
        for node, held in holdings.nodes.items():
            if held.node.clock == "update":
                read = {*map(setup.carried_name, (item.ref for item in held.inputs)), *self._makes[node]}
                self._read[node] = tuple(sorted(read & self._offloads.keys()))
        for name in leaving:
            self._leave(name)

    def call(self, firing: Firing) -> None:
        """A node is to fire: begin to bring back what it reads."""
        for name in self._read.get(firing.node, ()):
            offload = self._offloads[name]
            offload.fence(self._patience)
            if offload.where == "host":
                offload.come_back()

    def settle(self, node: str = "") -> None:
        """Wait for what a node reads, or for all that is on its way. Raises OffloadError for what is not there in time,
        or has failed."""
        for name in self._read.get(node, ()) if node else self._offloads:
            self._offloads[name].fence(self._patience)

    def fired(self, firing: Firing) -> None:
        """A node has fired: what its update has made, or made before and it has read, may leave."""
        self._made.update((name, firing.index) for name in self._makes[firing.node])
        for name in self._read.get(firing.node, ()):
            if self._made.get(name, -1) >= firing.index:
                self._leave(name)

    def finished(self, held: Held) -> None:
        """A stream has nothing left to work on."""
        if self._releases and isinstance(held.state, Releasing):
            held.state.release()
            give_back()

    def faults(self) -> list[str]:
        """Why moves have failed that nobody has waited for yet, each once."""
        faults = {name: str(o.fault) for name, o in self._offloads.items() if o.fault and name not in self._told}
        self._told |= faults.keys()
        return list(faults.values())

    def counts(self) -> Counter[str]:
        """Moves, the bytes of each value's last one, and milliseconds waited for them."""
        found: Counter[str] = Counter()
        for offload in self._offloads.values():
            found.update(moves=offload.moves, nbytes=offload.nbytes, waited_ms=round(1000 * offload.waited_s))
        return found

    def _leave(self, name: str) -> None:
        value = self._carried[name]
        assert isinstance(value, Offloadable)
        self._offloads[name].leave(value.offloadable())
