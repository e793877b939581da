"""The parts of a rank's process: its executor, its store of values in shared memory, its weight channels.

When it closes, it prints one line of JSON with the counts of its store, its exchange and its weight channels.

`RendezvousStore` is the key-value store by which torch's process groups find their ranks. Its data is on the
controller's board. It uses a connection that the rank has anyway, which is authenticated on a Unix socket and on TCP
alike. It needs no listening socket and no file system that hosts share.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue

import torch
from torch._C._distributed_c10d import PrefixStore
from torch._C._distributed_c10d import Store as C10dStore

from penstock.runtime.cluster.endpoints import LOOPBACK, AddressError, resolved
from penstock.runtime.cluster.placement import Rank
from penstock.runtime.control.executor import Executor, be_deterministic
from penstock.runtime.control.messages import Count, Look, Note, Post
from penstock.runtime.control.rank_state import HeldValues
from penstock.runtime.control.recorder import tell_node_warnings
from penstock.runtime.control.rendezvous import HeartbeatThread
from penstock.runtime.control.run_config import RunConfig
from penstock.runtime.control.security import Join
from penstock.runtime.control.sockets import SILENCE
from penstock.runtime.control.value_server import ExchangeClient, ExchangeServer
from penstock.runtime.control.weight_channels import SyncSettings, WeightChannels, drained
from penstock.runtime.tensor.object_store import ObjectReader, ObjectStore
from penstock.runtime.tensor.process_group import Pace, open_world, prepare_nccl
from penstock.runtime.tensor.shm import SHM, owner_of

# Seconds for the controller to answer what it knows. It may be suspended, which is no rank's fault; if it is gone, the
# connection shows that long before.
ANSWER_S = 600.0


# The key that torch's thread sets, without any group's prefix, when one of its NCCL groups fails. It is not read (see
# `prepare_nccl`), and the controller refuses it from a second rank; a refused rank gets no answers any more.
TORCH_SIGNAL = "exception_dump"


class RendezvousStore(C10dStore):
    """The only store of a rank's process. Thread-safe. Keep it for as long as a group made with it is in use.

    Raises RuntimeError if the controller does not answer, and for keys that are not there in time.
    """

    timeout: timedelta
    """Set by torch; missing in its stubs."""

    def __init__(self, pulse: HeartbeatThread) -> None:
        super().__init__()
        self._pulse = pulse

    def of(self, group: str) -> C10dStore:
        """The part of the store for the ranks of one group, whose name must be new."""
        return PrefixStore(group, self)

    def set(self, key: str, value: str | bytes) -> None:
        if key == TORCH_SIGNAL:
            return
        data = value.encode() if isinstance(value, str) else value
        self._pulse.say(Post(key, data.hex()))

    def get(self, key: str) -> bytes:
        return self._await([key], self.timeout)[key]

    def add(self, key: str, value: int) -> int:
        return int(bytes.fromhex(self._known(lambda number: Count(number, key, value))[key]))

    def check(self, keys: Sequence[str]) -> bool:
        return len(self._known(lambda number: Look(number, tuple(keys), at_once=True))) == len(set(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await(keys, self.timeout if timeout is None else timeout)

    def _known(self, question: Callable[[int], Count | Look]) -> Mapping[str, str]:
        """The answer to a question that the controller can answer at once."""
        found = self._pulse.ask(question, ANSWER_S)
        if found is None:
            raise RuntimeError(f"the controller has not answered {question(0)} within {ANSWER_S:g} s")
        return found

    def _await(self, keys: Sequence[str], timeout: timedelta) -> dict[str, bytes]:
        left, counted = timeout.total_seconds(), self._pulse.suspended_s
        while True:
            found = self._pulse.ask(lambda number: Look(number, tuple(keys)), left)
            if found is not None:
                return {key: bytes.fromhex(value) for key, value in found.items()}
            # Time in which the controller itself was suspended does not count. Its answers say how long that was.
            self.check(keys[:1])
            suspended_s = self._pulse.suspended_s
            if suspended_s <= counted:
                raise RuntimeError(f"{', '.join(keys)} not there within {timeout.total_seconds():g} s")
            left, counted = suspended_s - counted, suspended_s


# The share of the deadline that a wait within a sync of weights may take.
PATIENCE = 0.75
# The share of the startup deadline for ranks to connect once all ranks of a replica have come.
CONNECTING = 0.25


def require_device(device: str, host: str) -> None:
    """Raise ValueError for a CUDA device that this machine does not have: a cluster file may be wrong."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(device.removeprefix("cuda:")) >= there:
        given = f"{device} for a rank on host {host}, and PyTorch sees {there} GPUs there"
        raise ValueError(f"devices [no-device]: given {given}; needed a cluster file that says so (penstock doctor)")


