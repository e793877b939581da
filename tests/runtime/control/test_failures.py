"""Which of several failures a run reports as its cause, and how an exception is described."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from time import monotonic
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from penstock.graph import Rewards, load, trace
from penstock.graph.ir import Firing
from penstock.nodes.advantage import group_advantage
from penstock.nodes.fake import FakePolicy
from penstock.runtime.control.controller import Controller
from penstock.runtime.control.failure import (
    DOUBT_S,
    HELD,
    HELD_S,
    PRIORITY,
    Failure,
    FailureCode,
    Verdict,
    too_large,
)
from penstock.runtime.control.messages import (
    MAX_BYTES,
    AgentReady,
    BoardValues,
    End,
    Exited,
    Heartbeat,
    Launch,
    Message,
    Note,
    Order,
    Post,
    Ready,
    Result,
    Results,
    Setup,
    TooLargeError,
    Untrusted,
    pack,
    unpack,
)
from penstock.runtime.control.process import told
from penstock.runtime.control.recorder import RunRecorder
from penstock.runtime.control.run import Session
from penstock.runtime.control.run_config import RunConfig, RunOptions
from penstock.runtime.control.sockets import SILENCE, Client
from penstock.runtime.record.checkpoints import SavedCheckpoint
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.schedule.events import Abort, Done, Failed, Finish, Fire, Free, Published
from penstock.runtime.tensor.shm import ObjectRef
from tests.gates.running import make_run

from .sockets import Bench, until

# Of several failures, the verdict is the one that explains the others.


SINCE, BEFORE, LATER = 100.0, 99.9, 100.1
MESH = ("generator=tp2",)
TRANSFER = Failure(FailureCode.TRANSFER, "a transfer broke", ("agent:a", "agent:b"))
DEATH = Failure(FailureCode.RANK_DIED, "generator/0 rank 0 died")


def verdict(*failures: Failure, now: float = SINCE) -> Verdict:
    made = Verdict()
    for failure in failures:
        made.report(failure, now)
    return made


def test_a_held_failure_waits_a_moment_for_a_better_cause() -> None:
    ended = Failure(FailureCode.RANK_ENDED, "a rank ended")
    assert verdict(ended).final(SINCE + HELD_S, lambda peer: LATER) is None
    assert verdict(ended).final(SINCE + HELD_S + 0.1, lambda peer: BEFORE) == ended


def test_a_held_failure_waits_for_the_next_heartbeat_of_all_agents_and_not_for_ever() -> None:
    held, heard = verdict(TRANSFER), {"agent:a": LATER, "agent:b": BEFORE}
    assert held.final(SINCE + DOUBT_S, heard.__getitem__) is None
    assert DOUBT_S > SILENCE  # the silence of a lost host is detected earlier
    assert held.final(SINCE + DOUBT_S + 0.1, heard.__getitem__) == TRANSFER
    heard["agent:b"] = LATER
    assert held.final(SINCE + HELD_S, heard.__getitem__) is None
    assert held.final(SINCE + HELD_S + 0.1, heard.__getitem__) == TRANSFER


def test_seconds_in_which_the_one_who_waits_was_stopped_bring_no_better_cause_and_do_not_count() -> None:
    for failure in (TRANSFER, BROKEN):
        held = Verdict()
        held.report(failure, SINCE, suspended_s=7.0)
        assert held.final(SINCE + 20.0 + DOUBT_S, lambda peer: BEFORE, suspended_s=27.0) is None
        assert held.final(SINCE + 20.1 + DOUBT_S, lambda peer: BEFORE, suspended_s=27.0) == failure


def test_a_death_explains_a_broken_transfer_whichever_is_heard_first() -> None:
    for order in permutations([TRANSFER, DEATH]):
        assert verdict(*order).final(SINCE, lambda peer: BEFORE) == DEATH


def test_of_any_two_failures_the_one_of_the_earlier_code_is_said() -> None:
    for one, two in permutations(FailureCode, 2):
        said = verdict(Failure(one, "one"), Failure(two, "two")).final(SINCE + DOUBT_S + 1, lambda peer: LATER)
        assert said is not None
        assert said.code == min(one, two, key=PRIORITY.__getitem__)


def test_of_two_failures_of_one_code_the_first_is_said() -> None:
    assert verdict(DEATH, Failure(FailureCode.RANK_DIED, "another")).final(SINCE, lambda peer: BEFORE) == DEATH


def test_a_later_report_does_not_make_a_held_failure_wait_longer() -> None:
    held = verdict(TRANSFER)
    held.report(TRANSFER, SINCE + DOUBT_S)
    assert held.final(SINCE + DOUBT_S + 0.1, lambda peer: BEFORE) == TRANSFER


def test_only_consequences_are_held_and_they_come_last_but_for_a_rank_that_has_told_why() -> None:
    assert [code for code in FailureCode if not verdict(Failure(code, "")).certain] == list(HELD)
    assert set(list(FailureCode)[-2:]) < set(HELD)


BROKEN = Failure(FailureCode.NODE, "an all-reduce broke", ("agent:a", "agent:b"), doubtful=True)


def test_what_a_rank_says_that_computes_with_others_waits_until_none_of_their_hosts_can_be_gone() -> None:
    held, heard = verdict(BROKEN), {"agent:a": LATER, "agent:b": BEFORE}
    assert held.final(SINCE + DOUBT_S, heard.__getitem__) is None
    heard["agent:b"] = LATER
    assert held.final(SINCE + HELD_S + 0.1, heard.__getitem__) == BROKEN


@pytest.mark.parametrize("code", FailureCode)
def test_a_certain_failure_explains_a_doubtful_one_and_of_two_held_ones_the_earlier_code_does(code: str) -> None:
    other = Failure(FailureCode(code), "other")
    for order in permutations([BROKEN, other]):
        said = verdict(*order).final(SINCE + DOUBT_S + 1, lambda peer: LATER)
        assert said == (other if code not in HELD or code == FailureCode.RANK_ENDED else BROKEN)


def test_no_failure_ends_nothing() -> None:
    assert Verdict().final(SINCE, lambda peer: LATER) is None
    assert not Verdict().certain


def test_an_order_that_is_too_large_is_named_with_its_node_and_its_groups() -> None:
    graph = trace(load("toy"))
    update = next(node for node in graph.nodes if node.clock == "update" and node.construct == "call")
    groups = range(160_000)
    handle = ObjectRef("penstock-0123456789ab-generator.0.0-0", 1 << 20, 4096, 1 << 20, "generator.0.0")
    commands = (Free((Firing("generate", 0),), "trainer/0"), Fire(Firing(update.name, 3), "trainer/0", tuple(groups)))
    order = Order(commands, tuple((Firing("generate", group), "rollouts", handle) for group in groups))
    with pytest.raises(TooLargeError) as caught:
        pack(order)
    failure = too_large(caught.value, [graph])
    assert (failure.code, failure.held) == (FailureCode.NODE, False)
    named = (update.where, repr(update.name), "trainer/0", "160000 groups", "its handles", str(MAX_BYTES), "--batch")
    assert [part for part in named if part not in failure.text] == []


# Which of several bad messages a controller takes as the cause of the run's end.


pytestmark = pytest.mark.timeout(300)


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


def ended_by(controller: Controller) -> tuple[str, str]:
    """Return the failure that ends the run within the deadline: its code and its text."""
    hear(controller, lambda: not controller.session.running)
    ended_by = controller.session.failure
    assert ended_by is not None
    assert (controller.session.status, controller.session.error) == ("failed", ended_by.text)
    return ended_by.code, ended_by.text


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held failures wait for a better cause as long as the test needs."""
    monkeypatch.setattr("penstock.runtime.control.failure.HELD_S", 60.0)
    monkeypatch.setattr("penstock.runtime.control.failure.DOUBT_S", 60.0)


