"""The ways of a trainer and of replicas in a chain, told what to send by commands as a scheduler gives them."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import monotonic, sleep

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore

from penstock.runtime.cluster.placement import Rank, Replica
from penstock.runtime.control.messages import Manifest
from penstock.runtime.control.run_config import RunOptions
from penstock.runtime.control.weight_channels import BridgeWays, Ground
from penstock.runtime.schedule.compile import Channel
from penstock.runtime.schedule.events import Abort, Arrived, Send
from tests.runtime.tensor.peer import Policy

pytestmark = pytest.mark.timeout(300)
CHANNEL, TRAINER = "policy>generator", "trainer/0"
NAMES = tuple(f"generator/{index}" for index in range(3))


class Run:
    """All ranks of a run, in this process: a trainer on one host and three generators on others."""

    def __init__(self) -> None:
        source = Replica(TRAINER, (Rank("a"),))
        replicas = tuple(Replica(name, (Rank(host),)) for name, host in zip(NAMES, "bcd", strict=True))
        channels = {CHANNEL: Channel(CHANNEL, "policy", source, "broadcast", "generator", replicas)}
        meet = partial(PrefixStore, store=HashStore())
        ground = Ground(f"testchain{os.getpid()}", meet, "127.0.0.1", 30.0, RunOptions(), lambda: None, print)
        self.policy, self.layout = Policy(1_000_000), ""
        self.ways = {name: BridgeWays(channels, name, 0, "cpu", ground) for name in (TRAINER, *NAMES)}

    def sync(self, version: int, *groups: Sequence[str]) -> None:
        """Send a version to each group of replicas at once, the groups one after the other, and swap it in."""
        self.policy.advance(version)
        manifest = self.ways[TRAINER].publish(CHANNEL, version, {"policy": self.policy})
        assert manifest is not None
        self.layout = manifest.layout or self.layout
        assert bool(manifest.layout) == (version == 0)
        for group in groups:
            together = tuple(group) if len(group) > 1 else ()
            for name in group:
                command = Send(CHANNEL, version, TRAINER, name, together)
                self.ways[TRAINER].send(command, None)
                self.ways[name].send(command, Manifest(CHANNEL, version, manifest.digests, self.layout))
            for name in group:
                assert self.told(name) == [Arrived(CHANNEL, version, name)]
                self.ways[name].swap(CHANNEL, version)
                weights = self.ways[name].weights(CHANNEL)
                assert weights.version == version
                assert all(torch.equal(weights.tensors[key], t) for key, t in self.policy.tensors.items())

    def told(self, name: str) -> list[Arrived | Abort]:
        """What a rank has to tell next."""
        found: list[Arrived | Abort] = []

        def look() -> bool:
            found.extend(self.ways[name].arrived())
            return bool(found)

        until(look)
        return found

    def until_passed_on(self, *counts: int) -> None:
        """How many versions each generator has: the last one is counted when the next replica has it already."""
        until(lambda: [self.ways[name].counts()["passed on"] for name in NAMES] == list(counts))


def until(look: Callable[[], bool]) -> None:
    deadline = monotonic() + 30
    while not look():
        assert monotonic() < deadline
        sleep(0.005)


@pytest.fixture
def run() -> Iterator[Run]:
    made = Run()
    yield made
    for ways in made.ways.values():
        ways.close()


def test_who_is_sent_a_version_at_once_passes_it_on_and_who_comes_later_has_it_from_the_trainer(run: Run) -> None:
    run.sync(0, NAMES)
    run.until_passed_on(1, 1, 0)
    run.sync(1, NAMES[:2], NAMES[2:])
    run.until_passed_on(2, 1, 0)
    run.sync(2, NAMES[2:], NAMES[1:2], NAMES[:1])
    run.until_passed_on(2, 1, 0)
    run.sync(4, NAMES[1:], NAMES[:1])
    run.until_passed_on(2, 2, 0)
    run.sync(5, (NAMES[0], NAMES[2]))
    run.sync(7, NAMES)
    run.until_passed_on(3, 3, 0)
    assert [ways.arrived() for ways in run.ways.values()] == [[]] * 4
