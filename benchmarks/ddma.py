"""One sync of 402 MB of bf16 weights from 2 FSDP ranks to 2 tensor-parallel ranks, each a process, on one host.

    python benchmarks/ddma.py [--keep]

The weights are three layers of Llama 3.2 1B with a vocabulary of 9216. The baseline is the usual method, over gloo and
without a proof: parameter by parameter, the shards are gathered on one rank, which broadcasts the whole tensor to the
generator's ranks, each into a new tensor, as `full_tensor` and the weight updates of current trainers do; each rank
then copies its part. `gather_broadcast_kept_ms` is the same with all buffers kept and all gathers started at once. In
contrast, `gloo` and `shm` move each shard directly to where it belongs. A time is from the last rank's start to the
last rank's end; with the proof, the time that hashing adds to the sender's snapshot is added. The snapshot itself
(`snapshot_ms`) is in no figure, since the baseline makes none. `rebuild` is the time in which the four ranks of a link
close it and open it again. Each process has one thread. Figures are medians. Where Ray is installed (extra `bench`),
its object store moves the same weights (`ray_weights`), unproved. Its time includes the copy into the store, after
which a trainer may go on; so against Ray the snapshot is counted.
"""

import argparse
import ctypes
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from ddma_ranks import RANKS, SHAPES
from report import Keep, publish

REPEATS = {"base": 7, "base kept": 7, "gloo full": 15, "gloo off": 15, "shm full": 50, "shm off": 15, "shm sampled": 15}
REBUILT, REBUILDS = ("gloo full", "shm full"), 15
RAY_REPEATS, RAY_S = 15, 300.0


class Ranks:
    """The processes of one side."""

    def __init__(self, side: str, folder: Path) -> None:
        command = [sys.executable, str(Path(__file__).with_name("ddma_ranks.py")), side]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.processes: list[Any] = [
            subprocess.Popen([*command, str(rank), str(folder)], **pipes) for rank in range(RANKS)
        ]

    def tell(self, **order: Any) -> None:
        text = json.dumps(order) + "\n"
        for process in self.processes:
            process.stdin.write(text)
            process.stdin.flush()

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(process.stdout.readline()) for process in self.processes]

    def end(self) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def span(answers: Sequence[Mapping[str, Any]]) -> float:
    """Return milliseconds from the last start to the last end; all clocks are of one host."""
    return 1e3 * float(max(a["end"] for a in answers) - max(a["start"] for a in answers))


def sync(phase: str, version: int, sources: Ranks, destinations: Ranks) -> dict[str, float]:
    """Run one sync; return its times in milliseconds."""
    facts, published = {}, 0.0
    if not phase.startswith("base"):
        sources.tell(do="publish", phase=phase, version=version)
        answers = sources.answers()
        facts = answers[0]["facts"]
        published = span(answers)
    destinations.tell(do="move", phase=phase, version=version, facts=facts)
    sources.tell(do="move", phase=phase, version=version)
    arrived = destinations.answers()
    times = {key: 1e3 * max(a.get(key, 0.0) for a in arrived) for key in ("wire", "prove", "swap")}
    return {"ms": span([*arrived, *sources.answers()]), "publish": published, **times}


def rebuild(phase: str, epoch: int, sources: Ranks, destinations: Ranks) -> dict[str, float]:
    """Let all ranks of a link close it and open it again; return the milliseconds."""
    for side in (destinations, sources):
        side.tell(do="rebuild", phase=phase, epoch=epoch)
    return {"ms": span([*destinations.answers(), *sources.answers()])}


def memmove_gb_per_s(nbytes: int) -> float:
    """Return the rate of one thread between two buffers of this size, the best of five."""
    a, b = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    seconds = []
    for _ in range(5):
        started = perf_counter()
        ctypes.memmove(b.data_ptr(), a.data_ptr(), nbytes)
        seconds.append(perf_counter() - started)
    return nbytes / min(seconds) / 1e9


