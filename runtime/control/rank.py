"""What a rank's process is made of: its executor, its store of values in shared memory, its ways of weights."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.runtime.control.config import RunConfig
from penstock.runtime.control.executor import Executor
from penstock.runtime.control.setup import Setup
from penstock.runtime.control.weights import BridgeWays, channels_of
from penstock.runtime.tensor.segments import SHM
from penstock.runtime.tensor.store import Reader, Store
from penstock.runtime.tensor.world import Free, Lockstep, Pace, open_world


@dataclass(frozen=True)
class Rank:
    executor: Executor
    store: Store
    reader: Reader
    ways: BridgeWays
    pace: Pace

    def close(self) -> None:
        self.ways.close()
        self.reader.close()
        self.store.close()


def make_rank(
    config: RunConfig, replica: str, index: int, folder: Path, restore: str, run: str, wake: Callable[[], None]
) -> Rank:
    """Make all that rank `index` of `replica` holds; from the checkpoint folder `restore`, unless that is "" ."""
    own = config.plan.replica(replica)
    place = own.ranks[index]
    torch.set_num_threads(place.threads)
    # One folder per process: a bridge's meeting file must be one that no earlier attempt has used.
    bridges = folder / "bridges" / run
    bridges.mkdir(parents=True, exist_ok=True)
    ways = BridgeWays(
        channels_of(config.channels(), replica), replica, index, place.device, bridges, config.flags.deadline, wake
    )
    folders = (SHM, folder)
    store = Store(run, f"{replica.replace('/', '.')}.{index}", folders=folders)
    reader = Reader(run, folders=folders)
    if len(own.ranks) > 1:
        meeting = bridges / f"world-{replica.replace('/', '.')}"
        open_world(meeting, index, len(own.ranks), timeout=config.flags.deadline, device=place.device)
    contexts = config.contexts(own, index)
    setup = Setup(config.graphs, config.plan, replica, index, contexts, folder, Path(restore) if restore else None)
    values: dict[Any, Any] = {}
    executor = Executor(setup, ways, values, reader.get, store.put, store.free)
    together = len(own.ranks) > 1 and bool(executor.held.streams)
    return Rank(executor, store, reader, ways, Lockstep() if together else Free())
