"""Programs of trivial nodes, in a file as a user would write it; the tests load it by its path."""

from dataclasses import dataclass

from penstock.graph import (
    Advantages,
    Context,
    Logprobs,
    Metrics,
    Policy,
    Prompts,
    Rewards,
    Rollouts,
    Weights,
    broadcast,
    node,
    program,
)
from penstock.graph.types import Reference


def math_answer(prompt: str, response: str, answer: str) -> float:
    return float(response == answer)


def length(prompt: str, response: str, answer: str) -> float:
    return float(len(response))


class Engine:
    """A `Stream` that echoes what it is given."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def submit(self, tag: object, inputs: object) -> None: ...

    def step(self) -> list[tuple[object, object]]:
        return []

    def busy(self) -> bool:
        return False

    def reset(self) -> None: ...


def make_engine(context: Context, *, samples: int) -> Engine:
    return Engine(samples)


class Critic(Policy):
    """A value function with its optimizer."""


@dataclass
class Values:
    values_N: tuple[float, ...]


@node(pool="generator", init=make_engine)
def generate(engine: Engine, prompts: Prompts, behaviour: Weights, *, samples: int = 8) -> tuple[Engine, Rollouts]: ...
@node(pool="scorer")
def score(rollouts: Rollouts, *, by: object = math_answer) -> tuple[Rewards, Metrics]:
    rewards = Rewards((1.0,) * len(rollouts))
    return rewards, {"reward_mean": 1.0}


@node(pool="scorer")
def group_advantage(rewards: Rewards) -> Advantages:
    return Advantages(rewards.values_N)


@node(pool="trainer", clock="update")
def aipo_update(
    policy: Policy, rollouts: Rollouts, advantage: Advantages, reference: Logprobs | None = None, *, rho: float = 4.0
) -> tuple[Policy, Metrics]:
    return policy, {"loss": 0.0}


@node(pool="reference")
def reference_logprobs(reference: Reference, rollouts: Rollouts) -> Logprobs:
    return Logprobs(rollouts.logprobs_NT)


@node(pool="critic")
def estimate(rollouts: Rollouts, critic: Weights) -> Values:
    return Values((0.0,) * len(rollouts))


@node(pool="scorer")
def advantages(rewards: Rewards, values: Values) -> Advantages:
    return Advantages(rewards.values_N)


@node(pool="critic", clock="update")
def critic_update(critic: Critic, rollouts: Rollouts, rewards: Rewards) -> tuple[Critic, Metrics]:
    return critic, {}


@node(pool="scorer", clock="update")
def accuracy(rewards: Rewards) -> Metrics:
    return {"accuracy": 1.0}


@program
def evaluate(policy: Policy, prompts: Prompts) -> Policy:
    """Accuracy on held-out problems."""
    rewards = score(generate(prompts, broadcast(policy), samples=1))
    accuracy(rewards)
    return policy


@program(evaluation=evaluate)
def aipo(policy: Policy, prompts: Prompts, *, samples: int = 8, lag: int = 1, rho: float = 4.0) -> Policy:
    """Asynchronous importance-weighted policy optimisation.

    Args:
        samples: responses per prompt,
            at least two.
        lag (int): how old the generator's weights may be.

    Returns:
        The next policy.
    """
    behaviour = broadcast(policy, lag=lag)
    rollouts = generate(prompts, behaviour, samples=samples)
    rewards = score(rollouts, by=math_answer)
    advantage = group_advantage(rewards)
    return aipo_update(policy, rollouts, advantage, rho=rho)


@program
def anchored(policy: Policy, reference: Reference, prompts: Prompts, *, kl: float = 0.1) -> dict[str, Policy]:
    """A frozen value is read as it is, or not at all."""
    rollouts = generate(prompts, broadcast(policy))
    advantage = group_advantage(score(rollouts))
    anchor = reference_logprobs(reference, rollouts) if kl else None
    return {"policy": aipo_update(policy, rollouts, advantage, anchor), "reference": reference}


@program
def actor_critic(policy: Policy, critic: Critic, prompts: Prompts, *, lag: int = 1) -> dict[str, Policy]:
    """Two carried values: the critic learns beside the policy."""
    rollouts = generate(prompts, broadcast(policy, lag=lag))
    rewards = score(rollouts)
    advantage = advantages(rewards, estimate(rollouts, broadcast(critic, lag=2 * lag)))
    learnt = critic_update(critic, rollouts, rewards)
    return {"policy": aipo_update(policy, rollouts, advantage), "critic": learnt}
