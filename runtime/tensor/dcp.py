"""A carried value of a checkpoint in `torch.distributed.checkpoint`'s formats, for programs that read these.

The command line, which never imports torch, runs `python -m penstock.runtime.tensor.dcp CHECKPOINT REPLICA VALUE FORMAT
FOLDER` in a process of its own. `state_dict` has `model`, by the names in Hugging Face's files, and `optimizer.state`
with the moments of each tensor and the number of steps, as `get_optimizer_state_dict` names them. Tensors are whole,
whatever mesh wrote the checkpoint; a reader's DTensors take their shards.

*dcp* is torch's own format, whose `.metadata` and tensors torch pickles: Penstock writes it only on this command, and
never reads it. *dcp-safetensors* has no pickle; read it with `HuggingFaceStorageReader`.
"""

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save

from penstock.runtime.record.checkpoints import StateError
from penstock.runtime.tensor.checkpoint import CheckpointShard

MASTER = "master."


def state_dict(folder: Path, replica: str, value: str) -> dict[str, Any]:
    """The state, in the checkpoint in `folder`, of a carried value that the ranks of `replica` held. Raises StateError
    for files that cannot be read, KeyError for a value that is not there."""
    tensors, facts = CheckpointShard(folder, replica, 0).carried(value)
    model = {name.removeprefix(MASTER): tensor for name, tensor in tensors.items() if name.startswith(MASTER)}
    moments: dict[str, dict[str, Tensor]] = {}
    other: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        if name.startswith(MASTER):
            continue
        if rest in model:
            moments.setdefault(rest, {})[kind] = tensor
        else:
            other[name] = tensor
    for found in moments.values():
        found["step"] = torch.tensor(float(facts.get("steps", 0)))
    parts: dict[str, Any] = {"model": model, "optimizer": {"state": moments}, "other": other}
    return {name: part for name, part in parts.items() if part and part != {"state": {}}}


def write(state: dict[str, Any], format: str, folder: Path) -> None:
    """Write it into a new folder, as "dcp" or "dcp-safetensors". Raises OSError if it cannot be written."""
    writer = FileSystemWriter(folder) if format == "dcp" else HuggingFaceStorageWriter(str(folder))
    try:
        save(state, storage_writer=writer, no_dist=True)
    except CheckpointException as error:
        # The exception of this rank: torch wraps it with the tracebacks of all ranks.
        cause, _ = error.failures[0]
        raise OSError(f"{folder}: {cause}") from cause


def main(words: Sequence[str]) -> None:
    checkpoint, replica, value, format, out = words
    # torch warns that there is no process group.
    warnings.simplefilter("ignore")
    try:
        write(state_dict(Path(checkpoint), replica, value), format, Path(out))
    except (OSError, StateError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
