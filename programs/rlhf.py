"""Reinforcement learning from human feedback (InstructGPT, Ouyang et al. 2022, arXiv 2203.02155): PPO on the scores of
a reward model, with a penalty on divergence from the initial policy.

    prompts ─► generate ─┬► reward_scores ──────┐
       policy ───▲       ├► reference_logprobs ─► gae ─► policy_update ─► policy
                         └► critic_values ──────┴─────► critic_update ─► critic

Left out: pretraining gradients (PPO-ptx), a critic that starts from the reward model, normalised rewards.
`accuracy`, the share of right answers, is also measured: the reward model stands in for it.
"""

from functools import partial
from pathlib import Path

from penstock.graph import broadcast, program
from penstock.graph.types import Critic, Policy, Prompts, Reference, RewardModel
from penstock.nodes.critic import critic_update, critic_values, gae
from penstock.nodes.distill import policy_logprobs, reference_logprobs
from penstock.nodes.generate import generate
from penstock.nodes.learn.losses import ppo
from penstock.nodes.learn.update import policy_update
from penstock.nodes.reward_model import reward_scores
from penstock.nodes.score import accuracy, math_answer, score
from penstock.programs.evaluate import evaluate


@program(evaluation=evaluate)
def rlhf(
    policy: Policy,
    critic: Critic,
    reference: Reference,
    reward: RewardModel,
    prompts: Prompts,
    *,
    reward_model: Path | None = None,
    samples: int = 8,
    lag: int = 0,
    kl: float = 0.1,
    lr: float = 1e-4,
    critic_lr: float = 3e-4,
) -> dict[str, Policy | Critic | RewardModel]:
    """PPO on a learned reward model, close to the initial policy (InstructGPT, section 3.5, equation 2).

    Args:
        reward_model: the directory that a run of the program reward_model has written.
        samples: responses per prompt.
        lag: how many updates old the generator's weights may be; 0 is synchronous.
        kl: penalty per nat of divergence from the frozen initial policy.
        lr: learning rate of the policy's AdamW; a model of a billion parameters wants 1e-6.
        critic_lr: learning rate of the critic's.
    """
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=samples)
    accuracy(score(rollouts, by=math_answer))
    values, stay_close = critic_values(critic, rollouts), reference_logprobs(reference, rollouts)
    now = policy_logprobs(policy, rollouts) if lag else None  # at a lag, older weights have sampled
    advantage, returns = gae(reward_scores(reward, rollouts), values, rollouts, stay_close, proximal=now, kl=kl)
    learnt = policy_update(policy, rollouts, advantage, loss=partial(ppo, clip_low=0.2, clip_high=0.2), lr=lr)
    expects = critic_update(critic, rollouts, values, returns, clip=None, lr=critic_lr)
    return {"policy": learnt, "critic": expects, "reference": reference, "reward": reward}
