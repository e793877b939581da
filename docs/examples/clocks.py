from penstock.graph import Policy, Prompts, broadcast, program
from penstock.graph.types import Average
from penstock.nodes.advantage import group_advantage
from penstock.nodes.distill import reference_logprobs
from penstock.nodes.ema import refresh
from penstock.nodes.evaluate import measure
from penstock.nodes.generate import generate
from penstock.nodes.learn.losses import ppo
from penstock.nodes.learn.update import policy_update
from penstock.nodes.score import math_answer, score


@program
def anchored(
    policy: Policy, anchor: Average, prompts: Prompts, *, samples: int = 8, lag: int = 1, move: int = 10, look: int = 20
) -> dict[str, Policy]:
    """GRPO close to what the policy was up to `move` updates ago, measured every `look` updates while it trains."""
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=samples)
    advantage = group_advantage(score(rollouts, by=math_answer), normalize=True)
    close = reference_logprobs.per_update.on("trainer")(anchor, rollouts)
    learnt = policy_update(policy, rollouts, advantage, close, loss=ppo, kl=0.1, minibatches=2)
    measure.every(look)(broadcast(policy), problems=20)
    return {"policy": learnt, "anchor": refresh.every(move)(anchor, learnt)}
