"""Events and commands as bytes for the event log: the encoding of the wire, without a frame."""

from penstock.runtime.control.codec import Codec
from penstock.runtime.schedule.events import Command, Event

_CODEC: Codec[Event | Command] = Codec(Event | Command, "record")


def record_bytes(record: Event | Command) -> bytes:
    return _CODEC.pack(record)


def read_record(data: bytes) -> Event | Command:
    """Raises MessageError for bytes that no version of this program wrote."""
    return _CODEC.unpack(data)