def measure(folder: Path) -> dict[str, list[dict[str, float]]]:
    """Measure every phase's syncs. The phases take turns, so that other load on the machine affects all of them."""
    sources, destinations = Ranks("source", folder), Ranks("destination", folder)
    try:
        sources.answers(), destinations.answers()
        for version in range(3):
            for phase in REPEATS:
                sync(phase, version, sources, destinations)
        found: dict[str, list[dict[str, float]]] = {phase: [] for phase in REPEATS}
        for turn in range(max(REPEATS.values())):
            for phase, repeats in REPEATS.items():
                if turn < repeats:
                    found[phase].append(sync(phase, turn + 3, sources, destinations))
        for phase in REBUILT:
            found[f"rebuild {phase}"] = [rebuild(phase, n, sources, destinations) for n in range(1, 1 + REBUILDS)]
            sync(phase, turn + 4, sources, destinations)  # checks that the rebuilt link carries weights
        return found
    finally:
        sources.end()
        destinations.end()


def by_ray() -> dict[str, list[dict[str, float]]]:
    """Measure syncs by Ray's object store; none without Ray. Raises CalledProcessError or TimeoutExpired."""
    if importlib.util.find_spec("ray") is None:
        return {}
    command = [sys.executable, str(Path(__file__).with_name("ray_weights.py")), str(RAY_REPEATS)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=RAY_S)
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["bit_equal"], "Ray's destinations have other weights than its sources"
    return {"ray object store": [{"ms": ms} for ms in answer["ms"]]}


def figures(found: Mapping[str, Sequence[Mapping[str, float]]], nbytes: int, memmove: float) -> dict[str, Any]:
    def middle(phase: str, key: str = "ms") -> float:
        return statistics.median(entry[key] for entry in found[phase])

    snapshot = statistics.median(
        entry["publish"] for transport in ("gloo", "shm") for entry in found[f"{transport} off"]
    )
    proved = [phase for phase in REPEATS if "base" not in phase]
    hashing = {phase: max(0.0, middle(phase, "publish") - snapshot) for phase in proved}
    base, swaps = middle("base"), sorted(entry["swap"] for entry in found["shm full"])
    times = {
        f"{transport}{suffix}": middle(f"{transport} {proof}")
        + (hashing[f"{transport} {proof}"] if proof != "off" else 0.0)
        for transport in ("gloo", "shm")
        for suffix, proof in (("", "full"), ("_unproved", "off"))
    }
    put = nbytes / times["shm_unproved"] / 1e6
    shares = {
        f"proof_share_of_{transport}": (hashing[f"{transport} full"] + middle(f"{transport} full", "prove"))
        / times[transport]
        for transport in ("gloo", "shm")
    }
    exact = {
        "gather_broadcast_ms": base,
        "gather_broadcast_kept_ms": middle("base kept"),
        **{f"{name}_ms": value for name, value in times.items()},
        "shm_sampled_ms": middle("shm sampled") + hashing["shm sampled"],
        **{f"{name}_speedup": base / value for name, value in times.items()},
        **{f"{name}_speedup_over_kept": middle("base kept") / value for name, value in times.items()},
        "memmove_gb_per_s": memmove,
        "shm_unproved_gb_per_s": put,
        "shm_unproved_of_memmove": put / memmove,
        "digest_ms": hashing["shm full"] + middle("shm full", "prove"),
        "sender_digest_ms": hashing["shm full"],
        "receiver_digest_ms": middle("shm full", "prove"),
        **shares,
        "snapshot_ms": snapshot,
        **{f"{transport}_wire_ms": middle(f"{transport} off", "wire") for transport in ("gloo", "shm")},
        **{f"{transport}_rebuild_ms": middle(f"rebuild {transport} full") for transport in ("gloo", "shm")},
    }
    if "ray object store" in found:
        ray = middle("ray object store")
        exact |= {"ray_object_store_ms": ray}
        exact |= {f"{name}_speedup_over_ray": ray / (value + snapshot) for name, value in times.items()}
    # Each of the two receivers needs half of the bytes.
    into = {name: round(nbytes / 2 / value / 1e6, 2) for name, value in times.items()}
    pause = {"p50": round(swaps[len(swaps) // 2], 4), "p95": round(swaps[int(len(swaps) * 0.95)], 4)}
    rounded = {key: round(value, 3) for key, value in exact.items()}
    counts = {phase: len(entries) for phase, entries in found.items()}
    return {"bytes": nbytes, **rounded, "gb_per_s_into_one_receiver": into, "pause_ms": pause, "repeats": counts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action=Keep, help="write benchmarks/results/ddma.json")
    options = parser.parse_args()
    nbytes = sum(2 * torch.Size(shape).numel() for shape in SHAPES.values())
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder)) | by_ray()
    publish("ddma", figures(found, nbytes, memmove_gb_per_s(nbytes)), options.keep)


if __name__ == "__main__":
    main()
