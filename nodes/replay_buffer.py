"""A buffer of past prompt groups, some of which are trained on again beside each fresh batch.

Shapes: N rows, of an update or of the buffer.
"""

import random
from dataclasses import dataclass, fields, replace

import torch

from penstock.graph import node, requires
from penstock.graph.context import Context
from penstock.graph.deferred import widened
from penstock.graph.protocols import Array
from penstock.graph.types import Advantages, Metrics, Rollouts
from penstock.nodes.option_checks import count


@dataclass
class Past(Rollouts):
    """Rollouts with the values of their advantages, [N] or [N, T], and the update in which each was fresh, [N]."""

    values_N: Array = None
    born_N: Array = None


@dataclass
class ReplayBuffer(Past):
    """The state of a buffer, flat, so that a checkpoint can hold it: rows, updates so far, and the key of its draws.

    Before the first update it has no rows, and no arrays.
    """

    key: int = 0
    update: int = 0

    def past(self) -> Past:
        return Past(**{field.name: getattr(self, field.name) for field in fields(Past)})


def open_buffer(context: Context, *, capacity: int = 256, take: int = 16, max_age: int = 4) -> ReplayBuffer:
    """An empty buffer."""
    nothing: dict[str, Array] = dict.fromkeys(field.name for field in fields(Rollouts))
    nothing |= dict.fromkeys(("ordinals", "prompts", "answers", "texts", "transcripts", "turn_rewards"), ())
    return ReplayBuffer(**nothing, key=context.key("replay"))


@requires(count(1, "capacity", "take", "max_age"))
@node(pool="trainer", clock="update", init=open_buffer)
def replay(
    buffer: ReplayBuffer,
    rollouts: Rollouts,
    advantage: Advantages,
    *,
    capacity: int = 256,
    take: int = 16,
    max_age: int = 4,
) -> tuple[ReplayBuffer, tuple[Rollouts, Advantages], Metrics]:
    """The fresh batch, followed by `take` past prompt groups, or as many as there are.

    They are drawn anew at each update, all groups with the same probability. A group stays until it is more than
    `max_age` updates old, or `capacity` groups are younger. It keeps its advantage, and each token its log-probability
    and version: the loss has to correct for them. `replayed_N` of the rollouts marks the past rows, and an update
    counts their tokens separately (see `update_metrics`). Metrics: `replayed` (groups), `replayed_age` (their mean age
    in updates, 0 of none) and `buffered` (groups in the buffer after the update).
    """
    born_N = torch.full((len(rollouts),), buffer.update)
    fresh = widened(Past, rollouts, values_N=advantage.values_N, born_N=born_N)
    past = list(dict.fromkeys(buffer.groups))
    # Keyed by the update: a run that resumes draws the same groups.
    drawn = set(random.Random(Context(seed=buffer.key).key(buffer.update)).sample(past, min(take, len(past))))
    chosen = [row for row, group in enumerate(buffer.groups) if group in drawn]
    old = [buffer.past().take(chosen)] if chosen else []
    mixed = Past.concat([fresh, *old])
    ages = [float((buffer.update - each.born_N).float().mean()) for each in old]
    # Drawn groups may be drawn again, so the buffer keeps them.
    everything = Past.concat([buffer.past(), fresh]) if past else fresh
    # By groups and not by rows: a group is kept or dropped with all of its rows.
    born = dict(zip(everything.groups, everything.born_N.tolist(), strict=True))
    young = {group for group in list(born)[-capacity:] if born[group] > buffer.update - max_age}
    kept = everything.take([row for row, group in enumerate(everything.groups) if group in young])
    figures = {"replayed": float(len(drawn)), "replayed_age": sum(ages), "buffered": float(len(set(kept.groups)))}
    learnt = widened(Rollouts, mixed, replayed_N=mixed.born_N < buffer.update)
    worth = replace(advantage, values_N=mixed.values_N)
    return ReplayBuffer(**vars(kept), key=buffer.key, update=buffer.update + 1), (learnt, worth), figures
