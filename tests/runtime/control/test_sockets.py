"""Which messages a socket accepts, which it counts and drops, and which peers are late."""

import os
import random
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

import psutil
import pytest
from msgspec import structs

from penstock.graph.ir import Firing
from penstock.runtime.cluster.endpoints import ipc_endpoint
from penstock.runtime.control import listener, sockets
from penstock.runtime.control.listener import MAX_DRAIN_BYTES, WireError
from penstock.runtime.control.messages import (
    MAX_BYTES,
    MAX_TEXT,
    AgentReady,
    BoardValues,
    Exited,
    GivenUp,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    MessageError,
    Note,
    Order,
    Post,
    Ready,
    Result,
    Results,
    Waits,
    pack,
    unpack,
)
from penstock.runtime.control.rendezvous import HeartbeatThread, beat_interval
from penstock.runtime.control.security import Keys
from penstock.runtime.control.silence import PAUSE_S, LivenessTracker
from penstock.runtime.control.sockets import MAX_NOTES, SILENCE, Client, Server
from penstock.runtime.schedule.events import Abort, Begin, Checkpoint, Done, Failed, Fire, Published, Saved, Swapped
from penstock.runtime.tensor.shm import ObjectRef
from tests.halt import halt

from .sockets import RANKS, Bench, Raw, Role, bench, mutated, stranger, until

# What a socket accepts, and what it counts and drops; nothing raises out of the loop.


pytestmark = pytest.mark.timeout(300)
TCP = "tcp://127.0.0.1:0"
RESULTS = Results((Result(Done(Firing("generate", 3), "generator/0")),))
AFAR = ObjectRef("penstock-run-generator.7.0-0", 0, 64, 1, "generator.7.0", "local", "tcp://127.0.0.1:1")


def replace_owner(handle: ObjectRef) -> ObjectRef:
    return structs.replace(handle, host="b", owner="trainer.0.0")


@pytest.mark.parametrize("endpoint", ["", TCP])
def test_messages_go_both_ways_after_a_hello(b: Bench) -> None:
    client = b.client("generator/0", 0)
    ((peer, hello),) = b.heard
    assert isinstance(hello, Hello)
    assert (peer, hello.pid, hello.host) == ("generator/0:0", os.getpid(), "local")
    order = Order((Fire(Firing("generate", 3), "generator/0", (3,)),))
    assert b.server.send(peer, order)
    assert until(lambda: client.receive(0.1)) == [order]
    client.send(RESULTS)
    assert b.wait_for(2)[1] == (peer, RESULTS)
    assert not b.server.counts


def test_a_frame_before_hello_and_a_hello_with_another_token_are_unknown(b: Bench) -> None:
    raw = b.raw()
    raw.say(pack(RESULTS, 1))
    raw.hello(token="guess", sequence=2)
    raw.hello(token="", sequence=3)
    raw.say(pack(RESULTS, 4))
    b.wait_for_count("unknown", 4)
    assert (b.heard, b.server.peers) == ([], ())
    assert "another run's token" in b.server.dropped[1]
    raw.hello(sequence=5)
    b.wait_for(1)


def test_a_frame_whose_number_does_not_grow_is_replayed_and_dropped(b: Bench) -> None:
    raw = b.raw()
    raw.hello(sequence=1)
    frame = pack(RESULTS, 2)
    raw.say(frame)
    raw.say(frame)
    raw.say(pack(RESULTS, 1))
    raw.hello(sequence=1)
    raw.say(pack(RESULTS, 3))
    assert len(b.wait_for(3)) == 3
    b.wait_for_count("replayed", 3)
    assert "frame 2 after frame 2" in b.server.dropped[0]


def test_random_truncated_and_oversized_frames_are_counted_and_the_loop_goes_on(tmp_path: Path) -> None:
    chance, good = random.Random(5), pack(RESULTS, 9)
    with bench(tmp_path) as b:
        raw = b.raw()
        raw.hello()
        for _ in range(200):
            raw.say(chance.randbytes(chance.randrange(60)))
        for cut in range(len(good)):
            raw.say(good[:cut])
        raw.say(good, good)
        raw.say(b"\xdd\xff\xff\xff\xff")
        raw.say(bytes(MAX_BYTES + 1))
        raw.say(good)
        assert b.wait_for(2)[1] == ("generator/0:0", RESULTS)
        assert b.server.counts == {"malformed": 200 + len(good) + 2, "oversized": 1}
        assert len(b.server.dropped) == b.server.dropped.maxlen


