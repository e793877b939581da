"""How long the planner's search takes: three models on 64, 512 and 1,024 GPUs of one kind, and larger programs on 512.

    python benchmarks/plan_search.py [--limit SECONDS] [--repeats N] [--keep]

`aipo` at lag 1 with 256 prompts of 8 samples, responses lognormal with a mean of 1,000 tokens, σ 0.7, cut at 4,096; at
the same lag `grpo` with a reference (six nodes), `ppo` with a critic, `rlhf` with a critic, a reference and a reward
model. Seconds are wall-clock, each command in a new process without any cached plans: for the whole command, which
starts Python and traces the program, and for the search alone, including the plans set by hand.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from report import Keep, publish, spread

CLUSTERS = ("8x8xH100", "64x8xH100", "128x8xH100")
MODELS = ("llama-8b", "llama-70b", "llama-405b")
PROGRAMS: dict[str, tuple[str, ...]] = {
    "grpo": ("--lag", "1", "--kl", "0.01"),
    "ppo": ("--lag", "1"),
    "rlhf": ("--lag", "1"),
}
"""Programs with models besides the policy, which are planned on the middle cluster."""


def planned(program: str, words: Sequence[str], cluster: str, model: str, limit: float, repeats: int) -> dict[str, Any]:
    """Return one row: the results of `penstock plan`, and its seconds."""
    command = [sys.executable, "-m", "penstock.runtime.cli.main", "plan", program, "--cluster", cluster, "--json"]
    command += ["--model", model, "--time-limit", str(limit), *words]
    row: dict[str, Any] = {"program": " ".join((program, *words)), "model": model, "cluster": cluster}
    whole, searched = [], []
    for _ in range(repeats):
        start = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit + 60)
        whole.append(round(time.monotonic() - start, 2))
        if done.returncode:
            return row | {"command s": spread(whole), "refused": done.stderr.strip().splitlines()[0]}
        said = json.loads(done.stdout)
        searched.append(round(said["search_s"], 2))
    found = {name: said[name] for name in ("period_s", "optimal", "gap", "opened")}
    return row | {"command s": spread(whole), "search s": spread(searched)} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that each search may take")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", action=Keep, help="write benchmarks/results/plan_search.json")
    args = parser.parse_args()
    asked: list[tuple[str, tuple[str, ...], str, str]]
    asked = [("aipo", (), cluster, model) for cluster in CLUSTERS for model in MODELS]
    asked += [(program, words, CLUSTERS[1], model) for program, words in PROGRAMS.items() for model in MODELS]
    rows = []
    for question in asked:
        rows.append(planned(*question, args.limit, args.repeats))
        print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    publish("plan_search", {"rows": rows}, args.keep)


if __name__ == "__main__":
    main()
