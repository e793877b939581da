"""Programs that fail in chosen ways, and programs that learn from the first update on."""

import os
import resource
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any, ClassVar

import torch

from penstock.graph import broadcast, node, program
from penstock.graph.context import Context
from penstock.graph.node import UntrustedError
from penstock.graph.types import Advantages, Average, Metrics, Policy, Prompts, Rewards, Rollouts, Weights
from penstock.nodes import ema as averages
from penstock.nodes.advantage import group_advantage
from penstock.nodes.fake import TOKENS, FakeEngine, FakePolicy, FakePrompts, fake_generate, fake_score, fake_update
from penstock.nodes.generate import generate
from penstock.nodes.generate.engine import Engine
from penstock.nodes.generate.sampling import Sampler
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.prefixes import Said, after_tokens, cut
from penstock.nodes.score import score
from penstock.runtime.tensor.buffers import Shards
from penstock.runtime.tensor.layout import Copy
from penstock.runtime.tensor.one_sided import OneSidedTransport

# Seconds that a slow checkpoint takes to write: longer than a grace in which a process may be suspended for a while.
WRITES_S = 14.0


class FakeError(RuntimeError):
    """Raised at the firing `raise_at`."""


def fail(name: str, index: int, raise_at: int, hang_at: int) -> None:
    """Raise or never end at the given firing (a group's ordinal, an update); −1 is none."""
    if index == raise_at:
        raise FakeError(f"{name}[{index}] was told to raise")
    if index == hang_at:
        sleep(3600.0)


class FailingFakes(FakeEngine):
    def __init__(self, ms: float, **faults: int) -> None:
        super().__init__(4, ms)
        self.faults = faults

    def submit(self, tag: Any, inputs: Mapping[str, Any]) -> None:
        fail("failing_generate", inputs["prompts"].ordinals[0], **self.faults)
        super().submit(tag, inputs)


@node(pool="generator", init=lambda context, **options: FailingFakes(**options))
def failing_generate(
    engine: FailingFakes, prompts: Prompts, behaviour: Weights, *, ms: float, raise_at: int = -1, hang_at: int = -1
) -> tuple[FailingFakes, Rollouts]:
    raise NotImplementedError("workers drive the engine itself")


@node(pool="scorer")
def failing_score(rollouts: Rollouts, *, raise_at: int = -1, hang_at: int = -1) -> Rewards:
    fail("failing_score", rollouts.ordinals[0], raise_at, hang_at)
    scored: Rewards = fake_score.fn(rollouts)
    return scored


@node(pool="trainer", clock="update")
def failing_update(
    policy: FakePolicy, rollouts: Rollouts, rewards: Rewards, *, ms: float, raise_at: int = -1, hang_at: int = -1
) -> tuple[FakePolicy, Metrics]:
    fail("failing_update", policy.version, raise_at, hang_at)
    updated: tuple[FakePolicy, Metrics] = fake_update.fn(policy, rollouts, rewards, ms=ms)
    return updated


@program
def hangs(
    policy: FakePolicy, prompts: FakePrompts, *, generate: int = -1, score: int = -1, update: int = -1, lag: int = 1
) -> FakePolicy:
    """A node of one pool never ends the given firing."""
    rollouts = failing_generate(prompts, broadcast(policy, lag=lag), ms=5.0, hang_at=generate)
    rewards = failing_score(rollouts, hang_at=score)
    return failing_update(policy, rollouts, rewards, ms=5.0, hang_at=update)


@node(pool="trainer", clock="update")
def stuck_update(policy: FakePolicy, rollouts: Rollouts, rewards: Rewards, *, mark: str) -> tuple[FakePolicy, Metrics]:
    """Never end the third update; the file `mark` says that it has begun."""
    if policy.version == 2:
        Path(mark).touch()
        sleep(3600.0)
    updated: tuple[FakePolicy, Metrics] = fake_update.fn(policy, rollouts, rewards)
    return updated


@program
def stuck(policy: FakePolicy, prompts: FakePrompts, *, mark: str) -> FakePolicy:
    """A run that hangs in its third update."""
    rollouts = fake_generate(prompts, broadcast(policy), ms=5.0)
    return stuck_update(policy, rollouts, fake_score(rollouts), mark=mark)


