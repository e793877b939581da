"""Measure weights while others train: greedy accuracy on held-out problems, on a pool of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.graph import node, requires
from penstock.graph.context import Context
from penstock.graph.ir import PRECISIONS
from penstock.graph.node import fire
from penstock.graph.types import Metrics, Rewards, Weights
from penstock.nodes.data import open_prompts
from penstock.nodes.generate import make_engine
from penstock.nodes.generate.kv_cache import room
from penstock.nodes.open_model import computes
from penstock.nodes.option_checks import count
from penstock.nodes.score import Rule, accuracy, math_answer, score


class Examiner:
    """State of `measure`: a `Stream` whose firings are whole exams, each of `problems` held-out prompts."""

    def __init__(self, context: Context, problems: int, by: Rule) -> None:
        self.source = open_prompts(context.evaluation())
        # Greedy, so that the same weights get the same accuracy on every replica.
        # No response of an exam pauses: it is of one version.
        self.engine = make_engine(replace(context, segment=0), samples=1, temperature=0.0)
        self.problems, self.by = problems, by
        # By tag: the version that is measured, and the rewards so far.
        self.exams: dict[Any, tuple[int, list[Rewards]]] = {}

    def submit(self, tag: Any, inputs: Mapping[str, Any]) -> None:
        behaviour: Weights = inputs["behaviour"]
        self.exams[tag] = behaviour.version, []
        for ordinal in range(self.problems):
            self.engine.submit((tag, ordinal), {"prompts": self.source.read(ordinal), "behaviour": behaviour})

    def step(self) -> Sequence[tuple[Any, Metrics]]:
        finished = []
        for (tag, _), made in self.engine.step():
            if isinstance(made, Exception):  # of one problem; its exam has no figure without it
                raise made
            rollouts, _ = made
            version, scored = self.exams[tag]
            scored.append(score.fn(rollouts, by=self.by)[0])
            if len(scored) == self.problems:
                del self.exams[tag]
                figures = accuracy.fn(Rewards.concat(scored))
                finished.append((tag, {**figures, "accuracy_version": float(version)}))
        return finished

    def busy(self) -> bool:
        return bool(self.exams)

    def reset(self) -> None:
        self.exams.clear()
        self.engine.reset()


def _make_examiner(context: Context, *, problems: int, by: Rule) -> Examiner:
    return Examiner(context, problems, by)


@requires(count(1, "problems"), room, computes)
@node(pool="examiner", clock="update", init=_make_examiner)
def measure(
    examiner: Examiner, behaviour: Weights, *, problems: int = 100, by: Rule = math_answer
) -> tuple[Examiner, Metrics]:
    """Greedy accuracy of the weights on the first `problems` held-out problems. Metrics: `accuracy`, the share of full
    rewards as in the node `accuracy`, and `accuracy_version`, the version of the weights.

    It reads only weights, so no update waits for it: `measure.every(10)(broadcast(policy))`.
    """
    return examiner, fire(examiner, {"behaviour": behaviour})


measure.precisions, measure.evaluates = PRECISIONS, True
