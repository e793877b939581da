"""What the pools of a graph do, as far as the planner knows how to cost it. Pure.

One pool updates the policy, one decodes with its broadcast weights. Others may hold models beside the policy: frozen
ones that read each response once (a reference, a teacher, a reward model), and critics, which read it once and learn
from it as the policy does: on the trainer's GPUs or on others, together or apart. Copies that follow the policy (its
average, a reference that moves) lie beside it. All else is small work on CPUs.
Anything more is refused by name: a plan that leaves work out would be wrong, not approximate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


class PlanError(ValueError):
    """No plan can be made: what was given, what is needed, and where."""


class AskedError(PlanError):
    """What is asked for cannot be, whatever the program and the model are: a mistake on the command line.
    `status` is the exit status of a command that ends with it."""

    status: ClassVar[int] = 2


@dataclass(frozen=True)
class Models:
    """What there is beside the policy's own steps: passes over each response, one of each of the `frozen` models and of
    each critic, which then learns, too; `rereads`: passes on the trainer's GPUs, by the policy as it is before its
    update or by a copy. `copies` follow the policy in its trainer's pool; an update changes `followed` of them on
    average."""

    frozen: int = 1
    critics: int = 0
    rereads: int = 0
    copies: int = 0
    followed: float = 0.0

    @property
    def count(self) -> int:
        """Of those that are no policy."""
        return self.frozen + self.critics


@dataclass(frozen=True)
class Buffer:
    """A node that adds up to `take` past groups to an update's own. It holds the newest `capacity` groups, none of more
    than `max_age` updates before."""

    node: str
    take: int
    capacity: int
    max_age: int

    def adds(self, batch: int) -> int:
        """Groups per update, once it is full."""
        return min(self.take, self.capacity, self.max_age * batch)


@dataclass(frozen=True)
class Roles:
    """Pools by what they do, and what the graph says of the work.

    `beside` are the pools of models beside the policy. `reads_groups`: they take each group as it is finished, not a
    whole batch. `cycle` names what follows each other from one update of the policy to the next. `readers`, `learners`
    and `rereads` are nodes: those that read with a model beside, those that train one, and further passes of the
    policy. `turns` are those of a conversation with the pool `environment`; 1 where there is none.

    `filters` drop groups, and others take their places. `baselines` decode, too, with so many samples each, but nothing
    is learnt from their responses. `buffer` adds past groups. `followers` make the next values of copies of the policy.
    `outside` are pools that decode on a slower clock, beside the training, on machines of their own. `holds` are the
    frozen models and the critics of each pool beside the policy.
    """

    graph: str
    trainer: str
    generator: str
    beside: tuple[str, ...]
    small: tuple[str, ...]
    nodes: tuple[tuple[str, tuple[str, ...]], ...]
    samples: int
    lag: int
    epochs: int
    minibatches: int
    reads_groups: bool
    cycle: tuple[str, ...]
    models: Models
    readers: tuple[str, ...]
    learners: tuple[str, ...]
    rereads: tuple[str, ...]
    turns: int
    environment: str
    filters: tuple[str, ...] = ()
    baselines: tuple[tuple[str, int], ...] = ()
    buffer: Buffer | None = None
    followers: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    holds: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = ()

    def nodes_of(self, pool: str) -> tuple[str, ...]:
        return dict(self.nodes).get(pool, ())

    def models_of(self, pools: Sequence[str]) -> Models:
        """Those beside the policy that some pools hold together."""
        held = [(frozen, critics) for pool, frozen, critics in self.holds if pool in pools]
        return Models(*(len({name for names in held for name in names[kind]}) for kind in (0, 1)))
