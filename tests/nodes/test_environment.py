"""Environments answer several groups at once, each within a deadline, and say what a conversation was worth."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from penstock.graph import Graph, GraphError, Metrics, Rewards, Rollouts, alternate, broadcast, check, program, trace
from penstock.graph.protocols import Stream
from penstock.graph.types import Context, Replies
from penstock.nodes.environments.environment import Calls, OverdueError, environment, stack_of
from penstock.nodes.environments.guessing_game import guessing_game
from penstock.nodes.environments.python_tool import python_tool
from penstock.nodes.fake import FakePolicy, FakePrompts, fake_generate, fake_score, fake_update


@environment
def content(rollouts: Rollouts, *, word: str = "fine") -> Replies:
    """Replies the same to everybody, and is done."""
    return Replies((word,), ("user",), torch.tensor([True]))


@environment(pool="arcade", deadline=5.0)
def counted(rollouts: Rollouts, *, seconds: float = 0.0) -> tuple[Replies, Metrics]:
    time.sleep(seconds)
    return Replies(("",), ("user",), torch.tensor([True])), {"rows": 1.0}


@environment
def own_deadline(rollouts: Rollouts, *, deadline: float = 1.0) -> Replies:
    raise NotImplementedError


@program
def chat(policy: FakePolicy, prompts: FakePrompts, *, deadline: float = 60.0) -> FakePolicy:
    rollouts, _ = alternate(fake_generate, content, prompts, broadcast(policy), turns=2, deadline=deadline)
    return fake_update(policy, rollouts, fake_score(rollouts))


@program
def twice_named(policy: FakePolicy, prompts: FakePrompts) -> FakePolicy:
    rollouts, _ = alternate(fake_generate, own_deadline, prompts, broadcast(policy), turns=2)
    return fake_update(policy, rollouts, fake_score(rollouts))


def answered(calls: Calls) -> Any:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if found := calls.step():
            return found[0][1]
    raise AssertionError("no answer")


def test_outside_of_a_program_it_is_the_function() -> None:
    assert content(None, word="well").texts == ("well",)  # type: ignore[arg-type]


def test_the_graph_knows_its_pool_its_deadline_and_that_it_works_on_several_groups_at_once() -> None:
    graph = trace(chat, {"deadline": 2.5})
    node = graph["content"]
    assert (node.pool, node.stream, node.stateful, node.answers) == ("environment", True, False, True)
    assert dict(node.options) == {"deadline": 2.5, "word": "fine"}
    assert [o.name for o in node.outputs] == ["out"]
    assert check(graph, batch=2) == []
    loaded = Graph.from_json(json.loads(json.dumps(graph.to_json())))
    assert (loaded, loaded.digest()) == (graph, graph.digest())


def test_the_deadline_is_the_decorator_s_unless_the_program_says_another() -> None:
    assert dict(content.interface.options) == {"word": "fine", "deadline": 60.0}
    assert counted.interface.options["deadline"] == 5.0
    assert counted.pool == "arcade"
    assert dict(python_tool.interface.options)["deadline"] > dict(guessing_game.interface.options)["deadline"]


def test_an_option_of_that_name_is_refused() -> None:
    with pytest.raises(GraphError, match="own_deadline: option 'deadline'"):
        trace(twice_named, {})


def test_a_worker_s_state_is_the_calls_and_what_they_return_fits_the_node() -> None:
    for definition, options, metrics in ((content, {"word": "so"}, {}), (counted, {"seconds": 0.0}, {"rows": 1.0})):
        assert definition.init is not None
        calls = definition.init(Context(), deadline=60.0, **options)
        assert isinstance(calls, Calls)
        calls.submit("x", {"rollouts": None})
        state, outputs, figures = definition.split(answered(calls), stateful=False)
        assert state is None
        assert isinstance(outputs["out"], Replies)
        assert figures == metrics


def test_the_deadline_holds_for_each_call() -> None:
    assert counted.init is not None
    calls = counted.init(Context(), deadline=0.1, seconds=60.0)
    calls.submit("counted[4.1]", {"rollouts": None})
    error = answered(calls)
    assert isinstance(error, OverdueError)
    assert str(error).startswith("counted[4.1]: given no reply within 0.1 s")


def test_a_reply_of_another_type_is_told_as_the_function_s() -> None:
    with pytest.raises(TypeError, match=r"counted returned tuple\[Rewards, dict\], needed tuple\[.*Replies, Metrics\]"):
        counted.split((Rewards(torch.ones(1)), {}), stateful=False)


pytestmark = pytest.mark.timeout(120)
PATIENCE_S = 60.0
Answered = dict[Any, Any]


class Clock:
    """What deadlines are measured with: it stands until it is moved on, so that a call is where it hangs by then."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("penstock.nodes.environments.environment.monotonic", made)
    return made


def answered_to(calls: Calls, count: int) -> Answered:
    """Step until `count` firings have ended."""
    found: Answered = {}
    end = time.monotonic() + PATIENCE_S
    while len(found) < count:
        assert time.monotonic() < end
        found |= dict(calls.step())
    return found


