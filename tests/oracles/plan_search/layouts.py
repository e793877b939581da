"""The meshes that the ranks of a replica may form, and the sizes that are tried beside them. Pure."""

from collections.abc import Iterator

from penstock.runtime.plan.model_shape import Parallel, Shape
from tests.oracles.plan_search.islands import Island

FEWEST_SLOTS = 8


def trainer_meshes(shape: Shape, island: Island, gpus: int) -> Iterator[Parallel]:
    """Every cut of `gpus` ranks over dp, fsdp, tp and pp; tensor parallelism stays within a host."""
    for tp in _divisors(min(island.each, gpus)):
        for pp in _divisors(gpus // tp) if gpus % tp == 0 else ():
            data = gpus // tp // pp
            for fsdp in _divisors(data):
                mesh = Parallel(dp=data // fsdp, fsdp=fsdp, tp=tp, pp=pp)
                if not mesh.faults(shape):
                    yield mesh


def generator_meshes(shape: Shape, island: Island) -> Iterator[Parallel]:
    """Tensor parallelism within a host; stages only over whole hosts, where a host is not enough."""
    for tp in _divisors(island.each):
        for pp in _divisors(len(island.hosts)) if tp == island.each else (1,):
            mesh = Parallel(tp=tp, pp=pp)
            if not mesh.faults(shape):
                yield mesh


def micro_tokens(longest: int, most: int) -> Iterator[int]:
    """Tokens of a micro-batch: those of the longest sequence, doubled up to `most`."""
    tokens = longest
    yield tokens
    while tokens * 2 <= most:
        tokens *= 2
        yield tokens


def slot_counts(fit: int, useful: int) -> list[int]:
    """Rows at once: powers of two and what fits; none beyond the first that is more than can be of use."""
    counts = [FEWEST_SLOTS]
    while counts[-1] * 2 < fit:
        counts.append(counts[-1] * 2)
    counts = [count for count in counts if count < fit] + ([fit] if fit > 0 else [])
    return [count for before, count in zip([0, *counts], counts, strict=False) if before < useful]


def _divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]
