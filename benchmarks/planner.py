"""The cost model against published step times: errors by system, pairs ordered correctly, LlamaRL's speed-ups.

    python benchmarks/planner.py [--rows] [--keep]

docs/measurements.md defines which rows count and what is compared; it was written before the first prediction.
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import Any

import numpy as np
from calibration import NONE, leave_one_out
from llamarl import ratios
from predicted import Prediction, predict
from published import TABLE, Row, later, read
from report import Keep, publish

from penstock.runtime.plan.confidence import AS_IT_IS

UNSEEN = ("set-up left out", "set-up left out s")
TAIL = 0.1
"""Share of rows outside each end of the reported range."""
LARGE = 0.14
"""By how much the same rows of one project changed between two releases."""


def errors(predicted: Sequence[float], rows: Sequence[Row]) -> float:
    """Return the median relative error."""
    return median(abs(seconds / row.seconds - 1) for seconds, row in zip(predicted, rows, strict=True))


def same_setup(a: Row, b: Row) -> bool:
    return (a.source, a.model, a.kind, a.work, a.longest) == (b.source, b.model, b.kind, b.work, b.longest)


def pairs(rows: Sequence[Row], predicted: Sequence[float], least: float = 0.0) -> tuple[int, int]:
    """Return how many pairs of the same set-up that differ by more than `least` are ordered correctly, and how many
    there are. Steps of reinforcement learning are compared by seconds, others by tokens per second and GPU."""
    right = total = 0
    for (a, first), (b, second) in combinations(zip(rows, predicted, strict=True), 2):
        if not same_setup(a, b):
            continue
        per_gpu = a.system != "NeMo-RL"
        real = (b.per_gpu / a.per_gpu if per_gpu else a.seconds / b.seconds) - 1
        scale = a.per_gpu * a.seconds / (b.per_gpu * b.seconds) if per_gpu else 1.0
        said = first / second / scale - 1 if per_gpu else first / second - 1
        if max(real, 1 / (1 + real) - 1) > least:
            total += 1
            right += (real > 0) == (said > 0) and abs(said) > 1e-6
    return right, total


def compared(system: str, rows: Sequence[Row]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the figures of one system, and each of its rows."""
    predictions = [predict(row) for row in rows]
    plain = [prediction.seconds(NONE) for prediction in predictions]
    fitted: list[tuple[Prediction, float]] = [(p, row.seconds) for p, row in zip(predictions, rows, strict=True)]
    # A row is left out together with its other releases; a set-up is left out with all its layouts and modes.
    calibrated, scalars = leave_one_out(fitted, [row.released for row in rows])
    unseen, _ = leave_one_out(fitted, [row.setup for row in rows])
    found: dict[str, Any] = {
        "system": system,
        "rows": len(rows),
        "median error": round(errors(plain, rows), 3),
        "calibrated, row left out": round(errors(calibrated, rows), 3),
        "calibrated, set-up left out": round(errors(unseen, rows), 3),
        "scalars": {name: round(value, 4) for name, value in scalars.items()},
    }
    for name, least in (("pairs", 0.0), ("pairs over 14%", LARGE)):
        for label, seconds in ((name, plain), (f"{name}, set-up left out", unseen)):
            right, total = pairs(rows, seconds, least)
            found[label] = f"{right} of {total}"
    each = [
        {"row": row.name, "published s": row.seconds, "predicted s": p, "row left out s": c, "set-up left out s": u}
        for row, p, c, u in zip(rows, plain, calibrated, unseen, strict=True)
    ]
    return found, each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", action="store_true", help="print each row, too")
    parser.add_argument("--keep", action=Keep, help="write benchmarks/results/planner.json")
    args = parser.parse_args()
    if not TABLE.exists():
        sys.exit(f"{TABLE} is not there: the published rows are not part of the project")
    rows, unusable = read()
    systems = []
    everything: list[dict[str, Any]] = []
    for system in dict.fromkeys(row.system for row in rows):
        figures, each = compared(system, [row for row in rows if row.system == system])
        systems.append(figures)
        everything += each
        for row in each if args.rows else ():
            print(", ".join(f"{k} {v if isinstance(v, str) else round(v, 2)}" for k, v in row.items()))
        print(", ".join(f"{name} {value}" for name, value in figures.items()))
    overall: dict[str, Any] = {}
    for label, column in (("as it is", "predicted s"), ("row left out", "row left out s"), UNSEEN):
        quotients = [row["published s"] / row[column] for row in everything]
        low, high = np.quantile(quotients, (TAIL, 1 - TAIL)).tolist()
        overall[f"median error, {label}"] = round(median(abs(1 / each - 1) for each in quotients), 3)
        overall[f"published / predicted, {label}"] = f"{low:.2f} to {high:.2f}"
    for name in ("pairs", "pairs over 14%"):
        counts = [figures[name].split(" of ") for figures in systems]
        overall[name] = " of ".join(str(sum(map(int, column))) for column in zip(*counts, strict=True))
    low, high = AS_IT_IS
    quotients = [row.seconds / predict(row).seconds(NONE) for row in later()]
    unseen = {
        "rows": len(quotients),
        "median error": round(median(abs(1 / each - 1) for each in quotients), 3),
        "in the range of a plan": sum(low <= each <= high for each in quotients),
    }
    print(f"rows read later: {unseen}")
    figures = {"rows used": len(rows), "rows not used": unusable, "all rows": overall, "rows read later": unseen}
    publish("planner", {**figures, "systems": systems, "LlamaRL": ratios()}, args.keep)


if __name__ == "__main__":
    main()
