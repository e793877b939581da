"""An agent relays for its ranks: they send and receive the same as over connections of their own."""

import stat
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from msgspec import structs

from penstock.graph.ir import Firing
from penstock.runtime.cluster.endpoints import socket_file
from penstock.runtime.control.messages import (
    MAX_BYTES,
    BoardValues,
    Delivery,
    Exited,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    Note,
    Order,
    Post,
    RankMessages,
    Ready,
    Result,
    Results,
    SignsOfLife,
    pack,
    rank_peer,
)
from penstock.runtime.control.relay import HOLD, Relay
from penstock.runtime.control.rendezvous import HeartbeatThread
from penstock.runtime.control.sockets import Client
from penstock.runtime.schedule.events import Arrived, Done, Failed, Fire, each
from penstock.runtime.tensor.shm import ObjectRef

from .sockets import Bench, until

pytestmark = pytest.mark.timeout(120)
TCP = "tcp://127.0.0.1:0"
FIRING = Firing("generate", 3)
ORDER = Order((Fire(FIRING, "generator/0", (3,)),))
RESULTS = Results(())
BLOCK = ObjectRef("penstock-run-generator.0.0-0", 0, 64, 1, "generator.0.0", "local", "tcp://127.0.0.1:1")


@pytest.fixture
def endpoint() -> str:
    return TCP


class Host:
    """The relay of a host's agent, and the host's ranks, all in this thread."""

    def __init__(self, b: Bench, silence: float = 60.0) -> None:
        self.b, self.join = b, b.join()
        self.agent = Client(self.join, "agent", "local")
        b.stack.callback(self.agent.close)
        self.relay = Relay(self.join, silence=silence)
        b.stack.callback(self.relay.close)
        self.ranks: dict[int, Client] = {}
        until(lambda: b.hear() or "agent:local" in b.server.peers)

    def rank(self, number: int, replica: str = "generator/0") -> Client:
        """Return a rank that the controller knows."""
        self.relay.begin(rank_peer(replica, number))
        client = Client(replace(self.join, endpoint=self.relay.endpoint), "rank", replica, number)
        self.b.stack.callback(client.close)
        self.until(lambda: rank_peer(replica, number) in self.b.server.peers)
        return client

    def turn(self) -> None:
        for message in self.agent.receive(0.005):
            if isinstance(message, Delivery):
                self.relay.deliver(message)
        for said in self.relay.take(monotonic()):
            self.agent.send(said)
        self.b.heard += self.b.server.receive(0.005)

    def until(self, look: Any) -> Any:
        def turned() -> Any:
            self.turn()
            return look()

        return until(turned)

    def hear(self, client: Client) -> list[Message]:
        found: list[Message] = self.until(lambda: client.receive(0.0))
        return found

    def heard(self, kind: type) -> list[tuple[str, Any]]:
        return [(peer, message) for peer, message in self.b.heard if isinstance(message, kind)]


def done(rank: int, **fields: Any) -> Results:
    return Results((Result(Done(FIRING, "generator/0", rank), **fields),))


def test_ranks_are_greeted_and_asked_and_answer_by_their_agent(b: Bench) -> None:
    host = Host(b)
    ranks = [host.rank(number) for number in range(3)]
    hellos = [message for _, message in host.heard(Hello) if message.role == "rank"]
    assert [(hello.rank, hello.host, hello.token) for hello in hellos] == [(n, "local", "") for n in range(3)]
    assert b.server.send_all([f"generator/0:{n}" for n in range(3)], ORDER) == []
    assert [host.hear(rank) for rank in ranks] == [[ORDER]] * 3
    assert b.server.send("generator/0:1", Goodbye("done"))
    assert host.hear(ranks[1]) == [Goodbye("done")]
    assert ranks[0].receive(0.0) == ranks[2].receive(0.0) == []
    assert not b.server.send("generator/0:5", Goodbye("done"))
    assert not b.server.counts


