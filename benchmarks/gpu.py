"""What only a GPU shows: weights between a trainer and a generator on one card, runs on it, and conversion on it.

    python benchmarks/gpu.py [--keep]

`sync`: 2.5 GB of bf16 (Llama 3.2 1B) from one process to another on the same card, by CUDA IPC with each kind of proof
and in two wire formats, as messages through the host, and by NCCL between two ranks that take the card for two hosts'
(`NCCL_HOSTID`; unsupported and slow, but the same code as between two cards). Beside it the card's own copy of as many
bytes. GB/s are of bytes that travel, each of which a card reads and writes once. Every sync is proved or not as its
name says; `ms` is from the last start to the last end, the sender's copy aside (`publish_ms`) comes before.
`conversion`: whether two ranks' parts, converted on the card, are the converted whole, on the card and on the CPU.
`runs`: `penstock run aipo --device cuda` with the demo's small model, in each way that weights can go and with
`--offload on`: `unlike` is how far a run's rewards, losses and entropies are from those of the first one at lag 0, of
which all are to be 0 but for bfloat16 and what the card adds up in no order of its own. Without CUDA it says so and
ends well. `--device cpu --layers 1` tries the script where there is none.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Empty, Queue
from time import perf_counter
from typing import Any

import torch
from gpu_ranks import MODEL, shapes
from report import publish
from torch import Tensor

from penstock.runtime.tensor.buffers import allocate
from penstock.runtime.tensor.layout import Layout, Mesh, Region, sharded
from penstock.runtime.tensor.quantise import Converter
from penstock.runtime.tensor.wire_format import FORMATS, converted

Figures = dict[str, Any]
WARM, REPEATS = 2, 9
ANSWER_S, RUN_S = 120.0, 180.0
SHOWN = "reward_mean", "loss", "entropy"
RUN = ["--updates=8", "--batch=8", "--slots=64", "--eval-groups=0", "--plain", "--json"]


class Rank:
    """One of the two processes, and its answers."""

    def __init__(self, side: str, folder: Path, device: str, layers: int) -> None:
        script = str(Path(__file__).with_name("gpu_ranks.py"))
        command = [sys.executable, script, side, str(folder), device, str(layers)]
        self.side = side
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.lines: Queue[str] = Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def tell(self, **order: Any) -> None:
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Figures:
        """Raises RuntimeError for an error, and for a process that is gone or says nothing in time."""
        try:
            line = self.lines.get(timeout=ANSWER_S)
        except Empty:
            raise RuntimeError(f"{self.side}: no answer for {ANSWER_S:g} s") from None
        if not line.startswith("{"):
            raise RuntimeError(f"{self.side}: ended with {line!r}")
        found: Figures = json.loads(line)
        if "error" in found:
            raise RuntimeError(f"{self.side}: {found['error']}")
        return found

    def end(self) -> None:
        """By the end of its input, so that it takes its memory away; by force if that does not do."""
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(f"status {self.process.wait()}")


def phases(device: str) -> list[str]:
    straight = "shm" if device == "cpu" else "cuda_ipc"
    proved = [f"{straight} {proof}" for proof in ("off", "sampled", "full")]
    wires = [f"{straight} full {wire}" for wire in ("fp8", "int8")]
    return [*proved, *wires, "messages off", *(["nccl full"] if device != "cpu" else [])]


def sync_figures(device: str, layers: int) -> Figures:
    """Each phase in two processes of its own, so that what one leaves on the card, or breaks, is not the next one's."""
    found: Figures = {}
    for phase in phases(device):
        with tempfile.TemporaryDirectory() as name:
            ranks = [Rank(side, Path(name), device, layers) for side in ("source", "destination")]
            try:
                for rank in ranks:
                    rank.answer()
                found[phase] = _phase(phase, *ranks)
            except RuntimeError as error:
                found[phase] = {"error": str(error)}
            finally:
                for rank in ranks:
                    rank.end()
    return found


def _phase(phase: str, source: Rank, destination: Rank) -> Figures:
    times: dict[str, list[float]] = {"ms": [], "publish_ms": [], "wire_ms": [], "prove_ms": []}
    for version in range(WARM + REPEATS):
        source.tell(do="publish", phase=phase, version=version)
        published = source.answer()
        destination.tell(do="move", phase=phase, version=version, facts=published["facts"])
        source.tell(do="move", phase=phase, version=version)
        sent, arrived = source.answer(), destination.answer()
        if version >= WARM:
            span = max(sent["end"], arrived["end"]) - max(sent["start"], arrived["start"])
            each = span, published["seconds"], arrived["wire"], arrived["prove"]
            for own, seconds in zip(times.values(), each, strict=True):
                own.append(1e3 * seconds)
    middle = {name: round(statistics.median(own), 3) for name, own in times.items()}
    rate = sent["bytes"] / middle["ms"] / 1e6
    return {"bytes": sent["bytes"], **middle, "gb_per_s": round(rate, 2), "by": sent["way"]}


def copy_gb_per_s(device: str, nbytes: int) -> float:
    """A copy within the device's memory, the best of ten; bytes copied, not read and written."""
    a, b = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = []
    for _ in range(10):
        _finish(device)
        started = perf_counter()
        b.copy_(a)
        _finish(device)
        seconds.append(perf_counter() - started)
    return round(nbytes / min(seconds) / 1e9, 1)


