"""Agents with a ticket get a slot without being named beforehand, and nobody else does. Sockets are real (loopback)."""

import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from penstock import __version__
from penstock.runtime.cluster.endpoints import AddressError, resolved, why_unreachable
from penstock.runtime.cluster.placement import Plan, Pool, Rank, Replica
from penstock.runtime.control import applicant, desk, enrolment
from penstock.runtime.control.applicant import DeskClient, NoSlot, enrol, serve_ticket
from penstock.runtime.control.desk import SHARED, TICKET, Desk, EnrolmentError, distances
from penstock.runtime.control.enrolment import (
    Admitted,
    Enrol,
    Found,
    FromAgent,
    FromDesk,
    Joined,
    Present,
    Probe,
    Reached,
    Refused,
    Welcome,
    Withdrawn,
    pack_for_desk,
)
from penstock.runtime.control.security import DeskKeys, Join, KeyFileError, KeyPair, Keys, Ticket
from penstock.runtime.control.signals import FAILED, PREEMPTED

pytestmark = pytest.mark.timeout(120)
BIND = "127.0.0.1:0"
# Seconds that a test waits for an expected event.
PATIENCE_S = 60.0


@dataclass
class Office:
    """A desk in a folder, and agents that enrol there, one thread each."""

    desk: Desk
    folder: Path
    pool: ThreadPoolExecutor
    controller: str
    said: list[str] = field(default_factory=list)

    @property
    def ticket(self) -> Path:
        return self.folder / TICKET

    def agent(self, ticket: Path | None = None, folder: Path | None = None) -> "Future[Join]":
        return self.pool.submit(enrol, ticket or self.ticket, folder, "", lambda text: None)

    def wait(self, count: int, *clients: DeskClient, seconds: float = PATIENCE_S, reached: str = "") -> list[str]:
        """Return the names of the slots; meanwhile the given clients answer probes with `reached`."""
        waited = self.pool.submit(self.desk.wait, count, seconds, list, self.said.append)
        while not waited.done():
            time.sleep(0.02)
            for one in clients:
                if any(isinstance(found, Probe) for found in one.receive(0.02)):
                    one.send(Reached(reached))
        waited.result()
        return [host.name for host in self.desk.cluster("127.0.0.1:0").hosts]

    def begin(self, *slots: str) -> dict[str, Join]:
        """Begin the run: every slot gets its `Join`."""
        keys = Keys.make("run1", "tcp://127.0.0.1:0", slots)
        joins = {slot: keys.join(slot, self.controller, self.folder) for slot in slots}
        for slot, join in joins.items():
            self.desk.admit(slot, join)
        return joins

    def heard(self, text: str) -> None:
        """Wait until the user is told a text that contains `text`."""

        def told() -> bool:
            self.said += self.desk.news()
            return any(text in said for said in self.said)

        until(told)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextmanager
def unheard(port: int = 0) -> Iterator[int]:
    """A port (this one if given) on which nobody listens, and which no concurrent test can get."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", port))
        yield held.getsockname()[1]


@contextmanager
def opened(folder: Path, job: str = "aipo", bind: str = BIND) -> Iterator[Office]:
    folder.mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as controller:
        where = f"tcp://127.0.0.1:{controller.getsockname()[1]}"
        made = Office(Desk(DeskKeys.make(job), bind, folder), folder, ThreadPoolExecutor(), where)
        try:
            yield made
        finally:
            made.desk.close()
            made.pool.shutdown()


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    with opened(tmp_path / "run") as made:
        yield made


@contextmanager
def client(ticket: Ticket) -> Iterator[DeskClient]:
    made = DeskClient(ticket, f"tcp://{ticket.endpoint}")
    try:
        yield made
    finally:
        made.close()


def answer(one: DeskClient, message: FromAgent | None = None) -> FromDesk:
    """Return the desk's next message, after sending `message` if one is given."""
    if message is not None:
        one.send(message)
    found: list[FromDesk] = []

    def heard() -> bool:
        found.extend(one.receive(0.05))
        return bool(found)

    until(heard)
    return found[0]


def facts(ticket: Ticket, **changed: object) -> Enrol:
    return msgspec.structs.replace(enrolment.facts(ticket.token, "127.0.0.1"), **changed)


def come(one: DeskClient, ticket: Ticket, **changed: object) -> None:
    """Enrol, and report the shared folder as found."""
    assert isinstance(answer(one, facts(ticket, **changed)), Welcome)
    one.send(Found(shared=True))


def ready(office: Office) -> int:
    """The number of agents that have enrolled and found the folder."""
    return sum(bool(one.ready) for one in list(office.desk._applicants.values()))


# The ticket.


def test_an_agent_with_the_ticket_gets_the_join_of_its_slot_once_the_run_begins(office: Office, tmp_path: Path) -> None:
    agents = [office.agent(), office.agent(folder=tmp_path / "own")]
    slots = office.wait(2)
    assert not any(agent.done() for agent in agents)
    joins = office.begin(*slots)
    found = sorted((agent.result(PATIENCE_S) for agent in agents), key=lambda join: join.host)
    own = {join.host: join.folder for join in found}
    assert set(own.values()) == {str(office.folder), str(tmp_path / "own")}
    assert [replace(join, folder=str(office.folder)) for join in found] == [joins[slot] for slot in sorted(slots)]


