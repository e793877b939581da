"""What a loss sees: the tokens of a micro-batch that the policy sampled, and what is known of each.

Shapes: P sampled tokens of some responses, one response after the other.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from torch import Tensor

from penstock.graph.call import Call
from penstock.graph.requirement import requirements
from penstock.graph.types import Rollouts

Other = Literal["behaviour", "reference", "proximal"]
NEEDED: Mapping[Other, str] = {
    "behaviour": "rollouts whose logprobs_NT were recorded when they were sampled",
    "reference": "a frozen policy's log-probabilities as the input `reference` of the update (see reference_logprobs)",
    "proximal": "the trainer's own log-probabilities as the input `proximal` of the update (see policy_logprobs)",
}
"""Log-probabilities that a loss may read, and where they come from."""


@dataclass(frozen=True)
class Sampled:
    """The sampled tokens of a micro-batch, for those who write losses. Nothing here has a gradient.

    What nobody sampled, such as an environment's reply, is left out. A micro-batch holds whole responses, so that
    sums over `sequence_P` (see `segments`) are sums over responses.

    `advantages_P` is each token's advantage (its response's, unless the algorithm has one per token), `lengths_P` the
    number of sampled tokens of its response, `versions_P` the version of the weights that sampled it, `sequence_P`
    (int64) the row of its response in the batch. `given` has log-probabilities of the same tokens (nats) under other
    policies; the properties name them. `replayed_P` (bool) says which tokens an earlier update has learnt from
    already; it is None without a buffer of past groups (see `nodes.replay`).

    A loss that compares the responses to a prompt says so with `@requires(reads("group"))`. Then a micro-batch holds
    whole prompt groups, so that sums over `group_P`, or over the rows of a group, are sums over groups; `group_N`
    (int64) has the group of each row of the batch, `group_P` that of each token.
    """

    advantages_P: Tensor
    lengths_P: Tensor
    versions_P: Tensor
    sequence_P: Tensor
    given: Mapping[str, Tensor] = field(default_factory=dict)
    replayed_P: Tensor | None = None
    whole_groups_N: Tensor | None = None

    @property
    def group_N(self) -> Tensor:
        """The prompt group of each row of the batch. ValueError where micro-batches may cut groups."""
        if self.whole_groups_N is None:
            raise ValueError('loss: given micro-batches that may cut groups, needed @requires(reads("group")) above it')
        return self.whole_groups_N

    @property
    def group_P(self) -> Tensor:
        """The prompt group of each token, as `group_N`."""
        return self.group_N[self.sequence_P]

    @property
    def behaviour_P(self) -> Tensor:
        """log μ: of the policy that sampled the tokens. ValueError where it was not recorded, as all of these."""
        return self._given("behaviour")

    @property
    def reference_P(self) -> Tensor:
        """log π_ref: of a frozen policy to stay close to."""
        return self._given("reference")

    @property
    def proximal_P(self) -> Tensor:
        """log π_old: of the policy as it was before this update's first step."""
        return self._given("proximal")

    def _given(self, name: Other) -> Tensor:
        if name not in self.given:
            have = ", ".join(self.given) or "none"
            raise ValueError(f"loss: given no {name}_P (log-probabilities there are: {have}), needed {NEEDED[name]}")
        return self.given[name]


Loss = Callable[[Tensor, Sampled], Tensor | tuple[Tensor, Tensor]]
"""(log π of the sampled tokens [P] with a gradient, what is known of them) → the loss of each [P]; or that and, for
the figures, whether its ratio was clipped (bool [P]). Threads call it at the same time: it changes nothing."""


def reads(*names: Other | Literal["group"]) -> Callable[[Call], None]:
    """What a loss requires of the update that it is given to, where it cannot do without these log-probabilities, or
    without whole prompt groups ("group"):

    @requires(reads("behaviour", "proximal"))
    def tis(logprobs_P: Tensor, sampled: Sampled) -> Tensor: ...
    """

    def check(call: Call) -> None:
        for name in names:
            if name != "group" and _lacks(call, name):
                raise call.lack(f"no {name}_P for it", NEEDED[name])

    check.reads = frozenset(names)  # type: ignore[attr-defined]
    return check


def reads_groups(loss: Callable[..., object]) -> bool:
    """Does a loss say that it reads whole prompt groups, or one that is bound to it?"""
    bound: list[Callable[..., object]] = []
    while isinstance(loss, partial):
        bound += (option for option in loss.keywords.values() if callable(option))
        loss = loss.func
    said = any("group" in getattr(check, "reads", ()) for check in requirements(loss))
    return said or any(map(reads_groups, bound))


def _lacks(call: Call, name: Other) -> bool:
    if name != "behaviour":
        return name in call.left_out
    first = call.first("rollouts")
    return isinstance(first, Rollouts) and first.logprobs_NT is None
