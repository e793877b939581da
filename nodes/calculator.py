"""Sums and differences for a model that can call a calculator, and a teacher who seldom does.

A problem reads "37+58=", its answer "95" (see `arithmetic`). The teacher mostly answers in the head, digit by digit and
without carrying: "85", which is wrong half of the time. Its other demonstrations are conversations with `python_tool`:
the call "<python>37+58</python>" and the end of the turn, the reply "<output>95</output>", and the answer that it
holds: "95". So calling pays, and reinforcement learning can find that out.
"""

from penstock.graph.protocols import Source
from penstock.graph.types import Context, Prompts
from penstock.nodes.arithmetic import Problem, draw_problem, held_out
from penstock.nodes.data import ROWS, Demonstrations
from penstock.nodes.tokenizer import EOS

DIGITS = 2
CALLS = 0.3
"""The share of demonstrations with a call."""


class Calculations(Prompts):
    """Problems of two digits for ever, or the held-out ones in turn."""

    maker = "penstock.nodes.calculator:open_calculations"


class ToolDemonstrations(Demonstrations):
    """What the teacher wrote, the tool's replies included. It is for a model that reads bytes."""

    maker = "penstock.nodes.calculator:open_tool_demonstrations"


class _Calculations:
    def __init__(self, context: Context) -> None:
        self.context = context

    def read(self, ordinal: int) -> Prompts:
        if self.context.split == "evaluate":
            problems = held_out(DIGITS)
            problem = problems[ordinal % len(problems)]
        else:
            problem = draw_problem(self.context, DIGITS, ordinal)
        return Calculations((ordinal,), (problem.text,), (problem.answer,))


class _ToolDemonstrations:
    def __init__(self, context: Context) -> None:
        self.context = context

    def read(self, ordinal: int) -> Demonstrations:
        problems = [draw_problem(self.context, DIGITS, ordinal, row) for row in range(ROWS)]
        responses = [self._response(problem, ordinal, row) for row, problem in enumerate(problems)]
        return ToolDemonstrations(tuple(problem.text for problem in problems), tuple(responses))

    def _response(self, problem: Problem, *parts: int) -> str:
        if self.context.key("calls", *parts) % 10_000 >= CALLS * 10_000:
            return problem.draft
        call = problem.text.removesuffix("=")
        return f"<python>{call}</python>{EOS}<output>{problem.answer}</output>{problem.answer}"


def open_calculations(context: Context) -> Source:
    return _Calculations(context)


def open_tool_demonstrations(context: Context) -> Source:
    return _ToolDemonstrations(context)
