"""PPO (Schulman et al. 2017, arXiv 1707.06347) with a critic; each token is an action, as in InstructGPT (2203.02155).

    prompts ─► generate ─► score ──► gae ─► policy_update ─► policy
       policy ───▲  └──► critic_values ─┴─► critic_update ─► critic

Left out: shared weights of policy and critic. The entropy bonus is `entropy=` of `policy_update`, 0 here.
"""

from functools import partial

from penstock.graph import broadcast, program
from penstock.graph.types import Critic, Policy, Prompts
from penstock.nodes.critic import critic_update, critic_values, gae
from penstock.nodes.generate import generate
from penstock.nodes.learn.losses import ppo as clipped
from penstock.nodes.learn.update import policy_update
from penstock.nodes.score import math_answer, score
from penstock.programs.evaluate import evaluate


@program(evaluation=evaluate)
def ppo(
    policy: Policy,
    critic: Critic,
    prompts: Prompts,
    *,
    samples: int = 8,
    lag: int = 0,
    epochs: int = 1,
    minibatches: int = 2,
    clip: float = 0.2,
    value_clip: float = 0.2,
    lam: float = 0.95,
    lr: float = 1e-4,
    critic_lr: float = 3e-4,
) -> dict[str, Policy | Critic]:
    """Proximal policy optimisation with a critic and generalised advantages (arXiv 1707.06347, algorithm 1).

    Args:
        samples: responses per prompt.
        lag: how many updates old the generator's weights may be.
        epochs: passes over each batch, for policy and critic.
        minibatches: optimizer steps per pass.
        clip: bound of the policy's ratio around 1.
        value_clip: how far an update may move the critic's values.
        lam: lambda of GAE: 1 uses only the rewards, 0 mostly the critic.
        lr: learning rate of the policy's AdamW; a model of a billion parameters wants 1e-6.
        critic_lr: learning rate of the critic's.
    """
    behaviour = broadcast(policy, lag=lag)
    rollouts = generate(prompts, behaviour, samples=samples)
    rewards = score(rollouts, by=math_answer)
    values = critic_values(critic, rollouts)
    advantage, returns = gae(rewards, values, rollouts, lam=lam)
    loss = partial(clipped, clip_low=clip, clip_high=clip)
    learnt = policy_update(policy, rollouts, advantage, loss=loss, lr=lr, epochs=epochs, minibatches=minibatches)
    expects = critic_update(
        critic, rollouts, values, returns, clip=value_clip, lr=critic_lr, epochs=epochs, minibatches=minibatches
    )
    return {"policy": learnt, "critic": expects}
