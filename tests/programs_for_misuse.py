"""Programs that a user might write, each with one thing that a node or a loss cannot work with."""

from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from penstock.graph import (
    Advantages,
    Context,
    Logprobs,
    Policy,
    Prompts,
    Rewards,
    Rollouts,
    broadcast,
    keep,
    node,
    program,
    requires,
)
from penstock.graph.protocols import Source
from penstock.graph.requires import Call
from penstock.graph.types import Critic, LearningRate, Reference, RewardModel
from penstock.nodes.advantage import greedy_advantage, group_advantage, leave_one_out_advantage
from penstock.nodes.critic import critic_update, critic_values, gae
from penstock.nodes.distill import policy_logprobs, reference_logprobs
from penstock.nodes.environments.python_tool import python_tool
from penstock.nodes.evaluate import measure
from penstock.nodes.generate import converse, generate
from penstock.nodes.learn.dpo import dpo_update
from penstock.nodes.learn.losses import Sampled, aipo, ppo, reads, reinforce, tis
from penstock.nodes.learn.update import aipo_update, policy_update, term
from penstock.nodes.remote_score import remote_score
from penstock.nodes.replay_buffer import replay
from penstock.nodes.reward_model import reward_scores
from penstock.nodes.score import accuracy, length, math_answer, score


def compared(policy: Policy, prompts: Prompts) -> tuple[Rollouts, Advantages]:
    rollouts = generate(prompts, broadcast(policy), samples=4)
    return rollouts, group_advantage(score(rollouts, by=math_answer))


@program
def alone(policy: Policy, prompts: Prompts, *, samples: int = 1) -> Policy:
    rollouts = generate(prompts, broadcast(policy), samples=samples)
    rewards = half(score(rollouts, by=math_answer))
    # too-few-samples: group_advantage given rewards of samples=1, one response to a prompt
    return aipo_update(policy, rollouts, group_advantage(rewards))


@node(pool="scorer")
def half(rewards: Rewards) -> Rewards:
    return rewards * 0.5


@program
def judged_once(policy: Policy, prompts: Prompts) -> Policy:
    """A judge's option `samples` is about its own opinions: no fault."""
    rollouts = generate(prompts, broadcast(policy), samples=4)
    return aipo_update(policy, rollouts, group_advantage(opinions(rollouts, samples=1)))


@node(pool="scorer")
def opinions(rollouts: Rollouts, *, samples: int) -> Rewards:
    return Rewards(torch.zeros(len(rollouts.texts)))


@program
def forked(policy: Policy, prompts: Prompts) -> Policy:
    """A node from rollouts to rollouts may return more of them: no fault."""
    rollouts = fork(generate(prompts, broadcast(policy), samples=1))
    return aipo_update(policy, rollouts, group_advantage(score(rollouts, by=math_answer)))


@node(pool="generator")
def fork(rollouts: Rollouts) -> Rollouts:
    return rollouts.take([0, 0])


@program
def alone_and_learnt(policy: Policy, reward: RewardModel, prompts: Prompts) -> dict[str, object]:
    rollouts = generate(prompts, broadcast(policy), samples=1)
    # too-few-samples: group_advantage given rewards of samples=1, one response to a prompt
    advantage = group_advantage(reward_scores(reward, rollouts))
    return {"policy": aipo_update(policy, rollouts, advantage), "reward": reward}


@program
def of_others(policy: Policy, prompts: Prompts) -> Policy:
    weights = broadcast(policy, lag=1)
    own, others = (generate(prompts, weights, samples=2) for _ in range(2))
    worth = group_advantage(score(others, by=math_answer))
    # unmet-requirement: aipo_update: input 'advantage' given numbers for responses of generate_2 … those of generate
    return aipo_update(policy, own, worth)


