"""Rewards by functions that wait for an external service: a judge, or the server of a reward model.

`remote_score` is `score` for such functions. Its state is a `Stream`: several groups are in work at once, and the rank
continues with its other nodes. A call that raises, or exceeds its deadline, is retried. If all tries fail, so does the
group: a failure is never a reward.

All calls of a rank are made from one event loop, in a thread of its own, so that clients of asynchronous libraries can
be shared. A function that is not `async` has a thread for each call. A thread cannot be killed: after the deadline it
runs until the function returns, so the function should have a timeout of its own. An `async` function that waits
without `await` blocks all other calls: after a while an error names it, and the groups in work fail.
"""

import asyncio
import functools
import inspect
import json
import os
import re
import sys
import urllib.request
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from threading import Event, Thread
from typing import Any
from urllib.error import HTTPError

import torch

from penstock.graph import node, requires
from penstock.graph.context import Context
from penstock.graph.node import fire
from penstock.graph.requires import Call
from penstock.graph.types import Mean, Metrics, Rewards, Rollouts
from penstock.nodes.environments.environment import STEP_S
from penstock.nodes.option_checks import count, positive
from penstock.nodes.score import ScoreError, reward_of

# (prompt, response, reference answer) → reward.
RemoteRule = Callable[[str, str, str], float] | Callable[[str, str, str], Awaitable[float]]

# Seconds before the first retry of a call; each further one waits twice as long, up to `LONGEST_PAUSE_S`.
PAUSE_S, LONGEST_PAUSE_S = 0.25, 30.0
# Seconds between two ticks of the event loop, and seconds beyond a call's deadline without one.
TICK_S, SILENT_S = 0.5, 5.0
# The most bytes of a server's answer that are read.
MOST_BYTES = 1 << 20
# Packages whose frames are not of a user's function.
_NOT_USERS = {"penstock", *sys.stdlib_module_names}
# A URL with a user, and perhaps a password, which urllib takes for a part of the host.
_USER = re.compile(r"https?://[^/?#]*@")


class RetryLater(RuntimeError):
    """A server asks not to be called again for some `seconds`. The next call waits at most `LONGEST_PAUSE_S`."""

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(what)
        self.seconds = seconds


