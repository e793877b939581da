"""Rewards by functions that wait: many calls at once, each within its deadline; a lasting failure is no reward of 0."""

import asyncio
import json
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Barrier, Event
from time import monotonic
from typing import Any, cast

import pytest

from penstock.graph import Policy, Prompts, Rollouts, broadcast, check, program, trace
from penstock.graph.protocols import Stream
from penstock.nodes import remote_score as module
from penstock.nodes.advantage import group_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.remote_score import RemoteRule, RemoteScorer, http_reward, remote_score
from penstock.nodes.score import ScoreError, score
from penstock.runtime.control.process import told
from tests.nodes.reward_server import Asked, Server, serving
from tests.nodes.rollouts import random_rollouts

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "PAUSE_S", 0.01)
    return iter([None])


def group(ordinal: int, *texts: str) -> Rollouts:
    made = random_rollouts([(1, 2)] * len(texts))
    return replace(
        made,
        ordinals=(ordinal,) * len(texts),
        prompts=("p",) * len(texts),
        texts=texts,
        answers=("a",) * len(texts),
    )


def played(scorer: RemoteScorer, groups: Mapping[int, Rollouts]) -> dict[int, Any]:
    """Score all groups at once, and return the outcome of each."""
    assert isinstance(scorer, Stream)
    for tag, rollouts in groups.items():
        scorer.submit(tag, {"rollouts": rollouts})
    outcomes: dict[int, Any] = {}
    end = monotonic() + PATIENCE_S
    while scorer.busy():
        assert monotonic() < end
        outcomes.update(scorer.step())
    return outcomes


def scorer(by: RemoteRule, *, concurrency: int = 16, deadline: float = PATIENCE_S, retries: int = 0) -> RemoteScorer:
    return RemoteScorer(by, concurrency, deadline, retries)


def reward(asked: Asked) -> tuple[int, bytes]:
    return 200, json.dumps({"reward": float(asked["response"])}).encode()


def test_calls_of_several_groups_are_made_at_once_and_answered_in_their_places() -> None:
    # No call is answered before six calls are made: two groups have to be in work at once.
    together = Barrier(6)

    def answer(asked: Asked, server: Server) -> tuple[int, bytes]:
        together.wait(PATIENCE_S)
        return reward(asked)

    with serving(answer) as server:
        found = played(
            scorer(partial(http_reward, url=server.url)), {0: group(0, "1", "2", "3"), 1: group(1, "4", "5", "6")}
        )
    assert {tag: made[0].values_N.tolist() for tag, made in found.items()} == {0: [1, 2, 3], 1: [4, 5, 6]}
    assert found[1][1] == {"asked_again": 0.0}
    assert {"prompt": "p", "response": "4", "answer": "a"} in server.asked


def test_no_more_calls_are_made_at_once_than_allowed() -> None:
    crowded = Event()

    def answer(asked: Asked, server: Server) -> tuple[int, bytes]:
        # Wait long enough for a third call to come, if one is made.
        if server.now > 2:
            crowded.set()
        crowded.wait(0.1)
        return reward(asked)

    with serving(answer) as server:
        by = partial(http_reward, url=server.url)
        played(scorer(by, concurrency=2), {tag: group(tag, *"1234") for tag in range(3)})
    assert len(server.asked) == 12
    assert server.most <= 2


FAULTS = [
    *((500, b""), (429, b"later"), (204, b""), (201, b"1"), (200, b"no JSON"), (200, b"\xff"), (200, b"[1]")),
    *((200, b'{"reward": null}'), (200, b'{"reward": "1"}'), (200, b"NaN"), (200, b"1e39"), (200, b"true")),
]


@pytest.mark.parametrize(("status", "body"), FAULTS)
def test_a_call_that_fails_is_made_again_and_one_that_always_fails_fails_its_group(status: int, body: bytes) -> None:
    def answer(asked: Asked, server: Server) -> tuple[int, bytes]:
        text = asked["response"]
        return (status, body) if text == "7" or (text == "2" and server.tries(text) < 3) else reward(asked)

    with serving(answer) as server:
        by = partial(http_reward, url=server.url)
        found = played(scorer(by, retries=2), {0: group(0, "1", "2"), 1: group(1, "3", "7")})
    rewards, metrics = found[0]
    assert rewards.values_N.tolist() == [1.0, 2.0]
    assert metrics["asked_again"] == 1.0
    assert isinstance(found[1], ScoreError)
    assert "group 1, row 1: 3 calls failed" in str(found[1])
    assert server.tries("7") == 3


