"""Values read from other hosts: equal bits, or an error that names the owner; bad requests never stop the server."""

import os
import random
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from msgspec import structs

from penstock.graph.types import Prompts, Rewards
from penstock.runtime.control.listener import WireError, dial
from penstock.runtime.control.messages import (
    ANSWER,
    CHUNK,
    EXCHANGE,
    MAX_QUESTION,
    QUESTION,
    WINDOW,
    Ask,
    MessageError,
)
from penstock.runtime.control.security import Join, Keys
from penstock.runtime.control.value_server import ExchangeClient, ExchangeServer, reply
from penstock.runtime.tensor.object_store import ObjectReader, ObjectStore
from penstock.runtime.tensor.shm import ObjectRef, ObjectRefError
from tests.halt import halt

from .sockets import mutated, stranger, until

pytestmark = pytest.mark.timeout(300)
TCP = "tcp://127.0.0.1:0"
PATIENCE_S = 60.0
Far = Callable[[ObjectRef, Sequence[tuple[int, int]]], list[bytearray]]


@dataclass
class Hosts:
    """An owner on host a, and readers on host b."""

    keys: Keys
    folder: Path
    stack: ExitStack

    def __post_init__(self) -> None:
        self.run = self.keys.server.run
        self.died: list[str] = []
        self.server = self.new_server(ObjectReader(self.run, host="a"))
        self.stack.callback(self.server.close)
        self.store = ObjectStore(
            self.run, "generator.0", host="a", endpoint=self.server.endpoint, segment_bytes=1 << 16
        )
        self.stack.callback(self.store.close)
        self.client = self.new_client()
        self.reader = self.new_reader("b", self.client.ranges)

    def join(self, host: str) -> Join:
        return self.keys.join(host, TCP, self.folder)

    def new_server(self, reader: ObjectReader, owner: str = "generator.0") -> ExchangeServer:
        return ExchangeServer(self.join("a"), owner, reader, self.died.append)

    def new_client(self, patience: float = PATIENCE_S, join: Join | None = None) -> ExchangeClient:
        client = ExchangeClient(join or self.join("b"), patience)
        self.stack.callback(client.close)
        return client

    def new_reader(self, host: str, far: Far | None = None) -> ObjectReader:
        reader = ObjectReader(self.run, host=host, far=far)
        self.stack.callback(reader.close)
        return reader

    def gives(self, handle: ObjectRef, value: Rewards) -> bool:
        """True if a reader on host b gets equal bits."""
        return torch.equal(self.reader.get(handle, Rewards).values_N, value.values_N)

    def raw(self, join: Join | None = None, owner: str = "") -> "zmq.Socket[bytes]":
        """A DEALER socket that ignores the protocol, with host b's keys or `join`'s, to the server or `owner`."""
        join = join or self.join("b")
        context = zmq.Context()
        self.stack.callback(context.destroy, linger=0)
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.keys.hosts["a"].public.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, join.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, join.secret.encode())
        socket.connect(owner or self.server.endpoint)
        return socket


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with ExitStack() as stack:
        yield Hosts(Keys.make(f"x{secrets.token_hex(6)}", TCP, ["a", "b"]), tmp_path, stack)


