"""The work of each rank in tests of how a step is computed: recomputed layers, one reduction, moments on the host."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.nodes import trainable
from penstock.nodes.learn.update import policy_update

from .rank_cases import OPTIONS, assert_near, assert_same_everywhere, assert_whole, goes_on, policy
from .updating import batch, conversation, equal, in_parts


def recomputed(rank: int, folder: Path, mesh: str) -> None:
    """Recomputed layers have the bits of kept ones."""
    kept, again = policy(mesh, rank), policy(mesh, rank, recompute="layer")
    for _ in range(2):
        figures = [policy_update.fn(each, *batch(), **OPTIONS)[1] for each in (kept, again)]
    assert figures[0] == figures[1]
    assert equal(kept, again)


def on_the_host(rank: int, folder: Path, mesh: str) -> None:
    """Moments on the host, a few tensors at a time, have the bits of those on the device. A state goes on with its
    moments in the other place."""
    trainable.BUCKET_BYTES = 20_000
    places = ("device", "host")
    for options in ({}, {"dtype": "bfloat16"}):
        device, host = (policy(mesh, rank, **options, optimizer_state=place) for place in places)
        for _ in range(2):
            figures = [policy_update.fn(each, *batch(), **OPTIONS, epochs=2)[1] for each in (device, host)]
            assert figures[0] == figures[1]
        assert equal(device, host)
        for learner, place in ((host, "device"), (device, "host")):
            goes_on(learner, policy(mesh, rank, **options, seed=2, optimizer_state=place))
        assert equal(device, host)


def reduced_once(rank: int, folder: Path, mesh: str) -> None:
    """Gradients that are summed over micro-batches first, then over ranks, are one rank's within rounding, and
    repeatable to the bit. The sums of a failed step are forgotten."""
    first, second, one = policy(mesh, rank, zero=1), policy(mesh, rank, zero=1), policy()
    calls = []

    def failing(logprobs_P: Any, sampled: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise ArithmeticError
        return -logprobs_P

    if "pp" not in mesh:  # with "pp", only one stage has the loss
        with pytest.raises(ArithmeticError):
            policy_update.fn(first, *batch(), loss=failing, micro_tokens=1)
    for _ in range(2):
        every = [policy_update.fn(each, *batch(), **OPTIONS, minibatches=2)[1] for each in (first, second, one)]
        assert every[0] == every[1]
        assert_near(every[0], every[2])
        assert_same_everywhere(every[0])
    assert equal(first, second)
    assert_whole(first, one)
    goes_on(first, policy(mesh, rank, zero=1, seed=2))


def accumulated(rank: int, folder: Path, mesh: str) -> None:
    """A batch in parts, one of them without a sampled token, gives one rank's step on all of it within rounding, and is
    repeatable to the bit."""
    # The response of row 1 has no sampled token. It is the last part of the first update, and the first of the second.
    cases: list[dict[str, Any]] = [{"zero": 3}, {"zero": 1}, {"zero": 1, "lora": 4}]
    for options in cases:
        first, second, one = policy(mesh, rank, **options), policy(mesh, rank, **options), policy(**options)
        for rows in ([[0, 2], [3, 4], [1]], [[1], [0, 2, 4], [3]]):
            ours, again = (in_parts(each, *conversation(), rows, **OPTIONS) for each in (first, second))
            assert ours == again
            assert_near(ours, policy_update.fn(one, *conversation(), **OPTIONS)[1])
            assert_same_everywhere(ours)
        assert equal(first, second)
        assert_whole(first, one)
        # Adapters go on only with their own base, so with the same seed.
        goes_on(first, policy(mesh, rank, **{**options, "seed": 1 if "lora" in options else 2}))
    half = [policy(mesh, rank, zero=zero, dtype="bfloat16") for zero in (1, 1)]
    assert in_parts(half[0], *batch(), [[0, 1], [2, 3, 4]], **OPTIONS) == in_parts(
        half[1], *batch(), [[0, 1], [2, 3, 4]], **OPTIONS
    )
    assert equal(*half)


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.name().removeprefix("c10d::")] += 1
        return func(*args, **(kwargs or {}))


def counted(rank: int, folder: Path, mesh: str) -> None:
    """A step gathers weights and reduces gradients for each micro-batch, or once."""
    found = []
    for zero in (3, 1):
        learner = policy(mesh, rank, zero=zero)
        with Collectives() as mode:
            policy_update.fn(learner, *batch(), **OPTIONS)
        found.append(mode.counts)
    # In parts, gradients are reduced only with the last part.
    with Collectives() as mode:
        in_parts(learner, *batch(), [[0, 1], [2], [3, 4]], **OPTIONS)
    found.append(mode.counts)
    # Embedding, head, and the final norm are gathered by themselves.
    rounds, ends, layers = len(learner.pack(batch()[0], 12)) // 2, 3, len(learner.model.model.layers)
    assert rounds > 1
    reduced, gathered = ([counts[name] for counts in found] for name in ("_reduce_scatter_base_", "_allgather_base_"))
    assert reduced == [rounds * (layers + ends), layers + ends, layers + ends]
    # Each micro-batch gathers a layer for its forward and its backward pass, and the others once: their backward pass
    # follows at once or needs no weights.
    assert gathered == [rounds * (2 * layers + ends), layers + ends, 3 * (layers + ends)]
