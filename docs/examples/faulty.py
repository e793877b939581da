from penstock.graph import Policy, Prompts, program
from penstock.nodes.advantage import group_advantage
from penstock.nodes.generate import generate
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.score import score


@program
def faulty(policy: Policy, prompts: Prompts) -> Policy:
    rollouts = generate(prompts, policy, samples=0)  # type: ignore[arg-type]
    rewards = score(rollouts)
    group_advantage(rewards)
    return aipo_update(policy, rollouts, rewards)  # type: ignore[arg-type]
