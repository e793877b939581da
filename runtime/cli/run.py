"""`penstock run PROGRAM`: a run folder, the processes of the run, a display, and a summary at the end."""

import dataclasses
import importlib.util
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from time import monotonic

from penstock.runtime.cli.base_model import base_model
from penstock.runtime.cli.display import Display
from penstock.runtime.cli.flags import NEW, RunFlags
from penstock.runtime.cli.inputs import absolute_paths, file_digests, is_made_up
from penstock.runtime.cli.launching import DisplayOptions, asked, configure, go, require_start
from penstock.runtime.cli.tracing import CommandError, Traced, require_program, trace_program
from penstock.runtime.cluster.cluster import Cluster
from penstock.runtime.cluster.placement import why_no_turns
from penstock.runtime.record.errors import visible
from penstock.runtime.record.folder import MARKS, RunFolder, default_path


def main(argv: Sequence[str]) -> int:
    began = monotonic()
    require_program("run", argv)
    if sys.stderr.isatty() and not {"-h", "--help"} & set(argv):
        # Seconds of silence else.
        print(visible(f"penstock: importing torch, reading {argv[0]} …"), file=sys.stderr, flush=True)
    traced = trace_program("run", argv)
    traced.sound()
    flags = absolute_paths(traced.flags)
    traced = dataclasses.replace(traced, flags=flags)
    if flags.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise CommandError("--tensorboard: the package is not installed; needed: pip install 'penstock[track]'")
    cluster = Cluster.read(Path(flags.cluster)) if flags.cluster else Cluster.local()
    config = configure(traced, cluster, flags.model)
    look = DisplayOptions(flags.plain, flags.json, flags.in_process, began)
    require_start(config, cluster, look)
    needs_base = _needs_base(traced)
    digests = file_digests(flags)
    folder = RunFolder.create(flags.out or default_path(traced.name, datetime.now()))

    def prepare(display: Display) -> None:
        model = str(base_model(flags.data, display.tell)) if needs_base else config.flags.model
        complete = dataclasses.replace(config, flags=dataclasses.replace(config.flags, model=model))
        complete.write(folder, asked(argv[0], argv, cluster, digests))
        if flags.offload == "on" and (why := why_no_turns(config.graph, config.plan)):
            text = f"--offload on frees no memory that anybody needs: {why}"
            display.tell({"kind": "note", "level": "warning", "text": text})

    try:
        return go(folder, config, cluster, look, prepare)
    finally:
        if any((folder.path / mark).exists() for mark in MARKS):
            folder.unlock()
        else:  # nothing has run in it
            folder.discard()


def _needs_base(traced: Traced) -> bool:
    """Whether the program begins with the base model, since no other is given.

    Raises CommandError where the base would know nothing of the data.
    """
    flags: RunFlags = traced.flags
    if flags.model or not traced.base:
        return False
    if not is_made_up(flags.data):
        raise CommandError(
            f"--data: given {flags.data!r} without a model; needed --model DIR with it, since the base model that is "
            f"built by default knows arithmetic only (--model {NEW} takes an untrained one)",
            2,
        )
    return True