class RemoteScorer:
    """State of `remote_score`: a `Stream` of groups. `concurrency` calls of all groups together are made at once; each
    may take `deadline` seconds, and is retried `retries` times."""

    def __init__(self, by: RemoteRule, concurrency: int, deadline: float, retries: int) -> None:
        self.by = _timed(by, deadline)
        self.concurrency, self.deadline, self.retries = concurrency, deadline, retries
        self.groups: dict[Future[tuple[Rewards, Metrics]], Any] = {}
        self.rows: dict[asyncio.Task[Any], tuple[Rollouts, int]] = {}
        self.news = Event()
        self._begin()

    def _begin(self) -> None:
        self.loop, self.places, self.silent_s = asyncio.new_event_loop(), asyncio.Semaphore(self.concurrency), 0.0
        self.loop.call_soon(self._tick, self.loop)
        Thread(target=self.loop.run_forever, name="remote_score", daemon=True).start()

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop is self.loop:
            self.silent_s = 0.0
            loop.call_later(TICK_S, self._tick, loop)

    def submit(self, tag: Any, inputs: Mapping[str, Any]) -> None:
        group = asyncio.run_coroutine_threadsafe(self._group(inputs["rollouts"]), self.loop)
        self.groups[group] = tag
        group.add_done_callback(lambda _: self.news.set())

    def step(self) -> Sequence[tuple[Any, Any]]:
        """The groups whose rows are all answered, or of which one row failed. Waits at most `STEP_S` for the first."""
        # Counted in steps, so that time in which this process was suspended does not count.
        self.silent_s = 0.0 if self.news.wait(STEP_S) else self.silent_s + STEP_S
        if self.silent_s > self.deadline + SILENT_S:
            self._tell_silence()
        # Cleared before looking: a group that ends meanwhile is seen now, or ends the next wait.
        self.news.clear()
        done = [group for group in self.groups if group.done()]
        return [(self.groups.pop(group), _outcome(group)) for group in done]

    def busy(self) -> bool:
        return bool(self.groups)

    def _tell_silence(self) -> None:
        """Raises ScoreError for the call that blocks the event loop."""
        said = f": has gone on for over {self.deadline:g} s without await, which holds up all other calls; "
        said += "needed await, or a function that is not async"
        call = asyncio.current_task(self.loop)
        if call is not None and call in self.rows:
            raise ScoreError.on(self.by, *self.rows[call], said) from None
        raise ScoreError(f"remote_score{said}") from None

    def reset(self) -> None:
        for group in self.groups:
            group.cancel()
        self.groups.clear()
        self.rows.clear()
        if self.silent_s > self.deadline:
            # The old event loop is blocked: its thread runs until the function returns.
            self._begin()

    async def _group(self, rollouts: Rollouts) -> tuple[Rewards, Metrics]:
        rows = [asyncio.ensure_future(self._row(rollouts, row)) for row in range(len(rollouts))]
        try:
            answers = await asyncio.gather(*rows)
        finally:
            # Make no more calls for a group that has failed or is cancelled.
            for row in rows:
                row.cancel()
        values_N = torch.tensor([value for value, _ in answers], dtype=torch.float32)
        return Rewards(values_N), {"asked_again": Mean.of([tried for _, tried in answers])}

    async def _row(self, rollouts: Rollouts, row: int) -> tuple[float, int]:
        """The reward of a row, and the number of retries."""
        given = rollouts.prompts[row], rollouts.texts[row], rollouts.answers[row]
        pause = PAUSE_S
        for tried in range(self.retries + 1):
            async with self.places:
                try:
                    return reward_of(await self._ask(given, (rollouts, row))), tried
                except TimeoutError as error:
                    cause: Exception = error
                    why = str(error) or f"no answer within {self.deadline:g} s"
                # Report any exception of a user's function with the row.
                except Exception as error:
                    cause, why = error, f"{type(error).__name__}: {error}"
            if tried < self.retries:
                asked = cause.seconds if isinstance(cause, RetryLater) else 0.0
                await asyncio.sleep(max(pause, min(asked, LONGEST_PAUSE_S)))
                pause = min(2 * pause, LONGEST_PAUSE_S)
        what = f": {self.retries + 1} calls failed, the last with {why}"
        raise ScoreError.on(self.by, rollouts, row, what) from _in_users_code(cause)

    async def _ask(self, given: tuple[str, str, str], row: tuple[Rollouts, int]) -> Any:
        """The function's answer. Raises its exception, or TimeoutError at the deadline."""
        # A task of its own, so that a function that ignores its cancellation is not waited for.
        call = asyncio.create_task(self._called(given))
        self.rows[call] = row
        call.add_done_callback(lambda _: self.rows.pop(call, None))
        try:
            await asyncio.wait({call}, timeout=self.deadline)
            if not call.done():
                raise TimeoutError
            answer, error = call.result()
        finally:
            call.cancel()
        if isinstance(error, Exception):
            raise error
        if error is not None:  # a BaseException would end the event loop, and all other calls
            raise RuntimeError(f"{type(error).__name__} {error}".strip()) from error
        return answer

    async def _called(self, given: tuple[str, str, str]) -> tuple[Any, BaseException | None]:
        """(the function's answer, its exception or None)."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def settle(outcome: Any, error: BaseException | None) -> None:
            if not answer.done():  # done if it was cancelled at the deadline
                answer.set_result((outcome, error))

        def work() -> None:
            outcome: tuple[Any, BaseException | None]
            try:
                outcome = self.by(*given), None
            except BaseException as error:
                outcome = None, error
            loop.call_soon_threadsafe(settle, *outcome)

        made: Any
        try:
            if inspect.iscoroutinefunction(self.by):
                made = self.by(*given)
            else:
                Thread(target=work, name="remote_score", daemon=True).start()
                made, error = await answer
                # A plain function may return what is to be awaited, as an object with an async `__call__` does.
                if error is not None or not inspect.isawaitable(made):
                    return made, error
            return await made, None
        except BaseException as error:
            return None, error


def _timed(by: RemoteRule, deadline: float) -> RemoteRule:
    """The function with its option `timeout`, if it has one that is not bound: its own default, at most `deadline`,
    if that is a number of seconds, else `deadline`."""
    # So that the thread of an overdue call ends soon: until then there is one more than `concurrency`.
    try:
        option = inspect.signature(by).parameters.get("timeout")
    except ValueError:  # a builtin without a signature
        return by
    if option is None or (isinstance(by, functools.partial) and "timeout" in by.keywords):
        return by
    own = option.default
    # Other defaults mean no limit, such as 0, -1 or None, or "not given".
    limits = isinstance(own, int | float) and not isinstance(own, bool) and own > 0
    bound: dict[str, Any] = {"timeout": min(own, deadline) if limits else deadline}
    return functools.partial(by, **bound)


def _in_users_code(error: BaseException) -> BaseException | None:
    """The error from the user's first frame on. None if it has none, as one of a connection: then its message, which
    ScoreError has, says all."""
    frame = error.__traceback__
    while frame and str(frame.tb_frame.f_globals.get("__name__")).partition(".")[0] in _NOT_USERS:
        frame = frame.tb_next
    if frame:
        return error.with_traceback(frame)
    return _in_users_code(error.__cause__) if error.__cause__ else None


def _outcome(group: Future[tuple[Rewards, Metrics]]) -> Any:
    return group.exception() or group.result()


def make_remote_scorer(context: Context, **options: Any) -> RemoteScorer:
    return RemoteScorer(**options)


@requires(count(1, "concurrency"), positive("deadline"), count(0, "retries"))
@node(pool="scorer", init=make_remote_scorer)
def remote_score(
    scorer: RemoteScorer,
    rollouts: Rollouts,
    *,
    by: RemoteRule,
    concurrency: int = 64,
    deadline: float = 60.0,
    retries: int = 2,
) -> tuple[RemoteScorer, Rewards, Metrics]:
    """The reward of each response by a function that waits, `async` or not, such as `http_reward`.

    `concurrency` calls are made at once, of all prompt groups of a rank together. A call that raises, returns no finite
    number, or does not end within `deadline` seconds is retried `retries` times, with pauses that double from
    `PAUSE_S`, or as long as a `RetryLater` says. If all tries fail, so does the group: ScoreError names it and the row,
    and the run's `--retries` and `--on-failure` say what follows. The wait for a place among the `concurrency` calls
    does not count. A function's option `timeout`, if it is not bound, is its own default, at most the
    deadline.

        rewards = remote_score(rollouts, by=partial(http_reward, url="http://judge:8000/reward"), deadline=20.0)

    Metric: `asked_again` (retries per row).
    """
    return scorer, *fire(scorer, {"rollouts": rollouts})


def _url_lack(url: str) -> tuple[str, str] | None:
    """(given, needed) for a URL that cannot be used; else None."""
    if not url.startswith(("http://", "https://")):  # urllib reads files, too
        return repr(url), "http://… or https://…"
    if _USER.match(url):
        return "a user or a password in it", "none: token_variable names the environment variable of a token"
    return None


def web_address(call: Call) -> None:
    """Requirement of `http_reward`: a URL of the web, and the token that it has to send."""
    url, variable = str(call.options.get("url", "")), call.options.get("token_variable")
    if lack := _url_lack(url):
        raise call.lack(*lack, "url")
    if call.context is not None and variable and variable not in os.environ:
        raise call.lack(f"{variable!r}, which is not set", "an environment variable that is set", "token_variable")


class _Stays(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: that would be a GET without the response, and would send the token to another server."""

    def redirect_request(self, *_: Any) -> None:
        return None