def test_equal_answers_of_ranks_come_as_one_and_the_first_has_what_was_made(
    b: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.runtime.control.relay.HOLD", 60.0)  # however slowly the answers come
    host = Host(b)
    ranks = [host.rank(number) for number in range(3)]
    ranks[2].send(done(2, metrics={"tokens": 9.0}, counts={"tokens": 3.0}))
    ranks[0].send(done(0, outputs={"out": BLOCK}, metrics={"tokens": 1.0}, counts={"tokens": 2.0}))
    ranks[1].send(done(1))
    host.until(lambda: host.heard(Results))
    event = Done(FIRING, "generator/0", 0, others=2)
    said = Results((Result(event, {"out": BLOCK}, {"tokens": 1.0}, counts={"tokens": 2.0}),))
    assert host.heard(Results) == [("generator/0:0", said)]
    assert list(each(event)) == [Done(FIRING, "generator/0", rank) for rank in range(3)]


def test_an_answer_waits_a_moment_for_those_of_others_and_what_follows_it_comes_after_it(b: Bench) -> None:
    host = Host(b)
    ranks = [host.rank(number) for number in range(3)]
    arrived = Result(Arrived("policy>generator", 2, "generator/0", 1))
    failed = Result(Failed(FIRING, "generator/0", 1, "KeyError"))
    ranks[1].send(Results((arrived,)))
    ranks[1].send(Results((failed,)))
    ranks[1].send(Note("warning", "hot"))
    host.until(lambda: len(host.heard(Note)) == 1)
    assert host.b.heard[-2:] == [
        ("generator/0:1", said) for said in (Results((arrived, failed)), Note("warning", "hot"))
    ]
    ranks[0].send(done(0))
    ranks[2].send(done(2))
    host.until(lambda: len(host.heard(Results)) == 3)  # rank 1 has not answered
    assert {message.results[0].event.rank for _, message in host.heard(Results)[1:]} == {0, 2}


def test_answers_of_a_rank_go_as_one_as_far_as_a_frame_has_room(b: Bench) -> None:
    host = Host(b)
    rank = host.rank(0)
    sent = [done(0, metrics={f"{number}" * (MAX_BYTES // 3): 1.0}) for number in range(4)]
    for said in sent:
        rank.send(said)
    host.until(lambda: sum(len(message.results) for _, message in host.heard(Results)) == 4)
    assert [result for _, message in host.heard(Results) for result in message.results] == [
        result for said in sent for result in said.results
    ]
    assert not host.heard(Note)


def test_the_last_answer_to_a_command_waits_for_none_that_has_gone(b: Bench) -> None:
    host = Host(b)
    ranks, now = [host.rank(number) for number in range(3)], monotonic()

    def take(seconds: float, expected: int) -> list[tuple[int, str]]:
        """Return (rank, event) of what is relayed `seconds` later; wait for at least `expected` ranks."""
        said: list[tuple[int, str]] = []

        def heard() -> bool:
            for report in host.relay.take(now + seconds):
                for _, message in report.said if isinstance(report, RankMessages) else ():
                    assert isinstance(message, Results)
                    said.extend((one.rank, type(one).__name__) for r in message.results for one in each(r.event))  # type: ignore[union-attr]
            return len(said) >= expected

        until(heard)
        return said

    def come() -> None:
        """Wait until the next answer can be received."""
        assert host.relay.socket.poll(60_000)

    ranks[0].send(done(0))
    come()
    assert take(1.0, 0) == []
    assert take(1.0 + HOLD, 1) == [(0, "Done")]
    ranks[2].send(done(2, metrics={"tokens": 1.0}))
    come()
    assert take(2.0, 0) == []
    ranks[1].send(done(1))
    assert take(2.0, 2) == [(1, "Done"), (2, "Done")]
    # The same holds if a rank has failed, and for the next command.
    ranks[0].send(Results((Result(Failed(FIRING, "generator/0", 0, "KeyError")),)))
    assert take(3.0, 1) == [(0, "Failed")]
    ranks[1].send(done(1))
    come()
    assert take(3.0, 0) == []
    ranks[2].send(done(2))
    assert take(3.0, 2) == [(1, "Done"), (2, "Done")]
    ranks[0].send(done(0))
    come()
    assert take(4.0, 0) == []


def test_what_a_frame_has_no_room_for_is_told_whatever_its_number(b: Bench) -> None:
    host = Host(b)
    rank = host.rank(0)
    for _ in range(300):
        host.agent.send(Heartbeat())
    most = MAX_BYTES - len(pack(RankMessages((("generator/0:0", done(0, metrics={"": 1.0})),)))) - 4
    rank.send(done(0, metrics={"x" * most: 1.0}))  # with number 0 it would fit exactly
    host.until(lambda: host.heard(Note))
    assert [(peer, note.level) for peer, note in host.heard(Note)] == [("generator/0:0", "error")]


@pytest.mark.parametrize("several", [False, True])
def test_an_order_of_the_most_bytes_that_one_may_have_comes_to_ranks_by_their_agent(b: Bench, several: bool) -> None:
    host = Host(b)
    ranks = [host.rank(number) for number in range(8)]
    for _ in range(300):  # so that the frame's number is longer than the one with which the size is measured
        b.server.send("generator/0:0", ORDER)
    room = MAX_BYTES - len(pack(named("")))
    order = named("x" * (room - 4))  # the bytes for the length of a longer text
    assert len(pack(order)) == MAX_BYTES
    if several:
        assert b.server.send_all([f"generator/0:{n}" for n in range(8)], order) == []
    else:
        assert b.server.send("generator/0:0", order)

    def came(rank: Client) -> bool:
        return order in rank.receive(0.0)

    for rank in ranks if several else ranks[:1]:
        host.until(lambda rank=rank: came(rank))


def named(text: str) -> Order:
    return structs.replace(ORDER, checkpoint=text)


def test_a_shared_folder_without_sockets_is_done_without(b: Bench, tmp_path: Path) -> None:
    relay = Relay(replace(b.join(), folder=str(tmp_path / "none")))
    b.stack.callback(relay.close)
    file = socket_file(relay.endpoint)
    assert file is not None
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_an_agent_that_ends_late_leaves_its_successor_its_socket(b: Bench) -> None:
    """The successor may have the late agent's host slot, or be of the next run in the same folder."""
    late, *successors = (Relay(replace(b.join(), **new)) for new in ({}, {"life": 1}, {"run": "next"}))
    for successor in successors:
        b.stack.callback(successor.close)
    files = [socket_file(one.endpoint) for one in (late, *successors)]
    late.close()
    assert [file is not None and file.exists() for file in files] == [False, True, True]


def test_a_value_of_the_board_comes_to_the_thread_that_beats(b: Bench) -> None:
    host = Host(b)
    rank = host.rank(0)
    pulse = HeartbeatThread(replace(host.join, endpoint=host.relay.endpoint), "generator/0", 0).start()
    try:
        pulse.say(Post("key", "31"))
        host.until(lambda: host.heard(Post))
        assert b.server.send("generator/0:0", BoardValues(7, {"key": "31"}))
        host.turn()
        host.turn()
        assert rank.receive(0.05) == []
    finally:
        pulse.stop()


def test_what_ranks_are_at_and_which_are_silent_is_told_by_their_agent(b: Bench) -> None:
    host = Host(b, silence=1.5)
    talking, began = host.rank(0), monotonic()
    deaf = host.rank(1)

    def look() -> bool:
        talking.send(Heartbeat("generate[3]"))
        host.agent.send(Heartbeat())
        # A rank that was suspended for a moment is in the list until it is heard again.
        return b.server.late(monotonic()) == ["generator/0:1"]

    host.until(look)
    assert monotonic() - began > 1.0
    assert b.server.doing["generator/0:0"] == "generate[3]"
    b.server.forget("generator/0:1")
    host.turn()
    assert b.server.late(monotonic()) == []
    deaf.send(done(1))
    host.until(lambda: b.server.counts["unknown"])


def test_a_rank_that_has_ended_is_not_late_and_its_successor_is_greeted(b: Bench) -> None:
    host = Host(b, silence=0.2)
    _first, second = host.rank(0), host.rank(1)
    host.relay.end("generator/0:0")
    # The second rank may have been late before: a rank takes time to start.
    host.until(lambda: b.server.late(monotonic()) == ["generator/0:1"])
    b.server.forget("generator/0:0")
    assert not b.server.send("generator/0:0", Goodbye("done"))
    successor = host.rank(0)
    assert b.server.send("generator/0:0", Goodbye("done"))
    assert host.hear(successor) == [Goodbye("done")]
    assert second.receive(0.0) == []


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (("generator/7:0", Ready("generator/7", 0, 1)), "unauthorised"),  # of another host
        (("nobody/0:0", Ready("nobody/0", 0, 1)), "unauthorised"),
        (("generator/0:1", Ready("generator/0", 1, 1)), "unknown"),  # which has not said Hello
        (("generator/0:0", Ready("generator/0", 1, 1)), "unauthorised"),  # in another rank's name
        (("generator/0:0", Hello("rank", "generator/0", 0, 1, "local", "")), "duplicate"),
        (("generator/0:0", Hello("rank", "generator/0", 1, 1, "local", "")), "unauthorised"),
        (("generator/0:0", Hello("agent", "local", 0, 1, "local", "")), "unauthorised"),
        (("generator/0:0", Results((Result(Done(FIRING, "generator/0", 0, others=8)),))), "unauthorised"),
        (("generator/0:0", Results((Result(Done(FIRING, "generator/0", 1, others=1)),))), "unauthorised"),
        (("generator/0:0", done(0, outputs={"out": structs.replace(BLOCK, owner="trainer.0.0")})), "unauthorised"),
        (("generator/0:0", done(0, outputs={"out": structs.replace(BLOCK, host="b")})), "unauthorised"),
    ],
)
def test_an_agent_hands_on_only_what_ranks_of_its_host_may_say(b: Bench, said: tuple[str, Any], kind: str) -> None:
    host = Host(b)
    host.rank(0)
    before = len(b.heard)
    host.agent.send(RankMessages((said, ("generator/0:0", RESULTS))))
    host.until(lambda: len(b.heard) > before)
    assert b.heard[before:] == [("generator/0:0", RESULTS)]
    assert b.server.counts == {kind: 1}


def test_ranks_do_not_carry_and_speak_for_nobody_else(b: Bench) -> None:
    client = b.client("generator/0", 0)
    for message in (RankMessages((("generator/0:1", Note("warning", "hello")),)), SignsOfLife({"generator/0:1": "x"})):
        client.send(message)
    b.wait_for_count("unexpected", 2)
    client.send(Results((Result(Done(FIRING, "generator/0", 0, others=1)),)))
    b.wait_for_count("unauthorised")


def test_what_an_agent_has_dropped_is_counted_by_the_controller(b: Bench) -> None:
    host = Host(b)
    stranger = Client(replace(host.join, endpoint=host.relay.endpoint, token="guess"), "rank", "generator/0", 0)
    b.stack.callback(stranger.close)
    host.until(lambda: b.server.counts["unknown"] or b.server.counts["unauthorised"])
    assert "agent:local" in b.server.dropped[-1]
    host.agent.send(SignsOfLife({"generator/7:0": "x"}, ("generator/7:0",), {"odd": 5, "replayed": -1}, ""))
    host.agent.send(Exited("generator/0", 0, 1, 0, 9, ""))
    host.until(lambda: host.heard(Exited))
    assert "generator/7:0" not in b.server.doing
    assert b.server.late(monotonic()) == []
    assert not {"odd", "replayed"} & b.server.counts.keys()
