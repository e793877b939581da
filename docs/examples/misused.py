from penstock.graph import Policy, Prompts, alternate, broadcast, delay, keep, program
from penstock.nodes.advantage import group_advantage
from penstock.nodes.curriculum import Candidates, Varied, choose, remember
from penstock.nodes.environments.python_tool import python_tool
from penstock.nodes.generate import generate
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.score import math_answer, score


@program
def filter_by_lambda(policy: Policy, prompts: Prompts) -> Policy:
    rollouts = generate(prompts, broadcast(policy), samples=4)
    rewards = keep(score(rollouts, by=math_answer), when=lambda rewards: True)
    return aipo_update(policy, rollouts, group_advantage(rewards))


@program
def starving(policy: Policy, prompts: Prompts) -> Policy:
    rollouts = generate(prompts, broadcast(policy, lag=1, every=4), samples=4)
    return aipo_update(policy, rollouts, group_advantage(score(rollouts, by=math_answer)))


@program
def slow_group(policy: Policy, prompts: Prompts) -> Policy:
    rollouts = generate(prompts, broadcast(policy), samples=4)
    return aipo_update(policy, rollouts, group_advantage(score.every(2)(rollouts, by=math_answer)))


@program
def updated_twice(policy: Policy, prompts: Prompts) -> Policy:
    rollouts = generate(prompts, broadcast(policy), samples=4)
    advantage = group_advantage(score(rollouts, by=math_answer))
    aipo_update(policy, rollouts, advantage)
    return aipo_update(policy, rollouts, advantage)


@program
def delayed_elsewhere(policy: Policy, varied: Varied, several: Candidates) -> dict[str, object]:
    prompts = choose.on("generator")(several, delay(varied, lag=1))
    rollouts = generate(prompts, broadcast(policy), samples=4)
    rewards = score(rollouts, by=math_answer)
    learnt = aipo_update(policy, rollouts, group_advantage(rewards))
    return {"policy": learnt, "varied": remember(varied, prompts, rewards)}


@program
def unbounded(policy: Policy, prompts: Prompts) -> Policy:
    rollouts, _ = alternate(generate, python_tool, prompts, broadcast(policy), samples=4)
    return aipo_update(policy, rollouts, group_advantage(score(rollouts, by=math_answer)))