def until(look: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not look():
        assert time.monotonic() < end
        time.sleep(0.01)


def submit(calls: Calls, values: Sequence[Any]) -> None:
    for value in values:
        calls.submit(value, {"value": value})


def test_as_many_calls_are_in_work_as_there_are_firings() -> None:
    """Three calls that wait for each other end if they run at once."""
    meet = threading.Barrier(3, timeout=PATIENCE_S)

    def together(value: int) -> tuple[int, dict[str, float]]:
        meet.wait()
        return value, {}

    calls = Calls(together, PATIENCE_S)
    assert isinstance(calls, Stream)
    assert not calls.busy()
    submit(calls, range(3))
    assert calls.busy()
    assert answered_to(calls, 3) == {value: (value, {}) for value in range(3)}
    assert not calls.busy()


@pytest.mark.parametrize("error", [ZeroDivisionError("broke"), SystemExit(3), KeyboardInterrupt()])
def test_a_call_that_raises_fails_alone(error: BaseException) -> None:
    def breaks(value: int) -> tuple[int, dict[str, float]]:
        if value == 1:
            raise error
        return value, {}

    calls = Calls(breaks, PATIENCE_S)
    submit(calls, range(3))
    assert answered_to(calls, 3) == {0: (0, {}), 1: error, 2: (2, {})}


def test_an_overdue_call_fails_by_name_and_place_and_is_counted_until_it_ends(clock: Clock) -> None:
    reader, writer = os.pipe()

    def reads(value: str) -> tuple[str, dict[str, float]]:
        if value == "hangs[3.1]":
            os.read(reader, 1)
        return value, {"served": 1.0}

    calls = Calls(reads, 0.2)
    submit(calls, ["hangs[3.1]"])
    until(lambda: "os.read(reader, 1)" in stack_of(calls.calls["hangs[3.1]"].thread))
    assert calls.step() == []
    clock.now += 0.2
    error = answered_to(calls, 1)["hangs[3.1]"]
    assert isinstance(error, OverdueError)
    assert "hangs[3.1]: given no reply within 0.2 s, needed one (deadline=0.2); it was at" in str(error)
    assert "os.read(reader, 1)" in str(error)
    assert str(error).count("File ") == 1  # the function's own line, and no other
    calls.deadline = PATIENCE_S
    submit(calls, ["quick"])
    assert answered_to(calls, 1) == {"quick": ("quick", {"served": 1.0, "abandoned": 1.0})}
    (thread,) = calls.abandoned
    os.write(writer, b"x")
    until(lambda: not thread.is_alive())
    submit(calls, ["quick"])
    assert answered_to(calls, 1) == {"quick": ("quick", {"served": 1.0})}
    os.close(reader)
    os.close(writer)


def test_the_thread_of_a_loop_without_end_is_ended(clock: Clock) -> None:
    begun = threading.Event()

    def loops(value: int) -> None:
        begun.set()
        while True:
            try:
                while True:
                    pass
            except Exception:
                continue

    calls = Calls(loops, 0.2)
    submit(calls, [0])
    until(begun.is_set)
    clock.now += 0.2
    assert isinstance(answered_to(calls, 1)[0], OverdueError)
    (thread,) = calls.abandoned
    until(lambda: not thread.is_alive())


def test_the_late_result_of_a_call_is_not_taken_for_that_of_a_later_one(clock: Clock) -> None:
    first, second = threading.Event(), threading.Event()
    gates = [first, second]

    def waits(value: int) -> tuple[str, dict[str, float]]:
        gate = gates.pop(0)
        gate.wait(PATIENCE_S)
        return ("first" if gate is first else "second"), {}

    calls = Calls(waits, 0.2)
    submit(calls, [7])
    until(lambda: gates == [second])
    clock.now += 0.2
    assert isinstance(answered_to(calls, 1)[7], OverdueError)
    calls.deadline = PATIENCE_S
    submit(calls, [7])
    first.set()
    until(lambda: not calls.abandoned[0].is_alive())
    assert calls.step() == []
    second.set()
    assert answered_to(calls, 1)[7][0] == "second"


def test_a_reset_forgets_all_calls() -> None:
    calls = Calls(lambda value: time.sleep(PATIENCE_S), PATIENCE_S)
    submit(calls, range(2))
    calls.reset()
    assert not calls.busy()
    assert calls.step() == []
    assert len(calls.abandoned) == 2


@pytest.mark.parametrize("hang", ["time.sleep(3600)", "os.read(os.pipe()[0], 1)", "[None for _ in iter(int, 1)]"])
def test_a_call_that_hangs_does_not_keep_its_process(hang: str) -> None:
    code = f"""
import os, time
from penstock.nodes.environments.environment import Calls
calls = Calls(lambda value: {hang}, 0.1)
calls.submit("a", {{"value": 1}})
while not calls.step():
    pass
calls.submit("b", {{"value": 2}})
print("over")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "over\n", "")


@pytest.mark.parametrize("deadline", [0, -1.0, float("nan")])
def test_a_deadline_that_lets_nothing_run_is_refused(deadline: float) -> None:
    with pytest.raises(ValueError, match=r"environment: given deadline .*, needed more than 0 seconds"):
        Calls(lambda value: value, deadline)
