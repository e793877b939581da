"""The cost of `--invariant`: seconds with it over those without, of an update and of generating its batch.

    python benchmarks/invariant.py [--pairs 5] [--tiny] [--keep]

Llamas with random weights (those of `train.py`) on one thread. Runs with and without it alternate, in an order that is
reversed for every other pair; each ratio is of one pair. `mismatch` is the mean absolute difference between the
recorded log-probabilities and the trainer's, in nats.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from generate import MODELS, clock, texts
from report import Keep, publish, spread
from train import write_model

from penstock.graph.context import Context
from penstock.graph.types import Advantages, Prompts, Rollouts, Weights
from penstock.nodes.generate import make_engine
from penstock.nodes.generate.sampling import mismatch
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.policy import language_policy, make_policy

PROMPTS, SAMPLES, TOKENS = 8, 8, 32


class Side:
    """A trainer and a generator, with or without the flag."""

    def __init__(self, folder: Path, dtype: str, invariant: bool) -> None:
        shared: dict[str, Any] = {
            "model": str(folder),
            "dtype": dtype,
            "invariant": invariant,
            "slots": PROMPTS * SAMPLES,
        }
        context = Context(node="generate", max_tokens=TOKENS, updates=1000, **shared)
        self.engine = make_engine(context, samples=SAMPLES)
        self.engine.slots.stops[:] = False
        self.policy: Any = make_policy(context)
        self.version = 0

    def update(self) -> tuple[float, float, float]:
        """Generate and update once; return the seconds of each, and the mismatch."""
        self.version += 1
        weights = Weights(self.version, self.policy.weights())
        began = clock()
        for ordinal, text in enumerate(texts(PROMPTS)):
            self.engine.submit(ordinal, {"prompts": Prompts((ordinal,), (text,), ("",)), "behaviour": weights})
        found: dict[int, Any] = {}
        while self.engine.busy():
            found |= dict(self.engine.step())
        generated = clock() - began
        rollouts = Rollouts.concat([found[ordinal][0] for ordinal in range(PROMPTS)])
        distance = mismatch(language_policy(self.policy).model, rollouts)
        began = clock()
        self.policy, _ = aipo_update.fn(
            self.policy, rollouts, Advantages(torch.linspace(-1, 1, len(rollouts))), lr=1e-6
        )
        return generated, clock() - began, distance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="one pair of the smallest model: that it runs")
    parser.add_argument("--keep", action=Keep, help="write benchmarks/results/invariant.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("3M",) if args.tiny else ("3M", "25M"):
            hidden, layers, _ = MODELS[name]
            write_model(Path(scratch) / name, hidden, layers)
            for dtype in ("float32", "bfloat16"):
                sides = {on: Side(Path(scratch) / name, dtype, on) for on in (False, True)}
                taken: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
                for side in sides.values():
                    side.update()
                for pair in range(1 if args.tiny else args.pairs):
                    for on in (False, True) if pair % 2 else (True, False):
                        taken[on].append(sides[on].update())
                for what, work in enumerate(("generating", "update")):
                    ratios = [a[what] / b[what] for a, b in zip(taken[True], taken[False], strict=True)]
                    plain = round(median(each[what] for each in taken[False]), 3)
                    row: dict[str, Any] = {"model": name, "dtype": dtype, "work": work, "as it is, s": plain}
                    row["with over without"] = {key: round(value, 2) for key, value in spread(ratios).items()}
                    for on, title in ((False, "mismatch without"), (True, "with")):
                        row[title] = median(each[2] for each in taken[on])
                    rows.append(row)
                    print(row, flush=True)
    publish("invariant", {"rows": rows}, args.keep)


if __name__ == "__main__":
    main()
