"""Conversations: a generator and an environment take turns within each prompt group."""

from typing import Any, TypeVar

from penstock.graph import alternate
from penstock.graph.definition import NodeDef
from penstock.graph.types import Prompts, Rollouts, Weights
from penstock.nodes.generate import generate

Replied = TypeVar("Replied")


def converse(
    prompts: Prompts,
    behaviour: Weights,
    *,
    environment: NodeDef[..., Replied],
    turns: int | None = None,
    samples: int = 8,
    **options: Any,
) -> tuple[Rollouts, Replied]:
    """`samples` conversations for each prompt, of at most `turns` turns of the model; what became of them.

    After each turn `environment` (a node from Rollouts to Replies, first input and first output) reads the
    conversations so far and replies; rows that it calls done end, and the others go on. `options` are those of
    `generate` (temperature, …) and of the environment, shared out by name. Returned are the whole conversations and the
    environment's last outputs: of the Rollouts, `texts` has each row's newest turn and `transcripts` all turns.

        rollouts, replies = converse(prompts, behaviour, environment=python_tool, turns=4, seconds=2.0)
        rewards = score(rollouts, by=math_answer)
    """
    return alternate(generate, environment, prompts, behaviour, turns=turns, samples=samples, **options)
