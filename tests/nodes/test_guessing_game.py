"""The game tells higher from lower, ends when the guess is right, and gives its secrets by ordinal."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.graph import Metrics, Policy, Prompts, broadcast, node, program
from penstock.graph.types import Context, Replies, Rewards, Rollouts, TurnRewards
from penstock.nodes.advantage import group_advantage
from penstock.nodes.environments.environment import environment, outcome, turn_rewards
from penstock.nodes.environments.guessing_game import guessing_game, open_secrets
from penstock.nodes.generate import converse
from penstock.nodes.learn.batching import sampled_mask, turn_of_tokens
from penstock.nodes.learn.update import aipo_update
from tests.pages import SMALL, run

from .rollouts import random_rollouts


def rollouts(texts: list[str], answers: list[str]) -> Rollouts:
    count = len(texts)
    lengths_N = torch.ones(count, dtype=torch.long)
    zeros_N1 = torch.zeros(count, 1)
    tokens_NS = torch.zeros(count, 2, dtype=torch.long)
    return Rollouts(
        ordinals=(3,) * count,
        prompts=("0-9:",) * count,
        answers=tuple(answers),
        texts=tuple(texts),
        tokens_NS=tokens_NS,
        prompt_lengths_N=lengths_N,
        response_lengths_N=lengths_N,
        logprobs_NT=zeros_N1,
        versions_NT=zeros_N1.long(),
        finished_N=lengths_N > 0,
    )


def test_each_guess_is_answered_and_the_right_one_ends_the_game_with_reward_one() -> None:
    replies, metrics = guessing_game.fn(rollouts(["3", "I say 7 or 5", "what", "5"], ["5"] * 4), unclear="?")
    assert replies.texts[:3] == ("higher", "lower", "?")
    assert replies.done_N.tolist() == [False, False, False, True]
    assert replies.rewards_N is not None
    assert replies.rewards_N.tolist() == [0, 0, 0, 1]
    assert (replies.done, metrics) == (False, {"unclear": 0.25})
    assert guessing_game.fn(rollouts(["5"], ["5"]))[0].done


def test_the_same_transcript_gets_the_same_reply() -> None:
    said = rollouts(["3", "8"], ["5", "5"])
    assert guessing_game.fn(said)[0].texts == guessing_game.fn(said)[0].texts


def test_a_secret_that_is_no_number_is_an_error() -> None:
    with pytest.raises(ValueError, match="group 3: given the secret 'five', needed a whole number"):
        guessing_game.fn(rollouts(["3"], ["five"]))


def test_secrets_follow_from_seed_and_ordinal_and_stay_in_their_range() -> None:
    source = open_secrets(Context(node="prompts", seed=4, options={"low": 3, "high": 6}))
    again = open_secrets(Context(node="prompts", seed=4, options={"low": 3, "high": 6}))
    assert [source.read(i) for i in range(50)] == [again.read(i) for i in range(50)]
    assert {source.read(i).answers[0] for i in range(50)} == set("3456")
    assert source.read(7).texts == ("3-6:",)
    held_out = open_secrets(Context(split="evaluate"))
    assert [held_out.read(i).answers[0] for i in range(12)] == list("012345678901")
    with pytest.raises(ValueError, match="given the range 5 to 5, needed 0 <= low < high"):
        open_secrets(Context(options={"low": 5, "high": 5}))


def test_the_outcome_is_what_the_environment_gave() -> None:
    replies, _ = guessing_game.fn(rollouts(["5", "6"], ["5", "5"]))
    rewards, metrics = outcome.fn(replies)
    assert isinstance(rewards, Rewards)
    assert (rewards.values_N.tolist(), metrics) == ([1.0, 0.0], {"reward_mean": 0.5})
    with pytest.raises(ValueError, match="an environment that gives no rewards"):
        outcome.fn(Replies(("",), ("user",), torch.tensor([True])))


def test_replies_of_several_groups_join_with_rewards_or_without() -> None:
    replies, _ = guessing_game.fn(rollouts(["5", "6"], ["5", "5"]))
    both = Replies.concat([replies, replies])
    assert (len(both), both.done_N.tolist()) == (4, [True, False] * 2)
    bare = Replies(("a",), ("user",), torch.tensor([True]))
    assert Replies.concat([bare, bare]).rewards_N is None


# Rewards of turns ---------------------------------------------------------------------------------------------


@environment
def paying(rollouts: Rollouts) -> Replies:
    """After turn k of the model k + row / 10; row r is done after r + 1 turns, but hears what others are told."""
    turn = max(rollouts.turns())
    rewards_N = torch.tensor([turn + row / 10 for row in range(len(rollouts))])
    done_N = torch.tensor([turn > row for row in range(len(rollouts))])
    return Replies((":",) * len(rollouts), ("user",) * len(rollouts), done_N, rewards_N)


@node(pool="scorer")
def noted(rollouts: Rollouts, rewards: TurnRewards) -> tuple[Rewards, Metrics]:
    expected = torch.tensor([[1.0, 0, 0], [1.1, 2.1, 0], [1.2, 2.2, 3.2], [1.3, 2.3, 3.3]])
    torch.testing.assert_close(rewards.values_NK, expected)
    turn_NT = turn_of_tokens(rollouts)
    assert [row.max() + 1 for row in turn_NT] == rewards.turns_N.tolist() == rollouts.turns() == [1, 2, 3, 3]
    assert torch.equal(turn_NT >= 0, sampled_mask(rollouts))
    return Rewards(rewards.values_NK.sum(1)), {"turn_reward_mean": float(rewards.values_NK.mean())}


@program
def paid(policy: Policy, prompts: Prompts) -> Policy:
    rollouts, replies = converse(prompts, broadcast(policy), environment=paying, turns=3, samples=4)
    rewards = noted(rollouts, turn_rewards(rollouts, replies))
    return aipo_update(policy, rollouts, group_advantage(rewards))


def test_a_node_reads_what_every_turn_was_worth(tmp_path: Path) -> None:
    summary = run(paid, tmp_path / "run", replace(SMALL, eval_groups=0, updates=1))
    assert summary["status"] == "done", summary["error"]


def test_an_environment_that_gives_no_rewards_at_a_turn_is_told() -> None:
    rollouts = replace(random_rollouts(), ordinals=(8,) * 5)
    silent = Replies((":",) * 5, ("user",) * 5, torch.ones(5, dtype=torch.bool))
    with pytest.raises(ValueError, match="turn_rewards, group 8, row 0: given no reward for turn 0, needed one"):
        turn_rewards.fn(rollouts, silent)