@program
def paired_and_expected_of_others(
    policy: Policy, critic: Critic, reference: Reference, prompts: Prompts
) -> dict[str, object]:
    weights = broadcast(policy, lag=1)
    own, others = (generate(prompts, weights, samples=2) for _ in range(2))
    rewards, known = score(own, by=math_answer), reference_logprobs(reference, own)
    # unmet-requirement: gae: input 'reference' given numbers for responses of generate_2 … those of generate
    advantage, returns = gae(rewards, critic_values(critic, own), own, reference_logprobs(reference, others))
    # unmet-requirement: critic_update: input 'values' given numbers for responses of generate_2 … those of generate
    expects = critic_update(critic, own, critic_values(critic, others), returns)
    first = policy_update(policy, own, advantage, loss=aipo)
    # unmet-requirement: dpo_update: input 'rewards' given numbers for responses of generate_2 … those of generate
    learnt = dpo_update(first, own, score(others, by=math_answer), known)
    return {"policy": learnt, "critic": expects, "reference": reference}


@program
def twins(policy: Policy, prompts: Prompts) -> Policy:
    rollouts, advantage = compared(policy, prompts)
    again = [term(rollouts, advantage, loss=aipo), term(rollouts, loss=partial(ppo, clip_low=0.1))]
    # duplicate-term: policy_update given two terms of the name 'ppo'
    return policy_update(policy, rollouts, advantage, beside=again, loss=ppo)


def finished(rollouts: Rollouts) -> list[bool]:
    found: list[bool] = rollouts.finished_N.tolist()
    return found


@program
def unnamed(policy: Policy, prompts: Prompts) -> Policy:
    rollouts = generate(prompts, broadcast(policy), samples=4)
    # missing-rollouts: group_advantage: option 'by' given sub-groups of no rollouts
    advantage = group_advantage(score(rollouts, by=math_answer), by=finished)
    return policy_update(policy, rollouts, advantage, loss=ppo)


@program
def dotted(policy: Policy, prompts: Prompts) -> Policy:
    rollouts, advantage = compared(policy, prompts)
    # bad-name: term: option 'name' given 'my.term'
    again = term(rollouts, advantage, loss=ppo, name="my.term")
    return policy_update(policy, rollouts, advantage, beside=[again], loss=ppo)


@program
def term_without_old(policy: Policy, prompts: Prompts) -> Policy:
    rollouts, advantage = compared(policy, prompts)
    # missing-proximal: term: loss tis given no proximal_P for it
    again = term(rollouts, advantage, loss=tis)
    return policy_update(policy, rollouts, advantage, beside=[again], loss=ppo)


@node(pool="trainer", clock="update")
def slower(rewards: Rewards) -> LearningRate:
    return LearningRate(1e-4)


@program
def two_rates(policy: Policy, prompts: Prompts) -> Policy:
    rollouts = generate(prompts, broadcast(policy), samples=4)
    rewards = score(rollouts, by=math_answer)
    advantage, rate = group_advantage(rewards), slower(rewards)
    # two-learning-rates: policy_update: option 'lr' given a learning rate beside the input `rate`
    return policy_update(policy, rollouts, advantage, rate=rate, loss=ppo, lr=1e-4)


def well(call: Call) -> None:
    raise ValueError("nobody can")


@requires(well)
@node(pool="scorer")
def unwell(rollouts: Rollouts) -> Rewards:
    return Rewards(torch.zeros(len(rollouts.texts)))


@program
def refused_plainly(policy: Policy, prompts: Prompts) -> Policy:
    rollouts = generate(prompts, broadcast(policy), samples=4)
    # unmet-requirement: unwell given nobody can
    rewards = unwell(rollouts)
    return aipo_update(policy, rollouts, group_advantage(rewards))


@program
def one_left_out(policy: Policy, prompts: Prompts) -> Policy:
    rollouts = generate(prompts, broadcast(policy), samples=1)
    # too-few-samples: leave_one_out_advantage given rewards of samples=1, one response to a prompt
    advantage = leave_one_out_advantage(score(rollouts, by=math_answer))
    return aipo_update(policy, rollouts, advantage)


@program
def prompts_of_a_batch(policy: Policy, prompts: Prompts) -> Policy:
    """Rewards alone do not say which of a batch's rows answer the same prompt; the rollouts do."""
    rollouts = generate(prompts, broadcast(policy), samples=4)
    rewards = score(rollouts, by=math_answer)
    # missing-rollouts: group_advantage: input 'rewards' given rewards of a whole batch, without its rollouts
    advantage = group_advantage.per_update(rewards)
    return aipo_update(policy, rollouts, advantage)