def _finish(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def conversion(device: str) -> dict[str, dict[str, bool]]:
    """For each wire format, whether what two ranks make of their halves of each row is the converted whole."""
    generator = torch.Generator(device).manual_seed(2)
    tensors = {
        name: torch.randn(shape, generator=generator, device=device).bfloat16()
        for name, shape in {"gate": (2048, 1024), "down": (1000, 1536)}.items()
    }
    return {
        wire: {
            "parts_are_the_whole": _parts_are_the_whole(wire, tensors, device),
            "as_on_the_cpu": _equal(
                _whole(wire, tensors, device), _whole(wire, {n: t.cpu() for n, t in tensors.items()}, "cpu")
            ),
        }
        for wire in FORMATS
    }


def _entries(tensors: Mapping[str, Tensor]) -> list[tuple[str, tuple[int, ...], str]]:
    return [(name, tuple(t.shape), "bfloat16") for name, t in tensors.items()]


def _whole(wire: str, tensors: Mapping[str, Tensor], device: str) -> dict[str, Tensor]:
    layout = Layout.whole(_entries(tensors))
    out = allocate(converted(layout, wire), 0, device)
    Converter(layout, converted(layout, wire), 0).convert(tensors, out)
    return {name: part.tensor for name, part in out.items()}


def _parts_are_the_whole(wire: str, tensors: Mapping[str, Tensor], device: str) -> bool:
    layout = sharded(_entries(tensors), Mesh((("tp", 2),)), {"": (1, 0)})
    travels, whole = converted(layout, wire), _whole(wire, tensors, device)
    said: list[Tensor] = [torch.empty(0)] * 2
    meeting, same = threading.Barrier(2, timeout=ANSWER_S), [False] * 2

    def convert(rank: int) -> None:
        def agree(maxima: Tensor) -> Tensor:
            said[rank] = maxima
            meeting.wait()
            return torch.maximum(*said)

        own = {t.name: _cut(tensors[t.name], box) for t in layout.tensors for box in t.held_by(rank)}
        parts = allocate(travels, rank, device)
        Converter(layout, travels, rank).convert(own, parts, agree)
        expected = {name: _cut(whole[name], part.region) for name, part in parts.items()}
        same[rank] = _equal({name: part.tensor for name, part in parts.items()}, expected)

    threads = [threading.Thread(target=convert, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return all(same)


def _cut(tensor: Tensor, box: Region) -> Tensor:
    return tensor[box.slices(Region.whole(tensor.shape))]


def _equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """To the bit."""
    flat = [{name: t.cpu().contiguous().view(-1).view(torch.uint8) for name, t in each.items()} for each in (a, b)]
    return a.keys() == b.keys() and all(torch.equal(flat[0][name], flat[1][name]) for name in a)


def runs(device: str) -> Figures:
    """The runs, by what they are, and how unlike the first one at lag 0 the others at lag 0 are."""
    straight = "shm" if device == "cpu" else "cuda_ipc"
    asked = {
        "lag 1": ["--lag=1"],
        f"lag 0, {straight}": ["--lag=0", f"--transport={straight}"],
        "lag 0, messages": ["--lag=0", "--transport=messages"],
        "lag 0, offload": ["--lag=0", "--offload=on"],
        "lag 0, bfloat16": ["--lag=0", "--dtype=bfloat16"],
    }
    found = {name: _run(device, flags) for name, flags in asked.items()}
    shown = {name: found[name].pop("shown", []) for name in asked}
    _, first, *others = asked
    for name in others:
        if len(shown[name]) == len(shown[first]) > 0:
            found[name]["unlike"] = max(abs(a - b) for a, b in zip(shown[first], shown[name], strict=True))
    return found


def _run(device: str, flags: list[str]) -> Figures:
    command = [sys.executable, "-m", "penstock.runtime.cli.main", "run", "aipo", f"--device={device}", *RUN, *flags]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        try:
            done = subprocess.run([*command, "--out", str(folder)], capture_output=True, text=True, timeout=RUN_S)
        except subprocess.TimeoutExpired:
            return {"error": f"not over after {RUN_S:g} s"}
        if done.returncode:
            return {"error": (done.stderr or done.stdout)[-1500:]}
        summary = json.loads(done.stdout.strip().splitlines()[-1])
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        kept = {key: summary[key] for key in ("status", "wall_s", "updates", "groups", "warnings") if key in summary}
        for key in ("sync_s", "generate_tokens_per_s", "train_tokens_per_s", "mismatch"):
            own = [row[key] for row in rows[2:] if row.get(key) is not None]
            kept |= {key: round(statistics.median(own), 6)} if own else {}
        logs = [line for log in sorted((folder / "logs").glob("*.out")) for line in log.read_text().splitlines()]
        moved = [json.loads(line).get("offloaded") for line in logs if line.startswith("{")]
        kept |= {"offloaded": [own for own in moved if own]} if any(moved) else {}
        return {**kept, "shown": [row[key] for row in rows for key in SHOWN]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/gpu.json")
    parser.add_argument("--device", default="cuda:0", help="cpu tries the script without a GPU")
    parser.add_argument("--layers", type=int, default=MODEL.num_hidden_layers, help="of the model whose weights move")
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        print(f"nothing to measure: PyTorch {torch.__version__} sees no GPU here")
        return
    nbytes = sum(2 * torch.Size(shape).numel() for shape in shapes(options.layers).values())
    parts: dict[str, Callable[[], Any]] = {
        "card_copy_gb_per_s": lambda: copy_gb_per_s(options.device, nbytes),
        "sync": lambda: sync_figures(options.device, options.layers),
        "conversion": lambda: conversion(options.device),
        "runs": lambda: runs(options.device),
    }
    found: Figures = {"device": options.device, "torch": torch.__version__, "bytes": nbytes}
    for name, part in parts.items():
        found[name] = part()
        print(json.dumps({name: found[name]}), flush=True)  # what is there, should a later part fail
    publish("gpu", found, options.keep and options.device != "cpu")


if __name__ == "__main__":
    main()
