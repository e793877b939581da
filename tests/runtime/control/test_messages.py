"""Every message crosses the wire whole, and nothing else does."""

from contextlib import suppress
from typing import Any, get_args

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.graph.ir import Firing
from penstock.runtime.control.codec import MessageError
from penstock.runtime.control.messages import (
    PROTOCOL,
    Exited,
    Hello,
    Message,
    Result,
    Results,
    pack,
    unpack,
    unpack_frame,
)
from penstock.runtime.schedule.events import Command, Done, Event

from .annotations import values

MESSAGES = get_args(Message)


@pytest.mark.parametrize("message_type", MESSAGES, ids=lambda cls: str(cls.__name__))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_message_packs_and_unpacks(message_type: type, data: st.DataObject) -> None:
    message = data.draw(values(message_type))
    assert unpack_frame(pack(message, 7)) == (7, message)


@pytest.mark.parametrize("record_type", [*get_args(Event), *get_args(Command)], ids=lambda cls: str(cls.__name__))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_event_and_command_is_packed_inside_a_message(record_type: type, data: st.DataObject) -> None:
    record = data.draw(values(record_type))
    if record_type in get_args(Event):
        message: Any = Result(record)
    else:
        message = data.draw(values(MESSAGES[[m.__name__ for m in MESSAGES].index("Order")]))
        message = type(message)((record,), message.handles)
    assert unpack(pack(message)) == message


def test_tags_are_distinct() -> None:
    names = [cls.__name__ for cls in (*MESSAGES, *get_args(Event), *get_args(Command))]
    assert len(set(names)) == len(names)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_a_message_error(data: bytes) -> None:
    with pytest.raises(MessageError):
        unpack(data)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_truncated_and_damaged_frames_raise_nothing_but_message_errors(data: st.DataObject) -> None:
    frame = pack(Results((Result(Done(Firing("generate", 3), "generator/0"), metrics={"tokens": 1.0}),)), 5)
    cut = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(MessageError):
        unpack(frame[:cut])
    damaged = bytearray(frame)
    damaged[cut] = data.draw(st.integers(0, 255))
    with suppress(MessageError):
        unpack(bytes(damaged))


def named(raw: Any) -> bool:
    """Does it begin as a message does? Hypothesis draws words of our sources; some messages hold nothing else."""
    return isinstance(raw, list) and raw[:1] in [[message.__name__] for message in MESSAGES]


@settings(max_examples=300, deadline=None)
@given(values(Any).filter(lambda raw: not named(raw)))
def test_messagepack_of_another_shape_is_a_message_error(raw: Any) -> None:
    for frame in (raw, [PROTOCOL, 1, raw], [PROTOCOL, 1, ["Hello", raw]]):
        with pytest.raises(MessageError):
            unpack(msgpack.packb(frame))


def test_another_protocol_version_is_refused_by_number() -> None:
    _, sequence, message = msgpack.unpackb(pack(Results(()), 1))
    with pytest.raises(MessageError, match=f"needed {PROTOCOL}"):
        unpack(msgpack.packb([PROTOCOL + 1, sequence, message]))


def test_a_class_that_is_no_message_is_refused_though_the_codec_knows_it() -> None:
    for name, *parts in (["Firing", "a", 1, 0, 0], ["Begin"], ["Message"], ["builtins.eval", "1"]):
        with pytest.raises(MessageError):
            unpack(msgpack.packb([PROTOCOL, 1, [name, *parts]]))


def test_a_token_is_not_shown() -> None:
    assert "secret" not in repr(Hello("rank", "generator/0", 0, 1, "local", "secret"))


def test_an_exit_says_how_the_process_ended() -> None:
    assert Exited("generator/0", 0, 7, 0, 9, "").reason == "killed by SIGKILL (pid 7)"
    assert Exited("generator/0", 0, 7, 1, 0, "MemoryError").reason == "exit status 1 (pid 7)\nMemoryError"
