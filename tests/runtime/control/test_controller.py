"""Which of several pieces of bad news a controller takes for the reason of a run's end."""

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from penstock.runtime.control.controller import Controller
from penstock.runtime.control.failure import FailureCode
from penstock.runtime.control.messages import Exited, Found, Note, Post, Ready, Result, Results, pack, unpack
from penstock.runtime.control.recorder import RunRecorder
from penstock.runtime.control.run import Session
from penstock.runtime.control.run_config import RunConfig, RunOptions
from penstock.runtime.control.sockets import Client
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.schedule.events import Abort
from tests.gates.running import make_run

from .sockets import Bench, bench, until

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def b(tmp_path: Path) -> Iterator[Bench]:
    with bench(tmp_path) as made:
        yield made


@pytest.fixture
def controller(b: Bench, tmp_path: Path) -> Controller:
    run = RunFolder.open(make_run(tmp_path / "run", "toy", {}, RunOptions()))
    config, recorder = RunConfig.load(run), Mock(spec=RunRecorder)
    return Controller(run, config, b.server, Session(config, recorder), None)


def hear(controller: Controller, enough: Callable[[], object]) -> None:
    def turn() -> object:
        controller._turn()
        return enough()

    until(turn)


def failure(controller: Controller) -> tuple[str, str]:
    """What ends the run, of what is heard within the deadline: its code and what is said."""
    hear(controller, lambda: not controller.session.running)
    failure = controller.session.failure
    assert failure is not None
    assert (controller.session.status, controller.session.error) == ("failed", failure.text)
    return failure.code, failure.text


def test_a_rank_that_has_said_why_it_ends_is_believed_even_if_its_agent_is_heard_first(
    b: Bench, controller: Controller
) -> None:
    rank, agent = b.client("generator/0"), Client(b.join(), "agent", "local", 0)
    agent.send(Exited("generator/0", 0, 77, 1, 0, ""))
    hear(controller, lambda: controller.session.verdict.failure)
    assert controller.session.running
    rank.send(Note("error", "generator/0 rank 0 could not start: no file"))
    assert failure(controller) == (FailureCode.RANK_RAISED, "generator/0 rank 0 could not start: no file")
    agent.close()


@pytest.mark.parametrize(
    ("signal", "tail", "code", "said"),
    [
        (0, "", "rank-ended", "generator/0 rank 0 died: exit status 1 (pid 77)"),
        (0, "MemoryError", "rank-died", "generator/0 rank 0 died: exit status 1 (pid 77)\nMemoryError"),
        (9, "", "rank-died", "generator/0 rank 0 died: killed by SIGKILL (pid 77)"),
    ],
)
def test_a_rank_that_has_not_is_named_with_what_is_known(
    b: Bench, controller: Controller, signal: int, tail: str, code: str, said: str
) -> None:
    agent = Client(b.join(), "agent", "local", 0)
    agent.send(Exited("generator/0", 0, 77, int(not signal), signal, tail))
    assert failure(controller) == (code, said)
    agent.close()


def test_a_stop_is_heard_before_what_ranks_say(
    b: Bench, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, session = b.client("generator/0"), controller.session
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(
        "penstock.runtime.control.controller.say", lambda line: said.append((session.status, session.error))
    )
    for _ in range(20):
        rank.send(Note("info", "x" * (1 << 20)))
    controller.launcher.put("stop enough")
    hear(controller, lambda: len(said) == 20)
    assert said == [("stopped", "enough")] * 20


def test_a_death_that_is_heard_after_a_broken_transfer_is_said(b: Bench, controller: Controller) -> None:
    rank, agent = b.client("trainer/0"), Client(b.join(), "agent", "local", 0)
    rank.send(Results((Result(Abort("trainer/0 rank 0: connection lost")),)))
    hear(controller, lambda: controller.session.verdict.failure)
    agent.send(Exited("generator/0", 0, 77, 0, 9, ""))
    assert failure(controller) == (FailureCode.RANK_DIED, "generator/0 rank 0 died: killed by SIGKILL (pid 77)")
    agent.close()


def test_a_transfer_that_breaks_without_a_death_is_said_after_a_moment(b: Bench, controller: Controller) -> None:
    b.client("trainer/0").send(Results((Result(Abort("trainer/0 rank 0: connection lost")),)))
    hear(controller, lambda: controller.session.verdict.failure)
    assert controller.session.running
    assert failure(controller) == (FailureCode.TRANSFER, "trainer/0 rank 0: connection lost")


def test_an_agent_that_died_explains_the_death_of_its_rank(controller: Controller) -> None:
    controller._hear("agent:local", Exited("generator/0", 0, 77, 0, 9, ""))
    controller.launcher.put("agent local killed by SIGKILL")
    ranks = "trainer/0 rank 0, generator/0 rank 0, scorer/0 rank 0"
    text = f"the agent of host local died, and with it {ranks}: killed by SIGKILL"
    assert failure(controller) == (FailureCode.AGENT_DIED, text)


def test_a_rank_that_keeps_too_much_is_told_and_counted(b: Bench, controller: Controller) -> None:
    pulse = b.raw()
    pulse.hello(role="heartbeat")
    for number in range(5):
        pulse.say(pack(Post(str(number), "0" * (1 << 20)), 2 + number))
    hear(controller, lambda: b.server.counts["excessive"])
    assert pulse.socket.poll(20_000)
    _, found = unpack(pulse.socket.recv())
    assert isinstance(found, Found)
    assert "generator/0" in found.error


def test_a_second_ready_of_a_rank_changes_nothing(b: Bench, controller: Controller) -> None:
    rank = b.client("generator/0")
    for pid in (5, 6):
        rank.send(Ready("generator/0", 0, pid))
    hear(controller, lambda: b.server.counts["unexpected"])
    assert controller.pids == {("generator/0", 0): 5}
