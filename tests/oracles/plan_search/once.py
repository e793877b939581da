"""What is computed once and then kept. Pure."""

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Once:
    """Values by what they depend on."""

    def __init__(self) -> None:
        self._kept: dict[object, Any] = {}

    def __call__(self, key: object, make: Callable[[], T]) -> T:
        """Made at the first call."""
        if key not in self._kept:
            self._kept[key] = make()
        made: T = self._kept[key]
        return made

    def known(self, key: object, otherwise: float) -> float:
        """A number, if it has been made."""
        found: float = self._kept.get(key, otherwise)
        return found
