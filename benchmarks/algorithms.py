"""Every algorithm of the library on the demo task, from one base: accuracy before and after, reward gained, seconds.

    python benchmarks/algorithms.py [--only NAME] [--seeds 2] [--keep]

Each is a short run in one process with one thread, at lag 0; programs whose default is a lag also run at lag 2, with
pinned versions. The models that some need besides the base (a teacher, a reward model, a policy that knows the tool)
are trained first. Finished runs are kept in --scratch, so that an interrupted benchmark continues.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from statistics import fmean
from typing import Any

from here import Job, run_here, serve, shared_base, spread_out
from report import Keep, publish, spread

from penstock.graph import Program, load
from penstock.host import cache_folder
from penstock.runtime.control.run_config import RunOptions


@dataclass(frozen=True)
class Entry:
    """How a program is run: its options and flags besides the common ones, and the options or flags (`needs`) that take
    a trained model."""

    options: Mapping[str, Any] = field(default_factory=lambda: {"lr": 3e-4})
    flags: Mapping[str, Any] = field(default_factory=dict)
    needs: Mapping[str, str] = field(default_factory=dict)


UPDATES, BATCH, SLOTS = 24, 16, 128
FEW = Entry({"lr": 1e-4})
"""For programs that take four optimizer steps per update."""
CRITIC = {"lr": 3e-4, "critic_lr": 1e-3}
ENTRIES: Mapping[str, Entry] = {
    "reinforce": Entry(),
    "rloo": Entry(),
    "grpo": Entry(),
    "dr_grpo": Entry(),
    "dapo": Entry(),
    "gspo": FEW,
    "cispo": FEW,
    "reinforce_pp": Entry(),
    "ppo": Entry(CRITIC),
    "aipo": Entry(),
    "tis": FEW,
    "sequence_weighting": Entry(),
    "decoupled_ppo": FEW,
    "remax": Entry(),
    "online_dpo": Entry(),
    "distill": Entry(needs={"teacher_model": "teacher"}),
    "rlhf": Entry(CRITIC, needs={"reward_model": "preferences"}),
    "ema": Entry(),
    "moving_reference": Entry(),
    "replay": Entry(),
    "curriculum": Entry(),
    "tool_use": Entry(flags={"data": "calculator", "max_tokens": 24}, needs={"model": "caller"}),
}
TRAINED: Mapping[str, tuple[str, str, Entry]] = {
    "teacher": ("aipo", "policy", Entry({"lr": 2e-4, "lag": 0}, {"updates": 40, "batch": 16})),
    "preferences": ("reward_model", "reward_model", Entry({}, {"updates": 300, "batch": 4})),
    "caller": ("tool_sft", "policy", Entry({}, {"model": "", "updates": 800, "batch": 2, "data": "calculator"})),
}
"""The models that some programs need: the program that trains each, the carried value that it is, and how the program
is run."""


def work(job: Job, scratch: Path) -> Job:
    """Run an algorithm, or train a model that some algorithms need."""
    base = str(shared_base(scratch))
    if "train" in job:
        name, _, entry = TRAINED[job["train"]]
        known = {"model": base, "slots": SLOTS, "eval_groups": 100, "max_tokens": 24, **entry.flags}
        found = run_here(program(name), entry.options, RunOptions(**known), keep=scratch / job["train"])
        return {**job, **_ended(found)}
    entry = ENTRIES[job["algorithm"]]
    paths = {name: str(scratch / what / TRAINED[what][1]) for name, what in entry.needs.items()}
    versions = "pinned" if job["lag"] else "free"
    known = {"model": base, "updates": UPDATES, "batch": BATCH, "slots": SLOTS, "versions": versions, **entry.flags}
    flags = {**known, "seed": job["seed"], **{name: path for name, path in paths.items() if name == "model"}}
    options = {**entry.options, "lag": job["lag"], **{name: path for name, path in paths.items() if name != "model"}}
    found = run_here(program(job["algorithm"]), options, RunOptions(**flags))
    return {**job, **_ended(found), "reward_gain": reward_gain(found["rows"])}


def _ended(found: Job) -> Job:
    names = ("status", "accuracy_before", "accuracy_after", "updates", "error", "seconds", "cpu_s")
    return {name: found[name] for name in names}


def reward_gain(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean reward of the last four updates minus that of the first two. For programs that learn from the
    reward of a model it is still the rule's reward. None for programs without rewards."""
    figure = "accuracy" if rows and "accuracy" in rows[0] else "reward_mean"
    rewards = [row[figure] for row in rows if figure in row]
    return fmean(rewards[-4:]) - fmean(rewards[:2]) if rewards else None


