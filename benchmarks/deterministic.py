"""The cost of `--deterministic`: seconds of an update and of a decode step with it over those without, in one process.

    python benchmarks/deterministic.py [--pairs 15] [--keep]

On a CPU the results are bit-identical. Runs with and without it alternate, in an order that is reversed for every other
pair; each ratio is of one pair. For the cost on a GPU: `python benchmarks/gpu.py --only bits`.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from gpu_mesh import ROWS, rollouts
from gpu_ranks import Generator, Policy
from report import Keep, publish, spread

from penstock.graph.context import Context
from penstock.graph.types import Advantages
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.model import CausalLM, ModelConfig
from penstock.nodes.policy import LanguagePolicy
from penstock.nodes.tokenizer import byte_tokenizer
from penstock.runtime.control.executor import be_deterministic

WORDS = byte_tokenizer().vocab_size
MODELS = ModelConfig(WORDS, 128, 256, 4, 8, 4, 16), ModelConfig(WORDS, 512, 1024, 4, 8, 4, 64)
SLOTS, CONTEXT, STEPS = 16, 64, 8


def updating(config: ModelConfig) -> Callable[[], float]:
    model = CausalLM(config, torch.float32, "cpu")
    model.init_weights(1)
    context = Context(node="policy", updates=1000, device="cpu", threads=torch.get_num_threads())
    learner, given = LanguagePolicy(model, byte_tokenizer(), context), rollouts()

    def update() -> float:
        began = perf_counter()
        aipo_update.fn(learner, given, Advantages(torch.linspace(-1, 1, ROWS)), lr=1e-6)
        return perf_counter() - began

    return update


def decoding(config: ModelConfig, folder: Path) -> Callable[[], float]:
    engine = Generator(folder, config, "cpu", SLOTS, CONTEXT)
    tensors = Policy("cpu", config).tensors

    def decode() -> float:
        engine.fill(tensors)
        return median(engine.step() for _ in range(STEPS))

    return decode


def timed(work: Callable[[], float], on: bool) -> float:
    if on:
        be_deterministic()
    try:
        return work()
    finally:
        torch.use_deterministic_algorithms(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--keep", action=Keep, help="write benchmarks/results/deterministic.json")
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for config in MODELS:
            parameters = sum(p.numel() for p in CausalLM(config, torch.float32, "meta").parameters())
            for what, work in (("update", updating(config)), ("decode step", decoding(config, Path(folder)))):
                work()
                work()
                taken: dict[bool, list[float]] = {False: [], True: []}
                for pair in range(args.pairs):
                    for on in (False, True) if pair % 2 else (True, False):
                        taken[on].append(timed(work, on))
                ratios = spread([a / b for a, b in zip(taken[True], taken[False], strict=True)])
                found = {"as it is, ms": 1e3 * median(taken[False]), "deterministic, ms": 1e3 * median(taken[True])}
                rows.append({"parameters": parameters, "work": what, **{k: round(v, 2) for k, v in found.items()}})
                rows[-1]["with over without"] = {key: round(value, 2) for key, value in ratios.items()}
                print(rows[-1], flush=True)
    publish("deterministic", {"pairs": args.pairs, "rows": rows}, args.keep)


if __name__ == "__main__":
    main()