def test_a_frame_beyond_all_limits_ends_its_own_connection_alone(b: Bench) -> None:
    client, raw = b.client(), b.raw()
    raw.hello("scorer/0")
    b.wait_for(2)
    raw.say(bytes(4 * MAX_BYTES + 1))
    until(lambda: b.hear() is not None and not b.server.send("scorer/0:0", Goodbye("")))
    client.send(RESULTS)
    assert b.wait_for(3)[2] == ("generator/0:0", RESULTS)


def test_a_message_that_only_a_controller_says_is_unexpected(b: Bench) -> None:
    client = b.client()
    client.send(Goodbye("from a rank"))
    client.send(Order(()))
    b.wait_for_count("unexpected", 2)
    assert len(b.heard) == 1


OTHERS: list[tuple[str, Message]] = [
    ("rank", RESULTS),
    ("rank", Results((Result(Saved(3, "trainer/0")),))),
    ("rank", Results((Result(Swapped("policy>generator", 1, "generator/1")),))),
    ("rank", Results((Result(Published("policy>generator", 1, "trainer/0")),))),
    ("rank", Results((Result(Failed(Firing("generate", 3), "generator/7", 1, "my other rank")),))),
    ("rank", Results((Result(Done(Firing("generate", 3), "generator/7"), {"out": AFAR}),))),
    ("rank", Results((Result(Done(Firing("generate", 3), "generator/7"), {"out": replace_owner(AFAR)}),))),
    ("rank", Ready("trainer/0", 0, 1)),
    ("rank", Ready("generator/7", 0, 1, ((Firing("generate", 3), "out", AFAR),))),
    ("agent", AgentReady("local", 1)),
    ("agent", Exited("trainer/0", 0, 1, 0, 9, "")),
    ("agent", Exited("nowhere/0", 0, 1, 0, 9, "")),
]


@pytest.mark.parametrize("event", [Begin(), Checkpoint(final=True)])
def test_an_event_of_the_controllers_own_is_no_answer(event: Any) -> None:
    with pytest.raises(MessageError):
        unpack(pack(Results((Result(event),))))


@pytest.mark.parametrize("endpoint", ["", TCP])
def test_a_hosts_key_speaks_for_its_own_agent_and_ranks_and_a_rank_for_itself(b: Bench, endpoint: str) -> None:
    speakers = {"rank": b.raw("b"), "agent": b.raw("b")}
    speakers["rank"].hello("generator/7")
    speakers["agent"].hello("b", role="agent")
    b.wait_for(2)
    for number, (role, message) in enumerate(OTHERS, 2):
        speakers[role].say(pack(message, number))
    b.wait_for_count("unauthorised", len(OTHERS))
    own = Results((Result(Saved(3, "generator/7")),))
    speakers["rank"].say(pack(own, 100))
    speakers["agent"].say(pack(Exited("generator/7", 1, 1, 0, 9, ""), 100))
    assert {peer for peer, _ in b.wait_for(4)[2:]} == {"generator/7:0", "agent:b"}
    assert b.server.counts == {"unauthorised": len(OTHERS)}
    assert all(("key of host b" in text) == bool(endpoint) for text in b.server.dropped)


@pytest.mark.parametrize("role", ["rank", "heartbeat", "agent"])
@pytest.mark.parametrize("endpoint", [TCP])
def test_a_key_lets_in_only_what_is_on_its_host(b: Bench, role: Role) -> None:
    raw = b.raw("b")
    other, own = ("local", "b") if role == "agent" else ("trainer/0", "generator/7")
    for number, (name, host) in enumerate([(other, "b"), (other, "local"), (own, "local"), ("unknown/0", "b")]):
        raw.hello(name, sequence=number + 1, role=role, host=host)
    b.wait_for_count("unauthorised", 4)
    assert (b.heard, b.server.peers) == ([], ())
    raw.hello(own, sequence=9, role=role)
    raw.say(pack(Note("warning", "in"), 10))
    until(lambda: b.hear() is not None and ("warning" in repr(b.heard)))


@pytest.mark.parametrize("endpoint", [TCP])
def test_a_connection_that_takes_anothers_identity_is_a_stranger(b: Bench) -> None:
    """libzmq lets a client choose the identity that the server's socket sees, if no other connection has it."""
    first = b.raw()
    first.socket.close()
    first = Raw(b.join(), identity=b"trainer")
    b.stack.callback(first.context.destroy, linger=0)
    first.hello("trainer/0")
    b.wait_for(1)
    first.socket.close(linger=0)
    until(lambda: b.hear() is not None and not b.server.send("trainer/0:0", Goodbye("")))
    second = Raw(b.join("b"), identity=b"trainer")
    b.stack.callback(second.context.destroy, linger=0)
    second.say(pack(Results((Result(Saved(3, "trainer/0")),)), 5))
    b.wait_for_count("unknown")
    assert len(b.heard) == 1