class Judge:
    async def __call__(self, prompt: str, response: str, answer: str) -> float:
        await asyncio.sleep(0)
        if response == "9":
            raise ValueError("nine")
        return float(response)


@pytest.mark.parametrize("by", [Judge(), lambda *given: Judge()(*given), partial(Judge())])
def test_what_a_function_returns_to_be_awaited_is_awaited(by: Any) -> None:
    found = played(scorer(by), {0: group(0, "1", "2"), 1: group(1, "9")})
    assert found[0][0].values_N.tolist() == [1.0, 2.0]
    assert "group 1, row 0: 1 calls failed, the last with ValueError: nine" in str(found[1])


def patient(prompt: str, response: str, answer: str, *, timeout: float = 7.0) -> float:
    return timeout


async def patiently(prompt: str, response: str, answer: str, *, timeout: float = 7.0) -> float:
    return timeout


@pytest.mark.parametrize("by", [patient, patiently])
@pytest.mark.parametrize(("deadline", "waits"), [(50.0, [7.0, 3.0]), (5.0, [5.0, 3.0])])
def test_a_function_waits_no_longer_than_its_call_unless_it_is_told_to(
    by: Any, deadline: float, waits: list[float]
) -> None:
    found = [played(scorer(each, deadline=deadline), {0: group(0, "1")})[0] for each in (by, partial(by, timeout=3.0))]
    assert [made[0].values_N.item() for made in found] == waits


@pytest.mark.parametrize("own", [0, -1.0, float("nan"), float("inf"), True, None, "5"])
def test_a_function_whose_own_timeout_is_no_number_of_seconds_waits_as_long_as_its_call(own: Any) -> None:
    def by(prompt: str, response: str, answer: str, *, timeout: Any = own) -> float:
        return float(timeout)

    rewards, _ = played(scorer(by, deadline=50.0), {0: group(0, "1")})[0]
    assert rewards.values_N.item() == 50.0


