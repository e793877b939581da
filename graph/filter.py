"""What runs where a program says `keep`: the predicate, and its verdict on a group."""

from collections.abc import Mapping
from typing import Any

from penstock.graph.paths import path_of
from penstock.graph.types import Metrics


class Dropped:
    """Instead of outputs: the group is to be dropped."""


def _single(verdict: Any) -> bool:
    """Is it an array of one element, of whatever library?"""
    shape = getattr(verdict, "shape", None)
    return shape is not None and all(length == 1 for length in shape)


class Filter:
    """The definition of a `keep`, with what a `NodeDef` has for those who run nodes. Its outputs are its inputs."""

    init = None

    def run(self, state: None, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> "tuple[Any, ...] | Dropped":
        """Raises TypeError for a predicate that answers neither yes nor no, such as one that forgets to return."""
        values, when = tuple(inputs.values()), options["when"]
        verdict = when(*values)
        answer = verdict.item() if _single(verdict) else verdict
        if not isinstance(answer, bool):
            given = f"keep: {path_of(getattr(when, 'func', when))} returned {verdict!r}"
            raise TypeError(f"{given}, needed True or False for the whole group")
        return values if answer else Dropped()

    def split(self, result: tuple[Any, ...], *, stateful: bool) -> tuple[None, dict[str, Any], Metrics]:
        return None, {str(index): value for index, value in enumerate(result)}, {}