@program
def no_clipping(policy: Policy, prompts: Prompts) -> Policy:
    """What TRL calls no clipping is a bound of math.inf here."""
    rollouts = generate(prompts, broadcast(policy), samples=4)
    advantage = group_advantage(score(rollouts, by=math_answer))
    # wrong-option-type: policy_update: option 'clip_norm' given None needed a number
    return policy_update(policy, rollouts, advantage, loss=reinforce, clip_norm=None)  # type: ignore[arg-type]


@program
def greedy_of_a_batch(policy: Policy, prompts: Prompts) -> Policy:
    behaviour = broadcast(policy)
    rollouts = generate(prompts, behaviour, samples=1)
    greedy = generate(prompts, behaviour, samples=1, temperature=0.0)
    # whole-batch: greedy_advantage given a whole batch (per_update)
    advantage = greedy_advantage.per_update(score(rollouts, by=math_answer), score(greedy, by=math_answer))
    return policy_update(policy, rollouts, advantage, loss=reinforce)


@program
def many_greedy(policy: Policy, prompts: Prompts) -> Policy:
    behaviour = broadcast(policy)
    rollouts = generate(prompts, behaviour, samples=1)
    greedy = generate(prompts, behaviour, samples=4, temperature=0.0)
    # too-many-samples: greedy_advantage given greedy rewards of samples=4
    advantage = greedy_advantage(score(rollouts, by=math_answer), score(greedy, by=math_answer))
    return policy_update(policy, rollouts, advantage, loss=reinforce)


@program
def no_pair(policy: Policy, reference: Reference, prompts: Prompts) -> dict[str, Policy]:
    rollouts = generate(prompts, broadcast(policy), samples=1)
    rewards, close = score(rollouts, by=math_answer), reference_logprobs(reference, rollouts)
    # too-few-samples: dpo_update given rewards of samples=1, one response to a prompt
    return {"policy": dpo_update(policy, rollouts, rewards, close), "reference": reference}


@program
def expected_by_nothing(policy: Policy, critic: Critic, prompts: Prompts) -> dict[str, object]:
    rollouts = generate(prompts, broadcast(policy), samples=4)
    values = critic_values(critic, rollouts)
    # missing-reference: gae: option 'kl' given 0.1 without a reference
    advantage, returns = gae(score(rollouts, by=math_answer), values, rollouts, kl=0.1)
    learnt = policy_update(policy, rollouts, advantage, loss=ppo)
    return {"policy": learnt, "critic": critic_update(critic, rollouts, values, returns)}


@requires(reads("reference"))
@requires(reads("proximal"))
def own_loss(logprobs_P: Tensor, sampled: Sampled) -> Tensor:
    return (logprobs_P - sampled.proximal_P) * sampled.reference_P


@program
def own(policy: Policy, prompts: Prompts) -> Policy:
    rollouts = generate(prompts, broadcast(policy), samples=4)
    advantage, old = group_advantage(score(rollouts, by=math_answer)), policy_logprobs(policy, rollouts)
    # missing-reference: policy_update: loss own_loss given no reference_P for it
    return policy_update(policy, rollouts, advantage, proximal=old, loss=own_loss)


@program
def no_time(policy: Policy, prompts: Prompts) -> Policy:
    options = {"deadline": 0, "seconds": 0.0, "workers": 0, "memory_mib": 8, "on_timeout": None}
    # wrong-option-type: python_tool: option 'on_timeout' given None
    # out-of-range: python_tool: option 'seconds' given 0.0
    # out-of-range: python_tool: option 'workers' given 0
    # out-of-range: python_tool: option 'memory_mib' given 8
    # out-of-range: python_tool: option 'deadline' given 0
    rollouts, _ = converse(prompts, broadcast(policy), environment=python_tool, turns=2, samples=4, **options)
    return aipo_update(policy, rollouts, group_advantage(score(rollouts, by=math_answer)))


async def judged(response: str) -> float:
    return float(len(response))


