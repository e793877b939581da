"""How long the planner's search takes: three models on 64, 512 and 1,024 GPUs of one kind.

    python benchmarks/plan_search.py [--limit SECONDS] [--keep]

`aipo` at lag 1 with 256 prompts of 8 samples, responses lognormal with a mean of 1,000 tokens, σ 0.7, cut at 4,096.
The seconds are of the whole answer, the plans set by hand included, in a process that has planned nothing before.
"""

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from report import publish

CLUSTERS = ("8x8xH100", "64x8xH100", "128x8xH100")
MODELS = ("llama-8b", "llama-70b", "llama-405b")


def planned(cluster: str, model: str, limit: float) -> dict[str, Any]:
    """One row: what `penstock plan` says, and its seconds with and without starting and tracing."""
    command = [sys.executable, "-m", "penstock.runtime.cli.main", "plan", "aipo", "--cluster", cluster, "--json"]
    command += ["--model", model, "--time-limit", str(limit)]
    start = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit + 60)
    row: dict[str, Any] = {"model": model, "cluster": cluster, "command s": round(time.monotonic() - start, 2)}
    if done.returncode:
        return row | {"refused": done.stderr.strip().splitlines()[0]}
    said = json.loads(done.stdout)
    found = {name: said[name] for name in ("period_s", "optimal", "gap", "opened")}
    return row | {"search s": round(said["search_s"], 2), "search CPU s": round(said["search_cpu_s"], 2)} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that each search may take")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/plan_search.json")
    args = parser.parse_args()
    rows = []
    for cluster in CLUSTERS:
        for model in MODELS:
            rows.append(planned(cluster, model, args.limit))
            print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    publish("plan_search", {"rows": rows}, args.keep)


if __name__ == "__main__":
    main()