def test_the_join_of_a_run_of_two_thousand_hosts_arrives(office: Office) -> None:
    agent = office.agent()
    (slot,) = office.wait(1)
    names = [slot, *(f"ip-10-0-{number}.some-region.compute.internal" for number in range(2000))]
    office.desk.admit(slot, Keys.make("run1", "tcp://127.0.0.1:0", names).join(slot, office.controller, office.folder))
    assert agent.result(PATIENCE_S).hosts.keys() == set(names)


def test_a_ticket_is_private_and_goes_with_the_desk(tmp_path: Path) -> None:
    with opened(tmp_path / "run") as office:
        for name in (TICKET, SHARED):
            assert stat.S_IMODE((office.folder / name).stat().st_mode) == 0o600
        ticket = Ticket.read(office.ticket)
        assert ticket == office.desk.ticket
        assert ticket.token not in repr(ticket) + repr(facts(ticket))
        assert "secret" not in repr(Admitted("a", "secret"))
    assert list(office.folder.iterdir()) == []


def test_keys_that_are_kept_make_one_ticket_for_all_starts_of_a_job(tmp_path: Path) -> None:
    DeskKeys.make("job").write(tmp_path / "desk.json")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    tickets = []
    for _ in range(2):
        made = Desk(DeskKeys.read(tmp_path / "desk.json"), f"127.0.0.1:{port}", tmp_path)
        tickets.append(made.ticket)
        made.close()
    assert tickets[0] == tickets[1]
    assert (tmp_path / "desk.json").stat().st_mode & 0o777 == 0o600


def test_a_ticket_that_others_may_read_is_refused_before_anything_is_connected(office: Office) -> None:
    office.ticket.chmod(0o644)
    with pytest.raises(KeyFileError, match="chmod 600"):
        enrol(office.ticket, None, "", lambda text: None)
    with pytest.raises(KeyFileError, match="chmod 600"):
        serve_ticket(office.ticket, None, "")


