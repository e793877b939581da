"""On which GPU stream work on weights runs, and after what. Fake streams and events record what precedes them, so that
no GPU is needed; all code that uses them is the real one."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.runtime.tensor import streams
from penstock.runtime.tensor.broadcast_chain import ChainForwarder, ChainHop
from penstock.runtime.tensor.buffers import Shards
from penstock.runtime.tensor.digest import Checksums
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.offload import Offload
from penstock.runtime.tensor.quantise import Restorer
from penstock.runtime.tensor.weight_sync import LocalTransport, WeightPublisher, WeightReceiver
from tests.runtime.control.sockets import until

from .peer import CHANNEL, Policy, published


class FakeStream:
    """Work runs in the order given; `before` is the work that is certainly finished by then."""

    def __init__(self, priority: int = 0) -> None:
        self.priority, self.before = priority, set[str]()

    def wait_event(self, event: "FakeEvent") -> None:
        self.before |= event.before


class FakeEvent:
    def __init__(self) -> None:
        self.before = frozenset[str]()

    def record(self, stream: FakeStream) -> None:
        self.before = frozenset(stream.before)

    def synchronize(self) -> None:
        pass


class Card:
    """Streams as a device module provides them. Each thread starts on the common stream `main` and the first GPU. It
    must name its own GPU before it changes streams, else torch would use the first one, too."""

    Stream, Event = FakeStream, FakeEvent

    def __init__(self) -> None:
        self.main, self._here = FakeStream(), threading.local()
        self.after: dict[str, frozenset[str]] = {}
        self.on: dict[str, FakeStream] = {}

    def current_stream(self, device: object = None) -> FakeStream:
        found: FakeStream = getattr(self._here, "stream", self.main)
        return found

    @contextmanager
    def on_device(self, device: torch.device) -> Iterator[None]:
        before, self._here.device = getattr(self._here, "device", None), device
        try:
            yield
        finally:
            self._here.device = before

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        assert self._here.device is not None
        before, self._here.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._here.stream = before

    def work(self, name: str) -> None:
        """Put named work on the current stream."""
        stream = self.current_stream()
        self.after[name], self.on[name] = frozenset(stream.before), stream
        stream.before.add(name)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    made = Card()
    monkeypatch.setattr(streams, "streams_of", lambda device: made)
    monkeypatch.setattr(streams, "on_device", made.on_device)
    return made


def test_a_snapshot_is_taken_after_the_optimizer_and_before_its_next_step(card: Card, monkeypatch: Any) -> None:
    digests = Checksums.digests

    def hashed(*given: Any, **named: Any) -> Any:
        card.work("copy and hash")
        return digests(*given, **named)

    monkeypatch.setattr(Checksums, "digests", hashed)
    publisher = WeightPublisher(CHANNEL, Policy(100))
    card.work("optimizer 0")
    publisher.publish(0)
    card.work("optimizer 1")
    assert "optimizer 0" in card.after["copy and hash"]
    assert "copy and hash" in card.after["optimizer 1"]
    assert card.on["copy and hash"] is not card.main
    assert card.on["copy and hash"].priority < 0

    class Sent:
        def send(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
            card.work("send")
            return 0

    publisher.send(0, Sent())
    assert "optimizer 1" not in card.after["send"]
    assert card.on["send"] is not card.main


class Arriving:
    """Weights that arrive from a publisher in this process."""

    def __init__(self, card: Card, publisher: WeightPublisher) -> None:
        self.card, self.publisher = card, publisher

    def receive(self, version: int, copies: Sequence[Copy], parts: Shards) -> int:
        self.card.work(f"arrive {version}")
        transport = LocalTransport(CHANNEL)
        self.publisher.send(version, transport)
        return transport.receive(version, copies, parts)


def test_a_shadow_is_filled_beside_decoding_and_read_when_it_is_full(card: Card, monkeypatch: Any) -> None:
    fill, check = Restorer.fill, Checksums.check

    def restored(self: Restorer, arrived: Shards) -> None:
        card.work(f"restore {version}")
        fill(self, arrived)

    def checked(*given: Any) -> None:
        card.work(f"check {version}")
        check(*given)

    monkeypatch.setattr(Restorer, "fill", restored)
    monkeypatch.setattr(Checksums, "check", checked)
    policy = Policy(100)
    publisher, receiver = WeightPublisher(CHANNEL, policy, wire="bfloat16"), WeightReceiver(CHANNEL)
    for version in range(3):
        facts = published(publisher, version)
        receiver.describe(facts["description"])
        card.work(f"decode beside {version}")
        over: list[Any] = []
        receiver.start(version, facts["digests"], Arriving(card, publisher), over.append)
        until(lambda: over)  # noqa: B023 - called here
        assert not isinstance(over[0], Exception)
        receiver.swap(version)
        card.work(f"decode after {version}")
    for version in range(3):
        for step in ("arrive", "check", "restore"):
            assert card.on[f"{step} {version}"] is not card.main
            # It does not wait for concurrent decoding, and decoding after the swap waits for all of it.
            assert f"decode beside {version}" not in card.after[f"{step} {version}"]
            assert f"{step} {version}" in card.after[f"decode after {version}"]
    # Version 2's shadow was live as version 0: steps that may read it were issued before the swap to 1.
    assert {"decode after 0", "decode beside 1"} <= card.after["arrive 2"]
    assert "decode after 1" not in card.after["arrive 2"]


def test_a_message_is_passed_on_after_it_is_in_its_place(card: Card) -> None:
    tensors: Mapping[str, Tensor] = Policy(100).tensors
    publisher, receiver = WeightPublisher(CHANNEL, Policy(100)), WeightReceiver(CHANNEL)
    facts = published(publisher, 0)
    receiver.describe(facts["description"])

    class Before(Arriving):
        def receive(self, version: int, copies: Sequence[Copy], parts: Shards, arrived: Any = None) -> int:
            nbytes = super().receive(version, copies, parts)
            card.work("unpack")
            arrived(copies)
            return nbytes

    class After:
        def send(self, version: int, copies: Sequence[Copy], parts: Shards, ready: Any) -> int:
            ready(copies)
            card.work("pass on")
            return 0

    after: Any = After()
    before: Any = Before(card, publisher)
    relay = ChainForwarder(CHANNEL, 0, lambda error: None)
    receiver.receive(0, facts["digests"], ChainHop(relay, lambda: before, lambda: after, linked=False))
    until(lambda: relay.passed_on == 1)
    assert "unpack" in card.after["pass on"]
    assert card.on["pass on"] is not card.main
    assert tensors.keys() == publisher.layout.by_name.keys()


def test_state_moves_after_what_uses_its_memory_on_a_stream_of_its_own(card: Card, monkeypatch: Any) -> None:
    class State(Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is Tensor.detach:
                card.work("move")
            return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    offload, empty_like = Offload("trainer/0"), torch.empty_like

    def allocated(*given: Any, **named: Any) -> Tensor:
        # Memory may be new to one thread while the work of another one that has freed it is still queued.
        card.work("decode")
        return empty_like(*given, **named)

    card.work("update")
    offload.leave({"exp_avg": torch.ones(5).as_subclass(State)})
    offload.fence()
    assert "update" in card.after["move"]
    assert card.on["move"] is not card.main
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", allocated)
        offload.come_back()
        offload.fence()
    assert card.on["decode"] is card.main
    assert "decode" in card.after["move"]
    assert card.on["move"] is not card.main


def test_on_a_cpu_streams_are_torchs_own_that_do_nothing() -> None:
    side = streams.SideStream("cpu")
    with side.in_order():
        assert streams.current_stream(torch.device("cpu")) is not None
    with side.detached(streams.fence(torch.device("cpu"))):
        pass
    assert streams.streams_of(torch.device("cpu")) is torch.cpu
