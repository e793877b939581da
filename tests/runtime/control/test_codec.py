"""The codec takes what an annotation says, and nothing else."""

from datetime import datetime
from typing import Any, Literal, NamedTuple

import msgpack
import msgspec
import pytest

from penstock.runtime.control.codec import MAX_BYTES, Codec, MessageError
from penstock.runtime.packable import Packable


class Point(NamedTuple):
    x: int
    y: int = 0


class Empty(Packable, frozen=True):
    pass


class One(Packable, frozen=True):
    text: str


class Loose(msgspec.Struct):
    """Not a Packable: msgspec would let it have unknown fields."""


class Whole(Packable, frozen=True):
    text: str
    count: int
    share: float
    yes: bool
    kind: Literal["a", "b"]
    point: Point
    points: tuple[Point, ...]
    pair: tuple[int, str]
    table: dict[str, float]
    maybe: One | None
    either: Empty | One
    tables: dict[str, tuple[One, ...]]


WHOLE = Whole(
    "é", 3, 0.5, True, "b", Point(1), (Point(1, 2),), (1, "x"), {"k": 2.0}, None, One("t"), {"a": (One("b"),)}
)
CODEC: Codec[Whole] = Codec(Whole, "value")


def _fields() -> list[Any]:
    raw: list[Any] = msgpack.unpackb(CODEC.pack(WHOLE))
    return raw


def test_what_was_packed_is_unpacked_equal_and_of_the_same_types() -> None:
    value = CODEC.unpack(CODEC.pack(WHOLE))
    assert value == WHOLE
    assert type(value.point) is Point
    assert type(value.points) is tuple


def test_a_packable_is_its_name_and_its_fields_in_order() -> None:
    assert msgpack.unpackb(Codec[Any](Empty, "value").pack(Empty())) == ["Empty"]
    assert msgpack.unpackb(Codec[Any](One, "value").pack(One("x"))) == ["One", "x"]


def test_an_int_does_for_a_float_and_arrives_as_one() -> None:
    raw = _fields()
    raw[3] = 2
    share = CODEC.unpack(msgpack.packb(raw)).share
    assert share == 2.0
    assert type(share) is float


@pytest.mark.parametrize(
    ("place", "given", "named"),
    [
        (0, "Other", "Whole"),
        (0, 5, "Whole"),
        (1, b"bytes", "Whole.text"),
        (1, None, "Whole.text"),
        (2, True, "Whole.count"),
        (2, 1.0, "Whole.count"),
        (3, True, "Whole.share"),
        (3, "1", "Whole.share"),
        (4, 1, "Whole.yes"),
        (5, "c", "Whole.kind"),
        (5, ["a"], "Whole.kind"),
        (6, [1], "Whole.point: .*Point of 2 fields"),
        (6, [1, 2, 3], "Whole.point: .*Point of 2 fields"),
        (6, [1, "2"], "Point.y"),
        (7, [[1, 2], 3], r"Whole.points\[1\]: .*Point of 2 fields"),
        (7, [[1]], r"Whole.points\[0\]: .*Point of 2 fields"),
        (7, {"a": 1}, "Whole.points"),
        (8, [1], "Whole.pair"),
        (8, ["x", 1], "Whole.pair"),
        (9, {"k": "v"}, "Whole.table"),
        (9, [["k", 1.0]], "Whole.table"),
        (10, ["Two", "x"], "Whole.maybe"),
        (10, ["One", 1], "One.text"),
        (11, None, "Whole.either"),
        (11, [], "Whole.either"),
        (11, [["One"], "x"], "Whole.either"),
        (11, ["Empty", "extra"], "Empty"),
        (1, msgpack.ExtType(1, b"x"), "Whole.text"),
        (2, msgpack.Timestamp(1), "Whole.count"),
        (12, {"a": b"bytes"}, "Whole.tables"),
        (12, {"a": [["One", b"bytes"]]}, "Whole.tables"),
        (12, {"a": [["One"]]}, "Whole.tables"),
        (12, {1: []}, "Whole.tables"),
    ],
)
def test_a_field_of_another_type_is_refused_by_name(place: int, given: Any, named: str) -> None:
    raw = _fields()
    raw[place] = given
    with pytest.raises(MessageError, match=named):
        CODEC.unpack(msgpack.packb(raw))


@pytest.mark.parametrize("change", [[], ["extra"]])
def test_missing_and_extra_fields_are_refused(change: list[Any]) -> None:
    raw = _fields()
    with pytest.raises(MessageError, match="Whole of 12 fields"):
        CODEC.unpack(msgpack.packb(raw + change if change else raw[:-1]))


def test_bytes_after_the_end_are_refused() -> None:
    with pytest.raises(MessageError):
        CODEC.unpack(CODEC.pack(WHOLE) + b"\0")


def test_depth_and_length_end_where_the_annotation_or_the_bytes_do() -> None:
    codec: Codec[Any] = Codec(tuple[int, ...], "value")
    for data in (b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"):
        with pytest.raises(MessageError):
            codec.unpack(data)
    with pytest.raises(MessageError, match=str(MAX_BYTES)):
        codec.unpack(b"\0" * (MAX_BYTES + 1))
    with pytest.raises(MessageError, match=str(MAX_BYTES)):
        Codec[Any](One, "value").pack(One("x" * MAX_BYTES))


def test_an_error_does_not_repeat_what_a_peer_sent_at_length() -> None:
    with pytest.raises(MessageError) as caught:
        Codec[Any](Empty | One, "value").unpack(msgpack.packb(["x" * 100_000, "x"]))
    assert len(str(caught.value)) < 200


def test_text_that_utf8_cannot_hold_is_escaped() -> None:
    value = CODEC.unpack(CODEC.pack(msgspec.structs.replace(WHOLE, text="a\udc80b", table={"\udc80": 1.0})))
    assert (value.text, value.table) == ("a\\udc80b", {"\\udc80": 1.0})
    assert value.tables == WHOLE.tables


def test_what_is_no_message_cannot_be_packed() -> None:
    with pytest.raises(TypeError, match="object"):
        Codec[Any](int, "value").pack(object())


@pytest.mark.parametrize(
    "annotation", [set[int], list[int], bytes, dict[int, str], Any, object, tuple[Any, ...], datetime, Loose]
)
def test_an_annotation_that_is_not_read_is_an_error_at_once(annotation: Any) -> None:
    with pytest.raises(TypeError):
        Codec(annotation, "value")