def test_a_wrong_token_is_refused_and_told(office: Office, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    replace(office.desk.ticket, token="0" * 32).write(wrong)
    with pytest.raises(NoSlot, match="a token that is not this run's"):
        office.agent(wrong).result(PATIENCE_S)
    office.heard("a token that is not this run's")
    assert office.desk.counts["refused"] == 1
    # Nothing of the stranger is kept: the next agent gets the only slot.
    agent = office.agent()
    office.begin(*office.wait(1))
    assert agent.result(PATIENCE_S).run == "run1"


@pytest.mark.parametrize("there", ["an old one", "another run's"])
def test_an_old_ticket_and_that_of_another_run_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    monkeypatch.setattr(applicant, "OTHER_KEY_S", 1.0)
    kept = tmp_path / "kept.json"
    with opened(tmp_path / "a") as first:
        first.desk.ticket.write(kept)
        port = first.desk.ticket.endpoint.rpartition(":")[2]
        if there == "another run's":
            with opened(tmp_path / "b") as second:
                kept.unlink()
                replace(first.desk.ticket, endpoint=second.desk.ticket.endpoint).write(kept)
                with pytest.raises(NoSlot, match="an old ticket, or another run's"):
                    second.agent(kept).result(PATIENCE_S)
            return
    later = opened(tmp_path / "a", bind=f"127.0.0.1:{port}")
    with later as office, pytest.raises(NoSlot, match="an old ticket, or another run's"):
        office.agent(kept).result(PATIENCE_S)


def test_an_agent_that_has_an_old_ticket_takes_the_new_one_that_takes_its_place(tmp_path: Path) -> None:
    """A killed launcher has left its ticket, and its successor is about to replace it."""
    with opened(tmp_path / "old") as old:
        port = old.desk.ticket.endpoint.rpartition(":")[2]
        stale = old.desk.ticket
    with opened(tmp_path / "new", bind=f"127.0.0.1:{port}") as new:
        ticket = tmp_path / "ticket.json"
        stale.write(ticket)
        agent = new.agent(ticket)
        time.sleep(0.5)
        ticket.unlink()
        new.desk.ticket.write(ticket)
        new.begin(*new.wait(1))
        assert agent.result(PATIENCE_S).run == "run1"


def test_an_old_ticket_of_a_dead_desk_is_read_again_when_another_takes_its_place(office: Office) -> None:
    """A killed launcher has left its ticket, and nothing listens at that address any more."""
    current = office.desk.ticket
    office.ticket.unlink()
    with unheard() as port:
        replace(current, endpoint=f"127.0.0.1:{port}").write(office.ticket)
        agent = office.agent()
        time.sleep(0.5)
        office.ticket.unlink()
        current.write(office.ticket)
        office.begin(*office.wait(1))
        assert agent.result(PATIENCE_S).run == "run1"


def test_a_refusal_of_an_old_ticket_counts_from_the_first_one_and_not_from_the_wait_for_the_desk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = 0.0
    monkeypatch.setattr(applicant, "monotonic", lambda: time.monotonic() + later)
    with opened(tmp_path / "old") as old:
        port = old.desk.ticket.endpoint.rpartition(":")[2]
        stale = old.desk.ticket
    ticket = tmp_path / "ticket.json"
    stale.write(ticket)
    with ThreadPoolExecutor() as pool:
        with unheard(int(port)):
            agent = pool.submit(enrol, ticket, None, "", lambda text: None)
            time.sleep(0.5)
        later = 2 * applicant.OTHER_KEY_S
        with opened(tmp_path / "new", bind=f"127.0.0.1:{port}") as new:
            time.sleep(0.7)
            ticket.unlink()
            new.desk.ticket.write(ticket)
            new.begin(*new.wait(1))
            assert agent.result(PATIENCE_S).run == "run1"


def test_a_ticket_that_is_not_whole_yet_is_read_again(
    office: Office, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applicant, "WHOLE_S", PATIENCE_S)
    ticket = tmp_path / "copied.json"
    text = office.desk.ticket.text()
    ticket.touch(mode=0o600)
    agent = office.agent(ticket)
    time.sleep(0.3)
    ticket.write_text(text[:40])
    time.sleep(0.3)
    ticket.write_text(text)
    office.begin(*office.wait(1))
    assert agent.result(PATIENCE_S).run == "run1"


def test_a_ticket_has_its_name_once_it_is_whole(office: Office, tmp_path: Path) -> None:
    ticket = tmp_path / "ticket.json"

    def read() -> set[bytes]:
        found, end = set[bytes](), time.monotonic() + 1.0
        while time.monotonic() < end or not found:
            with suppress(FileNotFoundError):
                found.add(ticket.read_bytes())
        return found

    reading = office.pool.submit(read)
    while not reading.done():
        ticket.unlink(missing_ok=True)
        office.desk.ticket.write(ticket)
    assert reading.result() == {office.desk.ticket.text().encode()}
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["ticket.json"]


def test_a_ticket_is_waited_for(office: Office, tmp_path: Path) -> None:
    agent = office.agent(tmp_path / "later.json")
    time.sleep(0.3)
    office.desk.ticket.write(tmp_path / "later.json")
    office.begin(*office.wait(1))
    assert agent.result(PATIENCE_S).run == "run1"


@pytest.mark.parametrize(("requeue", "status"), [(False, FAILED), (True, PREEMPTED)])
def test_an_agent_without_a_desk_ends_after_its_own_wait_and_with_75_if_it_is_to_be_started_again(
    tmp_path: Path, requeue: bool, status: int
) -> None:
    with unheard() as port:
        DeskKeys.make("job").ticket(f"127.0.0.1:{port}").write(tmp_path / "ticket.json")
        assert serve_ticket(tmp_path / "ticket.json", None, "", wait=0.5, requeue=requeue) == status
    missing = serve_ticket(tmp_path / "none.json", None, "", wait=0.1, requeue=requeue)
    assert missing == (PREEMPTED if requeue else 2)


@pytest.mark.parametrize(("requeue", "status"), [(False, FAILED), (True, PREEMPTED)])
def test_a_desk_whose_name_is_not_known_is_waited_for_as_one_that_does_not_listen(
    office: Office, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requeue: bool, status: int
) -> None:
    """In a cluster, the name of the launcher's Pod exists only once the Pod does."""
    known: list[str] = []

    def look_up(name: str, *_: object, **__: object) -> list[object]:
        if not known:
            raise socket.gaierror(-2, "Name or service not known")
        return [(None, None, None, "", (known[0], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    named = tmp_path / "named.json"
    replace(office.desk.ticket, endpoint=office.desk.ticket.endpoint.replace("127.0.0.1", "localhost")).write(named)
    assert serve_ticket(named, None, "", wait=0.5, requeue=requeue) == status
    agent = office.agent(named)
    time.sleep(0.3)
    known.append("127.0.0.1")
    office.begin(*office.wait(1))
    assert agent.result(PATIENCE_S).run == "run1"


def test_an_agent_whose_desk_falls_silent_ends_with_75_if_it_is_to_be_started_again(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applicant, "GONE_S", 3.0)
    agent = office.pool.submit(serve_ticket, office.ticket, None, "", requeue=True)
    until(lambda: ready(office) == 1)
    monkeypatch.setattr(office.desk, "_take", lambda *frames: None)
    assert agent.result(PATIENCE_S) == PREEMPTED


@pytest.mark.parametrize("succeeded", [False, True])
def test_an_agent_that_ends_removes_its_join_file_but_not_that_of_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, succeeded: bool
) -> None:
    (tmp_path / "keys").mkdir()
    keys = Keys.make("run1", "tcp://127.0.0.1:1", ["a"])
    monkeypatch.setattr(applicant, "enrol", lambda *_: keys.join("a", "tcp://127.0.0.1:1", tmp_path))

    def serve_once(path: Path, grace: float | None) -> tuple[int, bool]:
        if succeeded:
            (path.parent / "new").write_text(path.read_text())
            (path.parent / "new").replace(path)
        return 0, False

    monkeypatch.setattr(applicant, "serve_once", serve_once)
    assert serve_ticket(tmp_path / "ticket.json", None, "") == 0
    assert [path.name for path in (tmp_path / "keys").iterdir()] == ["agent-a.json"] * succeeded


# What must be equal on all hosts, and what they must share.


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"torch": "1.0.0"}, "given torch 1.0.0, needed "),
        ({"python": "2.7"}, "given Python 2.7, needed "),
        # Further off than the time that the tests may take to get here.
        ({"clock": time.time() + 1e6}, "given a clock that is "),
    ],
)
def test_versions_and_clocks_that_differ_are_named_and_refused(
    office: Office, changed: dict[str, object], said: str
) -> None:
    with client(office.desk.ticket) as one:
        refused = answer(one, facts(office.desk.ticket, **changed))
    assert isinstance(refused, Refused)
    assert said in refused.reason
    office.heard(said)