def program(name: str) -> Program[..., Any]:
    found = load(name)
    assert isinstance(found, Program)
    return found


def lags(name: str) -> tuple[int, ...]:
    """Return 0, and also 2 for a program whose default lag is not 0."""
    return (0, 2) if signature(program(name).fn).parameters["lag"].default else (0,)


def row(runs: Sequence[Job]) -> dict[str, Any]:
    """Summarise the runs of one algorithm at one lag, which differ in their seeds."""
    gains = [run["reward_gain"] for run in runs if run["reward_gain"] is not None]
    failed = [run["error"].splitlines()[-1] for run in runs if run["status"] != "done"]
    done = [run for run in runs if run["status"] == "done"]
    found: dict[str, Any] = {"algorithm": runs[0]["algorithm"], "lag": runs[0]["lag"], "seeds": len(runs)}
    if done:
        found["accuracy before"] = done[0]["accuracy_before"]
        found["accuracy after"] = spread([run["accuracy_after"] for run in done])
        found["reward gained"] = round(fmean(gains), 4) if gains else None
        found["seconds"] = spread([run["seconds"] for run in done])
        found["processor seconds"] = round(fmean(run["cpu_s"] for run in done), 1)
    return {**found, "failed": failed[0]} if failed else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=["table", "serve"], default="table")
    parser.add_argument("--only", choices=sorted(ENTRIES), help="this algorithm alone; nothing is written")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument(
        "--scratch", type=Path, default=cache_folder() / "algorithms", help="another for another set-up"
    )
    parser.add_argument("--processes", type=int, default=2, help="runs at once, one thread each")
    parser.add_argument("--keep", action=Keep, help="write benchmarks/results/algorithms.json")
    args = parser.parse_args()
    if args.what == "serve":
        serve(partial(work, scratch=args.scratch))
        return
    if args.only and args.keep:
        parser.error("--keep writes the whole table: given --only beside it, needed one of the two")
    shared_base(args.scratch)
    worker = [__file__, "serve", "--scratch", str(args.scratch)]
    names = [args.only] if args.only else list(ENTRIES)
    needed = sorted({what for name in names for what in ENTRIES[name].needs.values()})
    trained = spread_out([{"train": what} for what in needed], worker, args.processes, args.scratch / "trained.jsonl")
    jobs = [
        {"algorithm": name, "lag": lag, "seed": seed}
        for seed in range(args.seeds)
        for name in names
        for lag in lags(name)
    ]
    runs = spread_out(jobs, worker, args.processes, args.scratch / "runs.jsonl")
    setup = {"updates": UPDATES, "prompts": BATCH, "threads": 1, "runs at once": args.processes}
    by_lag = [(name, lag) for name in names for lag in lags(name)]
    rows = [row([run for run in runs if (run["algorithm"], run["lag"]) == pair]) for pair in by_lag]
    made = {r["train"]: f"{TRAINED[r['train']][0]}, {r['updates']} updates, {r['cpu_s']:.0f} s" for r in trained}
    publish("algorithms", {"setup": setup, **({"trained before": made} if made else {}), "rows": rows}, args.keep)


if __name__ == "__main__":
    main()