@node(pool="trainer", clock="update")
def spoiling_update(
    policy: FakePolicy, rollouts: Rollouts, rewards: Rewards, *, spoil: str
) -> tuple[FakePolicy, Metrics]:
    """Make the next checkpoint fail: the "disk" has no room for it, or the "state" is not made of tensors."""
    updated: tuple[FakePolicy, Metrics] = fake_update.fn(policy, rollouts, rewards)
    policy.momentum_W = torch.zeros(1 << 20)
    if spoil == "disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    else:
        policy.momentum_W = "none"  # type: ignore[assignment]
    return updated


def await_gone(holds: str, name: str) -> None:
    """Wait while the folder `holds` has a file of this name."""
    while (Path(holds) / name).exists():
        sleep(0.01)


class HeldPolicy(FakePolicy):
    """A policy that is made only when there is no file "start"."""

    maker: ClassVar[str] = f"{__file__}:make_held"


def make_held(context: Context) -> HeldPolicy:
    await_gone(context.options["holds"], "start")
    return HeldPolicy(context)


class HeldEngine(FakeEngine):
    """Waits in the middle of a group while there is a file "group NUMBER"."""

    def __init__(self, samples: int, slots: int, holds: str) -> None:
        super().__init__(samples, 0.0, slots=slots)
        self.holds = holds

    def _make_token(self, group: Any) -> None:
        if len(group.made) == TOKENS // 2 and (Path(self.holds) / f"group {group.prompts.ordinals[0]}").exists():
            group.due = monotonic() + 0.01
        else:
            super()._make_token(group)


@node(pool="generator", init=lambda context, **options: HeldEngine(slots=context.slots, **options))
def held_generate(
    engine: HeldEngine, prompts: Prompts, behaviour: Weights, *, samples: int, holds: str
) -> tuple[HeldEngine, Rollouts]:
    raise NotImplementedError("workers drive the engine itself")


@node(pool="trainer", clock="update")
def held_update(policy: HeldPolicy, rollouts: Rollouts, rewards: Rewards, *, holds: str) -> tuple[HeldPolicy, Metrics]:
    """Wait while there is a file named by the update's number."""
    await_gone(holds, str(policy.version))
    updated: tuple[HeldPolicy, Metrics] = fake_update.fn(policy, rollouts, rewards)
    return updated


@program
def held(policy: HeldPolicy, prompts: FakePrompts, *, holds: str, lag: int = 1) -> HeldPolicy:
    """The program toy. Files in the folder `holds` make it wait at a point until the test has acted there."""
    rollouts = held_generate(prompts, broadcast(policy, lag=lag), samples=4, holds=holds)
    return held_update(policy, rollouts, fake_score(rollouts), holds=holds)


class DoubtingEngine(FakeEngine):
    """Raises UntrustedError once, in the middle of group `doubt`. If it is stepped again, it goes on as if nothing were
    wrong."""

    def __init__(self, samples: int, slots: int, doubt: int) -> None:
        super().__init__(samples, 4.0, slots=slots)
        self.doubt = doubt

    def _make_token(self, group: Any) -> None:
        if len(group.made) == TOKENS // 2 and group.prompts.ordinals[0] == self.doubt:
            self.doubt = -1
            raise UntrustedError("it computes with other weights")
        super()._make_token(group)


@node(pool="generator", init=lambda context, **options: DoubtingEngine(slots=context.slots, **options))
def doubting_generate(
    engine: DoubtingEngine, prompts: Prompts, behaviour: Weights, *, samples: int, doubt: int
) -> tuple[DoubtingEngine, Rollouts]:
    raise NotImplementedError("workers drive the engine itself")


@program
def doubting(policy: FakePolicy, prompts: FakePrompts, *, doubt: int, lag: int = 1) -> FakePolicy:
    """A generator finds out in the middle of a group that its results cannot be trusted."""
    rollouts = doubting_generate(prompts, broadcast(policy, lag=lag), samples=4, doubt=doubt)
    return fake_update(policy, rollouts, fake_score(rollouts))


class SlowExport(FakePolicy):
    """Its checkpoint never ends from the second version on."""

    maker: ClassVar[str] = f"{__file__}:make_slow_export"

    def export(self, folder: str) -> None:
        (Path(folder) / "half").write_text("written")
        while self.version > 1:
            sleep(1.0)


def make_slow_export(context: Context) -> SlowExport:
    return SlowExport(context)


class SlowWrite(FakePolicy):
    """Its checkpoint is copied at once, but writing it takes WRITES_S."""

    maker: ClassVar[str] = f"{__file__}:make_slow_write"

    def export(self, folder: str) -> Callable[[], None]:
        def write() -> None:
            (Path(folder) / "half").write_text("written")
            sleep(WRITES_S)
            (Path(folder) / "whole").write_text("written")

        return write


