"""What an update learns from: rollouts, their advantages, and log-probabilities under other policies.

Only tokens that a policy sampled count, those with version ≥ 0.

Shapes: N responses, T tokens of a response, P sampled tokens of a micro-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from penstock.graph.arrays import Array
from penstock.graph.types import Advantages, Logprobs, Rollouts, TokenAdvantages
from penstock.nodes.learn.aggregation import Aggregation
from penstock.nodes.learn.packing import Packed, group_rows, sampled_lengths
from penstock.nodes.learn.sampled import Sampled


def per_token(given: str, values_NT: Tensor, rollouts: Rollouts) -> None:
    """Raises ValueError unless there is one value for each token of the rollouts; `given` begins the message."""
    _refuse_other(given, values_NT, list(rollouts.versions_NT.shape), "token")


def per_response(given: str, values_N: Tensor, rollouts: Rollouts) -> None:
    """The same with one value for each response."""
    _refuse_other(given, values_N, [len(rollouts)], "response")


def _refuse_other(given: str, values: Tensor, shape: list[int], each: str) -> None:
    if list(values.shape) != shape:
        raise ValueError(f"{given} of shape {list(values.shape)}, needed {shape}, one for each {each} of the rollouts")


@dataclass(frozen=True)
class Batch:
    """`others` are log-probabilities of the rollouts' tokens under other policies, by the names of `Sampled`.

    `behaviour` is among them unless `rollouts.logprobs_NT` is None, which says that it was not recorded.
    """

    rollouts: Rollouts
    advantage: Advantages
    others: Mapping[str, Logprobs]

    @classmethod
    def of(cls, rollouts: Rollouts, advantage: Advantages, device: torch.device, **others: Logprobs | None) -> Self:
        """On the learner's device. Raises ValueError for inputs that are not of the same tokens."""
        if rollouts.logprobs_NT is not None:
            others["behaviour"] = Logprobs(rollouts.logprobs_NT)
        given = {name: Logprobs(other.logprobs_NT.to(device)) for name, other in others.items() if other is not None}
        check_advantages = per_token if isinstance(advantage, TokenAdvantages) else per_response
        check_advantages("advantage: given values", advantage.values_N, rollouts)
        for name, other in given.items():
            per_token(f"{name}: given log-probabilities", other.logprobs_NT, rollouts)
        replayed_N = None if rollouts.replayed_N is None else rollouts.replayed_N.to(device)
        there = replace(rollouts, versions_NT=rollouts.versions_NT.to(device), replayed_N=replayed_N)
        return cls(there, replace(advantage, values_N=advantage.values_N.to(device)), given)

    def __len__(self) -> int:
        return len(self.rollouts)

    def take(self, rows: Sequence[int]) -> "Batch":
        """These rows only."""
        others = {name: other.take(rows) for name, other in self.others.items()}
        return Batch(self.rollouts.take(rows), self.advantage.take(rows), others)

    def lengths(self) -> Tensor:
        """Sampled tokens of each response, int64 [N]. Raises ValueError if there is none at all."""
        return sampled_lengths(self.rollouts)

    def sampled(self, packed: Packed, lengths_N: Tensor, *, whole_groups: bool = False) -> Sampled:
        """What is known of a micro-batch's targets, which holds `whole_groups` or may cut them."""
        place, replayed_N = (packed.sequence_P, packed.step_P), self.rollouts.replayed_N
        return Sampled(
            advantages_P=self.advantage.at(*place),
            lengths_P=lengths_N[packed.sequence_P],
            versions_P=self.rollouts.versions_NT[place],
            sequence_P=packed.sequence_P,
            given={name: other.logprobs_NT[place] for name, other in self.others.items()},
            replayed_P=None if replayed_N is None else replayed_N[packed.sequence_P],
            whole_groups_N=group_rows(self.rollouts.ordinals).to(lengths_N.device) if whole_groups else None,
        )


@dataclass
class Term(Rollouts):
    """One term of an update's loss: rollouts, and what to make of them (see `update.term`).

    `values_N` are the advantages, [N] or [N, T]; `reference_NT` and `proximal_NT` log-probabilities as inputs of an
    update. `loss` is the loss function as JSON (`graph.paths.encode`), so that a term can cross processes.
    """

    values_N: Array = None
    reference_NT: Array = None
    proximal_NT: Array = None
    name: str = ""
    loss: str = ""
    weight: float = 1.0
    average: Aggregation = "token_mean"
    kl: float = 0.0

    def batch(self, device: torch.device) -> Batch:
        """As `Batch.of`."""
        rollouts = Rollouts(**{field.name: getattr(self, field.name) for field in fields(Rollouts)})
        kind = TokenAdvantages if self.values_N.ndim == 2 else Advantages
        others = {"reference": self.reference_NT, "proximal": self.proximal_NT}
        given = {name: None if values is None else Logprobs(values) for name, values in others.items()}
        return Batch.of(rollouts, kind(self.values_N), device, **given)