def test_a_builtin_without_a_signature_is_called() -> None:
    (found,) = played(scorer(cast(RemoteRule, max)), {0: group(0, "1")}).values()
    assert "needed a finite number" in str(found)


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(("said", "waited"), [("3", 3.0), ("99999", 20.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 0.01)])
def test_a_server_that_says_when_to_ask_again_is_asked_then(
    monkeypatch: pytest.MonkeyPatch, status: int, said: str, waited: float
) -> None:
    pauses, sleep = list[float](), asyncio.sleep

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(module, "LONGEST_PAUSE_S", 20.0)
    monkeypatch.setattr(asyncio, "sleep", pause)
    with serving(
        lambda asked, server: reward(asked) if server.tries("1") == 2 else (status, b"later"),
        headers={"Retry-After": said},
    ) as server:
        found = played(scorer(partial(http_reward, url=server.url), retries=1), {0: group(0, "1")})
    assert (found[0][0].values_N.tolist(), pauses) == ([1.0], [waited])


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed_and_no_token_sent_on(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    monkeypatch.setenv("JUDGE", "secret")
    with (
        serving(lambda asked, server: reward(asked)) as other,
        serving(lambda asked, server: (status, b""), headers={"Location": other.url}) as server,
    ):
        by = partial(http_reward, url=server.url, token_variable="JUDGE")
        (failed,) = played(scorer(by), {0: group(0, "1")}).values()
    assert isinstance(failed, ScoreError)
    assert f"status {status}" in str(failed)
    assert (other.asked, other.gets) == ([], 0)


def test_a_server_that_is_not_there_fails_the_group() -> None:
    with serving(lambda asked, server: reward(asked)) as server:
        gone = server.url
    (failed,) = played(scorer(partial(http_reward, url=gone), retries=1), {0: group(0, "1")}).values()
    assert isinstance(failed, ScoreError)
    assert "URLError" in str(failed)


def asks_itself(prompt: str, response: str, answer: str, *, url: str) -> float:
    """A user's function around `http_reward`."""
    return http_reward(prompt, response, answer, url=url)


def test_a_failure_shows_the_users_frames_and_no_others() -> None:
    """Not those of the event loop and of urllib, where the message says all."""
    with serving(lambda asked, server: (500, b"")) as server:
        by: list[RemoteRule] = [partial(http_reward, url=server.url), partial(judge, first=3600.0), goes_on]
        failed = [played(scorer(each, deadline=0.5), {0: group(0, "1")})[0] for each in by]
    failed.append(played(scorer(by[0]), {0: group(0, "1")})[0])
    for error in failed:
        assert isinstance(error, ScoreError)
        assert error.__cause__ is None
        assert len(told(error).splitlines()) == 1
    own: list[RemoteRule] = [partial(asks_itself, url=server.url), partial(leaves, how=SystemExit)]
    for each, name in zip(own, ("asks_itself", "leaves"), strict=True):
        error = played(scorer(each), {0: group(0, "1")})[0]
        assert error.__cause__ is not None
        frames = traceback.extract_tb(error.__cause__.__traceback__)
        assert (frames[0].name, frames[0].filename) == (name, __file__)
        assert f"in {name}" in told(error)


def test_the_begin_of_a_number_is_no_reward() -> None:
    with serving(lambda asked, server: (200, b"1"), unsent=2) as server:
        (failed,) = played(scorer(partial(http_reward, url=server.url)), {0: group(0, "12.")}).values()
    assert isinstance(failed, ScoreError)


def test_a_call_without_an_end_fails_its_group_at_the_deadline_and_holds_up_no_other() -> None:
    release = Event()

    def answer(asked: Asked, server: Server) -> tuple[int, bytes]:
        if asked["response"] == "9":
            release.wait(PATIENCE_S)
        return reward(asked)

    with serving(answer) as server:
        by = partial(http_reward, url=server.url, timeout=PATIENCE_S)
        found = played(scorer(by, concurrency=1, deadline=1.0), {0: group(0, "9"), 1: group(1, "1", "2")})
        release.set()
    assert isinstance(found[0], ScoreError)
    assert "no answer within 1 s" in str(found[0])
    assert found[1][0].values_N.tolist() == [1.0, 2.0]


async def judge(prompt: str, response: str, answer: str, *, first: float = 0.0) -> float:
    """A user's async function, for tests."""
    await asyncio.sleep(first if response == "1" else 0.0)
    return float(response)


def test_an_async_function_is_awaited_and_given_up_at_its_deadline() -> None:
    found = played(scorer(judge), {0: group(0, "1", "2")})
    assert found[0][0].values_N.tolist() == [1.0, 2.0]
    late = played(scorer(partial(judge, first=3600.0), deadline=0.5), {0: group(0, "1"), 1: group(1, "2")})
    assert isinstance(late[0], ScoreError)
    assert late[1][0].values_N.tolist() == [2.0]


async def leaves(prompt: str, response: str, answer: str, *, how: type[BaseException]) -> float:
    """Raise what ends the caller, except for "2"."""
    if response != "2":
        raise how
    return 2.0


@pytest.mark.parametrize("how", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_a_function_that_ends_its_caller_fails_its_group_alone(how: type[BaseException]) -> None:
    found = played(scorer(partial(leaves, how=how), retries=1), {0: group(0, "1", "2"), 1: group(1, "2")})
    assert isinstance(found[0], ScoreError)
    assert f"group 0, row 0: 2 calls failed, the last with RuntimeError: {how.__name__}" in str(found[0])
    assert found[1][0].values_N.tolist() == [2.0]


async def goes_on(prompt: str, response: str, answer: str) -> float:
    """Never end for "1", even when cancelled."""
    while response == "1":
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3600.0)
    return float(response)


def test_a_function_that_goes_on_when_it_is_cancelled_is_not_waited_for() -> None:
    found = played(scorer(goes_on, deadline=0.2, concurrency=1), {0: group(0, "1"), 1: group(1, "2")})
    assert isinstance(found[0], ScoreError)
    assert "no answer within 0.2 s" in str(found[0])
    assert found[1][0].values_N.tolist() == [2.0]


async def holds_up(prompt: str, response: str, answer: str, *, until: Event) -> float:
    """Wait without await for "1"."""
    if response == "1":
        until.wait(PATIENCE_S)
    return float(response)


def test_a_function_that_waits_without_await_is_named_and_later_calls_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "TICK_S", 0.05)
    monkeypatch.setattr(module, "SILENT_S", 1.0)
    release = Event()
    made = scorer(partial(holds_up, until=release), deadline=0.2)
    with pytest.raises(ScoreError, match=r"holds_up on group 0, row 1: .* without await"):
        played(made, {0: group(0, "2", "1"), 1: group(1, "3")})
    made.reset()
    assert played(made, {1: group(1, "3")})[1][0].values_N.tolist() == [3.0]
    release.set()