def make_slow_write(context: Context) -> SlowWrite:
    return SlowWrite(context)


@program
def writes_slowly(policy: SlowWrite, prompts: FakePrompts) -> FakePolicy:
    rollouts = fake_generate(prompts, broadcast(policy), ms=5.0)
    return fake_update(policy, rollouts, fake_score(rollouts), ms=5.0)


@program
def exports_slowly(policy: SlowExport, prompts: FakePrompts) -> FakePolicy:
    rollouts = fake_generate(prompts, broadcast(policy), ms=5.0)
    return fake_update(policy, rollouts, fake_score(rollouts), ms=5.0)


@program
def spoils(policy: FakePolicy, prompts: FakePrompts, *, spoil: str) -> FakePolicy:
    """The checkpoint at the end of the run fails."""
    rollouts = fake_generate(prompts, broadcast(policy), ms=5.0)
    return spoiling_update(policy, rollouts, fake_score(rollouts), spoil=spoil)


@program
def raises(
    policy: FakePolicy, prompts: FakePrompts, *, generate: int = -1, score: int = -1, update: int = -1, lag: int = 1
) -> FakePolicy:
    """A node of one pool raises at the given firing."""
    rollouts = failing_generate(prompts, broadcast(policy, lag=lag), ms=5.0, raise_at=generate)
    rewards = failing_score(rollouts, raise_at=score)
    return failing_update(policy, rollouts, rewards, ms=5.0, raise_at=update)


def divide(text: str, bad: int) -> float:
    """A reward function that fails for one prompt."""
    number = int(text.removeprefix("prompt "))
    return 1.0 / (number - bad)


@node(pool="scorer")
def faulty_score(rollouts: Rollouts, *, bad: int = 5) -> tuple[Rewards, Metrics]:
    """Return rewards of a function that divides by zero for one group."""
    values_N = torch.tensor([divide(text, bad) for text in rollouts.prompts])
    return Rewards(values_N), {"reward_mean": float(values_N.mean())}


@program
def faulty_reward(policy: FakePolicy, prompts: FakePrompts, *, bad: int = 5, lag: int = 1) -> FakePolicy:
    """The reward function raises for one group."""
    rollouts = fake_generate(prompts, broadcast(policy, lag=lag), ms=5.0)
    return fake_update(policy, rollouts, faulty_score(rollouts, bad=bad), ms=5.0)


def more_digits(prompt: str, response: str, answer: str) -> float:
    """A reward that an untrained model gets at once, so that every update changes the weights."""
    return sum(c.isdigit() for c in response) / 4 - response.count("-") / 8


@program
def digits(
    policy: Policy, prompts: Prompts, *, samples: int = 4, lag: int = 0, lr: float = 1e-3, accumulate: int = 0
) -> Policy:
    """AIPO with the reward `more_digits`."""
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=samples)
    advantage = group_advantage(score(rollouts, by=more_digits))
    return aipo_update.accumulate(accumulate)(policy, rollouts, advantage, lr=lr)


@program
def branches(policy: Policy, prompts: Prompts, *, samples: int = 4, lag: int = 0, lr: float = 1e-3) -> Policy:
    """Two responses continue each prefix of some responses, and each prefix of those; some groups may have none."""
    behaviour = broadcast(policy, lag=lag)
    rollouts = generate(prompts, behaviour, samples=samples)
    first = cut(rollouts, at=partial(after_tokens, tokens=2), most=2)
    second = cut(generate.named("vines")(prompts, behaviour, after=first, samples=2), at=after_places, most=1)
    leaves = generate.named("leaves")(prompts, behaviour, after=second, samples=2, learn_prefix=True)
    advantage = group_advantage(score(leaves, by=more_digits), leaves)
    return aipo_update(policy, leaves, advantage, lr=lr)


def after_places(said: Said) -> list[int]:
    """Return the position of the least likely token, if there is more than one."""
    return [said.logprobs.index(min(said.logprobs))] if len(said.texts) > 1 else []


def ordered(pool: str) -> Metrics:
    """Report whether PyTorch is deterministic in a rank of the pool."""
    asked = torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"
    return {f"{pool}_ordered": float(asked[0]), f"{pool}_workspace": float(asked[1])}


@node(pool="scorer")
def ordered_score(rollouts: Rollouts) -> tuple[Rewards, Metrics]:
    rewards, metrics = score.fn(rollouts, by=more_digits)
    return rewards, {**metrics, **ordered("scorer")}


