"""How much better a response is than its group."""

import torch

from penstock.graph import node
from penstock.graph.types import Advantages, Rewards


@node(pool="scorer")
def group_advantage(rewards: Rewards, *, normalize: bool = False) -> Advantages:
    """A = r − mean of the rewards of the same prompt's samples (LlamaRL, arXiv 2505.24034, section 6).

    With `normalize` it is divided by the group's standard deviation, as in GRPO (arXiv 2402.03300, section 4.1.2);
    a group whose rewards are all equal has advantage 0 either way.
    """
    values_N = torch.as_tensor(rewards.values_N, dtype=torch.float32)
    advantages_N = values_N - values_N.mean()
    if normalize:
        advantages_N = advantages_N / (values_N.std(correction=0) + 1e-6)
    return Advantages(advantages_N)
