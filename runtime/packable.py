"""What crosses a process or is written to the event log. `runtime.control.messages` packs it."""

from msgspec import Struct


class Packable(Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """A frozen value of named fields. Packed, it is an array of its class's name and its fields, in order."""
