from dataclasses import dataclass

import torch
from torch import Tensor

from penstock import Batchable, Rewards, Rollouts, node


@dataclass
class Verdicts(Batchable):
    """How sure a judge is of each response, float [N], and what it said."""

    sure_N: Tensor
    words: tuple[str, ...]


@node(pool="scorer")
def judge(rollouts: Rollouts) -> Verdicts:
    return Verdicts(torch.full((len(rollouts),), 0.5), tuple("unsure" for _ in rollouts.texts))


@node(pool="scorer")
def doubt(rewards: Rewards, verdicts: Verdicts) -> Rewards:
    return rewards * verdicts.sure_N