@program
def other_arguments(policy: Policy, prompts: Prompts) -> Policy:
    # wrong-option-type: generate: option 'stop' given 'ab'
    rollouts = generate(prompts, broadcast(policy), samples=4, stop="ab")  # type: ignore[arg-type]
    # wrong-option-type: score: option 'by' given length: missing a required argument: 'at_most' … math_answer(prompt,
    rewards = score(rollouts, by=length)  # type: ignore[arg-type]
    # wrong-option-type: remote_score: option 'by' given judged: too many positional arguments
    accuracy(remote_score(rollouts, by=judged))  # type: ignore[arg-type]
    return aipo_update(policy, rollouts, group_advantage(rewards))


@program
def empty_buffer(policy: Policy, prompts: Prompts) -> Policy:
    rollouts, advantage = compared(policy, prompts)
    # out-of-range: replay: option 'take' given 0
    # out-of-range: replay: option 'max_age' given -1
    batch, worth = replay(rollouts, advantage, take=0, max_age=-1)
    return policy_update(policy, batch, worth, loss=aipo)


@program
def empty_exam(policy: Policy, prompts: Prompts) -> Policy:
    rollouts = generate(prompts, broadcast(policy), samples=4)
    # out-of-range: measure: option 'problems' given 0
    measure.every(2)(broadcast(policy), problems=0)
    return aipo_update(policy, rollouts, group_advantage(score(rollouts, by=math_answer)))


class Logged(Rollouts):
    """Recorded responses, one to each of two prompts."""

    maker: ClassVar[str] = f"{__file__}:open_logged"


class _Log:
    def __init__(self, recorded: bool) -> None:
        self.recorded = recorded

    def read(self, ordinal: int) -> Logged:
        length_N = torch.full((2,), 3)
        logprobs_NT = torch.zeros(2, 3) if self.recorded else None
        tokens_NS, versions_NT, finished_N = torch.ones(2, 5, dtype=torch.long), torch.zeros(2, 3), length_N > 0
        texts = ("=3",) * 2
        return Logged(
            (ordinal,) * 2, texts, texts, texts, tokens_NS, length_N - 1, length_N, logprobs_NT, versions_NT, finished_N
        )


def open_logged(context: Context) -> Source:
    return _Log(bool(context.options["recorded"]))


@program
def offline(policy: Policy, logged: Logged, *, recorded: bool = False) -> Policy:
    kept, rewards = keep(logged, score(logged, by=math_answer), when=every)
    return policy_update(policy, kept, group_advantage(rewards), loss=ppo)


def every(logged: Logged, rewards: Rewards) -> bool:
    return True


@program
def offline_filled(policy: Policy, logged: Logged, *, recorded: bool = False) -> Policy:
    """A node may add what rollouts lack: no fault."""
    rollouts = filled(logged)
    return policy_update(policy, rollouts, group_advantage(score(rollouts, by=math_answer)), loss=ppo)


@node(pool="scorer")
def filled(rollouts: Logged) -> Logged:
    return replace(rollouts, logprobs_NT=torch.zeros(rollouts.versions_NT.shape))


@program
def offline_without_ratios(policy: Policy, logged: Logged, *, recorded: bool = False) -> Policy:
    return policy_update(policy, logged, group_advantage(score(logged, by=math_answer)), loss=reinforce)


@node(pool="trainer", clock="update")
def another_update(policy: Policy, rollouts: Rollouts, old: Logprobs, *, loss: object = tis) -> Policy:
    """A user's update, which passes the loss what it needs under another name."""
    raise NotImplementedError


@program
def another(policy: Policy, prompts: Prompts) -> Policy:
    rollouts = generate(prompts, broadcast(policy), samples=1)
    return another_update(policy, rollouts, policy_logprobs(policy, rollouts), loss=tis)