def rewards(count: int, seed: int = 0) -> Rewards:
    return Rewards(torch.randn(count, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("count", [0, 3, CHUNK // 4, 12 * CHUNK // 4 + 17])
def test_a_value_of_another_host_has_equal_bits_and_comes_in_parts(hosts: Hosts, count: int) -> None:
    value = rewards(count)
    handle = hosts.store.put(value)
    assert hosts.gives(handle, value)
    parts = ceil(handle.nbytes / CHUNK)
    until(lambda: hosts.server.counts["served"] == parts)
    assert hosts.client.counts == {"asked": parts, "bytes": handle.nbytes}
    prompts = Prompts((3,), ("1+1=",), ("2",))
    assert hosts.reader.get(hosts.store.put(prompts), Prompts) == prompts


def test_a_reader_on_the_owners_host_asks_nobody(hosts: Hosts) -> None:
    value = rewards(100)
    near = hosts.new_reader("a")
    assert torch.equal(near.get(hosts.store.put(value), Rewards).values_N, value.values_N)
    assert hosts.server.counts == {}


def test_a_value_that_was_freed_or_replaced_is_an_error_on_every_host(hosts: Hosts) -> None:
    handle = hosts.store.put(rewards(3))
    hosts.store.free(handle)
    with pytest.raises(ObjectRefError, match=r"of generator\.0 on host a .*freed"):
        hosts.reader.get(handle, Rewards)
    again = hosts.store.put(rewards(3, seed=1))
    assert again.offset == handle.offset
    with pytest.raises(ObjectRefError, match="freed"):
        hosts.reader.get(handle, Rewards)
    assert hosts.gives(again, rewards(3, seed=1))


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 64},
        {"offset": -64},
        {"offset": 1 << 40},
        {"nbytes": 1 << 40},
        {"nbytes": 0},
        {"nbytes": -1},
        {"nbytes": 64},
        {"serial": 99},
        {"owner": "generator.1"},
        {"segment": "penstock-other-generator.0-0"},
        {"segment": "../../etc/passwd"},
        {"host": "c"},
        {"endpoint": ""},
        {"endpoint": "tcp://nowhere"},
    ],
    ids=str,
)
def test_a_wrong_handle_is_an_error_and_the_next_one_is_answered(hosts: Hosts, change: dict[str, Any]) -> None:
    handle = hosts.store.put(rewards(3))
    with pytest.raises(ObjectRefError, match=r"penstock-|etc"):
        hosts.reader.get(structs.replace(handle, **change), Rewards)
    assert hosts.gives(handle, rewards(3))


def test_a_reader_that_cannot_ask_says_where_the_value_is(hosts: Hosts) -> None:
    with pytest.raises(ObjectRefError, match=r"on host a .*a reader on host 'c' that cannot ask other hosts"):
        hosts.new_reader("c").get(hosts.store.put(rewards(3)), Rewards)


def test_a_block_freed_between_two_parts_is_refused(hosts: Hosts) -> None:
    handle = hosts.store.put(rewards(CHUNK))
    raw = hosts.raw()
    answers = []
    for number, start in enumerate((0, CHUNK)):
        raw.send(QUESTION.pack((EXCHANGE, number, Ask(handle, start, CHUNK))))
        assert raw.poll(20_000)
        answers.append(ANSWER.unpack(raw.recv_multipart()[0])[1:])
        if start == 0:
            hosts.store.free(handle)
    assert answers[0] == (0, "")
    assert answers[1][0] == 1
    assert "freed" in answers[1][1]


def test_a_value_that_is_freed_while_it_is_read_is_whole_or_an_error(hosts: Hosts) -> None:
    """The owner frees a value and puts another in its place while a thread reads: no reader sees a mixture."""
    wrong: list[int] = []
    read = [0]
    shown: list[ObjectRef] = []
    over = threading.Event()
    client = hosts.new_client()

    def look() -> None:
        reader = ObjectReader(hosts.run, host="b", far=client.ranges)
        while not over.is_set():
            try:
                values_N = reader.get(shown[-1], Rewards).values_N
            except ObjectRefError:
                continue
            read[0] += 1
            if not bool((values_N == values_N[0]).all()):
                wrong.append(read[0])

    shown.append(hosts.store.put(Rewards(torch.full((CHUNK,), -1.0))))
    thread = threading.Thread(target=look)
    thread.start()
    try:
        number = 0
        while read[0] < 10:
            hosts.store.free(shown[-1])
            shown.append(hosts.store.put(Rewards(torch.full((CHUNK,), float(number)))))
            number += 1
            if number % 8 == 0:  # this value stays until it was read
                before = read[0]
                until(lambda: read[0] > before or not thread.is_alive())  # noqa: B023 - called here
                assert thread.is_alive()
    finally:
        over.set()
        thread.join(60)
    assert wrong == []


def test_whatever_is_no_question_is_counted_and_dropped(hosts: Hosts) -> None:
    handle = hosts.store.put(rewards(3))
    good = QUESTION.pack((EXCHANGE, 1, Ask(handle, 0, handle.nbytes)))
    raw = hosts.raw()
    for _ in range(20):
        raw.send(secrets.token_bytes(200))
    raw.send_multipart([good, b"and more"])
    raw.send(good[:-3])
    raw.send(good.replace(b"\x93\x01\x01", b"\x93\x02\x01", 1))  # another version
    raw.send(QUESTION.pack((EXCHANGE, 1, Ask(handle, 0, CHUNK + 1))))
    raw.send(bytes(MAX_QUESTION + 1))
    until(lambda: hosts.server.counts.total() == 25)
    assert hosts.server.counts == {"malformed": 24, "oversized": 1}
    raw.send(bytes(8 * MAX_QUESTION))  # cuts this connection; others continue
    assert hosts.gives(handle, rewards(3))
    assert raw.poll(0) == 0


CRUEL: list[dict[str, Any]] = [
    {"segment": "penstock-RUN-generator.0-0\0"},
    {"segment": "penstock-RUN-\0-0"},
    {"segment": "penstock-RUN-" + "x" * 3000 + "-0"},
    {"segment": "penstock-RUN-é😀-0"},
    {"segment": "penstock-RUN-../../../etc/passwd-0"},
    {"serial": -1},
    {"serial": (1 << 64) - 1},
    {"offset": (1 << 63) - 1, "nbytes": (1 << 63) - 1},
    {"offset": -(1 << 63)},
]


def cruel(handle: ObjectRef, run: str) -> list[ObjectRef]:
    changes = [{k: v.replace("RUN", run) if isinstance(v, str) else v for k, v in one.items()} for one in CRUEL]
    return [structs.replace(handle, **change) for change in changes]


def test_no_question_ends_the_thread_that_answers(hosts: Hosts) -> None:
    handle = hosts.store.put(rewards(3))
    raw = hosts.raw()
    asked = [Ask(one, 0, 64) for one in cruel(handle, hosts.run)]
    asked += [Ask(handle, start, length) for start, length in [(1 << 62, 1), (-1, 1), (0, -(1 << 63)), (0, 0)]]
    for number, ask in enumerate(asked):
        raw.send(QUESTION.pack((EXCHANGE, number, ask)))
    for number in range(len(asked)):
        assert raw.poll(20_000)
        _, given, answer = ANSWER.unpack(raw.recv_multipart()[0])
        assert given == number
        assert answer != ""
    assert hosts.gives(handle, rewards(3))
    assert hosts.died == []


@pytest.mark.parametrize("number", [50_000, pytest.param(250_000, marks=pytest.mark.slow)])
def test_a_mutated_question_has_an_answer_or_is_no_question(hosts: Hosts, number: int) -> None:
    """Nothing else may happen: the thread that answers catches no other exceptions."""
    handle, chance, kinds = hosts.store.put(rewards(3)), random.Random(number), Counter[str]()
    reader = hosts.new_reader("a")
    seeds = [QUESTION.pack((EXCHANGE, 7, Ask(one, 0, 64))) for one in (handle, *cruel(handle, hosts.run))]
    for _ in range(number):
        try:
            kinds[reply([mutated(chance, seeds)], "generator.0", reader)[0]] += 1
        except MessageError:
            kinds["dropped"] += 1
    assert kinds.total() == number
    assert min(kinds[kind] for kind in ("served", "refused", "dropped")) > 0


def test_whatever_another_host_gives_for_a_block_is_a_value_or_an_error_that_names_it(hosts: Hosts) -> None:
    prompts = Prompts((3,), ("1+1=",), ("2",))
    near, chance, wrong = hosts.new_reader("a"), random.Random(3), list[str]()
    given = bytearray()

    def far(handle: ObjectRef, wanted: Sequence[tuple[int, int]]) -> list[bytearray]:
        return [given[start : start + length] for start, length in wanted]

    reader = hosts.new_reader("b", far)
    for value in (rewards(3), prompts):
        handle = hosts.store.put(value)
        block = bytes(near.part(handle, 0, handle.nbytes))
        deep = block[:24] + b"[" * (handle.nbytes - 24)
        seeds = [block, deep, block.replace(b"3", b"9" * 9), block.replace(b"3", b"[0,4611686018427387904]")]
        for _ in range(5_000):
            given[:] = block[:24] + mutated(chance, seeds)[24:]
            try:
                reader.get(handle, type(value))
                for column in reader.rows(handle, type(value)).columns.values():
                    assert column is None or len(column.read([0])) == 1
            except ObjectRefError as error:
                wrong.append(str(error))
        assert wrong
        assert all(text.startswith(str(handle)) for text in wrong)
        wrong.clear()


def test_a_server_whose_thread_ends_says_so_at_once(hosts: Hosts) -> None:
    class Full(ObjectReader):
        def part(self, handle: ObjectRef, start: int, length: int) -> bytearray:
            raise MemoryError("no room for a part")

    server = hosts.new_server(Full(hosts.run, host="a"))
    handle = hosts.store.put(rewards(3))
    raw = hosts.raw(owner=server.endpoint)
    raw.send(QUESTION.pack((EXCHANGE, 1, Ask(handle, 0, 8))))
    (said,) = until(lambda: hosts.died)
    assert "MemoryError: no room for a part" in said
    server.close()


def test_a_key_of_another_run_is_refused(hosts: Hosts) -> None:
    handle = hosts.store.put(rewards(3))
    raw = hosts.raw(stranger(hosts.join("b")))
    with suppress(zmq.Again):  # it may have been refused already
        raw.send(QUESTION.pack((EXCHANGE, 1, Ask(handle, 0, handle.nbytes))), zmq.NOBLOCK)
    until(lambda: hosts.server.counts["stranger"] > 0)
    assert hosts.server.counts["served"] == 0
    assert hosts.reader.get(handle, Rewards) is not None


def test_a_reader_whose_connection_was_refused_before_it_asks_says_so_and_waits_for_nothing(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libzmq gives up such a connection, and a send that waits for another one never returns."""

    def refused(*given: Any) -> "zmq.Socket[bytes]":
        socket = dial(*given)
        until(lambda: not socket.poll(0, zmq.POLLOUT))
        return socket

    monkeypatch.setattr("penstock.runtime.control.value_server.dial", refused)
    handle = hosts.store.put(rewards(3))
    client = hosts.new_client(join=stranger(hosts.join("b")))
    for _ in range(2):
        with pytest.raises(ObjectRefError, match=r"of generator\.0 on host a .* refuses this host's key at tcp://"):
            client.ranges(handle, [(0, handle.nbytes)])
    monkeypatch.undo()
    assert hosts.gives(handle, rewards(3))


def test_a_reader_that_does_not_read_costs_a_bounded_number_of_parts_and_hinders_nobody(hosts: Hosts) -> None:
    handle = hosts.store.put(rewards(CHUNK))
    raw = hosts.raw()
    for number in range(16 * WINDOW):
        raw.send(QUESTION.pack((EXCHANGE, number, Ask(handle, 0, CHUNK))))
    until(lambda: hosts.server.counts.total() == 16 * WINDOW)
    assert hosts.server.counts["unread"] > 0
    small = hosts.store.put(rewards(3))
    assert hosts.gives(small, rewards(3))


OWNER = """
import sys, time
from pathlib import Path
import torch
from penstock.graph.types import Rewards
from penstock.runtime.control.value_server import ExchangeServer
from penstock.runtime.control.security import Join
from penstock.runtime.tensor.object_store import ObjectReader, ObjectStore
join = Join.read(Path(sys.argv[1]))
server = ExchangeServer(join, "owner", ObjectReader(join.run, host="a"), print)
h = ObjectStore(join.run, "owner", host="a", endpoint=server.endpoint).put(Rewards(torch.ones(5)))
print("\\n".join((h.segment, str(h.offset), str(h.nbytes), str(h.serial), h.owner, h.host, h.endpoint)), flush=True)
time.sleep(100)
"""


def test_an_owner_that_dies_while_a_reader_waits_is_named_and_one_that_comes_back_answers(hosts: Hosts) -> None:
    path = hosts.folder / "a.json"
    hosts.join("a").write(path)
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        segment, offset, nbytes, serial, *rest = [owner.stdout.readline().strip() for _ in range(7)]
        handle = ObjectRef(segment, int(offset), int(nbytes), int(serial), *rest)
        assert hosts.reader.get(handle, Rewards).values_N.tolist() == [1.0] * 5
        impatient = hosts.new_reader("b", hosts.new_client(0.5).ranges)
        halt(owner)
        with pytest.raises(ObjectRefError, match="owner on host a has not answered"):
            impatient.get(handle, Rewards)
        owner.send_signal(signal.SIGCONT)
        assert hosts.reader.get(handle, Rewards).values_N.tolist() == [1.0] * 5
        halt(owner)
        killer = threading.Timer(0.2, owner.kill)
        killer.start()
        gone = rf"^{re.escape(str(handle))}.*owner on host a has not answered at {handle.endpoint} for 0.5 s.*of host b"
        with pytest.raises(ObjectRefError, match=gone):
            impatient.get(handle, Rewards)
        killer.join()
    finally:
        owner.kill()
        owner.communicate()
        for left in Path("/dev/shm").glob(f"penstock-{hosts.run}-owner-*"):
            left.unlink(missing_ok=True)  # another run may have swept it at its start


def test_a_time_in_which_the_reader_itself_stood_still_is_no_silence_of_the_owner(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, began = rewards(3), iter([0.0])
    monkeypatch.setattr("penstock.runtime.control.value_server.monotonic", lambda: next(began, 3600.0))
    assert hosts.gives(hosts.store.put(value), value)


def test_answers_that_are_late_or_wrong_are_counted_and_dropped(hosts: Hosts) -> None:
    """The owner has the right key, and sends nonsense before its answer."""
    value = rewards(3)
    handle = hosts.store.put(value)
    block = bytes(ObjectReader(hosts.run, host="a").part(handle, 0, handle.nbytes))
    context = zmq.Context()
    hosts.stack.callback(context.destroy, linger=0)
    fake = context.socket(zmq.ROUTER)
    fake.setsockopt(zmq.LINGER, 0)
    fake.setsockopt(zmq.CURVE_SERVER, 1)
    fake.setsockopt(zmq.CURVE_SECRETKEY, hosts.keys.hosts["a"].secret.encode())
    fake.bind(TCP)
    endpoint = fake.getsockopt_string(zmq.LAST_ENDPOINT)

    def talk() -> None:
        who, frame = fake.recv_multipart()
        _, number, _ = QUESTION.unpack(frame)
        right = ANSWER.pack((EXCHANGE, number, ""))
        for frames in ([b"?"], [right], [right, block[:-1]], [right, block, b""]):
            fake.send_multipart([who, *frames])
        fake.send_multipart([who, ANSWER.pack((EXCHANGE, number + 7, "")), block])
        fake.send_multipart([who, right, block])

    thread = threading.Thread(target=talk)
    thread.start()
    found = hosts.reader.get(structs.replace(handle, endpoint=endpoint), Rewards)
    thread.join(20)
    assert torch.equal(found.values_N, value.values_N)
    assert hosts.client.counts == {"asked": 1, "bytes": handle.nbytes, "malformed": 4, "late": 1}


def test_an_address_that_this_machine_lacks_is_named_with_its_host(hosts: Hosts) -> None:
    join = replace(hosts.join("a"), address="192.0.2.1")
    with pytest.raises(WireError, match=r"generator\.0: cannot listen on tcp://192.0.2.1:0: .*no such address.*host a"):
        ExchangeServer(join, "generator.0", ObjectReader(hosts.run, host="a"), print)


def test_a_closed_server_leaves_no_socket_and_no_thread(hosts: Hosts) -> None:
    """Threads and sockets that an earlier test left may end meanwhile."""
    files, threads = set(os.listdir("/proc/self/fd")), set(threading.enumerate())
    server = hosts.new_server(ObjectReader(hosts.run, host="a"), "generator.1")
    assert len(set(threading.enumerate()) - threads) == 2
    server.close()
    assert set(os.listdir("/proc/self/fd")) <= files
    assert set(threading.enumerate()) <= threads
