"""A carried value that can be offloaded, nodes that update and read it, and a stream that can release its memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from penstock.graph import Context, Metrics, Policy, Prompts, Rewards, node, program, trace
from penstock.nodes.fake import FakePolicy, FakePrompts
from penstock.runtime.cluster.placement import Plan, Pool, Rank, Replica
from penstock.runtime.control.rank_setup import RankSetup

from .nodes_for_tests import Basket

HOLDS = ("policy", "prompts", "basket", "peek", "grow", "look_back")


class Heavy(FakePolicy):
    """A policy whose momentum can be offloaded. `seen` lists the momentum's addresses, one for each use by a node."""

    maker: ClassVar[str] = f"{__name__}:make_heavy"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.seen: list[int] = []

    def offloadable(self) -> Mapping[str, Tensor]:
        return {"momentum": self.momentum_W}

    @property
    def place(self) -> int:
        return self.momentum_W.untyped_storage().data_ptr()


def make_heavy(context: Context) -> Heavy:
    return Heavy(context)


class Cupboard(Basket):
    """`released` counts how often its memory was released."""

    released = 0

    def release(self) -> None:
        assert not self.busy()
        self.released += 1


def make_cupboard(context: Context) -> Cupboard:
    return Cupboard()


@node(pool="worker", init=make_cupboard)
def basket(state: Cupboard, prompts: Prompts) -> tuple[Cupboard, Rewards]:
    raise NotImplementedError("the executor drives the stream")


@node(pool="worker", clock="update")
def peek(policy: Heavy, rewards: Rewards) -> Rewards:
    """Read the value before its update."""
    policy.seen.append(policy.place)
    return rewards


@node(pool="worker", clock="update")
def grow(policy: Heavy, rewards: Rewards) -> tuple[Heavy, Metrics]:
    policy.seen.append(policy.place)
    policy.momentum_W.add_(rewards.values_N.sum())
    return policy, {}


@node(pool="worker", clock="update")
def look_back(policy: Heavy) -> Metrics:
    """Read the value after its update."""
    policy.seen.append(policy.place)
    return {"momentum": float(policy.momentum_W.sum())}


@program
def growing(policy: Heavy, prompts: FakePrompts) -> Policy:
    grown = grow(policy, peek(policy, basket(prompts)))
    look_back(grown)
    return grown


def make_leaving(folder: Path, restore: Path | None = None, **settings: Any) -> RankSetup:
    """Return the setup of one rank that holds everything."""
    plan = Plan((Pool("worker", HOLDS, (Replica("worker/0", (Rank(),), 8),)),))
    contexts = {name: Context(node=name) for name in HOLDS}
    return RankSetup((trace(growing, {}),), plan, "worker/0", 0, contexts, folder, restore, **settings)