@program
def learns_from_odd_samples(
    policy: Policy, prompts: Prompts, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> Policy:
    """The samples reach the update through a node, a filter and a buffer."""
    behaviour, told = broadcast(policy), {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    rollouts = generate(prompts, behaviour, samples=4, **told)  # type: ignore
    rollouts = fork(rollouts)
    rollouts, rewards = keep(rollouts, score(rollouts, by=math_answer), when=any_of)
    batch, worth = replay(rollouts, group_advantage(rewards))
    return policy_update(policy, batch, worth, loss=aipo)


def any_of(rollouts: Rollouts, rewards: Rewards) -> bool:
    return True


@program
def talks_oddly(policy: Policy, prompts: Prompts) -> Policy:
    behaviour, tool = broadcast(policy), python_tool
    # unscored-sampling: generate: option 'temperature' given 0.0, of rollouts that are scored by mine (
    rollouts, _ = converse(prompts, behaviour, environment=tool, turns=2, temperature=0.0)
    return mine(policy, rollouts)


@program
def stops_nowhere(policy: Policy, prompts: Prompts) -> Policy:
    # stop-never-matches: generate: option 'stop' given '' needed texts that are not empty
    rollouts = generate(prompts, broadcast(policy), samples=4, stop=("7", ""))
    return mine(policy, rollouts)


@node(pool="trainer", clock="update")
def mine(policy: Policy, rollouts: Rollouts) -> Policy:
    """A user's update."""
    raise NotImplementedError


@program
def compares_odd_samples(policy: Policy, prompts: Prompts) -> Policy:
    """Rewards of greedy responses are a baseline: no fault."""
    behaviour = broadcast(policy)
    rollouts = generate(prompts, behaviour, samples=4)
    greedy = generate(prompts, behaviour, samples=1, temperature=0.0)
    baseline = greedy_advantage(score(rollouts, by=math_answer), score(greedy, by=math_answer))
    return policy_update(policy, rollouts, baseline, loss=reinforce)


@node(pool="scorer")
def where_better(rollouts: Rollouts, others: Rollouts) -> Rollouts:
    """Choose some of `rollouts` by comparison with `others`."""
    raise NotImplementedError


@program
def chooses_by_odd_samples(policy: Policy, prompts: Prompts) -> Policy:
    """Responses from a part of the vocabulary only decide which others are trained on: no fault."""
    behaviour = broadcast(policy)
    rollouts = generate(prompts, behaviour, samples=4)
    chosen = where_better(rollouts, generate(prompts, behaviour, samples=4, top_k=40))
    return policy_update(policy, chosen, group_advantage(score(chosen, by=math_answer)), loss=reinforce)


@program
def rescores_odd_samples(policy: Policy, reference: Reference, prompts: Prompts) -> dict[str, Policy]:
    behaviour = broadcast(policy)
    rollouts = generate(prompts, behaviour, samples=4)
    # unscored-sampling: generate_2: option 'top_p' given 0.9, of rollouts that are scored by reference_logprobs (
    odd = generate(prompts, behaviour, samples=4, top_p=0.9)
    close = reference_logprobs(reference, odd)
    advantage = group_advantage(drift(score(rollouts, by=math_answer), close))
    return {"policy": aipo_update(policy, rollouts, advantage), "reference": reference}


# not-carried: given Reference, which forgets_the_reference does not return … return {…, "reference": reference}
@program
def forgets_the_reference(policy: Policy, reference: Reference, prompts: Prompts) -> Policy:
    rollouts, advantage = compared(policy, prompts)
    return policy_update(policy, rollouts, advantage, reference_logprobs(reference, rollouts), loss=ppo, kl=0.1)


@node(pool="scorer")
def drift(rewards: Rewards, close: Logprobs) -> Rewards:
    return rewards


@program
def accumulates_over_several_steps(policy: Policy, prompts: Prompts) -> Policy:
    rollouts, advantage = compared(policy, prompts)
    # accumulate-steps: policy_update: accumulate given epochs=3 needed epochs=1
    # accumulate-steps: policy_update: accumulate given minibatches=2 needed minibatches=1
    return policy_update.accumulate(2)(policy, rollouts, advantage, loss=ppo, epochs=3, minibatches=2)


@program
def accumulates_beside_a_term(policy: Policy, prompts: Prompts) -> Policy:
    rollouts, advantage = compared(policy, prompts)
    more = [term(rollouts, advantage, loss=aipo, weight=0.5)]
    # accumulate-whole-batch: input 'beside[0]', in parts given 'term', which term makes once per update … per group
    return policy_update.accumulate(2)(policy, rollouts, advantage, beside=more, loss=ppo)
