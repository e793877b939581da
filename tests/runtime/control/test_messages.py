"""Every message is packed and unpacked whole; a value that does not fit its annotation is refused."""

import json
import types
from contextlib import suppress
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct, structs

from penstock.graph.ir import Firing
from penstock.runtime.control.messages import (
    MAX_BYTES,
    PROTOCOL,
    Codec,
    Exited,
    Hello,
    Manifest,
    Message,
    MessageError,
    Order,
    Result,
    Results,
    Seconds,
    Weight,
    pack,
    read_record,
    record_bytes,
    unpack,
)
from penstock.runtime.control.worker import in_messages
from penstock.runtime.packable import Packable
from penstock.runtime.record.samples import MOST_BYTES
from penstock.runtime.schedule.events import (
    Begin,
    Checkpoint,
    Command,
    Done,
    Event,
    Others,
    Published,
    ReplicaJoined,
    ReplicaLost,
)
from penstock.runtime.tensor.layout import Layout
from penstock.runtime.tensor.wire_format import converted

MESSAGES = get_args(Message)
DONE = Done(Firing("generate", 3), "generator/0")

# Hypothesis strategies from annotations, for values of every type that a message can hold.

PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=20),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    bytes: st.binary(max_size=20),
    types.NoneType: st.none(),
    Seconds: st.floats(-1e12, 1e12),
    Weight: st.floats(0, 1e18, exclude_min=True),
    Others: st.integers(0, (1 << 20) - 1),
}
PLAIN[Any] = st.recursive(
    st.one_of(*PLAIN.values()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for any value that fits the annotation."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation in PLAIN:
        return PLAIN[annotation]
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(values, args))
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, args))
    hints = get_type_hints(annotation, include_extras=True)
    names = annotation.__struct_fields__ if issubclass(annotation, Struct) else annotation._fields
    return st.builds(annotation, *[values(hints[name]) for name in names])


class Point(NamedTuple):
    x: int
    y: int = 0


class One(Packable, frozen=True):
    text: str


class Whole(Packable, frozen=True):
    text: str
    count: int
    share: float
    kind: Literal["a", "b"]
    points: tuple[Point, ...]
    pair: tuple[int, str]
    table: dict[str, float]
    either: One | None
    tables: dict[str, tuple[One, ...]]


WHOLE = Whole("é", 3, 0.5, "b", (Point(1, 2),), (1, "x"), {"k": 2.0}, One("t"), {"a": (One("b"),)})
CODEC: Codec[Whole] = Codec(Whole, "value")
# Values that do not fit, by their place in a packed `Whole` (0 is its tag).
MISFITS: dict[int, tuple[Any, ...]] = {
    0: ("Other", 5),
    1: (b"bytes", None, msgpack.ExtType(1, b"x")),
    2: (True, 1.0, msgpack.Timestamp(1)),
    3: (True, "1"),
    4: ("c", ["a"]),
    5: ([[1, 2], 3], [[1, 2, 3]], [[1]], {"a": 1}),
    6: ([1], ["x", 1]),
    7: ({"k": "v"}, [["k", 1.0]]),
    8: ([], ["Two", "x"], ["One", 1], ["One"]),
    9: ({"a": b"bytes"}, {"a": [["One", b"bytes"]]}, {1: []}),
}


def packed(*changes: tuple[int, Any]) -> bytes:
    """Return `WHOLE` packed, with other values in these places."""
    raw = msgpack.unpackb(CODEC.pack(WHOLE))
    for place, value in changes:
        raw[place] = value
    found: bytes = msgpack.packb(raw)
    return found


def test_what_was_packed_is_unpacked_equal_and_of_the_same_types() -> None:
    value = CODEC.unpack(CODEC.pack(WHOLE))
    assert value == WHOLE
    assert (type(value.points), type(value.points[0])) == (tuple, Point)
    assert msgpack.unpackb(Codec[Any](One, "value").pack(One("x"))) == ["One", "x"]
    assert repr(CODEC.unpack(packed((3, 2))).share) == "2.0"  # an int is accepted as a float


@pytest.mark.parametrize("change", [(place, wrong) for place, some in MISFITS.items() for wrong in some])
def test_a_field_of_another_type_is_refused(change: tuple[int, Any]) -> None:
    with pytest.raises(MessageError):
        CODEC.unpack(packed(change))


def test_missing_and_extra_fields_and_bytes_are_refused() -> None:
    fields = msgpack.unpackb(CODEC.pack(WHOLE))
    for data in (msgpack.packb(fields[:-1]), msgpack.packb([*fields, "extra"]), CODEC.pack(WHOLE) + b"\0"):
        with pytest.raises(MessageError):
            CODEC.unpack(data)


