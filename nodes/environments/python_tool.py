"""A tool that runs the Python code of a model's call.

A call is the text between `<python>` and `</python>`; the last one of a turn counts, and the model must end its turn to
get an answer. The reply is `<output>…</output>`: the printed output of the code, and the value of its last line if that
is an expression, as in a notebook. An exception, or an exceeded limit, is the last line of the output. Only the
standard library is available, and calls share no state.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import compress
from threading import BoundedSemaphore
from typing import Literal

import torch

from penstock.graph import requires
from penstock.graph.types import Mean, Metrics, Replies, Rollouts
from penstock.nodes.environments.environment import environment
from penstock.nodes.environments.sandbox import Answer, Limits, isolated, run_python, wrapper_of
from penstock.nodes.option_checks import count, positive

# For a whole group, which may also wait for other groups' calls; each call has limits of its own.
DEADLINE_S = 500.0
_CALL = re.compile(r"<python>((?:(?!<python>).)*?)</python>", re.DOTALL)


class ToolTimeout(RuntimeError):
    """A call had not ended at its deadline: its group and row, and the code."""


@requires(isolated, positive("seconds"), count(1, "cpu_seconds", "max_output", "workers"), count(32, "memory_mib"))
@environment(deadline=DEADLINE_S)
def python_tool(
    rollouts: Rollouts,
    *,
    seconds: float = 5.0,
    cpu_seconds: int = 2,
    memory_mib: int = 256,
    max_output: int = 1000,
    workers: int = 4,
    on_timeout: Literal["reply", "fail"] = "reply",
    sandbox: bool = True,
) -> tuple[Replies, Metrics]:
    """The output of the call in each row's newest turn (for the form of calls see this module).

    A row without a call is done, and so is a row whose turn did not end by itself. `workers` calls of all groups
    together run at once, each in a process with the limits of `Limits`; equal code of several rows is run once. A call
    that has not ended after `seconds` is killed: its reply says so, or with on_timeout="fail" the firing raises
    ToolTimeout with group and code. If bubblewrap does not work, the run is refused, or SandboxError is raised;
    sandbox=False runs code without it, with your rights (see `sandbox.py`).

    Metrics: `tool_calls` (share of turns), `tool_errors` (share of those calls).
    """
    limits = Limits(seconds, cpu_seconds, memory_mib, max_output)
    finished = rollouts.finished_N.tolist()
    calls = [find_call(text) if ended else None for text, ended in zip(rollouts.texts, finished, strict=True)]
    answers = _run_all([call for call in calls if call is not None], limits, workers, sandbox)
    late = [row for row, call in enumerate(calls) if call is not None and answers[call].late]
    if late and on_timeout == "fail":
        given = f"given no end of the call within {seconds:g} s, needed one; its code was {calls[late[0]]!r}"
        raise ToolTimeout(f"python_tool, group {rollouts.ordinals[late[0]]}, row {late[0]}: {given}")
    texts = tuple("" if call is None else f"<output>{answers[call].output}</output>" for call in calls)
    failures = [answers[call].failed for call in calls if call is not None]
    called = [call is not None for call in compress(calls, rollouts.in_newest_turn())]
    metrics: Metrics = {"tool_calls": Mean.of(called), "tool_errors": Mean.of(failures)}
    done_N = torch.tensor([call is None for call in calls])
    return Replies(texts, ("tool",) * len(texts), done_N), metrics


def find_call(text: str) -> str | None:
    """The code of the last call in a text; None if there is none."""
    calls = _CALL.findall(text)
    return calls[-1] if calls else None


def _run_all(codes: list[str], limits: Limits, workers: int, sandbox: bool) -> dict[str, Answer]:
    """The answer to each piece of code; equal pieces are run once."""
    if not codes:
        return {}
    command = wrapper_of(sandbox, "python_tool")
    distinct, places = list(dict.fromkeys(codes)), _places(workers)

    def run(code: str) -> Answer:
        with places:
            return run_python(code, limits, command)

    with ThreadPoolExecutor(min(workers, len(distinct)), "tool") as pool:
        return dict(zip(distinct, pool.map(run, distinct), strict=True))


@lru_cache
def _places(workers: int) -> BoundedSemaphore:
    """A semaphore for the calls of all groups, so that a call's time does not depend on the number of groups."""
    return BoundedSemaphore(workers)
