"""On-policy distillation from the sampled tokens alone: the teacher scores what the student has written.

Shapes: P response tokens of many responses, one after the other. `logprobs_P` are the student's, `teacher_P` the
teacher's log-probabilities of the tokens that the student sampled (nats).
"""

from torch import Tensor

from penstock.nodes.learn.losses import reinforce_loss


def distillation_advantages(logprobs_P: Tensor, teacher_P: Tensor) -> Tensor:
    """−(log π − log π_T) of each token, without a gradient: the reward of reverse-KL distillation.

    Thinking Machines Lab, "On-Policy Distillation" (2025); the policy gradient of MiniLLM (Gu et al. 2023,
    arXiv 2306.08543), section 2.2, with discount 0: a token answers for its own divergence, not for later ones.
    """
    return (teacher_P - logprobs_P).detach()


def distillation_loss(logprobs_P: Tensor, teacher_P: Tensor) -> Tensor:
    """sg(log π − log π_T) · log π: its mean gradient over tokens sampled with π is that of `reverse_kl`.

    Its value is no divergence; `kl_estimate` gives that. Without the stop gradient a term log π · ∇ log π would come in
    that knows of no teacher. For tokens sampled with older weights, give `distillation_advantages` to `aipo_loss`.
    """
    return reinforce_loss(logprobs_P, distillation_advantages(logprobs_P, teacher_P))
