"""How a batch is cut into minibatches: by whole prompt groups, in a keyed order."""

import random
from collections.abc import Sequence
from itertools import groupby, pairwise

from penstock.graph.types import Context


def minibatch_rows(ordinals: Sequence[int], minibatches: int, key: int, *, empty: bool = False) -> list[list[int]]:
    """The rows of each minibatch, in the order of the batch; which prompt group is in which is drawn by `key`.

    `ordinals` names the prompt group of each row; a group's rows are consecutive. What is cut is the batch as it is,
    with the past groups that a buffer has added. Where their number does not divide, some minibatches have one group
    more than others, which ones is a function of the numbers. Raises ValueError for fewer groups than minibatches,
    unless some may be `empty`.
    """
    rows = range(len(ordinals))
    groups = [list(group) for _, group in groupby(rows, key=lambda row: ordinals[row])]
    if minibatches < 1 or (len(groups) < minibatches and not empty):
        given = f"minibatches={minibatches} for a batch of {len(groups)} prompt groups"
        raise ValueError(f"minibatches: given {given}, needed at least 1, and a prompt group for each")
    order = list(range(len(groups)))
    random.Random(key).shuffle(order)
    bounds = [-(-len(groups) * number // minibatches) for number in range(minibatches + 1)]
    shares = (sorted(order[begin:end]) for begin, end in pairwise(bounds))
    return [[row for group in share for row in groups[group]] for share in shares]


def optimizer_steps(
    context: Context, version: int, ordinals: Sequence[int], epochs: int, minibatches: int, term: int = 0
) -> list[tuple[int, list[int]]]:
    """(epoch, rows) of each optimizer step of an update, in order, drawn by the run's seed, the version and the epoch.

    `term` is the number of the term of the loss: each cuts its own rows. Those behind the first, 0, may have fewer
    groups than there are minibatches. Raises ValueError for less than one epoch, and as `minibatch_rows` does.
    """
    if epochs < 1:
        raise ValueError(f"{context.node}: given epochs={epochs}, needed 1 or more")
    more = (term,) if term else ()
    return [
        (epoch, rows)
        for epoch in range(epochs)
        for rows in minibatch_rows(
            ordinals, minibatches, context.key("minibatches", version, epoch, *more), empty=bool(term)
        )
    ]
