"""Real period over simulated period of `toy`, with nodes of 50 ms, at lag 0, 1 and 4: the overhead of the runtime.

    python benchmarks/overhead.py [--keep]

Each lag runs `--repeats` times with real processes; the simulated period is for the same graph, plan and rules.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import Keep, publish, spread

MILLISECONDS = 50
BATCH = 4
UPDATES = 40
WARM = 10


def measured(lag: int, folder: Path) -> float:
    """Run for real; return the seconds per update after the first `WARM` updates."""
    command = [sys.executable, "-m", "penstock.runtime.cli.main", "run", "toy", "--out", str(folder), "--plain"]
    command += ["--updates", str(UPDATES), "--batch", str(BATCH), *_options(lag)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return float(rows[-1]["time_s"] - rows[WARM - 1]["time_s"]) / (UPDATES - WARM)


def simulated(lag: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "penstock.runtime.cli.main", "simulate", "toy", "--json"]
    command += ["--updates", str(UPDATES), "--batch", str(BATCH), *_options(lag)]
    out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return found


def _options(lag: int) -> list[str]:
    durations = [f"--{name}-ms={MILLISECONDS}" for name in ("generate", "score", "update")]
    return [f"--lag={lag}", *durations, "--sync-ms=0"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", action=Keep, help="write benchmarks/results/overhead.json")
    args = parser.parse_args()
    rows = []
    for lag in (0, 1, 4):
        prediction = simulated(lag)
        with tempfile.TemporaryDirectory() as scratch:
            periods = [measured(lag, Path(scratch) / str(i)) for i in range(args.repeats)]
        ratio = spread([period / prediction["period_s"] for period in periods])
        rows.append({"lag": lag, "simulated_s": prediction["period_s"], "real_s": spread(periods), "ratio": ratio})
        print(f"lag {lag}: simulated {prediction['period_s']:.4f} s, real / simulated {ratio['median']:.3f}")
    publish("overhead", {"node_ms": MILLISECONDS, "batch": BATCH, "updates": UPDATES, "rows": rows}, args.keep)


if __name__ == "__main__":
    main()
