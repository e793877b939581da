"""Measurements that need a GPU: nine phases, the most informative first, each in its own process with a deadline.

    python benchmarks/gpu.py [--only smoke decode] [--out FILE]
    python benchmarks/gpu.py --device cpu      # tiny models: checks that the script still works

    smoke    a run on the card with forked ranks, and the tests that need a GPU
    decode   seconds of a decode step by model, slots and context; its kernels; tokens/s over the roofline
    overlap  a weight sync alone, and during decoding and training
    train    tokens/s, MFU and peak memory over the plan's, by micro-batch, log-prob chunk and recomputation
    state    GB/s of snapshots, digests and checkpoints; conversions of parts and of the whole
    bits     whether two equal runs are bit-identical, and how close other settings are to them
    plan     what `doctor --measure` finds; predicted over measured seconds of an update
    nccl     a sync by NCCL between two ranks of one card
    mesh     updates of a trainer over two ranks of one card, by pp, tp and fsdp, compared with one rank

Each figure is written to a JSON file as soon as it is measured: by default `benchmarks/results/gpu_CARD.json`, where a
phase that is run again replaces its earlier figures. A phase that fails or exceeds its deadline has an `error` next to
the figures that it had found until then. `gpu_phases.py` has the phases, `gpu_ranks.py` the two processes of a sync,
`gpu_mesh.py` the ranks of a trainer.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from gpu_phases import PHASES
from report import RESULTS, commit, machine

Figures = dict[str, Any]
# Of one phase, on a GPU. A CPU computes less in each phase, but slower.
DEADLINE_S = 90.0
LAST_CHARACTERS = 2000


def run_phase(name: str, device: str, deadline: float, record: Any) -> None:
    """Run the phase in a process and call `record(figures)` after each figure. A failure becomes the figure `error`."""
    script = Path(__file__).with_name("gpu_phases.py")
    began = perf_counter()
    found: Figures = {"date": datetime.now(UTC).date().isoformat(), "commit": commit()}
    process: Any = subprocess.Popen(
        [sys.executable, str(script), name, device],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that the processes that it has started can be killed with it
    )
    late = threading.Timer(deadline, _kill, (process,))
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(process.stderr), daemon=True)
    late.start()
    reader.start()
    for line in process.stdout:
        if line.startswith("{"):
            found |= json.loads(line)
            record({**found, "seconds": round(perf_counter() - began, 1)})
    status = process.wait()
    in_time = late.is_alive()
    late.cancel()
    _kill(process)
    reader.join(5)
    if status:
        why = f"ended with status {status}" if in_time else f"not over after {deadline:g} s"
        found["error"] = f"{why}: {''.join(said)[-LAST_CHARACTERS:]}".strip(": ")
    record({**found, "seconds": round(perf_counter() - began, 1)})


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill the process and all that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


class Record:
    """The JSON file of one card. Each change is written at once, and replaces the file atomically."""

    def __init__(self, path: Path | None, device: str) -> None:
        self.path = path
        self.found: Figures = json.loads(path.read_text()) if path is not None and path.exists() else {}
        self.found |= {"benchmark": "gpu", "machine": machine(), "device": device, "torch": torch.__version__}
        self.found.setdefault("phases", {})

    def put(self, phase: str, figures: Figures) -> None:
        self.found["phases"][phase] = figures
        if self.path is not None:
            part = self.path.with_name(f".{self.path.name}.part")
            part.write_text(json.dumps(self.found, indent=2) + "\n")
            part.replace(self.path)


def card_file(name: str) -> Path:
    """Return the path at which the figures of a card are kept."""
    return RESULTS / f"gpu_{re.sub(r'[^a-z0-9]+', '_', name.lower()).strip('_')}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PHASES, default=list(PHASES), metavar="PHASE")
    parser.add_argument("--device", default="cuda:0", help="cpu tries the script without a GPU, on tiny models")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds of a phase")
    parser.add_argument("--out", type=Path, help="the JSON file; a CPU's figures are kept nowhere else")
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        print(f"nothing to measure: PyTorch {torch.__version__} sees no GPU here")
        return
    path = options.out
    if path is None and options.device != "cpu":
        path = card_file(torch.cuda.get_device_name(options.device))
    kept = Record(path, options.device)
    for name in options.only:
        run_phase(name, options.device, options.deadline, lambda figures, name=name: kept.put(name, figures))
        print(json.dumps({name: kept.found["phases"][name]}), flush=True)
    failed = [name for name in options.only if "error" in kept.found["phases"][name]]
    if failed:
        sys.exit(f"phases that failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
