"""A user's environment that is slow, or hangs, at one group; and programs of fake nodes."""

import os
import time
import warnings
from functools import partial
from pathlib import Path

import torch

from penstock.graph import alternate, broadcast, node, program
from penstock.graph.types import Metrics, NodeWarning, Replies, Rewards, Rollouts
from penstock.nodes.environments.environment import environment
from penstock.nodes.fake import FakePolicy, FakePrompts, fake_environment, fake_generate, fake_score, fake_update
from penstock.nodes.remote_score import http_reward, remote_score

PATIENCE_S = 60.0


def hang(how: str) -> None:
    """Never return: in a sleep, in a system call, or in Python code."""
    if how == "sleep":
        time.sleep(3600)
    if how == "read":
        os.read(os.pipe()[0], 1)
    while how == "loop":
        pass


def wait_for(folder: Path, count: int) -> None:
    """Wait until `count` groups have marks in the folder."""
    end = time.monotonic() + PATIENCE_S
    while len(list(folder.iterdir())) < count:
        assert time.monotonic() < end, f"only {len(list(folder.iterdir()))} other groups went on"
        time.sleep(0.01)


@environment
def shop(
    rollouts: Rollouts, *, folder: str, slow: int = -1, others: int = 0, hangs: int = -1, how: str = "sleep"
) -> tuple[Replies, Metrics]:
    """Answer two turns of every group. The first turn of group `slow` lasts until `others` groups have ended theirs;
    the second turn of group `hangs` never ends, or with how="once" ends at the second try."""
    ordinal, turn, count = rollouts.ordinals[0], rollouts.turns()[0] - 1, len(rollouts)
    if (ordinal, turn) == (slow, 0):
        wait_for(Path(folder), others)
    if (ordinal, turn) == (hangs, 1):
        tried = Path(folder) / "tried"
        if how != "once" or not tried.exists():
            tried.touch()
            hang("sleep" if how == "once" else how)
    rewards_N = (rollouts.tokens_NS.sum(1) % 101).float() / 100
    done_N = torch.full((count,), turn == 1)
    return Replies(("7",) * count, ("user",) * count, done_N, rewards_N), {"served": 1.0}


@node(pool="scorer")
def seen(replies: Replies) -> tuple[Rewards, Metrics]:
    """Return the environment's rewards."""
    assert replies.rewards_N is not None
    return Rewards(replies.rewards_N), {"reward_mean": float(replies.rewards_N.mean())}


@node(pool="scorer")
def marked(rollouts: Rollouts, rewards: Rewards, *, folder: str) -> Rewards:
    """Mark the group with a file. By now the scheduler knows that it was `seen`."""
    (Path(folder) / str(rollouts.ordinals[0])).touch()
    return rewards


@program
def shopping(
    policy: FakePolicy,
    prompts: FakePrompts,
    *,
    folder: str,
    slow: int = -1,
    others: int = 0,
    hangs: int = -1,
    how: str = "sleep",
    deadline: float = 60.0,
    lag: int = 1,
) -> FakePolicy:
    """Two turns per group with `shop`."""
    rollouts, replies = alternate(
        fake_generate,
        shop,
        prompts,
        broadcast(policy, lag=lag),
        turns=2,
        folder=folder,
        slow=slow,
        others=others,
        hangs=hangs,
        how=how,
        deadline=deadline,
    )
    return fake_update(policy, rollouts, marked(rollouts, seen(replies), folder=folder))


@program
def uneven(policy: FakePolicy, prompts: FakePrompts, *, ms: float = 0.0, lag: int = 1) -> FakePolicy:
    """Replies take a random time up to `ms`, so that groups finish in any order."""
    behaviour = broadcast(policy, lag=lag)
    late = fake_environment.given(jitter_ms=ms)
    rollouts, _ = alternate(fake_generate, late, prompts, behaviour, turns=3, samples=3, jitter_ms=ms)
    return fake_update(policy, rollouts, fake_score(rollouts))


@node(pool="scorer")
def wary(rewards: Rewards) -> Rewards:
    """Warn at each firing. Only the first warning is shown."""
    warnings.warn("these rewards are <made up>", NodeWarning, stacklevel=1)
    return rewards


@program
def warned(policy: FakePolicy, prompts: FakePrompts) -> FakePolicy:
    rollouts = fake_generate(prompts, broadcast(policy))
    return fake_update(policy, rollouts, wary(fake_score(rollouts)))


@program
def asked(policy: FakePolicy, prompts: FakePrompts, *, url: str, lag: int = 1, retries: int = 0) -> FakePolicy:
    """Rewards come from a server."""
    rollouts = fake_generate(prompts, broadcast(policy, lag=lag))
    rewards = remote_score(rollouts, by=partial(http_reward, url=url), deadline=20.0, retries=retries)
    return fake_update(policy, rollouts, rewards)
