"""Where a rank's part of a checkpoint lies, and in what format it is: known before any rank starts. No torch.

A part is a safetensors file: 8 bytes that say how long its header is, the header as JSON, the tensors.
"""

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.runtime.record.folder import open_regular
from penstock.runtime.record.typed_json import parse_json, require_shape

FORMAT = 2
"""What is in the facts of a part. The first one knew nothing of ranks and layouts."""
_LENGTH = struct.Struct("<Q")
_LONGEST = 100 << 20  # what safetensors itself takes


def part_path(folder: Path, replica: str, rank: int) -> Path:
    return folder / f"{replica.replace('/', '-')}-{rank}.safetensors"


def read_facts(path: Path) -> dict[str, Any]:
    """The facts of a part, without its tensors. Raises ValueError for a file that is missing or none."""
    try:
        with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            header = parse_json(file.read(min(length, _LONGEST)), "header")
        facts: dict[str, Any] = parse_json(header["__metadata__"]["facts"].encode(), "facts")
        require_shape(facts, dict[str, Any], "facts")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"{path}: not a readable state: {error}") from error
    return facts


def refusal(path: Path, facts: Mapping[str, Any]) -> str:
    """Why a part with these facts cannot be gone on from; "" if it can."""
    given = facts.get("format", 1)
    if given == FORMAT:
        return ""
    needed = f"{FORMAT}: go on with the Penstock that wrote it, or start from its exported model (--model)"
    return f"{path}: given a checkpoint of format {given}, needed {needed}"