def test_notes_are_handed_on_up_to_a_number_and_a_length(b: Bench) -> None:
    client = b.client()
    for _ in range(MAX_NOTES + 50):
        client.send(Note("warning", "x" * (1 << 20)))
    b.wait_for_count("excessive", 50)
    client.send(Note("error", "y" * MAX_TEXT + "the end"))
    texts = [note.text for _, note in b.wait_for(MAX_NOTES + 2)[1:] if isinstance(note, Note)]
    assert len(texts) == MAX_NOTES + 1
    assert max(map(len, texts)) < 2 * MAX_TEXT
    assert texts[-1].endswith("the end")


def test_what_a_rank_says_of_a_failure_is_handed_on_up_to_a_length(b: Bench) -> None:
    client, told = b.client("generator/0"), "y" * (1 << 20) + "the end"
    failed = Failed(Firing("generate", 3), "generator/0", 0, told)
    client.send(Results((RESULTS.results[0], Result(failed), Result(Abort(told)))))
    _, results = b.wait_for(2)[1]
    assert isinstance(results, Results)
    done, *others = results.results
    assert done == RESULTS.results[0]
    texts = [result.event.error for result in others if isinstance(result.event, Failed | Abort)]
    assert [(len(text) < 2 * MAX_TEXT, text.endswith("the end")) for text in texts] == [(True, True)] * 2


def test_mutated_frames_are_messages_or_counted_on_both_sides(b: Bench) -> None:
    """From a rank and its heartbeat to a controller, and from a controller to a rank."""
    chance, number = random.Random(7), 3000
    order = Order((Fire(Firing("generate", 3), "generator/0", (3,)),), ((Firing("prompts", 3), "out", AFAR),))
    client, raw = b.client("scorer/0"), b.raw()
    raw.hello()
    b.wait_for(2)
    ready = Ready("generator/0", 0, 1, ((Firing("x", 1), "out", AFAR),))
    own: list[Message] = [RESULTS, ready, Note("warning", "x"), Post("k", "0")]
    for sent in range(1, number + 1):
        raw.say(mutated(chance, [pack(message, 1 << 30) for message in own]))
        if sent % 50 == 0:  # a sender blocks while too many frames are unread
            until(lambda: b.hear() is not None and b.server.counts.total() + len(b.heard) - 2 == sent)  # noqa: B023
    identity = b.server._routes["scorer/0:0"].identity
    theirs: list[Message] = [order, Goodbye("x"), BoardValues(1, {"k": "0"})]
    for _ in range(number):
        frame = mutated(chance, [pack(message, 1 << 30) for message in theirs])
        b.server.socket.send_multipart([identity, frame])
    heard: list[Message] = []

    def all_taken() -> bool:
        heard.extend(client.receive(0.1))
        return client.counts.total() + len(heard) == number

    until(all_taken)


def test_one_receive_takes_a_bounded_number_of_bytes(b: Bench) -> None:
    client = b.client()
    frame = Note("warning", "x" * (3 << 20))
    for _ in range(40):
        client.send(frame)
    until(lambda: b.hear() is not None and len(b.heard) > 1)
    while len(b.heard) < 41:
        assert len(b.hear()) <= MAX_DRAIN_BYTES // (3 << 20) + 1


def test_a_rank_has_one_connection_for_its_heartbeats(b: Bench) -> None:
    """Otherwise their number would be unbounded."""
    first, second = b.raw(), b.raw()
    first.hello(role="heartbeat")
    until(lambda: b.hear() is not None and b.server.send("generator/0:0", BoardValues(1, {})))
    second.hello(role="heartbeat")
    second.say(pack(Post("key", "01"), 2))
    b.wait_for_count("duplicate")
    b.wait_for_count("unknown")
    first.say(pack(Post("key", "02"), 2))
    assert b.wait_for(1) == [("generator/0:0", Post("key", "02"))]


