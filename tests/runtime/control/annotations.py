"""Hypothesis strategies from annotations: values of every type that a message can hold."""

import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st
from msgspec import Struct

from penstock.runtime.control.messages import Seconds

PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=20),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    types.NoneType: st.none(),
}
JSON: st.SearchStrategy[Any] = st.recursive(
    st.one_of(*PLAIN.values()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Any value that fits the annotation."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is Seconds:
        return st.floats(-1e12, 1e12)
    if annotation in PLAIN:
        return PLAIN[annotation]
    if annotation is Any:
        return JSON
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