@node(pool="trainer", clock="update")
def ordered_update(
    policy: Policy, rollouts: Rollouts, advantages: Advantages, *, lr: float, unordered: bool
) -> tuple[Policy, Metrics]:
    if unordered:
        torch.zeros(2).put_(torch.tensor([0, 0]), torch.ones(2))  # not deterministic: both write to element 0
    updated, metrics = aipo_update.fn(policy, rollouts, advantages, lr=lr)
    return updated, {**metrics, **ordered("trainer")}


@program
def ordered_digits(
    policy: Policy, prompts: Prompts, *, samples: int = 4, lag: int = 0, lr: float = 1e-3, unordered: bool = False
) -> Policy:
    """`digits` whose metrics say if PyTorch is deterministic; with `unordered` its update calls an op that is not."""
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=samples)
    advantages = group_advantage(ordered_score(rollouts))
    return ordered_update(policy, rollouts, advantages, lr=lr, unordered=unordered)


class FaultyEngine(Engine):
    """The real engine, but step number `bad` spoils its cache, loses the responses that it finished, and raises."""

    bad = -1
    steps = 0

    def step(self) -> Sequence[tuple[Any, tuple[Rollouts, Metrics]]]:
        finished = super().step()
        self.steps += 1
        if self.steps == self.bad:
            assert self.memory is not None
            self.memory.cache.keys.fill_(torch.nan)
            raise FakeError(f"step {self.bad} was told to raise with {self.slots.live.sum()} responses in it")
        return finished


def make_faulty_engine(context: Context, *, samples: int, bad: int) -> FaultyEngine:
    engine = FaultyEngine(context, Sampler(), samples)
    engine.bad = bad
    return engine


@node(pool="generator", init=make_faulty_engine)
def faulty_generate(
    engine: FaultyEngine, prompts: Prompts, behaviour: Weights, *, samples: int = 4, bad: int = -1
) -> tuple[FaultyEngine, Rollouts, Metrics]:
    raise NotImplementedError("workers drive the engine itself")


@program
def faulty_steps(policy: Policy, prompts: Prompts, *, bad: int = -1, lag: int = 0) -> Policy:
    """AIPO with an engine that raises in one step."""
    rollouts = faulty_generate(prompts, broadcast(policy, lag=lag), bad=bad)
    advantage = group_advantage(score(rollouts, by=more_digits))
    return aipo_update(policy, rollouts, advantage, lr=1e-3)


_receive = OneSidedTransport.receive


def _receive_badly(self: OneSidedTransport, version: int, copies: Sequence[Copy], shards: Shards) -> int:
    """Receive weights from the same host, but flip one bit of version 2."""
    received = _receive(self, version, copies, shards)
    if version == 2:
        shards["values"].tensor.view(torch.int32)[7] ^= 1
    return received


def _spoil(context: Context, *, samples: int) -> FakeEngine:
    OneSidedTransport.receive = _receive_badly  # type: ignore[method-assign]
    return FakeEngine(samples, 1.0)


@node(pool="generator", init=_spoil)
def generate_over_a_bad_wire(
    engine: FakeEngine, prompts: Prompts, behaviour: Weights, *, samples: int = 4
) -> tuple[FakeEngine, Rollouts]:
    made: tuple[FakeEngine, Rollouts] = fake_generate.fn(engine, prompts, behaviour, samples=samples)
    return made


@program
def bad_wire(policy: FakePolicy, prompts: FakePrompts) -> FakePolicy:
    rollouts = generate_over_a_bad_wire(prompts, broadcast(policy))
    return fake_update(policy, rollouts, fake_score(rollouts))


@program
def averaged(policy: Policy, average: Average, prompts: Prompts, *, lag: int = 0) -> dict[str, Policy]:
    """Two carried values. One reads the other's master weights after its update."""
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=4)
    learnt = aipo_update(policy, rollouts, group_advantage(score(rollouts, by=more_digits)), lr=1e-3)
    return {"policy": learnt, "average": averages.ema(average, learnt, decay=0.5)}


@program
def in_int8(policy: Policy, prompts: Prompts, *, lag: int = 0) -> Policy:
    """AIPO whose generator computes in int8."""
    rollouts = generate(prompts, broadcast(policy, lag=lag, precision="int8"), samples=4)
    return aipo_update(policy, rollouts, group_advantage(score(rollouts, by=more_digits)), lr=1e-3)