SERVER = """
import resource, sys, threading
from contextlib import ExitStack
from pathlib import Path
from penstock.runtime.control import listener, sockets
from penstock.runtime.control.messages import Goodbye, Note
from penstock.runtime.control.listener import raise_descriptors
from penstock.runtime.control.security import ServerKeys
sockets.SILENCE, descriptors = float(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (min(descriptors, 100), descriptors))
assert raise_descriptors() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == descriptors
server = sockets.Server(ServerKeys.read(Path(sys.argv[1])), {"generator/0:0": "local", "generator/0:1": "local"})
print(server.endpoint, flush=True)
def checkpoint():
    for line in sys.stdin:
        with ExitStack() as files:
            try:
                for _ in range(int(line)):
                    files.enter_context(open("/dev/null"))
                said = "saved"
            except OSError as error:
                said = str(error)
        print(said, flush=True)
threading.Thread(target=checkpoint, daemon=True).start()
while True:
    for peer, message in server.receive(0.1):
        if isinstance(message, Note):
            server.send(peer, Goodbye(message.text))
"""


class Child:
    """A server in its own process, which answers a note with a goodbye of the same text. A number on its stdin makes it
    open this many files."""

    def __init__(self, folder: Path, endpoint: str, stack: ExitStack, silence: float = 60.0, files: int = 300) -> None:
        keys, self.stack = Keys.make("run", endpoint or ipc_endpoint(folder), ["local", "b"]), stack
        keys.server.write(folder / "door.json")
        command = [sys.executable, "-c", SERVER, str(folder / "door.json"), str(silence), str(files)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stack.callback(self.process.communicate)
        stack.callback(self.process.kill)
        self.join = keys.join("local", self.read(), folder)

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def opens(self, files: int) -> bool:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{files}\n")
        self.process.stdin.flush()
        return self.read() == "saved"

    def client(self, rank: int = 0) -> Client:
        client = Client(self.join, "rank", "generator/0", rank)
        self.stack.callback(client.close)
        answers(client)
        return client


def answers(client: Client, text: str = "here") -> None:
    client.send(Note("warning", text))
    assert until(lambda: client.receive(0.1)) == [Goodbye(text)]


@pytest.mark.parametrize("endpoint", ["", TCP])
def test_a_controller_that_was_stopped_goes_on_with_the_same_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    silence = 0.5
    monkeypatch.setattr(sockets, "SILENCE", silence)
    with ExitStack() as stack:
        child = Child(tmp_path, endpoint, stack, silence)
        client = child.client()
        halt(child.process)
        client.send(Note("warning", "meanwhile"))
        end = monotonic() + 5 * silence
        while monotonic() < end:
            assert client.receive(0.1) == []
            assert client.lost(monotonic()) == 0
        child.process.send_signal(signal.SIGCONT)
        assert until(lambda: client.receive(0.1)) == [Goodbye("meanwhile")]
        assert client.lost(monotonic()) == 0


def test_connections_of_idle_strangers_leave_descriptors_for_files_and_for_ranks(tmp_path: Path) -> None:
    with ExitStack() as stack:
        child = Child(tmp_path, TCP, stack)
        first = child.client()
        host, _, port = child.join.endpoint.removeprefix("tcp://").rpartition(":")
        for _ in range(600):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
        until(lambda: child.opens(200))  # eventually: strangers are dropped one by one
        until(lambda: len(os.listdir(f"/proc/{child.process.pid}/fd")) < 100)
        child.client(1)
        answers(first)


@pytest.mark.parametrize("endpoint", [TCP])
def test_a_connection_that_is_known_before_others_are_counted_is_no_stranger(
    b: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, host = b.server._listener, ("127.0.0.1", int(b.server.endpoint.rpartition(":")[2]))
    answer, held, greeted = gate._answer, gate._lock, threading.Event()

    def slow() -> None:
        answer()
        assert greeted.wait(20)  # the listener waits until the client has been heard

    monkeypatch.setattr(gate, "_answer", slow)
    monkeypatch.setattr(gate, "_most", (4, 100))
    with held:
        strangers = [b.stack.enter_context(socket.create_connection(host, timeout=20)) for _ in range(3)]
        client = Client(b.join(), "rank", "generator/0")
        b.stack.callback(client.close)
        assert client.receive(0.3) == []  # its key is not checked meanwhile
    b.wait_for(1)
    greeted.set()
    strangers += [b.stack.enter_context(socket.create_connection(host, timeout=20)) for _ in range(8)]
    for one in strangers[:7]:  # all but four
        while one.recv(100):
            pass
    assert b.server.send("generator/0:0", Goodbye("still here"))
    assert until(lambda: client.receive(0.1)) == [Goodbye("still here")]
    assert client.lost(monotonic()) == 0
    assert not b.server.counts


def test_a_second_process_under_a_name_is_turned_away_until_the_first_is_forgotten(b: Bench) -> None:
    first = b.client()
    second = b.raw()
    second.hello(sequence=1)
    b.wait_for_count("duplicate")
    assert b.server.send("generator/0:0", Goodbye("to the first"))
    assert until(lambda: first.receive(0.1)) == [Goodbye("to the first")]
    b.server.forget("generator/0:0")
    assert not b.server.send("generator/0:0", Goodbye(""))
    second.hello(sequence=2)
    b.wait_for(2)
    first.send(RESULTS)
    b.wait_for_count("unknown")


def test_a_peer_that_never_came_or_is_gone_cannot_be_sent_to(b: Bench) -> None:
    assert not b.server.send("generator/9:0", Goodbye(""))
    client = Client(b.join(), "rank", "generator/0")
    b.wait_for(1)
    client.close()
    until(lambda: not b.server.send("generator/0:0", Goodbye("")))


def test_a_peer_is_late_when_it_gives_no_sign_of_life(tmp_path: Path) -> None:
    with bench(tmp_path, silence=5.0) as b:
        b.client("generator/0")
        b.client("scorer/0")
        assert b.server.tracker.late(monotonic()) == []
        assert [b.server.tracker.late(monotonic() + second) for second in range(7)][-1] == [
            "generator/0:0",
            "scorer/0:0",
        ]
        b.server.forget("scorer/0:0")
        assert b.server.tracker.late(monotonic() + 6) == ["generator/0:0"]


def test_heartbeats_are_noted_and_not_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = monotonic()
    with bench(tmp_path, silence=5.0) as b:
        client = b.client()
        monkeypatch.setattr(sockets, "monotonic", lambda: now + 100)
        client.send(Heartbeat())
        until(lambda: b.hear() == [] and b.server.tracker.last("generator/0:0") == now + 100)
        assert len(b.heard) == 1


def test_a_client_is_woken_by_another_thread_and_by_a_descriptor(b: Bench) -> None:
    client = b.client()
    until(lambda: client.receive(0.0) == [] and client.lost(monotonic()) == 0)
    threading.Timer(0.05, client.wake).start()
    began = monotonic()
    assert client.receive(30.0) == []
    reader, writer = os.pipe()
    client.watch(reader)
    os.write(writer, b"x")
    assert client.receive(30.0) == []
    client.unwatch(reader)
    assert monotonic() - began < 30.0
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("endpoint", ["", TCP])
def test_a_client_that_stands_still_while_it_connects_learns_that_it_has(
    b: Bench, monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    made = listener.dial

    def slow(*args: Any) -> Any:
        socket = made(*args)
        until(lambda: b.hear() == [] and monotonic() > began + 0.3)
        return socket

    began = monotonic()
    monkeypatch.setattr(sockets, "dial", slow)
    client = b.client()
    until(lambda: client.receive(0.05) == [] and client.lost(monotonic()) == 0)


def test_a_client_knows_when_the_server_is_gone_and_drops_replayed_frames(b: Bench) -> None:
    client = b.client()
    until(lambda: client.receive(0.05) == [] and client.lost(monotonic()) == 0)
    connection = b.server._routes["generator/0:0"]
    for sequence in (1, 1, 2):
        b.server.socket.send_multipart([connection.identity, pack(Order(()), sequence)])
    b.server.socket.send_multipart([connection.identity, b"junk"])
    until(lambda: client.receive(0.05) is not None and client.counts["malformed"])
    assert client.counts == {"replayed": 1, "malformed": 1}
    b.server.close()
    until(lambda: client.receive(0.05) == [] and client.lost(monotonic()) > 0)


def test_a_client_that_connects_again_says_who_it_is(tmp_path: Path) -> None:
    """For example, if a thousand connect at once, some are cut off before they are heard."""
    keys = Keys.make("t1", TCP, ["local"])
    first = Server(keys.server, RANKS)
    with closing(Client(keys.join("local", first.endpoint, tmp_path), "rank", "generator/0")) as client:
        until(lambda: first.receive(0.02))
        first.close()
        with closing(Server(replace(keys.server, endpoint=first.endpoint), RANKS)) as again:
            until(lambda: again.receive(0.02) or client.receive(0.02) or "generator/0:0" in again.peers)


def cut(b: Bench) -> None:
    """Break all connections, as a network failure does."""
    for descriptor in {*b.server._listener._waiting, *b.server._listener._known}:
        connection = socket.socket(fileno=descriptor)
        connection.shutdown(socket.SHUT_RDWR)
        connection.detach()


@pytest.mark.parametrize("endpoint", [TCP])
def test_a_peer_that_is_cut_after_its_hello_is_heard_on_its_next_connection(b: Bench) -> None:
    client = b.client()
    assert b.server.send("generator/0:0", Goodbye("first"))
    assert until(lambda: client.receive(0.1)) == [Goodbye("first")]
    cut(b)
    client.send(Ready("generator/0", 0, 1))  # it may be lost, or arrive before the new Hello
    until(lambda: client.receive(0.02) or b.hear() is None or len(b.heard) >= 3)
    assert [type(message) for _, message in b.heard] == [Hello, Hello, Ready]
    assert b.server.send("generator/0:0", Goodbye("second"))
    assert until(lambda: client.receive(0.1)) == [Goodbye("second")]
    client.send(RESULTS)
    assert b.wait_for(4)[3] == ("generator/0:0", RESULTS)
    assert b.server.counts.keys() <= {"unknown"}


@pytest.mark.parametrize("endpoint", [TCP])
def test_a_process_that_was_given_up_does_not_come_in_the_way_of_its_successor(b: Bench) -> None:
    first = b.client()
    b.server.forget("generator/0:0")
    cut(b)
    until(lambda: first.receive(0.02) or b.hear() is None or b.server.counts["duplicate"])
    assert b.server.peers == ()
    second = b.raw()
    second.hello(sequence=1)
    second.say(pack(RESULTS, 2))
    assert b.wait_for(3)[2] == ("generator/0:0", RESULTS)


def turns(b: Bench, look: Callable[[], Any], *clients: Client) -> None:
    """Let clients and the server take what comes until `look` returns something true; the clients discard it."""

    def turn() -> Any:
        for client in clients:
            client.receive(0.02)
        b.hear()
        return look()

    until(turn)


@pytest.mark.parametrize("endpoint", ["", TCP])
def test_an_agent_that_comes_before_its_predecessor_is_given_up_waits_and_is_heard_then(b: Bench) -> None:
    first = b.stack.enter_context(closing(Client(b.join("b"), "agent", "b")))
    (_, hello), came = b.wait_for(1)[0], AgentReady("b", 1)
    second, third = (b.stack.enter_context(closing(Client(b.join("b"), "agent", "b"))) for _ in range(2))
    b.wait_for_count("duplicate", 2)
    assert isinstance(hello, Hello)
    for waiting in (second, third):
        assert until(partial(waiting.receive, 0.1)) == [Waits(os.getpid())]
        waiting.send(came)
        waiting.send(Heartbeat())
    b.server.forget("agent:b")
    turns(b, lambda: b.server.counts["duplicate"] == 3, second, third)
    assert b.wait_for(3)[1:] == [("agent:b", hello), ("agent:b", came)]
    # One of the two is heard; the other waits on.
    b.server.forget("agent:b")
    turns(b, lambda: len(b.heard) >= 5, second, third)
    assert b.heard[3:] == [("agent:b", hello), ("agent:b", came)]
    assert b.server.send("agent:b", Goodbye("to the last"))
    assert until(lambda: [*second.receive(0.05), *third.receive(0.05)]) == [Goodbye("to the last")]
    assert (first.receive(0.0), b.server.counts) == ([], {"duplicate": 3})


@pytest.mark.parametrize("endpoint", [TCP])
def test_an_agent_whose_connection_breaks_while_it_waits_is_heard_all_the_same(b: Bench) -> None:
    first = b.raw("b")
    first.hello("b", role="agent", host="b", pid=1)
    b.wait_for(1)
    second = b.stack.enter_context(closing(Client(b.join("b"), "agent", "b")))
    turns(b, lambda: b.server.counts["duplicate"], second)
    cut(b)
    turns(b, lambda: b.server.counts["duplicate"] >= 2, second)
    b.server.forget("agent:b")
    turns(b, lambda: len(b.heard) >= 2, second)
    assert [(peer, message.pid) for peer, message in b.heard if isinstance(message, Hello)][1:] == [
        ("agent:b", os.getpid())
    ]


@pytest.mark.parametrize("endpoint", [TCP])
def test_an_agent_that_was_given_up_while_it_had_no_connection_is_told_when_it_has(b: Bench) -> None:
    agent = b.stack.enter_context(closing(Client(b.join("b"), "agent", "b")))
    b.wait_for(1)
    assert b.server.send("agent:b", Goodbye("first"))
    assert until(lambda: agent.receive(0.1)) == [Goodbye("first")]
    b.server.forget("agent:b")
    cut(b)
    told = until(lambda: b.hear() or agent.receive(0.05))
    assert [type(message) for message in told] == [GivenUp]
    assert b.server.peers == ()


def test_a_server_that_ends_leaves_the_socket_of_its_successor(tmp_path: Path) -> None:
    keys = Keys.make("t1", ipc_endpoint(tmp_path), ["local"])
    first = Server(keys.server, RANKS)
    with closing(Server(keys.server, RANKS)) as second:
        first.close()
        with closing(Client(keys.join("local", second.endpoint, tmp_path), "rank", "generator/0")):
            until(lambda: second.receive(0.05))
    assert not [path for path in tmp_path.iterdir() if path.is_socket()]


def test_only_the_process_that_has_said_nothing_but_hello_may_say_it_again(b: Bench) -> None:
    first, *others = (b.raw() for _ in range(4))
    first.hello(sequence=1)
    b.wait_for(1)
    others[0].hello(sequence=1, again=True, pid=2)
    b.wait_for_count("duplicate", 1)
    others[1].hello(sequence=1, again=True)
    b.wait_for(2)
    first.say(pack(RESULTS, 2))
    b.wait_for_count("unknown")
    others[1].say(pack(RESULTS, 2))
    b.wait_for(3)
    others[2].hello(sequence=3, again=True)
    b.wait_for_count("duplicate", 2)
    others[1].say(pack(RESULTS, 3))
    b.wait_for(4)


@pytest.mark.parametrize("endpoint", [TCP])
def test_a_key_that_is_not_on_the_list_is_refused(b: Bench) -> None:
    client = Client(stranger(b.join()), "rank", "generator/0")
    until(lambda: b.hear() == [] and client.receive(0.05) == [] and client.refused)
    assert b.server.counts["refused"] >= 1
    assert (b.server.peers, b.heard) == ((), [])
    b.client("scorer/0")
    client.close()


@pytest.mark.parametrize("endpoint", [TCP])
def test_a_message_that_is_not_taken_after_a_refusal_is_told_as_the_refusal(b: Bench) -> None:
    """libzmq drops the queue at a refusal, before the client has read that."""
    client = Client(stranger(b.join()), "rank", "generator/0")
    until(lambda: b.hear() == [] and not client.send(Heartbeat()))
    assert "does not know the key of host 'local'" in client.gone()
    client.close()


@pytest.mark.parametrize("endpoint", [TCP])
def test_a_client_that_knows_another_server_key_gets_nowhere(b: Bench) -> None:
    wrong = Client(replace(b.join(), server=stranger(b.join()).public), "rank", "generator/0")
    end = monotonic() + 1.0
    while monotonic() < end:
        assert b.hear() == []
        assert wrong.receive(0.01) == []
    assert wrong.lost(monotonic()) > 0
    wrong.close()


def test_tcp_without_keys_is_never_listened_on(tmp_path: Path) -> None:
    with bench(tmp_path, TCP) as b, pytest.raises(ValueError, match="CURVE"):
        Server(replace(b.keys.server, endpoint=TCP, secret="", allowed={}), {})


@pytest.mark.parametrize("endpoint", [TCP])
def test_a_port_in_use_and_an_address_of_another_machine_are_named(b: Bench) -> None:
    with pytest.raises(WireError, match=f"{b.server.endpoint}.*in use"):
        Server(replace(b.keys.server, endpoint=b.server.endpoint), {})
    with pytest.raises(WireError, match=r"192\.0\.2\.1.*no such address"):
        Server(replace(b.keys.server, endpoint="tcp://192.0.2.1:5000"), {})


def test_a_server_listens_on_loopback_alone_and_its_socket_file_is_private(tmp_path: Path) -> None:
    def listening() -> set[str]:
        return {c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}

    before = listening()
    with bench(tmp_path) as b:
        file = Path(b.server.endpoint.removeprefix("ipc://"))
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert listening() <= before
    assert not file.exists()
    with bench(tmp_path, TCP):
        assert listening() - before <= {"127.0.0.1"}


def test_a_run_folder_with_a_long_path_works(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100) / ("y" * 100)
    folder.mkdir(parents=True)
    with bench(folder, ipc_endpoint(folder)) as b:
        client = b.client()
        client.send(Ready("generator/0", 0, 1))
        assert b.wait_for(2)[1][1] == Ready("generator/0", 0, 1)
        file = Path(b.server.endpoint.removeprefix("ipc://"))
    assert not file.exists()


def test_a_goodbye_just_before_closing_arrives(b: Bench) -> None:
    client = b.client()
    client.send(Note("warning", "last words"))
    client.close()
    b.stack.pop_all()
    assert b.wait_for(2)[1][1] == Note("warning", "last words")
    b.server.close()


# A heartbeat thread continues while the main thread is busy, and does not count as a second peer.


def test_a_pulse_keeps_a_silent_rank_from_being_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bench(tmp_path, silence=50.0) as b:
        b.client("generator/0", 1)
        pulse = HeartbeatThread(b.join(), "generator/0", 1, interval=0.02).start()
        future = monotonic() + 100
        monkeypatch.setattr(sockets, "monotonic", lambda: monotonic() + 100)
        until(lambda: b.hear() == [] and b.server.tracker.last("generator/0:1") >= future)
        pulse.stop()
        assert b.server.peers == ("generator/0:1",)
        assert len(b.heard) == 1
        assert not b.server.counts


def test_a_pulse_may_begin_before_its_rank_and_ends_when_told(b: Bench) -> None:
    pulse = HeartbeatThread(b.join(), "generator/0", 0, interval=0.02).start()
    until(lambda: b.hear() == [] and b.server.tracker.last("generator/0:0") > 0)
    assert not b.server.peers
    b.client("generator/0", 0)
    assert "generator/0:0" in b.server.peers
    pulse.stop()
    assert not pulse._thread.is_alive()


def test_a_pulse_that_has_seen_its_end_before_it_is_woken_may_be_woken_all_the_same(
    b: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulse = HeartbeatThread(b.join(), "generator/0", 0, interval=0.02).start()
    wake = pulse._client.wake

    def wake_late() -> None:
        pulse._thread.join(20)
        wake()

    monkeypatch.setattr(pulse._client, "wake", wake_late)
    pulse.stop()
    assert pulse._client._socket.closed


def test_a_pulse_says_what_the_main_thread_has_no_time_for(b: Bench) -> None:
    pulse = HeartbeatThread(b.join(), "generator/0", 0, interval=60.0).start()
    note = Note("error", "generator/0 rank 0: a thread ended")
    pulse.say(note)
    assert b.wait_for(1) == [("generator/0:0", note)]
    pulse.stop()


@pytest.mark.parametrize("ranks", [1, 256, 1024, 1_000_000])
def test_a_rank_of_a_large_run_may_stand_still_almost_as_long_as_one_of_a_small_run(ranks: int) -> None:
    assert 1.0 <= beat_interval(ranks) <= SILENCE / 5


# Silence is counted from the last sign of life, and only while the tracker looks.


def look(tracker: LivenessTracker, since: int, until: int) -> list[str]:
    """Return the late peers at time `until`, after two looks per second from `since` on."""
    return [tracker.late(time / 2) for time in range(2 * since, 2 * until + 1)][-1]


def test_a_peer_is_late_once_it_was_silent_for_longer_than_allowed() -> None:
    tracker = LivenessTracker(silence=5.0)
    tracker.heard("b", 10.0)
    tracker.heard("a", 11.0)
    assert look(tracker, 11, 15) == []
    assert tracker.late(15.5) == ["b"]
    assert look(tracker, 16, 17) == ["a", "b"]
    tracker.heard("b", 17.0)
    assert tracker.late(17.0) == ["a"]
    assert (tracker.last("b"), tracker.last("c")) == (17.0, -inf)


def test_nobody_is_late_because_the_one_who_listens_was_stopped() -> None:
    """Messages sent meanwhile may be read one by one. A peer that was silent before, or stays silent after, is late."""
    tracker = LivenessTracker(silence=5.0)
    tracker.heard("a", 0.0)
    tracker.heard("b", 1.0)
    assert look(tracker, 1, 4) == []
    tracker.heard("b", 64.0)
    assert look(tracker, 64, 64) == []
    assert look(tracker, 64, 65) == ["a"]
    assert look(tracker, 65, 69) == ["a"]
    assert look(tracker, 69, 70) == ["a", "b"]


def test_what_a_stop_took_is_known_at_the_moment_that_is_asked_about() -> None:
    """The process may be stopped between a check for late peers and another deadline's check."""
    tracker = LivenessTracker(3.0)
    tracker.heard("a", 0.0)
    assert tracker.late(0.5) == []
    assert tracker.suspended_s(20.5) == 20.0 - PAUSE_S
    assert tracker.late(20.6) == []
    assert tracker.suspended_s(20.7) == 20.0 - PAUSE_S


def test_a_peer_is_late_for_one_who_never_looks_often() -> None:
    tracker = LivenessTracker(silence=5.0)
    tracker.heard("a", 0.0)
    assert [tracker.late(3.0 * look) for look in range(7)][-2:] == [[], ["a"]]


def test_a_peer_is_tracked_from_its_first_sign_until_it_is_forgotten() -> None:
    tracker = LivenessTracker(silence=5.0)
    assert tracker.late(100.0) == []
    tracker.heard("a", 100.0)
    tracker.forget("a")
    tracker.forget("never heard of")
    assert look(tracker, 100, 200) == []
