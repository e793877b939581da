"""Deferred batches: a column is read when it is first used, and only for the rows that are used.

Ranks that share the work on a batch each need a part of it. Each gets a deferred batch: a value of the edge's class
that knows its number of rows. It reads a column, from wherever that is stored, at the first access. `take` reads
nothing: its result reads the columns of the taken rows only. So a node that takes its rows first loads only its share,
and any other node loads all rows, with equal bits.

A deferred batch behaves like a loaded one, except for `vars(type(value))`, and except that derived properties do not
follow an array that is changed in place. `replace`, `concat` and copies of it make plain batches. It is valid only for
the firing that it was given to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Protocol, TypeVar, cast

from penstock.graph.types import Batchable, joined, row_numbers, taken

B = TypeVar("B", bound=Batchable)


class Column(Protocol):
    """One column of a batch, wherever it lies."""

    @property
    def widths(self) -> tuple[int, ...]:
        """Its shape without the row axis; () for a tuple."""

    def read(self, rows: Sequence[int]) -> Any:
        """An array or a tuple of these rows, in this order."""


@dataclass(frozen=True)
class LoadedColumn:
    """A column that is loaded: an array or a tuple."""

    values: Any

    @property
    def widths(self) -> tuple[int, ...]:
        return () if isinstance(self.values, tuple) else tuple(self.values.shape[1:])

    def read(self, rows: Sequence[int]) -> Any:
        return taken(self.values, rows)


@dataclass(frozen=True)
class StackedColumns:
    """Columns joined along the rows, as (column, rows): arrays are padded to a common width with zeros."""

    parts: tuple[tuple[Column, int], ...]

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(max(sizes) for sizes in zip(*(column.widths for column, _ in self.parts), strict=True))

    def read(self, rows: Sequence[int]) -> Any:
        starts = [0]
        for _, count in self.parts:
            starts.append(starts[-1] + count)
        wanted: dict[int, list[int]] = {}
        for place in sorted(range(len(rows)), key=rows.__getitem__):
            # Rows come in ascending order, so a row is in the same part as the one before it or in a later part.
            part = next(reversed(wanted), 0)
            while rows[place] >= starts[part + 1]:
                part += 1
            wanted.setdefault(part, []).append(place)
        # For no rows: an empty read, which has the column's type.
        pieces = [self.parts[0][0].read([])] if not rows else []
        for part, places in wanted.items():
            pieces.append(self.parts[part][0].read([rows[place] - starts[part] for place in places]))
        found = joined(pieces, self.widths)
        order = [place for places in wanted.values() for place in places]
        back = sorted(range(len(order)), key=order.__getitem__)
        return found if back == list(range(len(back))) else taken(found, back)


@dataclass(frozen=True)
class _Taken:
    """Some rows of a column."""

    column: Column
    rows: Sequence[int]

    @property
    def widths(self) -> tuple[int, ...]:
        return self.column.widths

    def read(self, rows: Sequence[int]) -> Any:
        return self.column.read([self.rows[row] for row in rows])


def deferred(kind: type[B], columns: Mapping[str, Column | None], rows: Sequence[int]) -> B:
    """A batch of these rows of `columns`. Their names are those of the fields and derived properties of `kind`; None is
    a column that is None."""
    found: Any = object.__new__(_deferring(cast(Any, kind)))
    object.__setattr__(found, "_columns", columns)
    object.__setattr__(found, "_rows", rows)
    object.__setattr__(found, "_read", {})
    return cast(B, found)


def may_defer(kind: type[Batchable]) -> bool:
    """True if a class has the `concat` and `take` of `graph.types`. A user's class with its own `concat` or `take` gets
    all rows."""
    return {kind.concat.__func__.__module__, kind.take.__module__} == {Batchable.__module__}  # type: ignore[attr-defined]


def is_deferred(value: object) -> bool:
    return issubclass(type(value), _Deferred)


def columns_of(batch: Batchable) -> dict[str, Column | None]:
    """The columns of a batch by name. Loads none."""
    if is_deferred(batch):
        own: Any = batch
        found = {name: None if one is None else _Taken(one, own._rows) for name, one in own._columns.items()}
        # A loaded column may have been replaced since.
        return {**found, **_present(own._read)}
    names = [*(field.name for field in fields(batch)), *type(batch).derived]
    return {**_present({name: getattr(batch, name) for name in names})}


def _present(values: Mapping[str, Any]) -> dict[str, LoadedColumn | None]:
    return {name: None if value is None else LoadedColumn(value) for name, value in values.items()}


def widened(kind: type[B], batch: Batchable, **columns: Any) -> B:
    """A batch of `kind` with the fields of `batch` and these columns: each an array, None, or a field of another batch,
    (batch, name). Loads no column of a deferred batch."""
    named = {name: given for name, given in columns.items() if isinstance(given, tuple)}
    known = {field.name for field in fields(kind)}
    kept = [field.name for field in fields(batch) if field.name in known - columns.keys()]
    if not any(is_deferred(one) for one in (batch, *(other for other, _ in named.values()))):
        here = {name: getattr(*named[name]) if name in named else given for name, given in columns.items()}
        return kind(**{name: getattr(batch, name) for name in kept}, **here)
    own = columns_of(batch)
    found: dict[str, Column | None] = dict.fromkeys(known)
    found |= {name: own[name] for name in (*kept, *kind.derived)}
    for name, given in columns.items():
        if name in named:
            found[name] = columns_of(given[0])[given[1]]
        else:
            found[name] = None if given is None else LoadedColumn(given)
    return deferred(kind, found, range(len(batch)))


def shape_of(batch: Batchable, name: str) -> list[int] | None:
    """The shape of a column that is an array, without reading it; None for one that is None."""
    if is_deferred(batch):
        own: Any = batch
        column = own._columns[name]
        return None if column is None else [len(own._rows), *column.widths]
    value = getattr(batch, name)
    return None if value is None else list(value.shape)


class _Deferred:
    """The base of the classes that `_deferring` makes."""

    _columns: Mapping[str, Column | None]
    _rows: Sequence[int]
    _read: dict[str, Any]

    def __len__(self) -> int:
        return len(self._rows)


@cache
def _deferring(kind: type[Batchable]) -> type:
    """The class of deferred batches of a kind."""
    names = [*(field.name for field in fields(kind)), *kind.derived]

    def column(name: str) -> property:
        def read(self: _Deferred) -> Any:
            if name not in self._read:
                found = self._columns[name]
                self._read[name] = None if found is None else found.read(self._rows)
            return self._read[name]

        return property(read)

    def take(self: Any, rows: Any) -> Any:
        return deferred(kind, columns_of(self), row_numbers(rows, len(self), kind.__name__))

    def change(self: Any, name: str, value: Any) -> None:
        self._read[name] = value
        # Derived properties may depend on the field.
        self._read.update({each: getattr(kind, each).fget(self) for each in kind.derived})

    def whole(self: Any) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(kind)}

    body: dict[str, Any] = {
        # Making another object of the class (`replace`, a copy) needs all columns, and makes a plain batch.
        "__new__": lambda cls, *given, **named: kind(*given, **named),
        "__class__": property(lambda self: kind),
        "__dict__": property(whole),
        "__len__": _Deferred.__len__,
        "__setattr__": change,
        "__deepcopy__": lambda self, memo: kind(**whole(self)),
        "__copy__": lambda self: kind(**whole(self)),
        "take": take,
        **{name: column(name) for name in names},
    }
    return type(kind.__name__, (_Deferred, kind), body)
