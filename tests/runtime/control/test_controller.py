"""Which of several pieces of bad news a controller takes for the reason of a run's end."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.runtime.control.controller import Controller, PeerFault
from penstock.runtime.control.messages import Exited, Found, Note, Post, Ready, pack, unpack
from penstock.runtime.control.run_config import RunConfig, RunOptions
from penstock.runtime.control.sockets import Client
from penstock.runtime.record.folder import RunFolder
from tests.gates.running import make_run

from .sockets import Bench, bench, until

pytestmark = pytest.mark.timeout(300)


class Still:
    """A test's session: nothing moves."""

    running = True

    def __init__(self) -> None:
        self.stops: list[str] = []

    def moving(self, replica: str) -> str:
        return ""

    def stop(self, now: float, why: str) -> dict[str, Any]:
        self.stops.append(why)
        return {}


@pytest.fixture
def b(tmp_path: Path) -> Iterator[Bench]:
    with bench(tmp_path) as made:
        yield made


@pytest.fixture
def controller(b: Bench, tmp_path: Path) -> Controller:
    run = RunFolder.open(make_run(tmp_path / "run", "toy", {}, RunOptions()))
    still: Any = Still()
    return Controller(run, RunConfig.load(run), b.server, still, None)


def hear(controller: Controller, enough: Callable[[], object]) -> None:
    def turn() -> object:
        controller._turn()
        return enough()

    until(turn)


def fault(controller: Controller) -> str:
    """What ends the run, of what is heard within the deadline."""
    with pytest.raises(PeerFault) as raised:
        hear(controller, lambda: False)
    return str(raised.value)


def test_a_rank_that_has_said_why_it_ends_is_believed_even_if_its_agent_is_heard_first(
    b: Bench, controller: Controller
) -> None:
    rank, agent = b.client("generator/0"), Client(b.join(), "agent", "local", 0)
    agent.send(Exited("generator/0", 0, 77, 1, 0, ""))
    hear(controller, lambda: controller._complaint)
    rank.send(Note("error", "generator/0 rank 0 could not start: no file"))
    assert fault(controller) == "generator/0 rank 0 could not start: no file"
    agent.close()


@pytest.mark.parametrize(
    ("signal", "tail", "said"),
    [
        (0, "", "generator/0 rank 0 died: exit status 1 (pid 77)"),
        (0, "MemoryError", "generator/0 rank 0 died: exit status 1 (pid 77)\nMemoryError"),
        (9, "", "generator/0 rank 0 died: killed by SIGKILL (pid 77)"),
    ],
)
def test_a_rank_that_has_not_is_named_with_what_is_known(
    b: Bench, controller: Controller, signal: int, tail: str, said: str
) -> None:
    agent = Client(b.join(), "agent", "local", 0)
    agent.send(Exited("generator/0", 0, 77, int(not signal), signal, tail))
    assert fault(controller) == said
    agent.close()


def test_a_stop_is_heard_before_what_ranks_say(
    b: Bench, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[list[str]] = []
    monkeypatch.setattr("penstock.runtime.control.controller.say", lambda line: said.append([*still(controller).stops]))
    rank = b.client("generator/0")
    for _ in range(20):
        rank.send(Note("info", "x" * (1 << 20)))
    controller.launcher.put("stop enough")
    hear(controller, lambda: len(said) == 20)
    assert said == [["enough"]] * 20


def still(controller: Controller) -> Still:
    session: Any = controller.session
    assert isinstance(session, Still)
    return session


def test_a_rank_that_keeps_too_much_is_told_and_counted(b: Bench, controller: Controller) -> None:
    pulse = b.raw()
    pulse.hello(role="heartbeat")
    for number in range(5):
        pulse.say(pack(Post(str(number), "0" * (1 << 20)), 2 + number))
    hear(controller, lambda: b.server.counts["excessive"])
    assert pulse.socket.poll(20_000)
    found = unpack(pulse.socket.recv())
    assert isinstance(found, Found)
    assert "generator/0" in found.error


def test_a_second_ready_of_a_rank_changes_nothing(b: Bench, controller: Controller) -> None:
    rank = b.client("generator/0")
    for pid in (5, 6):
        rank.send(Ready("generator/0", 0, pid))
    hear(controller, lambda: b.server.counts["unexpected"])
    assert controller.pids == {("generator/0", 0): 5}
