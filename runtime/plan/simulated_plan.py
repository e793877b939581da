"""What the simulator needs of a plan: a value, and a part of what `penstock plan --json` prints. Reads such a file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from penstock.runtime.plan.decoding import Generator
from penstock.runtime.plan.found import Found
from penstock.runtime.plan.roles import Models, PlanError, Roles
from penstock.runtime.plan.training import Trainer
from penstock.runtime.plan.workload import Workload
from penstock.runtime.record.typed_json import parse_json

KEY = "costed"
"""Of the JSON of a plan."""


@dataclass(frozen=True)
class Reader:
    """Pools of models beside the policy, on the same GPUs: the trainer's, or with `apart` their own."""

    pools: tuple[str, ...]
    models: Models
    trainer: Trainer
    apart: bool


@dataclass(frozen=True)
class Costed:
    """A plan with all that its seconds follow from. `lag` is the one that it was made for, `period_s` and `bound` what
    the planner says of it.

    readers: what runs the passes and steps of models beside the policy, by the pools that share GPUs. shared: the
    generator has the trainer's GPUs, and they take turns. `leaves_s` and `returns_s` are of the trainer's moments, to
    the host before decoding and back after it.
    """

    program: str
    work: Workload
    lag: int
    gpus: int
    trainer: Trainer
    generator: Generator
    replicas: int
    readers: tuple[Reader, ...]
    shared: bool
    sync_s: float
    leaves_s: float
    returns_s: float
    period_s: float
    bound: str

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = _adapter().dump_python(self, mode="json")
        return data


def costed(roles: Roles, work: Workload, lag: int, found: Found) -> Costed:
    """Of what the planner found."""
    free = [pool for pool in roles.beside if not any(pool in each.pools for each in found.split.apart)]
    readers = [Reader(tuple(free), roles.models_of(free), found.training.trainer, False)] if free else []
    for each, reading in zip(found.split.apart, found.readings, strict=True):
        readers.append(Reader(each.pools, roles.models_of(each.pools), reading.trainer, True))
    return Costed(
        program=roles.graph,
        work=work,
        lag=lag,
        gpus=found.split.gpus,
        trainer=found.training.trainer,
        generator=found.generating.generator,
        replicas=found.generating.replicas,
        readers=tuple(readers),
        shared=found.split.shared,
        sync_s=found.sync.seconds,
        leaves_s=found.switch.parts["to the host"],
        returns_s=found.switch.parts["from the host"],
        period_s=found.period_s,
        bound=found.bound,
    )


def read_costed(path: Path, program: str) -> Costed:
    """The plan in a file that `penstock plan PROGRAM --json` wrote. Raises PlanError for any other file."""
    needed = f"what `penstock plan {program} --json` prints"
    given = f"--plan {path}: given"
    try:
        data = parse_json(path.read_bytes(), str(path))
        found = _adapter().validate_python(data[KEY])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{given} {_fault(error)}, needed {needed}") from error
    if found.program != program:
        raise PlanError(f"{given} a plan of {found.program}, needed {needed}")
    return found


def _fault(error: Exception) -> str:
    """What was found in place of a plan."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return ".".join(map(str, (KEY, *first["loc"]))) + f": {first['msg']}"
    if isinstance(error, OSError):
        return f"a file that cannot be read ({error.strerror})"
    if isinstance(error, KeyError | TypeError):
        return f"JSON without {KEY!r}"
    return f"something that is not JSON ({error!s:.200})"


def _adapter() -> TypeAdapter[Costed]:
    return TypeAdapter(Costed)
