"""A CPU as the cost model sees it: rates and constants that `penstock doctor --measure` has found out. Pure.

Its cores work for a pool in one of three ways: a generator with all of them, where trainer and generator take turns
(`turns`); a generator with what the default plan leaves it beside a trainer, which keeps the others busy (`beside`);
and a trainer with all of them (`training`). For each way and precision there are the rates of matrix products by shape,
and what the passes of reference decoders took beyond those, as four constants.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from math import log2

from pydantic import BaseModel, ConfigDict, Field, model_validator

from penstock.runtime.plan.gpus import Precision


class Passes(BaseModel):
    """One way, in one precision. `products` are (rows of a lane, width, FLOP/s of all lanes together), of square
    weights. The other figures are of all lanes together, too: `launch_us` of each operation of a pass, `element_gb_s`
    the bytes between products as fused kernels would move them, `attention_gb_s` keys and values read in decoding,
    `attention_gflops` in training. `optimizer` are (parameters, seconds per parameter) of an AdamW step."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lanes: int = Field(ge=1)
    products: tuple[tuple[int, int, float], ...] = Field(min_length=1)
    launch_us: float = Field(ge=0)
    element_gb_s: float = Field(gt=0)
    attention_gb_s: float = Field(default=0.0, ge=0)
    attention_gflops: float = Field(default=0.0, ge=0)
    optimizer: tuple[tuple[int, float], ...] = ()

    @model_validator(mode="after")
    def _check_grid(self) -> "Passes":
        rows, widths = ({p[axis] for p in self.products} for axis in (0, 1))
        given = {(row, width) for row, width, _ in self.products}
        if len(given) != len(rows) * len(widths) or min(rate for _, _, rate in self.products) <= 0:
            raise ValueError("products: needed a rate above 0 for every pair of rows and width, once")
        return self

    def flops(self, rows: float, width: float) -> float:
        """Per second, of all lanes: between the measured shapes linear in the logarithms, beyond them the nearest."""
        table = {(row, wide): log2(rate) for row, wide, rate in self.products}
        every_row, every_width = (sorted({key[axis] for key in table}) for axis in (0, 1))

        def of_width(wide: float) -> float:
            return _between(every_row, lambda row: table[int(row), int(wide)], rows)

        return float(2 ** _between(every_width, of_width, width))

    def optimizer_s(self, parameters: float) -> float:
        """Of one step, between the measured sizes linear in the logarithm of their number."""
        found = dict(self.optimizer)
        return parameters * _between(sorted(found), lambda size: found[int(size)], parameters) if found else 0.0


class Crowded(BaseModel):
    """How many times longer the work of each takes while the other is at work, too, with more threads between them than
    there are cores."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    trainer: float = Field(ge=1)
    generator: float = Field(ge=1)


class Cpu(BaseModel):
    """A host's cores. GB are 10^9 bytes; `latency_us` is that of a message between two processes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cores: int = Field(ge=1)
    rest: int = Field(ge=1, description="cores of a generator beside a trainer")
    memory_gib: float = Field(gt=0)
    read_gb_s: float = Field(gt=0)
    copy_gb_s: float = Field(gt=0)
    cached_gb_s: float = Field(gt=0)
    beside_gb_s: float = Field(gt=0, description="as copy_gb_s, with all other cores busy")
    shared_gb_s: float = Field(gt=0)
    gloo_gb_s: float = Field(gt=0)
    latency_us: float = Field(ge=0)
    call_us: float = Field(ge=0, description="of one operation on next to nothing")
    crowded: Crowded
    turns: dict[Precision, Passes]
    beside: dict[Precision, Passes]
    training: dict[Precision, Passes]

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Those that all ways were measured in."""
        return tuple(name for name in self.turns if name in self.beside and name in self.training)


def _between(places: Sequence[float], value: Callable[[float], float], at: float) -> float:
    """`value` at the places beside `at`, linear in the logarithm between them."""
    index = bisect_right(places, at)
    if index in (0, len(places)):
        return value(places[min(index, len(places) - 1)])
    low, high = places[index - 1], places[index]
    share = (log2(at) - log2(low)) / (log2(high) - log2(low))
    return (1 - share) * value(low) + share * value(high)
