"""`penstock export DIR`: a checkpoint's weights and optimizer in a format that other programs read."""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from penstock.host import module_command
from penstock.runtime.cli.display import many
from penstock.runtime.cli.flags import FolderFlags, OutputFlags, read_flags
from penstock.runtime.cli.tracing import CommandError
from penstock.runtime.control.run_config import RunConfig, Shown
from penstock.runtime.record.checkpoints import (
    SavedCheckpoint,
    all_checkpoints,
    checkpoint_of,
    in_use,
    latest_checkpoint,
)
from penstock.runtime.record.errors import disk_fault, visible
from penstock.runtime.record.folder import RunFolder, absolute

# The modules of the child process, which imports torch.
CHILD, MERGE = "penstock.runtime.tensor.dcp", "penstock.nodes.model.merge"


@dataclass(frozen=True)
class ExportFlags(OutputFlags, FolderFlags):
    """Write a carried value of a run's checkpoint for programs that read torch.distributed.checkpoint: float32 weights
    and the optimizer's moments, unsharded, whatever mesh wrote them.

    The format of Hugging Face needs no export: it is in each checkpoint (checkpoints/NUMBER/policy). dcp is torch's own
    format, which pickles: Penstock writes it here, and never reads it. dcp-safetensors has no pickle; it is for
    HuggingFaceStorageReader. merged is for policies with adapters, for which checkpoints have peft's format: it is the
    format of Hugging Face, with the adapters added to the base's weights.

    Example:
      penstock export runs/aipo-20250304-050607 --to dcp --out /data/step-150"""

    out: Annotated[str, Shown("DIR")]
    """The folder to write, new or empty."""
    to: Literal["dcp", "dcp-safetensors", "merged"] = "dcp"
    """Format of the export."""
    value: str = "policy"
    """The carried value to export."""
    update: Annotated[int | None, Shown("INT", "the newest")] = None
    """Number of the checkpoint: updates that were done."""


def main(argv: Sequence[str]) -> int:
    flags = read_flags(ExportFlags, "export", argv)
    folder, out = RunFolder.open(flags.dir), absolute(flags.out)
    config = RunConfig.load(folder)
    pools = [pool for pool in config.plan.pools if flags.value in pool.holds]
    if not pools:
        known = ", ".join(sorted({argument.name for argument in config.graph.carried}))
        raise CommandError(f"--value: given {flags.value!r}, needed a carried value of the run: {known}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CommandError(f"--out: given {out}, which is there already; needed a new or empty folder")
    saved = _chosen(folder, flags.update)
    # Written to a fresh folder, which gets its name when it is complete.
    fresh = out.with_name(f".{out.name}.{os.getpid()}.part")
    command = module_command(CHILD, saved.folder, pools[0].replicas[0].name, flags.value, flags.to, fresh)
    if flags.to == "merged":
        command = module_command(MERGE, saved.folder / flags.value, fresh)
    try:
        fresh.mkdir(parents=True)
        with in_use(saved):
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise CommandError(f"{flags.value} could not be exported: {done.stderr.rstrip()}", 1)
        os.rename(fresh, out)
    except OSError as error:
        raise disk_fault(out, error, choice="--out DIR") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    if flags.json:
        facts = {"checkpoint": saved.update, "value": flags.value, "format": flags.to, "bytes": written}
        print(json.dumps({**facts, "folder": str(out)}))
    else:
        updates = f"{saved.update} update{'s' * (saved.update != 1)}"
        text = f"{flags.value} after {updates}: {many(written)}B in {out} ({flags.to})"
        print(visible(text))
    return 0


def _chosen(folder: RunFolder, update: int | None) -> SavedCheckpoint:
    saved = latest_checkpoint(folder) if update is None else checkpoint_of(folder, update)
    if saved is not None:
        return saved
    known = [other.update for other in all_checkpoints(folder)]
    if not known:
        raise CommandError(f"{folder.path}: given a run without a checkpoint, needed one that has one")
    raise CommandError(f"--update: given {update}, needed the update of a checkpoint: {', '.join(map(str, known))}")
