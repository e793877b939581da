"""Metrics in TensorBoard, the extra `track`: the same rows as `metrics.jsonl`, as scalars by update."""

import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from penstock.runtime.record.faults import RecordError
from penstock.runtime.record.folder import make_folder
from penstock.runtime.record.metrics import Row, scalars


class Board(Protocol):
    def write(self, row: Row) -> None:
        """Plot a row's figures at its update."""

    def close(self) -> None:
        """Write what is buffered."""


def open_board(folder: Path, *, required: bool, keep: Iterable[Row] = ()) -> Board | None:
    """A board in `folder`/tensorboard, begun with the rows that a resumed run keeps; None without the package.

    Raises RecordError if it is `required` and missing.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]
    except ImportError:
        if required:
            needed = "the extra `track`: pip install 'penstock[track]'"
            raise RecordError(f"--tensorboard: the package tensorboard is not installed; needed {needed}") from None
        return None
    path = make_folder(folder / "tensorboard")
    for old in path.glob("events.out.tfevents.*"):
        old.unlink()
    place = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    # By number: TensorBoard takes no path that is not UTF-8.
    writer = EventFileWriter(f"/proc/self/fd/{place}", filename_suffix=f".{secrets.token_hex(8)}")
    board = _Board(writer, place, Event, Summary)
    for row in keep:
        board.write(row)
    return board


class _Board:
    def __init__(self, writer: Any, place: int, event: Any, summary: Any) -> None:
        self._writer, self._place, self._event, self._summary = writer, place, event, summary

    def write(self, row: Row) -> None:
        values = [self._summary.Value(tag=name, simple_value=number) for name, number in scalars(row)]
        self._writer.add_event(
            self._event(wall_time=row["time_s"], step=row["update"], summary=self._summary(value=values))
        )

    def close(self) -> None:
        self._writer.close()
        os.close(self._place)
