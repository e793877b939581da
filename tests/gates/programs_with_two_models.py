"""Programs with a second model of another shape and tokenizer, in a file as a user would write it."""

from pathlib import Path
from typing import ClassVar

import torch

from penstock.graph import (
    Context,
    Metrics,
    Policy,
    Prompts,
    Rewards,
    Rollouts,
    alternate,
    broadcast,
    node,
    opens,
    program,
)
from penstock.graph.protocols import Carried
from penstock.graph.types import FrozenModel, RewardModel
from penstock.nodes.advantage import group_advantage
from penstock.nodes.environments.environment import outcome
from penstock.nodes.generate import generate, reply
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.model import CausalLM, ModelConfig, save_model
from penstock.nodes.open_model import ModelSpec
from penstock.nodes.policy import make_policy
from penstock.nodes.score import math_answer, score
from penstock.nodes.tokenizer import byte_tokenizer


def judge_spec(context: Context | None = None, width: int = 48) -> ModelSpec:
    """Return a model of three layers of width 48, with bytes as tokens: unlike the small default model of a run."""
    tokenizer = byte_tokenizer()
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=width,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        initializer_range=0.08,
        max_position_embeddings=256,
        eos_token_ids=tokenizer.stops,
        pad_token_id=tokenizer.pad,
    )
    return ModelSpec(config, tokenizer)


def write_model(folder: Path, width: int = 48) -> str:
    """Write a model directory of this shape."""
    spec = judge_spec(width=width)
    model = CausalLM(spec.config, torch.float32, "cpu")
    model.init_weights(1)
    save_model(model, model.state_dict(), folder)
    spec.tokenizer.save(folder)
    return str(folder)


@node(pool="scorer")
def ask(rollouts: Rollouts) -> Prompts:
    """Return one question about each response."""
    said = zip(rollouts.prompts, rollouts.texts, strict=True)
    return Prompts(rollouts.ordinals, tuple(f"Is {prompt} {text}?" for prompt, text in said), rollouts.answers)


@node(pool="scorer")
def verdict(rollouts: Rollouts, said: Rollouts) -> tuple[Rewards, Metrics]:
    """Return rewards that depend on the judge's whole texts. Raises ValueError if the judge's prompt tokens are not the
    bytes of the questions."""
    if len(said) != len(rollouts):
        raise ValueError(f"given {len(said)} verdicts, needed {len(rollouts)}")
    for row, question in enumerate(said.prompts):
        length = int(said.prompt_lengths_N[row])
        if bytes(said.tokens_NS[row, :length].tolist()) != question.encode():
            raise ValueError(f"given the tokens {said.tokens_NS[row, :length].tolist()}, needed those of {question!r}")
    rewards = Rewards(torch.tensor([sum(text.encode()) % 7 / 7 for text in said.texts]))
    return rewards, {"verdict": float(rewards.values_N.mean())}


@program
def judged(
    policy: Policy,
    judge: FrozenModel,
    prompts: Prompts,
    *,
    judge_model: Path | None = None,
    samples: int = 4,
    lag: int = 0,
) -> dict[str, object]:
    """AIPO on a judge's verdict about each response."""
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=samples)
    said = generate.of(judge)(ask(rollouts), samples=1)
    return {"policy": aipo_update(policy, rollouts, group_advantage(verdict(rollouts, said))), "judge": judge}


def question(prompt: str, response: str, answer: str) -> str:
    return f"{prompt} {response}?"


def curt(reply: str) -> bool:
    """True for some replies, so that some conversations end early."""
    return len(reply) % 3 == 0


def varied(reply: str) -> float:
    return len(set(reply)) / 8


@program
def talk(
    policy: Policy,
    judge: FrozenModel,
    prompts: Prompts,
    *,
    judge_model: Path | None = None,
    samples: int = 3,
    turns: int = 3,
    pool: str = "judge",
    lag: int = 0,
) -> dict[str, object]:
    """Two models talk, each with its own tokenizer. The reward is the number of different letters in the replies."""
    behaviour = broadcast(policy, lag=lag)
    partner = generate.of(judge).on(pool).named("judge_says")
    rollouts, replies = alternate(
        generate, partner, prompts, behaviour, samples=samples, turns=turns, ask=question, over=curt, reward=varied
    )
    learnt = aipo_update(policy, rollouts, group_advantage(outcome(replies)))
    return {"policy": learnt, "judge": judge}


@program
def self_play(policy: Policy, prompts: Prompts, *, samples: int = 3, turns: int = 2, lag: int = 1) -> Policy:
    """The policy talks with itself, with weights that are at most `lag` versions old."""
    older = broadcast(policy, lag=lag)
    speaker, partner = generate.of(broadcast(policy, lag=lag)), reply.of(older).given(temperature=0.5, reward=varied)
    rollouts, replies = alternate(speaker, partner, prompts, samples=samples, turns=turns)
    return aipo_update(policy, rollouts, group_advantage(outcome(replies)))


class Silent(Policy):
    """A policy whose maker does not say which model it opens."""

    maker: ClassVar[str] = f"{__file__}:make_silent"


class Wide(Policy):
    """A policy whose maker says so."""

    maker: ClassVar[str] = f"{__file__}:make_wide"


def make_silent(context: Context) -> Carried:
    return make_policy(context)


@opens(judge_spec)
def make_wide(context: Context) -> Carried:
    return make_policy(context)


@program
def silent(policy: Policy, other: Silent, prompts: Prompts) -> dict[str, object]:
    rollouts = generate(prompts, broadcast(other), samples=2)
    return {"policy": aipo_update(policy, rollouts, group_advantage(score(rollouts, by=math_answer))), "other": other}


@program
def wide(policy: Policy, other: Wide, prompts: Prompts) -> dict[str, object]:
    rollouts = generate(prompts, broadcast(other), samples=2)
    return {"policy": aipo_update(policy, rollouts, group_advantage(score(rollouts, by=math_answer))), "other": other}


@program
def strange_words(
    policy: Policy, judge: FrozenModel, prompts: Prompts, *, judge_model: Path | None = None
) -> dict[str, object]:
    """The policy shall learn from the judge's tokens."""
    rollouts = generate.of(judge)(prompts, samples=2)
    learnt = aipo_update(policy, rollouts, group_advantage(score(rollouts, by=math_answer)))
    return {"policy": learnt, "judge": judge}


@program
def numbers(policy: Policy, reward_model: RewardModel, prompts: Prompts) -> dict[str, object]:
    """A reward model shall generate text."""
    rollouts = generate(prompts, broadcast(reward_model), samples=2)
    learnt = aipo_update(policy, rollouts, group_advantage(score(rollouts, by=math_answer)))
    return {"policy": learnt, "reward_model": reward_model}
