"""How a batch is cut into minibatches: by whole prompt groups, in a keyed order."""

import random
from collections.abc import Sequence
from dataclasses import fields
from itertools import groupby
from typing import Any, TypeVar

import torch

from penstock.graph.types import Batchable, Context

B = TypeVar("B", bound=Batchable)


def minibatch_rows(ordinals: Sequence[int], minibatches: int, key: int) -> list[list[int]]:
    """The rows of each minibatch, in the order of the batch; which prompt group is in which is drawn by `key`.

    `ordinals` names the prompt group of each row; a group's rows are consecutive. Raises ValueError unless the groups
    can be shared out evenly.
    """
    rows = range(len(ordinals))
    groups = [list(group) for _, group in groupby(rows, key=lambda row: ordinals[row])]
    if minibatches < 1 or len(groups) % minibatches:
        given = f"minibatches={minibatches} for a batch of {len(groups)} prompt groups"
        raise ValueError(f"minibatches: given {given}, needed a number that divides the batch")
    order = list(range(len(groups)))
    random.Random(key).shuffle(order)
    size = len(groups) // minibatches
    shares = (sorted(order[begin : begin + size]) for begin in range(0, len(order), size))
    return [[row for group in share for row in groups[group]] for share in shares]


def optimizer_steps(
    context: Context, version: int, ordinals: Sequence[int], epochs: int, minibatches: int
) -> list[tuple[int, list[int]]]:
    """(epoch, rows) of each optimizer step of an update, in order, drawn by the run's seed, the version and the epoch.

    Raises ValueError for less than one epoch, and as `minibatch_rows` does.
    """
    if epochs < 1:
        raise ValueError(f"{context.node}: given epochs={epochs}, needed 1 or more")
    return [
        (epoch, rows)
        for epoch in range(epochs)
        for rows in minibatch_rows(ordinals, minibatches, context.key("minibatches", version, epoch))
    ]


def take_rows(value: B, rows: Sequence[int]) -> B:
    """The value with these rows only, in this order."""
    index = torch.tensor(rows)

    def taken(column: Any) -> Any:
        if column is None:
            return None
        return tuple(column[row] for row in rows) if isinstance(column, tuple) else column[index]

    return type(value)(**{field.name: taken(getattr(value, field.name)) for field in fields(value)})
