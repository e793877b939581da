"""Supervised fine-tuning: the policy imitates demonstrations. It makes the base model that RL starts from.

demonstrations → sft_update → policy
"""

from penstock.graph import program
from penstock.graph.types import Policy
from penstock.nodes.data import Demonstrations
from penstock.nodes.learn.sft import sft_update
from penstock.programs.evaluate import evaluate


@program(evaluation=evaluate, defaults={"model": "new", "updates": 500, "batch": 4})
def sft(policy: Policy, demonstrations: Demonstrations, *, lr: float = 2e-3) -> Policy:
    """Supervised fine-tuning on a teacher's demonstrations, 32 in a group.

    Args:
        lr: highest learning rate of AdamW; it warms up, then falls along a cosine to 0 at the run's end.
    """
    return sft_update(policy, demonstrations, lr=lr)