def prepare_torch(place: Rank, config: RunConfig, address: str) -> None:
    """Set up torch in this process for a rank's place and the run's options. Ranks of other hosts reach it at
    `address`. Raises ValueError as `require_device`."""
    torch.set_num_threads(place.threads)
    if config.flags.deterministic:
        be_deterministic()
    if place.device == "cpu":
        return
    several = len({host for one in config.plan.replicas for host in one.hosts}) > 1
    # A process's first group decides for all its groups, and weights may go to other hosts.
    beside = several or config.flags.transport == "nccl"
    prepare_nccl(address if several else LOOPBACK, beside=beside)
    require_device(place.device, place.host)  # after `prepare_nccl`, since it initialises the driver
    torch.cuda.set_device(place.device)  # the default device for libraries that name none


class RankRuntime:
    """Everything that rank `index` of `replica` holds, restored from the first checkpoint in `restore` that exists.

    `life` is how often the replica has been lost before, `start` how often it was started. `server` answers readers on
    other hosts; None if there are none. `notes` are warnings for the user: values and weights that take a slower
    transport, and warnings of nodes.
    """

    def __init__(
        self,
        config: RunConfig,
        replica: str,
        index: int,
        restore: Sequence[str],
        join: Join,
        pulse: HeartbeatThread,
        wake: Callable[[], None],
        life: int,
        start: int,
    ) -> None:
        try:
            join = dataclasses.replace(join, address=resolved(join.address))
        except AddressError as error:
            raise ValueError(f"host {join.host}: address: {error}") from None
        folder, own, flags = Path(join.folder), config.plan.replica(replica), config.flags
        place, num_ranks = own.ranks[index], len(own.ranks)
        prepare_torch(place, config, join.address)
        self.notes: SimpleQueue[str] = SimpleQueue()
        tell_node_warnings(self.notes.put)
        # Less than the controller's deadline: a rank that waits for a peer can name it, and the controller would blame
        # the waiting rank.
        patience = PATIENCE * flags.deadline
        meet = RendezvousStore(pulse).of
        settings = SyncSettings(
            run=join.run,
            meet=meet,
            address=join.address,
            timeout=patience,
            options=flags,
            wake=wake,
            warn=self.notes.put,
            life=life,
            elastic=bool(config.elastic),
            keep=config.kept_versions,
        )
        self.channels = WeightChannels(config.channels(), replica, index, place.device, settings)
        if num_ranks > 1:
            names = [config.plan.spelled(replica, number) for number in range(num_ranks)]
            open_world(
                # A new name for each start: the keys of earlier starts are still on the board.
                meet(f"ranks of {replica}" + (f", start {start}" if start else "")),
                names,
                index,
                timeout=flags.deadline,
                # Short enough for ranks that cannot reach each other to say so before the controller finds them late.
                connecting=CONNECTING * flags.startup_deadline,
                device=place.device,
                address=join.address if len(own.hosts) > 1 else LOOPBACK,
            )
        cuts = [folder / "checkpoints" / name for name in restore]
        cut = next((path for path in cuts if path.is_dir()), cuts[-1] if cuts else None)
        setup = config.setup(own, index, folder, cut, patience)
        owner, folders = owner_of(replica, index), (SHM, folder)
        # Less than the deadline: a reader can name a silent owner before the controller gives up on the reader.
        self.client = ExchangeClient(join, min(SILENCE, flags.deadline / 2))
        self.reader = ObjectReader(join.run, host=place.host, far=self.client.ranges, folders=folders)
        # A rank whose values are read only on its own host does not listen.
        self.server: ExchangeServer | None = None
        if setup.asked_from_afar:
            ended = f"{config.plan.spelled(replica, index)}: the thread that answers readers of other hosts ended"
            reader = ObjectReader(join.run, host=place.host, folders=folders)
            # Sent by the heartbeat's thread: the main thread may be busy for minutes.
            self.server = ExchangeServer(join, owner, reader, lambda why: pulse.say(Note("error", f"{ended}:\n{why}")))
        endpoint = self.server.endpoint if self.server is not None else ""
        self.store = ObjectStore(
            join.run, owner, host=place.host, endpoint=endpoint, folders=folders, warn=self.notes.put, life=life
        )
        values = HeldValues(setup, {}, self.reader.get, self.store.put, self.store.free, self.reader.rows)
        self.executor = Executor(setup, self.channels, values, wake, self.notes.put)
        # Until here more threads were of use, to read what the rank holds.
        torch.set_num_threads(self.executor.threads)
        self.pace = Pace(together=num_ranks > 1 and bool(self.executor.held.streams))

    def warnings(self) -> list[str]:
        """The notes since the last call."""
        return drained(self.notes)

    def close(self) -> None:
        # Close readers before the store whose memory they read.
        self.channels.close()
        self.client.close()
        figures = {**self.store.usage()._asdict(), "asked": dict(self.client.counts), "sent": self.channels.counts()}
        figures["copied"] = self.reader.copied
        if self.server is not None:
            self.server.close()
            figures["answered"] = dict(self.server.counts)
        if offloaded := self.executor.offloading.counts():
            figures["offloaded"] = dict(offloaded)
        sys.stdout.write(json.dumps({"kind": "values", **figures}) + "\n")  # one write: a node's threads may print, too
        sys.stdout.flush()
        self.reader.close()
        self.store.close()
