"""What a rank's process is made of: its executor, its store of values in shared memory, its weight channels.

When it closes, it prints one line of JSON with what its store, its exchange and its weight channels have done.

`RendezvousStore` is the key-value store by which torch's process groups find their ranks, kept on the controller's
board. It goes over the connection that a rank has anyway, authenticated on a Unix socket and on TCP alike. Nothing
listens for it, and hosts need no file system in common.
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
from penstock.runtime.control.rendezvous import Pulse
from penstock.runtime.control.run_config import RunConfig
from penstock.runtime.control.security import Join
from penstock.runtime.control.sockets import SILENCE
from penstock.runtime.control.value_server import ExchangeClient, ExchangeServer
from penstock.runtime.control.weight_channels import SyncSettings, WeightChannels, drained
from penstock.runtime.tensor.object_store import ObjectReader, ObjectStore
from penstock.runtime.tensor.process_group import Pace, open_world, prepare_nccl
from penstock.runtime.tensor.shm import SHM, owner_of

# Seconds for the controller to answer what it knows. It may be stopped, which is no rank's fault; one that is gone is
# found by its connection, long before that.
ANSWER_S = 600.0


# What torch's thread posts, past the prefix of any group, when one of its NCCL groups fails. Nobody reads it (see
# `prepare_nccl`), and the controller would answer nothing any more to the second rank that posts one key.
TORCH_SIGNAL = "exception_dump"


class RendezvousStore(C10dStore):
    """The one store of a rank's process: for several threads, and to be kept for as long as a group made with it lives.

    Raises RuntimeError where the controller does not answer, and for keys that are not there in time.
    """

    timeout: timedelta
    """torch's own; its stubs lack it."""

    def __init__(self, pulse: Pulse) -> None:
        super().__init__()
        self._pulse = pulse

    def of(self, group: str) -> C10dStore:
        """The part of it that is for the ranks of one group. Its name is new: no group is made twice."""
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
        """The answer to what the controller can answer at once."""
        found = self._pulse.ask(question, ANSWER_S)
        if found is None:
            raise RuntimeError(f"the controller has not answered {question(0)} within {ANSWER_S:g} s")
        return found

    def _await(self, keys: Sequence[str], timeout: timedelta) -> dict[str, bytes]:
        left, counted = timeout.total_seconds(), self._pulse.held_up
        while True:
            found = self._pulse.ask(lambda number: Look(number, tuple(keys)), left)
            if found is not None:
                return {key: bytes.fromhex(value) for key, value in found.items()}
            # Seconds for which the controller itself was stopped count for no rank: its answers say how many they were.
            self.check(keys[:1])
            held_up = self._pulse.held_up
            if held_up <= counted:
                raise RuntimeError(f"{', '.join(keys)} not there within {timeout.total_seconds():g} s")
            left, counted = held_up - counted, held_up


# The share of the deadline that a wait within a sync of weights may take.
PATIENCE = 0.75
# The share of the deadline for the start that ranks have to connect once all of a replica have come.
CONNECTING = 0.25


def require_device(device: str, host: str) -> None:
    """Raises ValueError for a CUDA device that is not on this machine: a cluster file may say what there is not."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(device.removeprefix("cuda:")) >= there:
        given = f"{device} for a rank on host {host}, and PyTorch sees {there} GPUs there"
        raise ValueError(f"devices [no-device]: given {given}; needed a cluster file that says so (penstock doctor)")


def prepare_torch(place: Rank, config: RunConfig, address: str) -> None:
    """Have torch in this process compute where a rank is to, as the run's options say. Ranks of other hosts reach it at
    `address`. Raises ValueError as `require_device`."""
    torch.set_num_threads(place.threads)
    if config.flags.deterministic:
        be_deterministic()
    if place.device == "cpu":
        return
    several = len({host for one in config.plan.replicas for host in one.hosts}) > 1
    # The first group of a process decides for all: weights may go to other hosts.
    beside = several or config.flags.transport == "nccl"
    prepare_nccl(address if several else LOOPBACK, beside=beside)
    require_device(place.device, place.host)  # asks the driver, so that it comes after
    torch.cuda.set_device(place.device)  # where libraries put what names no device


class RankRuntime:
    """All that rank `index` of `replica` holds, made from the first checkpoint named in `restore` that is there.

    `life` is how often the replica has been lost before, `start` how often it was started. `server` answers readers on
    other hosts; None where there are none: then nothing listens. `notes` are what the user should know: values and
    weights that take a slower transport, and warnings of nodes.
    """

    def __init__(
        self,
        config: RunConfig,
        replica: str,
        index: int,
        restore: Sequence[str],
        join: Join,
        pulse: Pulse,
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
        # Whoever waits for a peer knows its name: to be heard before the controller gives up on the one that waits.
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
                # Of those that have met before the keys are still there.
                meet(f"ranks of {replica}" + (f", start {start}" if start else "")),
                names,
                index,
                timeout=flags.deadline,
                # So that those who do not reach each other say so before the controller only sees them late.
                connecting=CONNECTING * flags.startup_deadline,
                device=place.device,
                address=join.address if len(own.hosts) > 1 else LOOPBACK,
            )
        cuts = [folder / "checkpoints" / name for name in restore]
        cut = next((path for path in cuts if path.is_dir()), cuts[-1] if cuts else None)
        setup = config.setup(own, index, folder, cut, patience)
        owner, folders = owner_of(replica, index), (SHM, folder)
        # An owner that is silent is to be named by its reader, before the controller gives up on the reader.
        self.client = ExchangeClient(join, min(SILENCE, flags.deadline / 2))
        self.reader = ObjectReader(join.run, host=place.host, far=self.client.ranges, folders=folders)
        # A rank whose values are read on its own host alone listens nowhere.
        self.server: ExchangeServer | None = None
        if setup.asked_from_afar:
            ended = f"{config.plan.spelled(replica, index)}: the thread that answers readers of other hosts ended"
            reader = ObjectReader(join.run, host=place.host, folders=folders)
            # By the heartbeat's thread: the main one may be at work for minutes.
            self.server = ExchangeServer(join, owner, reader, lambda why: pulse.say(Note("error", f"{ended}:\n{why}")))
        endpoint = self.server.endpoint if self.server is not None else ""
        self.store = ObjectStore(
            join.run, owner, host=place.host, endpoint=endpoint, folders=folders, warn=self.notes.put, life=life
        )
        values = HeldValues(setup, {}, self.reader.get, self.store.put, self.store.free, self.reader.rows)
        self.executor = Executor(setup, self.channels, values, wake, self.notes.put)
        # By more of them what it holds has been read.
        torch.set_num_threads(self.executor.threads)
        self.pace = Pace(together=num_ranks > 1 and bool(self.executor.held.streams))

    def warnings(self) -> list[str]:
        """The notes since the last call."""
        return drained(self.notes)

    def close(self) -> None:
        # Readers before the store whose memory they read.
        self.channels.close()
        self.client.close()
        figures = {**self.store.usage()._asdict(), "asked": dict(self.client.counts), "sent": self.channels.counts()}
        figures["copied"] = self.reader.copied
        if self.server is not None:
            self.server.close()
            figures["answered"] = dict(self.server.counts)
        if offloaded := self.executor.offloading.counts():
            figures["offloaded"] = dict(offloaded)
        sys.stdout.write(json.dumps({"kind": "values", **figures}) + "\n")  # whole: a node's threads may print, too
        sys.stdout.flush()
        self.reader.close()
        self.store.close()