def test_the_clock_of_an_agent_that_has_waited_for_the_desk_is_that_of_the_moment_at_which_it_enrols(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found_long_ago(*given: Any) -> Enrol:
        now = enrolment.facts(*given)
        return msgspec.structs.replace(now, clock=now.clock - 1e6)

    monkeypatch.setattr(applicant, "facts", found_long_ago)
    agent = office.agent()
    office.begin(*office.wait(1))
    assert agent.result(PATIENCE_S).run == "run1"


def test_another_version_of_penstock_is_named_on_both_sides(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = msgspec.msgpack.encode([1, "9.9.9", ["Enrol", "of that version"]])
    with client(office.desk.ticket) as one:
        one._socket.send(frame)
        refused = answer(one)
    assert isinstance(refused, Refused)
    assert refused.reason == f"given Penstock 9.9.9, needed {__version__}, as the launcher has"
    office.heard("given Penstock 9.9.9")
    (told,) = (said for said in office.said if "9.9.9" in said)
    assert "127.0.0.1" in told
    monkeypatch.setattr(desk, "pack_for_agent", lambda message: msgspec.msgpack.encode([1, "9.9.9", None]))
    with pytest.raises(NoSlot, match=r"needed 9\.9\.9, as the launcher has"):
        office.agent().result(PATIENCE_S)


@pytest.mark.parametrize("there", ["no folder", "another folder", "one that is read-only here"])
def test_a_folder_that_is_not_shared_is_found_when_an_agent_enrols(
    office: Office, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: str
) -> None:
    monkeypatch.setattr(applicant, "SHARED_S", 0.1)
    ticket = tmp_path / "ticket.json"
    office.desk.ticket.write(ticket)
    if there == "no folder":
        office.folder.rename(tmp_path / "elsewhere")
    elif there == "one that is read-only here":  # root may write to any other folder
        monkeypatch.setattr(os, "access", lambda *_: False)
    else:  # a folder of the same name with other content
        (office.folder / SHARED).write_text("0" * 32)
    with pytest.raises(NoSlot, match=r"needed a file system that the hosts share, or .*--folder"):
        office.agent(ticket).result(PATIENCE_S)
    office.heard("needed a file system that the hosts share")


def test_a_folder_of_an_agents_own_that_cannot_be_made_is_told(office: Office, tmp_path: Path) -> None:
    ticket, own = tmp_path / "ticket.json", tmp_path / "own"
    office.desk.ticket.write(ticket)
    own.touch()
    with pytest.raises(NoSlot, match=r"given --folder .*own: File exists; needed a folder that can be made"):
        office.agent(ticket, own).result(PATIENCE_S)


# Agents that come, and agents that do not.


def test_slots_are_in_the_order_of_the_managers_numbers_and_their_names_differ(office: Office) -> None:
    ticket = office.desk.ticket
    with client(ticket) as one, client(ticket) as two, client(ticket) as three:
        come(one, ticket, hostname="node b!", order=2, cores=3)
        come(two, ticket, hostname="node-a", order=1, cores=4)
        come(three, ticket, hostname="node-a", order=0, cores=5)
        assert office.wait(3, one, two, three) == ["node-a", "node-a-2", "node-b"]
        hosts = office.desk.cluster("127.0.0.1:7").hosts
        assert [host.cores for host in hosts] == [5, 4, 3]
        assert {host.agent for host in hosts} == {"external"}


@pytest.mark.parametrize(
    ("name", "memory_gib"), [("Some Card 9000", 12.0), ("NVIDIA A100-SXM4-40GB", 40.0), ("NVIDIA GH200 480GB", 95.6)]
)
def test_gpus_that_agents_report_are_those_of_the_cluster(office: Office, name: str, memory_gib: float) -> None:
    ticket = office.desk.ticket
    with client(ticket) as one, client(ticket) as two:
        come(one, ticket, hostname="a", gpus=2, gpu="NVIDIA H100 80GB HBM3", gpu_gib=79.6)
        come(two, ticket, hostname="b", gpus=1, gpu=name, gpu_gib=memory_gib)
        office.wait(2, one, two)
        cluster = office.desk.cluster("127.0.0.1:7")
        first, second = cluster.hosts
        assert (first.devices, first.gpu) == (("cuda:0", "cuda:1"), "H100")
        kind = cluster.gpu_of(second)
        assert kind is not None
        assert kind.memory_gib == memory_gib


@pytest.mark.parametrize(
    ("given", "found", "refused"), [("2", 0, True), ("2", 1, False), ("0", 0, False), ("", 0, False)]
)
def test_an_agent_that_finds_none_of_the_gpus_that_slurm_gave_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: str, found: int, refused: bool
) -> None:
    monkeypatch.setattr(enrolment, "cuda_devices", lambda: tuple(f"cuda:{index}" for index in range(found)))
    assert ("given 2 GPUs by Slurm" in enrolment.require_gpus({"SLURM_GPUS_ON_NODE": given})) is refused


def test_too_few_agents_are_told_by_who_came_who_is_missing_and_who_was_refused(office: Office) -> None:
    ticket = office.desk.ticket
    with client(ticket) as one, client(ticket) as two:
        come(one, ticket, hostname="n0", order=0)
        answer(two, facts(ticket, hostname="n2", order=2, torch="1.0.0"))
        until(lambda: ready(office) == 1)
        with pytest.raises(EnrolmentError) as raised:
            office.wait(3, seconds=1.0)
    lines = str(raised.value).splitlines()
    assert "1 of 3 agents joined" in lines[0]
    assert [line for line in lines if line.startswith("  joined: n0 ")]
    assert "  missing: number 1, 2" in lines
    assert [line for line in lines if line.startswith("  refused: the agent of n2 ") and "torch 1.0.0" in line]


def test_agents_whose_managers_number_each_host_alone_leave_no_number_missing(office: Office) -> None:
    ticket = office.desk.ticket
    with client(ticket) as one, client(ticket) as two:
        come(one, ticket, hostname="n0", order=0)
        come(two, ticket, hostname="n1", order=0)
        until(lambda: ready(office) == 2)
        with pytest.raises(EnrolmentError) as raised:
            office.wait(3, seconds=1.0)
    assert "2 of 3 agents joined" in str(raised.value)
    assert "missing" not in str(raised.value)


@pytest.mark.parametrize(
    ("environment", "order"),
    [
        ({"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}, -1),
        ({"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "JOB_COMPLETION_INDEX": "2"}, 2),
        ({"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}, 1),
    ],
)
def test_a_torchrun_of_one_host_alone_gives_its_agent_no_number(environment: dict[str, str], order: int) -> None:
    assert enrolment.facts("t", "127.0.0.1", 0, environment).order == order


def test_hosts_that_do_not_reach_each_other_are_told_with_the_connection(office: Office) -> None:
    ticket = office.desk.ticket
    with client(ticket) as one, client(ticket) as two:
        come(one, ticket, hostname="a")
        come(two, ticket, hostname="b")
        lack = "the connection from b (10.0.0.2) to 10.0.0.1:7 timed out"
        with pytest.raises(EnrolmentError, match=r"hosts do not reach each other(.|\n)*from b \(10\.0\.0\.2\) to 10"):
            office.wait(2, one, two, reached=lack)


@pytest.mark.parametrize("count", [1, 2, 5, 33, 34, 100, 513])
def test_every_host_is_tried_by_as_many_others_and_by_all_of_few(count: int) -> None:
    away = distances(count)
    assert len(set(away)) == len(away) == min(count - 1, desk.MAX_TRIED)
    assert all(0 < distance < count for distance in away)


def test_more_agents_than_may_be_extra_are_let_in_before_they_are_waited_for(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    many = desk.MAX_EXTRA + 6
    made = Desk(DeskKeys.make("job"), BIND, tmp_path / "run", expected=many)
    with ExitStack() as stack:
        stack.callback(made.close)
        for order in range(many):
            come(stack.enter_context(client(made.ticket)), made.ticket, order=order)
        assert made.counts["refused"] == 0


def test_an_agent_that_does_not_reach_the_controller_says_from_where_to_where(office: Office) -> None:
    agent = office.agent()
    slots = office.wait(1)
    with unheard() as port:
        office.controller = f"tcp://127.0.0.1:{port}"
        office.begin(*slots)
        said = f"the connection from {socket.gethostname()} (127.0.0.1) to 127.0.0.1:{port} was refused"
        with pytest.raises(NoSlot) as raised:
            agent.result(PATIENCE_S)
    assert said in str(raised.value)
    until(lambda: bool(office.desk._losses))
    assert [(slot, life, said in why) for slot, life, why in office.desk.losses()] == [(slots[0], 0, True)]


def test_an_agent_that_its_manager_finds_dead_is_not_waited_for(office: Office) -> None:
    with pytest.raises(EnrolmentError, match="the agent of n1 ended: exit status 3"):
        office.desk.wait(2, PATIENCE_S, lambda: [("n1", "exit status 3")], office.said.append)


def test_a_desk_that_fails_says_so_at_once_and_blames_no_agent(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(frame: bytes) -> FromAgent:
        raise RuntimeError("a fault of the desk's own")

    monkeypatch.setattr(desk, "read_at_desk", fail)
    with client(office.desk.ticket) as one:
        one.send(Present())
        with pytest.raises(EnrolmentError, match="a fault of the desk's own"):
            office.desk.wait(1, PATIENCE_S, list, office.said.append)
    assert any("a fault of the desk's own" in text for text in office.said + office.desk.news())


def test_a_run_that_goes_on_by_itself_does_with_fewer_agents_after_a_while_if_it_can(office: Office) -> None:
    """Managers' reports of other agents' ends are passed on then and do not end it; late agents find free slots."""
    ticket = office.desk.ticket
    with client(ticket) as one, client(ticket) as two:
        come(one, ticket, hostname="a")
        said, told = list[str](), [[("b", "exit status 3")]]

        def poll() -> list[tuple[str, str]]:
            return told.pop() if told else []

        waited = office.pool.submit(office.desk.wait, 3, 8.0, poll, said.append, fewest=1)
        while not waited.done():
            if any(isinstance(found, Probe) for found in one.receive(0.05)):
                one.send(Reached())
        assert waited.result(PATIENCE_S) == 1
        assert len([text for text in said if "1 of 3 agents" in text]) == 1
        assert said.count("the agent of b ended: exit status 3") == 1
        office.desk.reserve(2)
        assert len(office.desk.vacant()) == 2
        come(two, ticket, hostname="b")
        until(lambda: len(office.desk.vacant()) == 1)


def test_agents_without_which_a_run_might_do_are_named_with_their_ends_where_too_few_are_left(office: Office) -> None:
    told = [[("n1", "exit status 3"), ("n2", "exit status 4")]]
    with pytest.raises(EnrolmentError) as raised:
        office.desk.wait(2, 0.5, lambda: told.pop() if told else [], office.said.append, fewest=1)
    for death in ("the agent of n1 ended: exit status 3", "the agent of n2 ended: exit status 4"):
        assert death in str(raised.value)


def test_an_agent_that_left_before_the_run_began_is_replaced_by_the_next(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client(office.desk.ticket) as one:
        come(one, office.desk.ticket)
        (slot,) = office.wait(1, one)
    monkeypatch.setattr(desk, "SILENCE_S", 0.5)  # only now: an agent may need longer to get its slot
    office.desk._wake()
    office.heard("has left: no heartbeat")
    assert office.desk.vacant() == [slot]
    agent = office.agent()
    office.begin(slot)
    assert agent.result(PATIENCE_S).host == slot


def test_an_agent_that_is_started_again_gets_the_slot_of_its_host_and_the_same_join(office: Office) -> None:
    ticket = office.desk.ticket
    with client(ticket) as one, client(ticket) as two:
        come(one, ticket, hostname="a", order=0)
        come(two, ticket, hostname="b", order=1)
        joins = office.begin(*office.wait(2, one, two))
        for each in (one, two):
            assert isinstance(answer(each), Admitted)
            each.send(Joined())
    until(lambda: not office.desk._applicants)
    for slot in ("a", "b"):
        office.desk.vacate(slot, 0)
    with client(ticket) as again:
        come(again, ticket, hostname="b", address="127.0.0.2")
        found = answer(again)
    assert isinstance(found, Admitted)
    assert found.slot == "b"
    # Its ranks listen at its new address.
    assert msgspec.json.decode(found.join, type=Join) == replace(joins["b"], address="127.0.0.2", life=1)
    assert office.desk.vacant() == ["a"]


def test_a_slot_is_for_agents_with_all_that_the_plan_knows_of_it_and_no_more(office: Office) -> None:
    """Many cores do not replace a GPU. What the first agent had beyond the plan, later ones may lack."""
    ticket = office.desk.ticket

    def comes(cores: int, gpus: int) -> DeskClient:
        one = stack.enter_context(client(ticket))
        come(one, ticket, hostname=f"{cores}-{gpus}", cores=cores, gpus=gpus)
        return one

    def leaves(one: DeskClient) -> None:
        one.send(Withdrawn("it was ended"))
        until(lambda: office.desk.vacant() == [slot])

    with ExitStack() as stack:
        first = comes(4, 1)
        (slot,) = office.wait(1, first)
        office.begin(slot)
        leaves(first)
        comes(64, 0)
        larger = comes(8, 2)
        until(lambda: office.desk.vacant() == [])
        assert isinstance(answer(larger), Admitted)
        leaves(larger)
        assert isinstance(answer(comes(4, 1)), Admitted)
        assert office.desk.vacant() == []
    # If an agent's host name differs from its slot's, the user is told both.
    office.heard(f"host {slot}")
    assert any("8-2" in said and f"host {slot}" in said for said in office.said)


def test_a_slot_of_a_run_that_is_planned_is_for_agents_with_what_its_ranks_need(office: Office) -> None:
    """The agent with which the plan was made has more than its ranks need."""
    ticket = office.desk.ticket
    with client(ticket) as first, client(ticket) as other, client(ticket) as another:
        come(first, ticket, hostname="a", cores=64, gpus=8)
        (slot,) = office.wait(1, first)
        (host,) = office.desk.cluster(BIND).hosts
        ranks = (Rank(slot, "cuda:0", 64), Rank(slot, "cuda:1", 64), Rank(slot, "cpu", 3))
        plan = Plan((Pool("generator", (), (Replica("generator/0", ranks),)),))
        assert (host.cores, plan.needs(slot), plan.needs("b")) == (64, (5, 2), (1, 0))
        office.desk.require(slot, *plan.needs(slot))
        office.begin(slot)
        first.send(Withdrawn("it was ended"))
        until(lambda: office.desk.vacant() == [slot])
        come(other, ticket, hostname="b", cores=64, gpus=1)
        come(another, ticket, hostname="c", cores=5, gpus=2)
        assert isinstance(answer(another), Admitted)


def test_an_end_that_is_told_of_twice_is_not_taken_for_that_of_the_next_agent(office: Office) -> None:
    """The controller or the desk missed a life's end, and the manager reports it when the next agent has the slot. The
    manager's report after that is of the next agent."""
    ticket = office.desk.ticket
    with ExitStack() as stack:
        life, slot = -1, ""

        def newcomer() -> DeskClient:
            nonlocal life
            one = stack.enter_context(client(ticket))
            come(one, ticket, hostname="a")
            life += 1
            if life == 0:
                office.begin(*office.wait(1, one))
            admitted = answer(one)
            assert isinstance(admitted, Admitted)
            assert msgspec.json.decode(admitted.join, type=Join).life == life
            return one

        first = newcomer()
        (slot,) = (host.name for host in office.desk.cluster(BIND).hosts)
        first.send(Joined())
        until(lambda: not office.desk._applicants)
        office.desk.vacate(slot, 0)
        second = newcomer()
        office.desk.vacate(slot, 0)
        assert office.desk.ended(slot) is None
        second.send(Withdrawn("it was ended"))
        until(lambda: office.desk.vacant() == [slot])
        assert office.desk.losses() == [(slot, 1, "it was ended")]
        newcomer()
        assert office.desk.ended(slot) is None
        office.desk.vacate(slot, 1)
        assert office.desk.vacant() == []
        assert office.desk.ended(slot) == 2
        assert office.desk.vacant() == [slot]


def test_an_agent_for_which_there_is_no_slot_is_refused_after_a_while(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "NO_SLOT_S", 0.3)
    agents = [office.agent(), office.agent()]
    until(lambda: ready(office) == 2)
    office.begin(*office.wait(1))
    results = []
    for agent in agents:
        try:
            results.append(agent.result(PATIENCE_S).run)
        except NoSlot as error:
            results.append(str(error))
    assert "run1" in results
    (refusal,) = (text for text in results if text != "run1")
    assert "all 1 slots are taken" in refusal


@pytest.mark.parametrize("over", [True, False])
def test_whoever_waits_at_the_end_is_told_how_the_run_ended(tmp_path: Path, over: bool) -> None:
    with opened(tmp_path / "run") as office:
        agent = office.agent()
        until(lambda: bool(office.desk._applicants))
        office.desk.close("the run has ended", over=over)
        with pytest.raises(NoSlot, match="the run has ended") as raised:
            agent.result(PATIENCE_S)
        assert raised.value.status == (0 if over else 1)
        # `opened` closes the desk once more, and needs one.
        office.desk = Desk(DeskKeys.make("x"), BIND, tmp_path)


# Between two lives of a run that restarts by itself.


def test_whoever_comes_after_the_controller_has_ended_waits_for_the_next_desk(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is neither given a free slot of the run that has ended nor refused, however long the run takes to end."""
    monkeypatch.setattr(desk, "NO_SLOT_S", 0.1)
    ticket = office.desk.ticket
    with client(ticket) as one, client(ticket) as two:
        come(one, ticket, hostname="a")
        slots = office.wait(1, one)
        office.desk.reserve(1)
        office.begin(*slots, *office.desk.vacant())
        assert isinstance(answer(one), Admitted)
        one.send(Joined())
        until(lambda: not office.desk._applicants)
        office.desk.rest()
        come(two, ticket, hostname="a")
        office.heard("has come")
        time.sleep(0.5)
        # Messages sent before the heartbeat have been answered now.
        assert isinstance(answer(two, Present()), Present)
        assert office.desk.counts["refused"] == 0
        office.desk.close(again=True)
        refused = answer(two)
        assert isinstance(refused, Refused)
        assert refused.again
    office.desk = Desk(DeskKeys.make("x"), BIND, office.folder)


def test_an_agent_enrols_again_where_it_is_given_a_slot_of_the_run_that_it_has_left(office: Office) -> None:
    """The agent's controller has said goodbye and is about to end: the slot is useless, and the next run has one."""
    agent = office.pool.submit(enrol, office.ticket, None, "", lambda text: None, "run1")
    slots = office.wait(1)
    office.desk.reserve(1)
    vacant = office.desk.vacant()
    office.begin(*slots, *vacant)
    # Like any agent, it is offered each free slot.
    until(lambda: not office.desk.vacant() and bool(office.desk._applicants))
    assert not agent.done()
    assert office.desk.losses() == []
    office.desk.rest()
    office.desk.close(again=True)
    office.desk = Desk(DeskKeys.make("x"), BIND, office.folder)
    slots = office.wait(1)
    keys = Keys.make("run2", "tcp://127.0.0.1:0", slots)
    office.desk.admit(slots[0], keys.join(slots[0], office.controller, office.folder))
    assert agent.result(PATIENCE_S).run == "run2"


# Strangers.


@contextmanager
def raw(ticket: Ticket, identity: bytes) -> Iterator["zmq.Socket[bytes]"]:
    """A client that chooses its identity, and sends any frame."""
    pair = KeyPair.make()
    with zmq.Context() as context, context.socket(zmq.DEALER) as one:
        one.setsockopt(zmq.LINGER, 2000)
        one.setsockopt(zmq.IDENTITY, identity)
        one.setsockopt(zmq.CURVE_SERVERKEY, ticket.server.encode())
        one.setsockopt(zmq.CURVE_PUBLICKEY, pair.public.encode())
        one.setsockopt(zmq.CURVE_SECRETKEY, pair.secret.encode())
        one.connect(f"tcp://{ticket.endpoint}")
        yield one


def test_nobody_is_heard_before_the_token_and_nobody_takes_another_agents_place(office: Office) -> None:
    ticket, counts = office.desk.ticket, office.desk.counts
    with raw(ticket, b"a") as one:
        for frame in (b"", b"\xff" * 100, pack_for_desk(Present()), pack_for_desk(Found(shared=True))):
            one.send(frame)
        until(lambda: counts["dropped"] == 4)
        one.send(pack_for_desk(facts(ticket)))
        assert isinstance(enrolment.read_at_agent(one.recv()), Welcome)

    def dropped() -> bool:
        # libzmq ignores a new client of this identity until it knows that the first is gone: that one must try again.
        with raw(ticket, b"a") as other:
            other.send(pack_for_desk(Found(shared=True)))
            time.sleep(0.3)
        return counts["dropped"] > 4

    # The connection is broken, and another client takes its identity: its key differs, so that it is not believed.
    until(dropped)
    assert [one.ready for one in office.desk._applicants.values()] == [0]


def test_a_frame_that_is_too_long_ends_its_connection_and_nothing_else(office: Office) -> None:
    agent = office.agent()
    with raw(office.desk.ticket, b"a") as one:
        one.send(bytes(1 << 20))
        office.begin(*office.wait(1))
    assert agent.result(PATIENCE_S).run == "run1"


def test_a_flood_of_connections_keeps_no_agent_out(office: Office) -> None:
    host, _, port = office.desk.ticket.endpoint.rpartition(":")
    flood = []
    for _ in range(400):
        with suppress(OSError):
            flood.append(socket.create_connection((host, int(port)), timeout=10))
    agent = office.agent()
    office.begin(*office.wait(1))
    assert agent.result(PATIENCE_S).run == "run1"
    for one in flood:
        one.close()


def test_where_no_desk_listens_the_connection_is_named(tmp_path: Path) -> None:
    with unheard() as port:
        DeskKeys.make("job").ticket(f"127.0.0.1:{port}").write(tmp_path / "ticket.json")
        said = rf"from {socket.gethostname()} \(127\.0\.0\.1\) to 127\.0\.0\.1:{port} was refused"
        with pytest.raises(NoSlot, match=said):
            enrol(tmp_path / "ticket.json", None, "", lambda text: None, wait=1.0)


# Host names.


def test_a_host_name_is_looked_up_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        "far": ["10.0.0.7"],
        "both": ["fd00::1", "10.0.0.8"],
        "six": ["fd00::2"],
        "self": ["127.0.1.1"],
        "all": ["0.0.0.0"],
    }

    def look_up(name: str, *_: object, **__: object) -> list[object]:
        if name not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return [(None, None, None, "", (ip, 0)) for ip in known[name]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert [resolved(name) for name in ("far", "both", "six")] == ["10.0.0.7", "10.0.0.8", "[fd00::2]"]
    assert [resolved(ip) for ip in ("10.0.0.1", "[::1]")] == ["10.0.0.1", "[::1]"]
    for name, said in (("none", "does not know"), ("self", r"which is 127\.0\.1\.1"), ("all", "every interface")):
        with pytest.raises(AddressError, match=said):
            resolved(name)


def test_a_connection_that_can_be_made_has_nothing_against_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        assert why_unreachable(f"tcp://127.0.0.1:{there.getsockname()[1]}") == ""
