"""What the names of hosts decide: which way weights go, and where gloo listens."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import psutil
import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore

from penstock.runtime.control.bridges import Bridges, Span
from penstock.runtime.control.ground import Ground
from penstock.runtime.control.routes import Routes
from penstock.runtime.plan.plan import Rank, Replica
from penstock.runtime.schedule.tables import Channel
from penstock.runtime.tensor.memory import SharedMemory
from penstock.runtime.tensor.messages import MessageTransport
from penstock.runtime.tensor.put import PutTransport
from penstock.runtime.tensor.segments import sweep
from penstock.runtime.tensor.transport import Transport, TransportError

pytestmark = pytest.mark.timeout(60)
RUN, CHANNEL, TRAINER, GENERATOR = "testbridges", "policy>generator", "trainer/0", "generator/0"
ADDRESS = "127.0.0.2"
"""Of a host: this machine's loopback interface has all of 127.0.0.0/8."""


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    found = SharedMemory(RUN, "destination")
    found(4096)
    yield found
    sweep(RUN)


def both_sides(host: str, memory: SharedMemory, timeout: float = 20.0) -> dict[str, Bridges]:
    """A trainer on host a and a generator on this one, both on this machine with one /dev/shm."""
    channel = Channel(
        CHANNEL,
        "policy",
        Replica(TRAINER, (Rank("a"),)),
        "broadcast",
        "generator",
        (Replica(GENERATOR, (Rank(host),)),),
    )
    meet = partial(PrefixStore, store=HashStore())
    ground = Ground(RUN, meet, ADDRESS, timeout, "full", "", 0, "auto", lambda: None, print)
    routes = {CHANNEL: Routes(channel, "auto", 0)}
    return {
        side: Bridges({CHANNEL: channel}, 0, "cpu", ground, routes, {CHANNEL: memory})
        for side in ("source", "destination")
    }


def opened(sides: dict[str, Bridges]) -> list[Transport]:
    spans = {side: Span(CHANNEL, TRAINER, GENERATOR, side) for side in sides}  # type: ignore[arg-type]
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lambda side: sides[side].open(spans[side]), sides))


def listening() -> set[str]:
    found = psutil.Process().net_connections("inet")
    return {str(c.laddr.ip) for c in found if c.laddr and c.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize(
    ("host", "kind", "address"), [("a", PutTransport, "127.0.0.1"), ("b", MessageTransport, ADDRESS)]
)
def test_hosts_of_other_names_get_messages_at_their_address_whatever_they_share(
    memory: SharedMemory, host: str, kind: type, address: str
) -> None:
    before, sides = listening(), both_sides(host, memory)
    assert {type(transport) for transport in opened(sides)} == {kind}
    assert listening() - before == {address} - before
    for side in sides.values():
        side.close()


def test_the_error_of_a_bridge_between_hosts_names_both(memory: SharedMemory) -> None:
    source = both_sides("b", memory, timeout=0.2)["source"]
    where = "policy>generator from trainer/0 on host a to generator/0 on host b: source rank 0"
    with pytest.raises(TransportError, match=rf"{where}: .* not there: destination rank 0"):
        source.open(Span(CHANNEL, TRAINER, GENERATOR, "source"))
