from penstock import Policy, aipo_update, broadcast, delay, generate, group_advantage, math_answer, program, score
from penstock.nodes.curriculum import Candidates, Varied, choose, remember


def width(text: str) -> str:
    """What two problems have in common: how long they are."""
    return str(len(text))


@program
def by_width(
    policy: Policy, varied: Varied, several: Candidates, *, samples: int = 8, candidates: int = 4, lag: int = 1
) -> dict[str, object]:
    """AIPO that prefers problems of the length whose rewards have varied most."""
    prompts = choose(several, delay(varied, lag=lag), by=width)
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=samples)
    rewards = score(rollouts, by=math_answer)
    learnt = aipo_update(policy, rollouts, group_advantage(rewards))
    return {"policy": learnt, "varied": remember(varied, prompts, rewards, by=width)}