@pytest.mark.usefixtures("patient")
def test_a_rank_that_has_said_why_it_ends_is_believed_even_if_its_agent_is_heard_first(
    b: Bench, controller: Controller
) -> None:
    rank, agent = b.client("generator/0"), Client(b.join(), "agent", "local", 0)
    agent.send(Exited("generator/0", 0, 77, 1, 0, ""))
    hear(controller, lambda: controller.session.verdict.failure)
    assert controller.session.running
    rank.send(Note("error", "generator/0 rank 0 could not start: no file"))
    assert ended_by(controller) == (FailureCode.RANK_RAISED, "generator/0 rank 0 could not start: no file")
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
    assert ended_by(controller) == (code, said)
    agent.close()


def test_a_stop_is_heard_before_what_ranks_say(
    b: Bench, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, session = b.client("generator/0"), controller.session
    said: list[tuple[str, str]] = []
    monkeypatch.setattr(session.recorder, "warn", lambda *_: said.append((session.status, session.error)))
    for _ in range(20):
        rank.send(Note("warning", "x" * (1 << 20)))
    controller.launcher.put("stop enough")
    hear(controller, lambda: len(said) == 20)
    assert said == [("stopped", "enough")] * 20


@pytest.mark.usefixtures("patient")
def test_a_death_that_is_heard_after_a_broken_transfer_is_said(b: Bench, controller: Controller) -> None:
    rank, agent = b.client("trainer/0"), Client(b.join(), "agent", "local", 0)
    rank.send(Results((Result(Abort("trainer/0 rank 0: connection lost")),)))
    hear(controller, lambda: controller.session.verdict.failure)
    agent.send(Exited("generator/0", 0, 77, 0, 9, ""))
    assert ended_by(controller) == (FailureCode.RANK_DIED, "generator/0 rank 0 died: killed by SIGKILL (pid 77)")
    agent.close()


@pytest.mark.parametrize("several", [False, True])
def test_a_death_that_is_heard_after_the_whole_machine_has_stood_still_is_said(
    b: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    """It could not be heard during the stop. A failure of a rank that computes with others is held longer."""
    flags, meshes = RunOptions(lost_replica="replace"), ["generator=tp2"] * several
    run = RunFolder.open(make_run(tmp_path / "run", "toy", {}, flags, meshes=meshes))
    config = RunConfig.load(run)
    controller = Controller(run, config, b.server, Session(config, Mock(spec=RunRecorder)), None)
    agent, stood = Client(b.join(), "agent", "local", 0), 0.0
    for module in ("controller", "sockets"):
        monkeypatch.setattr(f"penstock.runtime.control.{module}.monotonic", lambda: monotonic() + stood)
    hear(controller, lambda: b.server.peers)
    rank = "generator/0" if several else "trainer/0"
    b.client(rank).send(Results((Result(Abort(f"{rank} rank 0: connection lost")),)))
    hear(controller, lambda: controller.session.verdict.failure or controller._held_failures)
    believed, stood = controller.session.verdict.failure, 60.0
    for _ in range(2):
        controller._turn()
    assert (controller.session.running, controller.session.verdict.failure) == (True, believed)
    agent.send(Exited("trainer/0", 0, 77, 0, 9, ""))
    assert ended_by(controller) == (FailureCode.RANK_DIED, "trainer/0 rank 0 died: killed by SIGKILL (pid 77)")
    agent.close()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("before", [Abort("generator/0 rank 0: connection lost"), None])
def test_results_that_are_not_trusted_end_a_run_in_the_turn_that_hears_it_and_what_follows_changes_nothing(
    b: Bench, tmp_path: Path, before: Abort | None
) -> None:
    """Even if the generator may be lost, and what one of its ranks reports may follow from the loss of another."""
    run = RunFolder.open(make_run(tmp_path / "r", "toy", {}, RunOptions(lost_replica="replace"), meshes=MESH))
    controller = Controller(run, config := RunConfig.load(run), b.server, Session(config, Mock(spec=RunRecorder)), None)
    session, doubt = controller.session, Untrusted("generator/0 rank 0: other weights")
    session.begin(monotonic(), {})
    controller._hear("generator/0:0", Results((Result(before),)) if before else Heartbeat())
    controller._hear("generator/0:0", doubt)
    stage = session.stage
    assert stage is not None
    version = stage.scheduler.update
    fed = [answer for answer in stage.scheduler.answers if isinstance(answer, Done | Published)]
    assert fed
    stage.feed = Mock(wraps=stage.feed)  # type: ignore[method-assign]
    controller._hear("trainer/0:0", Results(tuple(map(Result, fed))))
    controller._hear("agent:local", Exited("generator/0", 1, 77, 0, 9, ""))
    controller._turn()
    assert ended_by(controller) == (FailureCode.UNTRUSTED, doubt.error)
    assert [call.args[0] for call in stage.feed.mock_calls] == [Abort(doubt.error)]
    assert stage.scheduler.update == version


def test_a_transfer_that_breaks_without_a_death_is_said_after_a_moment(b: Bench, controller: Controller) -> None:
    b.client("trainer/0").send(Results((Result(Abort("trainer/0 rank 0: connection lost")),)))
    hear(controller, lambda: controller.session.verdict.failure)
    assert controller.session.running
    assert ended_by(controller) == (FailureCode.TRANSFER, "trainer/0 rank 0: connection lost")


@pytest.mark.parametrize("gone", [False, True])
def test_a_firing_that_fails_on_one_of_several_ranks_waits_for_their_hosts_to_be_heard(
    b: Bench, tmp_path: Path, gone: bool
) -> None:
    run = RunFolder.open(make_run(tmp_path / "r", "aipo", {}, RunOptions(data="arithmetic"), meshes=["trainer=fsdp2"]))
    config, agent = RunConfig.load(run), Client(b.join(), "agent", "local", 0)
    controller = Controller(run, config, b.server, Session(config, Mock(spec=RunRecorder)), None)
    session = controller.session
    session.begin(monotonic(), {})
    hear(controller, lambda: b.server.peers)
    assert session.stage is not None
    session.stage.finish = Finish("failed", "connection closed")
    failed = Failed(Firing("aipo_update", 0), "trainer/0", 0, "connection closed")
    session.stage.feed = lambda *_: None  # type: ignore[method-assign]
    session._feed(failed, monotonic())
    controller._turn()
    assert session.running
    if gone:
        controller._hear("agent:local", Exited("trainer/0", 1, 77, 0, 9, ""))
        assert ended_by(controller) == (FailureCode.RANK_DIED, "trainer/0 rank 1 died: killed by SIGKILL (pid 77)")
    else:
        agent.send(Heartbeat())
        assert ended_by(controller) == (FailureCode.NODE, "connection closed")
    agent.close()


def test_what_could_not_be_read_waits_for_the_host_that_had_it_to_be_heard(tmp_path: Path) -> None:
    run = RunFolder.open(make_run(tmp_path / "run", "toy", {}, RunOptions()))
    session = Session(RunConfig.load(run), Mock(spec=RunRecorder))
    session.begin(SINCE, {})
    assert session.stage is not None
    session.stage.finish = Finish("failed", "connection refused")
    session.stage.feed = lambda *_: None  # type: ignore[method-assign]
    failed = Failed(Firing("score", 0), "scorer/0", 0, "connection refused")
    session._feed(failed, SINCE, Result(failed, unread=("generator/0", 0)))
    session.decide(SINCE + HELD_S + 0.1, lambda peer: BEFORE)
    assert session.running
    session.decide(SINCE + HELD_S + 0.1, lambda peer: LATER)
    assert (getattr(session.failure, "code", None), session.error) == (FailureCode.TRANSFER, "connection refused")


def test_a_stage_that_begins_after_the_controller_was_stopped_has_its_own_deadlines(controller: Controller) -> None:
    controller.session.watch(5000.0, 3600.0)
    controller.session.begin(5000.0, {})
    stage = controller.session.stage
    assert stage is not None
    assert stage.overdue(5059.0, 60.0, {}, 3600.0) is None
    assert "for 61 s" in str(stage.overdue(5061.0, 60.0, {}, 3600.0))


def test_an_agent_that_died_explains_the_death_of_its_rank(controller: Controller) -> None:
    controller._hear("agent:local", Exited("generator/0", 0, 77, 0, 9, ""))
    controller.launcher.put("agent local 0 killed by SIGKILL")
    ranks = "trainer/0 rank 0, generator/0 rank 0, scorer/0 rank 0"
    text = f"the agent of host local died, and with it {ranks}: killed by SIGKILL"
    assert ended_by(controller) == (FailureCode.AGENT_DIED, text)
    assert getattr(controller.session.failure, "host", "") == "local"


def test_a_rank_that_keeps_too_much_is_told_and_counted(b: Bench, controller: Controller) -> None:
    pulse = b.raw()
    pulse.hello(role="heartbeat")
    for number in range(5):
        pulse.say(pack(Post(str(number), "0" * (1 << 20)), 2 + number))
    hear(controller, lambda: b.server.counts["excessive"])
    assert pulse.socket.poll(20_000)
    _, found = unpack(pulse.socket.recv())
    assert isinstance(found, BoardValues)
    assert "generator/0" in found.error


def test_a_second_ready_of_a_rank_changes_nothing(b: Bench, controller: Controller) -> None:
    rank = b.client("generator/0")
    for pid in (5, 6):
        rank.send(Ready("generator/0", 0, pid))
    hear(controller, lambda: b.server.counts["unexpected"])
    assert controller.pids == {("generator/0", 0): 5}


@pytest.mark.parametrize(
    ("made", "readers", "restores"),
    [
        ({}, {}, set()),
        ({"generate": "generator/0"}, {"generate": 1}, {"generator/0"}),
        ({"generate": "generator/1"}, {"generate": 1}, {"generator/1"}),
        # The generator may have been lost after its value was read, and absent when the checkpoint was made.
        ({"generate": "generator/1", "score": "scorer/0"}, {"generate": 0, "score": 1}, {"scorer/0"}),
    ],
)
def test_a_replica_that_may_have_been_away_when_a_checkpoint_was_made_restores_what_it_has_in_it_alone(
    b: Bench, tmp_path: Path, made: dict[str, str], readers: dict[str, int], restores: set[str]
) -> None:
    flags = RunOptions(lost_replica="replace")
    run = RunFolder.open(make_run(tmp_path / "run", "toy", {}, flags, generators=2))
    config = RunConfig.load(run)
    cut = SavedCheckpoint(
        1, {"update": 1, "groups": [[4, made, readers]]}, {}, written="fresh", folder=Path("00000001")
    )
    controller = Controller(run, config, b.server, Session(config, Mock(spec=RunRecorder)), cut)
    ranks, found = {r.name: b.client(r.name) for r in config.plan.replicas}, dict[str, tuple[str, ...]]()
    for peer, hello in b.heard:
        controller._hear(peer, hello)

    def told() -> bool:
        heard = {name: one for name, rank in ranks.items() for one in rank.receive(0.0) if isinstance(one, Setup)}
        found.update({name: setup.restore for name, setup in heard.items()})
        return len(found) == len(ranks)

    until(told)
    assert found == {name: ("fresh", "00000001") if name in {*restores, "trainer/0"} else () for name in ranks}


def test_a_late_replica_that_ends_before_it_is_ready_ends_whole_and_is_started_again(b: Bench, tmp_path: Path) -> None:
    """The run has begun without it, while its ranks were starting."""
    flags = RunOptions(lost_replica="replace", first_generators=1)
    run = RunFolder.open(make_run(tmp_path / "run", "toy", {}, flags, generators=2, meshes=["generator=tp2"]))
    config, agent, late = RunConfig.load(run), Client(b.join(), "agent", "local", 0), "generator/1"
    controller, said = Controller(run, config, b.server, Session(config, Mock(spec=RunRecorder)), None), list[Message]()
    agent.send(AgentReady("local", 7))
    ranks = [(replica.name, index) for replica in config.plan.replicas for index in range(len(replica.ranks))]

    def told(number: int) -> list[Message]:
        """Wait for this many messages from the controller to the agent about the late replica, and return them."""

        def look() -> bool:
            said.extend(m for m in agent.receive(0.0) if isinstance(m, Launch | End) and m.replica == late)
            return len(said) >= number

        until(look)
        found = said[:]
        said.clear()
        return found

    hear(controller, lambda: controller._begun == set(ranks))
    assert told(2) == [Launch(late, index) for index in range(2)]
    controller.pids.update({key: 1 for key in ranks if key[0] != late})
    controller._begin()
    controller._hear("agent:local", Exited(late, 0, 77, 0, 9, ""))
    assert told(1) == [End(late, 1)]
    controller._hear("agent:local", Exited(late, 1, 78, 0, 9, ""))
    assert told(2) == [Launch(late, index, start=1) for index in range(2)]
    assert controller.lost[late] == 1
    agent.close()


# How an exception is described: with its traceback, unless the library refuses its input.


REFUSED = Rewards(torch.tensor([1.0]))
"""A group of one response."""


def caught(call: Callable[[], Any], within: int = 0) -> Exception:
    """Return what a call raises, without the caller's outermost `within` frames: as the executor would see it."""
    with pytest.raises(Exception) as found:  # noqa: PT011
        call()
    for _ in range(within):
        assert found.value.__traceback__ is not None
        found.value.__traceback__ = found.value.__traceback__.tb_next
    return found.value


def test_a_refusal_of_the_library_is_its_message() -> None:
    said = told(caught(lambda: group_advantage.fn(REFUSED), 2))
    assert said.startswith("ValueError: group_advantage: given 1 sample for a prompt, needed 2 or more")
    assert len(said.splitlines()) == 1


def test_a_refusal_in_a_thread_is_its_message() -> None:
    with ThreadPoolExecutor(1) as threads:
        said = told(caught(threads.submit(group_advantage.fn, REFUSED).result, 1))
    assert "Traceback" not in said


def test_a_refusal_beneath_a_users_function_shows_where_he_called() -> None:
    said = told(caught(lambda: group_advantage.fn(REFUSED), 1))
    assert "Traceback" in said
    assert Path(__file__).name in said


def test_whatever_else_is_raised_has_its_traceback() -> None:
    assert "fake.py" in told(caught(lambda: FakePolicy(None), 2))  # type: ignore[arg-type]
    assert "Traceback" in told(caught(lambda: torch.zeros(2) + torch.zeros(3), 1))


def test_half_a_character_is_told_by_its_number() -> None:
    assert "ValueError: \\ud800" in told(ValueError("\ud800"))
