"""The log-probabilities of the policy that sampled, for nodes that cannot do without them.

Shapes: N responses, T tokens of a response.
"""

from torch import Tensor

from penstock.graph.types import Rollouts
from penstock.nodes.learn.sampled import NEEDED


def behaviour_logprobs(rollouts: Rollouts, asker: str) -> Tensor:
    """log μ of each token, float [N, T]; zero where nobody sampled. Raises ValueError, which names the `asker`, for
    rollouts that lack them, such as data that no policy of this run has generated."""
    if rollouts.logprobs_NT is None:
        raise ValueError(f"{asker}: given rollouts without log μ (logprobs_NT is None), needed {NEEDED['behaviour']}")
    logprobs_NT: Tensor = rollouts.logprobs_NT
    return logprobs_NT
