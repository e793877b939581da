"""Errors of a user's file name the key, what was given and what was probably meant."""

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from penstock.runtime.cluster.cluster import explain, nearest


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    width: int


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    parts: tuple[Inner, ...] = ()


def _faults(data: object) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(data)
    return explain(caught.value, Outer, "f.toml").splitlines()


def test_the_nearest_name_is_offered_or_all_of_them() -> None:
    assert nearest("generater", ["trainer", "generator"]) == "did you mean 'generator'?"
    assert nearest("xyz", ["b", "a"]) == "known: a, b"


def test_an_unknown_key_is_compared_with_those_of_its_own_table() -> None:
    assert _faults({"parts": [{"width": 1, "widht": 2}]}) == [
        "f.toml: unknown key 'parts.0.widht'; did you mean 'width'?"
    ]
    assert _faults({"width": 1}) == ["f.toml: unknown key 'width'; known: parts"]


def test_missing_and_mistyped_keys_are_named_with_what_was_given() -> None:
    assert _faults({"parts": [{}]}) == ["f.toml: parts.0.width: missing"]
    (fault,) = _faults({"parts": [{"width": "wide"}]})
    assert fault.startswith("f.toml: parts.0.width: given 'wide'; input should be a valid integer")
