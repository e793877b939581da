"""Nodes whose firings a test can follow, and programs of them for one rank."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from penstock.graph import Context, Metrics, Policy, Program, Prompts, Rewards, Rollouts, node, program, trace
from penstock.graph.node import Paused
from penstock.graph.types import Advantages, Batchable
from penstock.nodes.fake import FakePolicy, FakePrompts
from penstock.runtime.cluster.placement import Plan, Pool, Rank, Replica
from penstock.runtime.control.rank_setup import RankSetup


class Basket:
    """A `Stream` that returns the ordinals of all groups it holds. A step raises the first time it holds `bad`. It
    returns a non-reward for `odd` and an exception for `cracked`. At `slow` it pauses once, with a reward one lower."""

    def __init__(self, bad: int = -1, odd: int = -1, cracked: int = -1, slow: int = -1) -> None:
        self.bad, self.slow = bad, slow
        self.answers: dict[int, Any] = {odd: "odd", cracked: ZeroDivisionError("one egg cracked")}
        self.held: dict[Any, Prompts] = {}
        self.paused: dict[int, Rewards] = {}

    def submit(self, tag: Any, inputs: Mapping[str, Any]) -> None:
        self.held[tag] = inputs["prompts"]
        if "paused" in inputs:
            self.paused[self.held[tag].ordinals[0]] = inputs["paused"]

    def step(self) -> Sequence[tuple[Any, Any]]:
        ordinals = {tag: prompts.ordinals[0] for tag, prompts in self.held.items()}
        if self.bad in ordinals.values():
            self.bad = -1
            raise ZeroDivisionError("the basket fell")
        self.held.clear()
        return [(tag, self.answer(ordinal)) for tag, ordinal in ordinals.items()]

    def answer(self, ordinal: int) -> Any:
        less = Rewards(torch.tensor([ordinal - 1.0]))
        if ordinal == self.slow and ordinal not in self.paused:
            return Paused(less)
        if ordinal in self.paused:
            return self.paused[ordinal] + Rewards(torch.tensor([1.0]))
        return self.answers.get(ordinal, less + Rewards(torch.tensor([1.0])))

    def busy(self) -> bool:
        return bool(self.held)

    def reset(self) -> None:
        self.held.clear()


def make_basket(context: Context, *, bad: int, odd: int, cracked: int, slow: int) -> Basket:
    return Basket(bad, odd, cracked, slow)


@node(pool="worker", init=make_basket)
def basket(
    state: Basket, prompts: Prompts, *, bad: int = -1, odd: int = -1, cracked: int = -1, slow: int = -1
) -> tuple[Basket, Rewards]:
    raise NotImplementedError("the executor drives the stream")


@node(pool="worker")
def doubled(rewards: Rewards) -> tuple[Rewards, Metrics]:
    return rewards + rewards, {"reward_mean": float(rewards.values_N.mean())}


@node(pool="worker", clock="update")
def learn(policy: FakePolicy, rewards: Rewards) -> tuple[FakePolicy, Metrics]:
    policy.version += 1
    return policy, {"reward_sum": float(rewards.values_N.sum())}


@program
def baskets(
    policy: FakePolicy, prompts: FakePrompts, *, bad: int = -1, odd: int = -1, cracked: int = -1, slow: int = -1
) -> Policy:
    return learn(policy, doubled(basket(prompts, bad=bad, odd=odd, cracked=cracked, slow=slow)))


@node(pool="worker")
def say(prompts: Prompts) -> Rollouts:
    """Return two responses of one token each."""
    row, ones_N = torch.zeros(2, 1), torch.ones(2, dtype=torch.long)
    texts, finished_N = ("a", "b"), torch.tensor([True, True])
    return Rollouts(prompts.ordinals * 2, ("", ""), ("", ""), texts, row, ones_N, ones_N, row, row, finished_N)


@node(pool="worker")
def grade(rollouts: Rollouts, *, given: int) -> Rewards:
    """Return `given` rewards; if `given` is negative, exit the process."""
    return Rewards(torch.ones(given)) if given >= 0 else sys.exit("enough of this")


@program
def graded(policy: FakePolicy, prompts: FakePrompts, *, given: int = 2) -> Policy:
    return learn(policy, grade(say(prompts), given=given))


@node(pool="worker")
def weigh(rollouts: Rollouts, *, given: int) -> Advantages:
    return Advantages(torch.ones(given))


@node(pool="worker", clock="update")
def learn_weighed(policy: FakePolicy, advantage: Advantages) -> FakePolicy:
    return policy


@program
def weighed(policy: FakePolicy, prompts: FakePrompts, *, given: int = 2) -> Policy:
    return learn_weighed(policy, weigh(say(prompts), given=given))


@dataclass
class Words(Batchable):
    words: Any


@node(pool="worker")
def speak(prompts: Prompts) -> Words:
    return Words(["a list is no column"])


@node(pool="worker", clock="update")
def learn_words(policy: FakePolicy, words: Words) -> FakePolicy:
    return policy


@program
def listing(policy: FakePolicy, prompts: FakePrompts) -> Policy:
    return learn_words(policy, speak(prompts))


@node(pool="worker")
def backed(rewards: Rewards, others: Rollouts) -> Rewards:
    """Return the rewards times the number of other responses."""
    return rewards * len(others)


@program
def backing(policy: FakePolicy, prompts: FakePrompts) -> Policy:
    return learn(policy, backed(basket(prompts), say(prompts)))


@node(pool="worker")
def spoken(rewards: Rewards, *, times: int = 2, context: Context | None = None) -> tuple[Rewards, Metrics]:
    assert context is not None
    return rewards * times, {"max_tokens": context.max_tokens}


@program
def speaking(policy: FakePolicy, prompts: FakePrompts) -> Policy:
    return learn(policy, spoken(basket(prompts)))


@dataclass
class Seen:
    """A state with `names`: JSON keeps it, cannot hold it, or changes its type."""

    names: Any


KINDS: dict[str, Any] = {"list": Seen(["a"]), "set": Seen({"a"}), "by number": Seen({1: "a"}), "no field": object()}


def make_seen(context: Context, *, kind: str) -> Any:
    return KINDS[kind]


@node(pool="worker", init=make_seen)
def noted(state: Any, rewards: Rewards, *, kind: str) -> tuple[Any, Rewards]:
    return state, rewards


class Owner(FakePolicy):
    """A policy whose facts JSON cannot hold."""

    maker: ClassVar[str] = "tests.runtime.control.nodes_for_tests:make_owner"

    def state(self) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]:
        return {}, {"owner": object()}


def make_owner(context: Context) -> Owner:
    return Owner(context)


@program
def noting(policy: FakePolicy, prompts: FakePrompts, *, kind: str) -> Policy:
    return learn(policy, noted(grade(say(prompts), given=2), kind=kind))


@program
def owned(policy: Owner, prompts: FakePrompts) -> Policy:
    return learn(policy, grade(say(prompts), given=2))


def make_setup(
    folder: Path,
    replicas: int = 1,
    restore: Path | None = None,
    traced: Program[..., Any] = baskets,
    **options: Any,
) -> RankSetup:
    """Return the setup of the first of `replicas` replicas, each of which holds everything."""
    graph = trace(traced, options)
    holds = (*(argument.name for argument in graph.arguments), *(node.name for node in graph.nodes))
    pool = Pool("worker", holds, tuple(Replica(f"worker/{i}", (Rank(),), 8) for i in range(replicas)))
    contexts = {name: Context(node=name) for name in holds}
    return RankSetup((graph,), Plan((pool,)), "worker/0", 0, contexts, folder, restore)
