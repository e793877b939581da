import torch
from torch import Tensor

from penstock import requires
from penstock.nodes.learn.losses import Sampled, reads


@requires(reads("behaviour"))
def clip_higher(logprobs_P: Tensor, sampled: Sampled, *, low: float = 0.2, high: float = 0.28) -> tuple[Tensor, Tensor]:
    """DAPO, arXiv 2503.14476, equation 10: PPO's clip with more room above than below."""
    ratio_P = torch.exp(logprobs_P - sampled.behaviour_P)
    free_P = ratio_P * sampled.advantages_P
    bounded_P = ratio_P.clamp(1 - low, 1 + high) * sampled.advantages_P
    return -torch.minimum(free_P, bounded_P), bounded_P < free_P
