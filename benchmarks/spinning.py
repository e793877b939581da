"""How long OpenMP's threads spin before they sleep: seconds of updates that share cores with generators, and of decode
steps that have the cores to themselves.

    python benchmarks/spinning.py [--keep]

`libgomp` is its own default, `ranks` what our ranks have, `none` no spinning. `shared`: runs of `aipo` at lag 1 whose
cluster file has 3 cores for each 2 of this machine, so that there are two generator threads and three of an update on
two cores. `alone`: decode steps of an engine with all cores, of a model of 3 million parameters.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import Keep, publish, spread

from penstock.runtime.control.process import short_spins

# libgomp's own count where OMP_WAIT_POLICY is not set.
SETTINGS = {"libgomp": {"GOMP_SPINCOUNT": "300000"}, "ranks": {}, "none": {"OMP_WAIT_POLICY": "passive"}}
UPDATES = 12
ROWS = 16
STEPS = """
import json, sys
from pathlib import Path
import torch
from generate import MODELS, Ours, texts
from statistics import median
from train import write_model
torch.set_num_threads(int(sys.argv[2]))
folder, (hidden, layers, tokens) = Path(sys.argv[1]), MODELS["3M"]
write_model(folder, hidden, layers)
engine = Ours(folder, sys.argv[3], int(sys.argv[4]), tokens)
for turn in range(5):
    rows = texts(int(sys.argv[4]), turn)
    engine.run({turn * len(rows) + i: text for i, text in enumerate(rows)})
print(json.dumps(median(engine.steps)))
"""


def environment(setting: str) -> dict[str, str]:
    mine = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    return {**mine, **SETTINGS[setting]}


def shared(setting: str, folder: Path, cores: int) -> float:
    """Run for real; return the seconds per update after the first one."""
    cluster = folder / "cluster.toml"
    cluster.write_text(f'[[hosts]]\nname = "here"\ncores = {cores * 3 // 2}\n')
    command = [sys.executable, "-m", "penstock.runtime.cli.main", "run", "aipo", "--lag=1", "--samples=16", "--plain"]
    command += [f"--updates={UPDATES}", "--eval-groups=0", f"--cluster={cluster}", f"--out={folder / 'run'}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300, env=environment(setting))
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return float(rows[-1]["time_s"] - rows[0]["time_s"]) / (UPDATES - 1)


def alone(setting: str, folder: Path, cores: int, dtype: str) -> float:
    """Return the median seconds of a decode step."""
    spins = {} if SETTINGS[setting] else short_spins()
    command = [sys.executable, "-c", STEPS, str(folder / "model"), str(cores), dtype, str(ROWS)]
    path = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    told = {**environment(setting), **spins, **path}
    out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, env=told).stdout
    return float(out.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--keep", action=Keep, help="write benchmarks/results/spinning.json")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    cases: dict[str, Any] = {
        "update beside generation": lambda setting, folder: shared(setting, folder, cores),
        **{f"decode step alone, {d}": lambda s, f, d=d: alone(s, f, cores, d) for d in ("float32", "bfloat16")},
    }
    rows = []
    for case, measured in cases.items():
        found: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
        for _ in range(args.repeats):
            for setting in SETTINGS:
                with tempfile.TemporaryDirectory() as scratch:
                    found[setting].append(measured(setting, Path(scratch)) * 1e3)
        ratios = [theirs / ours for theirs, ours in zip(found["libgomp"], found["ranks"], strict=True)]
        times = {f"{setting}_ms": spread(each) for setting, each in found.items()}
        rows.append({"case": case, **times, "libgomp_over_ranks": spread(ratios)})
        print(json.dumps(rows[-1]))
    publish("spinning", {"threads": cores, "rows": rows}, args.keep)


if __name__ == "__main__":
    main()
