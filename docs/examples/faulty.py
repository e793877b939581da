from penstock import Policy, Prompts, aipo_update, generate, group_advantage, program, score


@program
def faulty(policy: Policy, prompts: Prompts) -> Policy:
    rollouts = generate(prompts, policy, samples=0)  # type: ignore[arg-type]
    rewards = score(rollouts)
    group_advantage(rewards)
    return aipo_update(policy, rollouts, rewards)  # type: ignore[arg-type]