def test_groups_that_are_given_up_are_asked_about_no_more() -> None:
    made = scorer(partial(judge, first=3600.0))
    made.submit(0, {"rollouts": group(0, "1")})
    made.reset()
    assert not made.busy()
    assert played(made, {1: group(1, "2")})[1][0].values_N.tolist() == [2.0]


def test_outside_of_a_run_one_group_is_waited_for() -> None:
    state = scorer(judge)
    _, rewards, _ = remote_score.fn(state, group(0, "1", "2"), by=judge)
    assert rewards.values_N.tolist() == [1.0, 2.0]
    with pytest.raises(ScoreError, match=r"judge on group 0, row 0: 1 calls failed, the last with ValueError"):
        remote_score.fn(state, group(0, "no number"), by=judge)


def test_a_token_is_sent_and_never_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    with serving(lambda asked, server: reward(asked)) as server:
        assert http_reward("p", "1", "a", url=server.url, token_variable="JUDGE_TOKEN") == 1.0
    assert server.tokens == {"Bearer secret"}
    with pytest.raises(ValueError, match="needed http://"):
        http_reward("p", "1", "a", url="file:///etc/passwd")
    with pytest.raises(ValueError, match="token_variable") as refused:
        http_reward("p", "1", "a", url="http://bob:pw@judge/reward")
    assert "pw" not in str(refused.value)


@pytest.mark.parametrize(("status", "body"), [(500, b""), (200, b"no number")])
def test_an_error_of_a_server_says_no_key_of_its_address(status: int, body: bytes) -> None:
    with serving(lambda asked, server: (status, body)) as server, pytest.raises((RuntimeError, ValueError)) as raised:
        http_reward("p", "1", "a", url=f"{server.url}?api_key=verysecret")
    assert server.url in str(raised.value)
    assert "verysecret" not in str(raised.value)


@program
def asks(policy: Policy, prompts: Prompts, *, url: str = "http://judge:8000", calls: int = 1) -> Policy:
    rollouts = generate(prompts, broadcast(policy), samples=2)
    rewards = remote_score(rollouts, by=partial(http_reward, url=url), concurrency=calls)
    return aipo_update(policy, rollouts, group_advantage(rewards))


async def judged(prompt: str, response: str, answer: str) -> float:
    return 1.0


@program
def awaits(policy: Policy, prompts: Prompts) -> Policy:
    rollouts = generate(prompts, broadcast(policy), samples=2)
    rewards = score(rollouts, by=judged)  # type: ignore[arg-type]
    return aipo_update(policy, rollouts, group_advantage(rewards))


def test_a_rule_that_is_async_is_told_by_check() -> None:
    (fault,) = check(trace(awaits))
    assert "remote_score" in fault.needed


def test_a_url_that_is_none_and_options_that_are_none_are_told_by_check() -> None:
    graph = trace(asks)
    assert not check(graph)
    assert next(node for node in graph.nodes if node.name == "remote_score").stream
    for url in ("ftp://x", "http://bob:pw@judge/reward"):
        (fault,) = check(trace(asks, {"url": url}))
        assert (fault.code, "pw" in str(fault)) == ("unmet-requirement", False)
    assert [fault.code for fault in check(trace(asks, {"calls": 0}))] == ["out-of-range"]
