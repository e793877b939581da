"""What runs where a program says `keep`: the predicate, and its verdict on a group."""

from collections.abc import Mapping
from typing import Any

from penstock.graph.paths import path_of
from penstock.graph.types import Metrics


class Dropped:
    """Instead of outputs: the group is to be dropped."""


class Filter:
    """The definition of a `keep`, with what a `NodeDef` has for those who run nodes. Its outputs are its inputs."""

    init = None

    def run(self, state: None, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> "tuple[Any, ...] | Dropped":
        """Raises TypeError for a predicate that answers neither yes nor no."""
        values, when = tuple(inputs.values()), options["when"]
        verdict = when(*values)
        try:
            return values if bool(verdict) else Dropped()
        except (RuntimeError, ValueError, TypeError) as error:
            name = path_of(getattr(when, "func", when))
            given = f"keep: {name} returned {verdict!r}"
            raise TypeError(f"{given}, needed one truth value for the whole group") from error

    def split(self, result: tuple[Any, ...], *, stateful: bool) -> tuple[None, dict[str, Any], Metrics]:
        return None, {str(index): value for index, value in enumerate(result)}, {}
