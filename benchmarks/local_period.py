"""Predicted over measured seconds per update of `aipo` on this machine, at two sizes, lag 0 and 1.

    python benchmarks/local_period.py [--machine FILE] [--size 256 512] [--lag 0 1] [--keep]

Without --machine the machine is measured first (`penstock doctor --measure`). Nothing but the lengths of the responses
is taken from the runs. The model is untrained and earns no reward, so that all updates are alike. With --keep, cases
that are not asked for stay as they were kept last.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from report import RESULTS, publish, spread
from train import PROMPTS, SAMPLES, TOKENS, problems, write_model

LAYERS = {256: 4, 512: 8}
"""By width: 3.1 and 25 million parameters."""
WARM = 2
"""Updates that are not counted."""
PROMPT_TOKENS = 6
COMMAND = (sys.executable, "-m", "penstock.runtime.cli.main")


def measured(model: Path, data: Path, lag: int, updates: int, folder: Path) -> dict[str, float]:
    """Seconds of each update after the first few; the last one of a lagged run has no generation beside it."""
    command = [*COMMAND, "run", "aipo", "--plain", f"--lag={lag}", "--eval-groups=0", f"--updates={updates}"]
    command += ["--model", str(model), "--data", str(data), f"--batch={PROMPTS}", f"--samples={SAMPLES}"]
    command += [f"--max-tokens={TOKENS}", f"--slots={PROMPTS * SAMPLES}", "--out", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=900)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return spread([b["time_s"] - a["time_s"] for a, b in pairwise(rows[WARM - 1 : len(rows) - lag])])


def predicted(machine: Path, model: Path, lag: int, folder: Path) -> dict[str, Any]:
    command = [*COMMAND, "plan", "aipo", "--json", f"--lag={lag}", "--cluster", str(machine), "--model", str(model)]
    command += [f"--batch={PROMPTS}", f"--samples={SAMPLES}", f"--slots={PROMPTS * SAMPLES}"]
    command += ["--lengths", str(folder), f"--max-tokens={TOKENS}", f"--prompt-tokens={PROMPT_TOKENS}"]
    out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return found


def case(width: int, lag: int, machine: Path, updates: int, repeats: int, scratch: Path) -> dict[str, Any]:
    model, data = scratch / f"model-{width}", scratch / "problems.jsonl"
    parameters = write_model(model, width, LAYERS[width])
    data.write_text("".join(json.dumps(row) + "\n" for row in problems(2000)))
    folders = [scratch / f"run-{width}-{lag}-{number}" for number in range(repeats)]
    found = [measured(model, data, lag, updates, folder) for folder in folders]
    real = spread([run["median"] for run in found]) if repeats > 1 else found[0]
    plan = predicted(machine, model, lag, folders[0])
    parts = {stage: round(sum(seconds.values()), 3) for stage, seconds in plan["parts"].items()}
    ratio = plan["period_s"] / real["median"]
    print(f"{parameters:,} parameters, lag {lag}: {plan['period_s']:.3f} s predicted, {real['median']:.3f} s measured")
    return {
        "parameters": parameters, "lag": lag, "predicted_s": plan["period_s"], "measured_s": real,
        "predicted over measured": ratio, "predicted parts": parts, "bound": plan["bound"],
    }  # fmt: skip


def merged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """These and the cases kept earlier, in order."""
    path = RESULTS / "local_period.json"
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    found = {(row["parameters"], row["lag"]): row for row in (*kept, *rows)}
    return [found[key] for key in sorted(found)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", type=Path, help="what doctor --measure wrote")
    parser.add_argument("--size", type=int, nargs="+", choices=sorted(LAYERS), default=sorted(LAYERS))
    parser.add_argument("--lag", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/local_period.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        machine = args.machine or scratch / "machine.toml"
        if not args.machine:
            subprocess.run([*COMMAND, "doctor", "--measure", "--out", str(machine)], check=True, timeout=600)
        cases = product(args.size, args.lag)
        rows = [case(width, lag, machine, args.updates, args.repeats, scratch) for width, lag in cases]
    setup = {"prompts": PROMPTS, "samples": SAMPLES, "max_tokens": TOKENS, "dtype": "float32"}
    publish("local_period", {"setup": setup, "rows": merged(rows) if args.keep else rows}, args.keep)


if __name__ == "__main__":
    main()