@requires(web_address, positive("timeout"))
def http_reward(
    prompt: str, response: str, answer: str, *, url: str, token_variable: str = "", timeout: float | None = None
) -> float:
    """The number that a server answers with: `{"reward": 0.5}`, or `0.5`.

    The server gets a POST with the JSON object of `prompt`, `response` and `answer`, and the token in the environment
    variable `token_variable`, if that is given, as `Authorization: Bearer`. Raises for another status than 200, and for
    another answer; `RetryLater` if the server says when to ask again (Retry-After, in seconds). `timeout` is in
    seconds, for each step of the connection: by default the deadline of `remote_score`, elsewhere a minute.
    """
    if lack := _url_lack(url):
        raise ValueError(f"http_reward: url: given {lack[0]}, needed {lack[1]}")
    # For messages without the query, which may have a key.
    where = url.partition("?")[0]
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if token_variable:
        headers["Authorization"] = f"Bearer {os.environ[token_variable]}"
    asked = json.dumps({"prompt": prompt, "response": response, "answer": answer}).encode()
    request = urllib.request.Request(url, asked, headers, method="POST")
    try:
        with urllib.request.build_opener(_Stays).open(request, timeout=timeout or 60.0) as reply:
            status, said, later = reply.status, reply.read(MOST_BYTES), ""
            # The connection broke, or the text is too long: its beginning may be another number, such as 1 of 12.5.
            if reply.length:
                raise RuntimeError(f"given {len(said)} bytes from {where}, needed all {len(said) + reply.length}")
    except HTTPError as error:
        status, said, later = error.code, error.read(200), error.headers.get("Retry-After", "")
    if status != 200:
        what = f"given status {status} from {where}: {said[:200]!r}, needed 200"
        raise RetryLater(what, float(later)) if later.isdecimal() else RuntimeError(what)
    try:
        found = json.loads(said)
    except ValueError:
        found = None
    reward = found.get("reward") if isinstance(found, dict) else found
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise ValueError(f'given {said[:200]!r} from {where}, needed {{"reward": number}} or a number')
    return float(reward)
