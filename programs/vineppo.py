"""VinePPO (Kazemnejad et al. 2024, arXiv 2410.01679): PPO with Monte-Carlo values of states, without a critic.

    prompts ─► generate ─► cut ─► vines ─► outcomes ─► vine_advantage ─► policy_update ─► policy
       policy ───▲───────────────── ▲        score ────▲ (rewards of the whole responses)

A state is the prompt with the beginning of a response. Its value is the mean reward of a few responses that continue
exactly these tokens. Left out: the penalty on divergence from a reference, and extra samples for the value of the
prompt: the other responses to it are such samples.
"""

from functools import partial

from penstock.graph import broadcast, program
from penstock.graph.types import Policy, Prompts
from penstock.nodes.advantage import vine_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn.losses import ppo
from penstock.nodes.learn.update import policy_update
from penstock.nodes.prefixes import after_text, after_tokens, cut
from penstock.nodes.score import math_answer, score
from penstock.programs.evaluate import evaluate


@program(evaluation=evaluate)
def vineppo(
    policy: Policy,
    prompts: Prompts,
    *,
    samples: int = 8,
    vines: int = 4,
    states: int = 2,
    step: str = "",
    step_tokens: int = 3,
    lag: int = 0,
    clip: float = 0.2,
    lr: float = 1e-4,
) -> Policy:
    """Proximal policy optimisation with Monte-Carlo values of steps (arXiv 2410.01679, section 4).

    Args:
        samples: responses per prompt, which are learnt from.
        vines: responses that continue each state; their mean reward is its value.
        states: most states of a response, spread evenly over its steps.
        step: text that ends a step, such as a line's end; "" is every `step_tokens` tokens.
        step_tokens: tokens of a step if `step` is "".
        lag: how many updates old the generator's weights may be; 0 is synchronous.
        clip: bound of the policy's ratio around 1, PPO's epsilon.
        lr: learning rate of AdamW; a model of a billion parameters wants 1e-6.
    """
    behaviour = broadcast(policy, lag=lag)
    rollouts = generate(prompts, behaviour, samples=samples)
    rewards = score(rollouts, by=math_answer)
    at = partial(after_text, text=step) if step else partial(after_tokens, tokens=step_tokens)
    prefixes = cut(rollouts, at=at, most=states)
    further = generate.named("vines")(prompts, behaviour, after=prefixes, samples=vines)
    outcomes = score.named("outcomes")(further, by=math_answer)
    advantage = vine_advantage(rewards, rollouts, prefixes, further, outcomes)
    return policy_update(policy, rollouts, advantage, loss=partial(ppo, clip_low=clip, clip_high=clip), lr=lr)