def test_depth_and_length_end_where_the_annotation_or_the_bytes_do() -> None:
    codec: Codec[Any] = Codec(tuple[int, ...], "value")
    for data in (b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"):
        with pytest.raises(MessageError):
            codec.unpack(data)
    with pytest.raises(MessageError, match=str(MAX_BYTES)):
        codec.unpack(b"\0" * (MAX_BYTES + 1))
    with pytest.raises(MessageError, match=str(MAX_BYTES)):
        Codec[Any](One, "value").pack(One("x" * MAX_BYTES))


def test_what_is_known_of_the_largest_mixtures_of_experts_fits_into_a_message() -> None:
    """For example the weights of Qwen3-235B-A22B with scales."""
    maps = [f"mlp.experts.{expert}.{name}" for expert in range(128) for name in ("gate_proj", "up_proj", "down_proj")]
    maps += [f"self_attn.{name}_proj" for name in "qkvo"]
    names = [f"model.layers.{layer}.{name}.weight" for layer in range(94) for name in maps]
    layout = Layout.whole([(name, (1536, 4096), "bfloat16") for name in names], 1)
    digests = {tensor.name: 2**64 - 1 for tensor in converted(layout, "fp8").tensors}
    assert len(digests) == 2 * len(names)
    manifest = Manifest("policy>generator", 1, digests, json.dumps(layout.to_json()))
    result = Result(Published("policy>generator", 1, "trainer/0", 0), manifest=manifest)
    assert unpack(pack(result)) == (0, result)


def test_an_error_does_not_repeat_what_a_peer_sent_at_length() -> None:
    with pytest.raises(MessageError) as caught:
        Codec[Any](Whole | One, "value").unpack(msgpack.packb(["x" * 100_000, "x"]))
    assert len(str(caught.value)) < 200


def test_text_that_utf8_cannot_hold_is_escaped() -> None:
    value = CODEC.unpack(CODEC.pack(structs.replace(WHOLE, text="a\udc80b", table={"\udc80": 1.0})))
    assert (value.text, value.table, value.tables) == ("a\\udc80b", {"\\udc80": 1.0}, WHOLE.tables)


def test_what_is_no_message_cannot_be_packed() -> None:
    with pytest.raises(TypeError, match="object"):
        Codec[Any](int, "value").pack(object())


@pytest.mark.parametrize("kind", [*MESSAGES, *get_args(Event), *get_args(Command)], ids=lambda kind: str(kind.__name__))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_message_packs_and_unpacks_with_every_event_and_command(kind: type, data: st.DataObject) -> None:
    message = data.draw(values(kind))
    if kind in (*get_args(Event), *get_args(Command)):
        assert read_record(record_bytes(message)) == message
    if kind in (Begin, Checkpoint, ReplicaLost, ReplicaJoined):
        return  # the controller's own: ranks may not send them
    if kind in get_args(Event):
        message = Result(message)
    elif kind in get_args(Command):
        message = Order((message,), data.draw(values(Order)).handles)
    assert unpack(pack(message, 7)) == (7, message)


def test_tags_are_distinct() -> None:
    names = [kind.__name__ for kind in (*MESSAGES, *get_args(Event), *get_args(Command))]
    assert len(set(names)) == len(names)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_random_truncated_and_damaged_frames_raise_nothing_but_message_errors(data: st.DataObject) -> None:
    frame = pack(Results((Result(DONE, metrics={"tokens": 1.0}),)), 5)
    cut = data.draw(st.integers(0, len(frame) - 1))
    for wrong in (frame[:cut], data.draw(st.binary(max_size=200))):
        with pytest.raises(MessageError):
            unpack(wrong)
    damaged = bytearray(frame)
    damaged[cut] = data.draw(st.integers(0, 255))
    with suppress(MessageError):
        unpack(bytes(damaged))


def is_a_message(raw: Any) -> bool:
    """True if it begins like a message. Hypothesis draws names from our sources, and some messages have no fields."""
    return isinstance(raw, list) and raw[:1] in [[message.__name__] for message in MESSAGES]


@settings(max_examples=300, deadline=None)
@given(values(Any).filter(lambda raw: not is_a_message(raw)))
def test_messagepack_of_another_shape_is_a_message_error(raw: Any) -> None:
    for frame in (raw, [PROTOCOL, 1, raw], [PROTOCOL, 1, ["Hello", raw]]):
        with pytest.raises(MessageError):
            unpack(msgpack.packb(frame))


def test_another_protocol_version_is_refused_by_number() -> None:
    _, sequence, message = msgpack.unpackb(pack(Results(()), 1))
    with pytest.raises(MessageError, match=str(PROTOCOL + 1)):
        unpack(msgpack.packb([PROTOCOL + 1, sequence, message]))


@pytest.mark.parametrize("began", [float("nan"), float("inf"), -1e13])
def test_a_time_that_no_clock_shows_is_refused(began: float) -> None:
    """A run's files hold finite numbers only."""
    for result in (Result(DONE, began=began), Result(DONE, ended=began)):
        with pytest.raises(MessageError):
            unpack(pack(Results((result,))))


def test_a_class_that_is_no_message_is_refused_though_the_codec_knows_it() -> None:
    for name, *parts in (["Firing", "a", 1, 0, 0], ["Begin"], ["Message"], ["builtins.eval", "1"]):
        with pytest.raises(MessageError):
            unpack(msgpack.packb([PROTOCOL, 1, [name, *parts]]))


def test_a_token_is_not_shown_and_an_exit_says_how_the_process_ended() -> None:
    assert "secret" not in repr(Hello("rank", "generator/0", 0, 1, "local", "secret"))
    assert Exited("generator/0", 0, 7, 0, 9, "").reason == "killed by SIGKILL (pid 7)"
    assert Exited("generator/0", 0, 7, 1, 0, "MemoryError").reason == "exit status 1 (pid 7)\nMemoryError"
    assert "forks" in Exited("generator/0", 0, 7, 0, 9, "", forks=True).reason


@pytest.mark.parametrize("num", [1, 2, 3, 64])
def test_answers_with_the_longest_samples_fit_into_their_messages(num: int) -> None:
    results = [Result(Done(Firing("score", i), "scorer/0", 0), sample="x" * MOST_BYTES) for i in range(num)]
    messages = [*in_messages(results)]
    assert [one for message in messages for one in message.results] == results
    assert all(unpack(pack(message)) == (0, message) for message in messages)
    assert len(messages) == -(-num // 2)
