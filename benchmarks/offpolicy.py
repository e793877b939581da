"""AIPO against five other ways to learn from stale samples, at lag 0 to 16: accuracy, collapse and importance ratios.

    python benchmarks/offpolicy.py pilot             the learning rate, by the rule of `chosen_rate`
    python benchmarks/offpolicy.py table [--keep]    all missing runs; then the tables and the picture

The methods run the same program with different losses, and with the same number of samples, updates and optimizer
steps and the same learning rate. Versions are pinned: the groups of update u are sampled with version max(0, u − lag)
exactly, so that a run is a function of its seed. A finished run is a line of a file in --scratch, so that an
interrupted benchmark continues.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from chart import line_chart
from here import Job, run_here, serve, shared_base, spread_out
from report import RESULTS, ROOT, Keep, publish, spread

from penstock.graph import broadcast, program
from penstock.graph.types import Policy, Prompts
from penstock.host import cache_folder
from penstock.nodes.advantage import group_advantage
from penstock.nodes.distill import policy_logprobs
from penstock.nodes.generate import generate
from penstock.nodes.learn import losses
from penstock.nodes.learn.losses import Loss
from penstock.nodes.learn.update import policy_update
from penstock.nodes.score import math_answer, score
from penstock.programs.evaluate import evaluate
from penstock.runtime.control.run_config import RunOptions

METHODS: Mapping[str, Loss] = {
    "AIPO": partial(losses.aipo, rho=4.0),
    "no correction": losses.reinforce,
    "PPO clip": partial(losses.ppo, clip_low=0.2, clip_high=0.2),
    "TIS": partial(losses.tis, cap=2.0, clip_low=0.2, clip_high=0.2),
    "sequence weights": partial(losses.importance_weighted, level="sequence", bound="truncate", cap=2.0),
    "decoupled PPO": partial(losses.decoupled_ppo, clip_low=0.2, clip_high=0.2),
}
"""The losses, with the default bounds of their programs in the library."""
AROUND_OLD = ("TIS", "decoupled PPO")
"""Methods that use the policy's log-probabilities from before the update."""
LAGS = (0, 1, 2, 4, 8, 16)
SEEDS = (0, 1, 2)
UPDATES, BATCH, SAMPLES, MINIBATCHES, MAX_TOKENS = 32, 8, 8, 4, 12
FULL = max(LAGS)
"""The first update whose samples are as old as the lag for every lag; figures of ratios begin here."""
PILOT_RATES = (1e-4, 2e-4, 3e-4, 6e-4)
PILOT_METHODS, PILOT_LAGS, PILOT_SEED = ("AIPO", "no correction"), (0, 8), 100
PICTURE = ROOT / "docs" / "img" / "off-policy.svg"


@program(evaluation=evaluate)
def stale(policy: Policy, prompts: Prompts, *, method: str, lag: int, lr: float) -> Policy:
    """One loss of METHODS on samples of a policy `lag` updates old; everything else is the same for all methods."""
    rollouts = generate(prompts, broadcast(policy, lag=lag), samples=SAMPLES)
    advantage = group_advantage(score(rollouts, by=math_answer))
    old = policy_logprobs(policy, rollouts) if method in AROUND_OLD else None
    loss = METHODS[method]
    return policy_update(policy, rollouts, advantage, proximal=old, loss=loss, minibatches=MINIBATCHES, lr=lr)


def work(job: Job, base: str) -> Job:
    """Run once. A gradient that is not finite ends the run, which its status shows."""
    options = {name: job[name] for name in ("method", "lag", "lr")}
    flags = RunOptions(
        updates=UPDATES, batch=BATCH, seed=job["seed"], model=base, max_tokens=MAX_TOKENS, slots=64, versions="pinned"
    )
    found = run_here(stale, options, flags)
    rows = found["rows"][FULL:] or found["rows"]
    figures = {
        "ess": fmean(row["ess"] for row in rows),
        "ess_min": min(row["ess"] for row in rows),
        "ratio_mean": fmean(row["ratio_mean"] for row in rows),
        "ratio_max": max(row["ratio_max"] for row in rows),
        "clipped": fmean(row["ratio_clipped"] for row in rows),
    }
    kept = {name: found[name] for name in ("status", "accuracy_before", "accuracy_after", "updates", "error")}
    rewards = [round(row["reward_mean"], 4) for row in found["rows"]]
    return {**job, **kept, **figures, "seconds": found["seconds"], "cpu_s": found["cpu_s"], "rewards": rewards}


# The learning rate ------------------------------------------------------------------------------------------


def pilot_jobs() -> list[Job]:
    return [
        {"method": method, "lag": lag, "seed": PILOT_SEED, "lr": lr}
        for lr in PILOT_RATES
        for method in PILOT_METHODS
        for lag in PILOT_LAGS
    ]


def chosen_rate(results: Sequence[Job]) -> float:
    """Choose the learning rate by a rule that was fixed before the table: of the rates at which both methods gain at
    lag 0, the one at which lag 8 costs most accuracy, as a mean over both, and the lowest of equals. The pilot's seed
    is not one of the table's."""

    def accuracy(lr: float, lag: int) -> list[float]:
        return [final(run) for run in results if run["lr"] == lr and run["lag"] == lag]

    low, high = PILOT_LAGS
    gaining = [lr for lr in PILOT_RATES if min(accuracy(lr, low)) > results[0]["accuracy_before"]]
    if not gaining:
        raise RuntimeError(f"pilot: at none of the rates {PILOT_RATES} do both methods gain at lag {low}; give others")
    return max(gaining, key=lambda lr: fmean(accuracy(lr, low)) - fmean(accuracy(lr, high)))


# The table --------------------------------------------------------------------------------------------------


def final(run: Job) -> float:
    """Return the greedy accuracy on the held-out problems at the end; 0 for a run that ended early."""
    after = run["accuracy_after"]
    return 0.0 if run["status"] != "done" or after is None else float(after)


def collapsed(run: Job) -> bool:
    """True if the run ended less accurate than its base, or with an error."""
    return bool(final(run) < run["accuracy_before"])


def table_jobs(lr: float) -> list[Job]:
    return [
        {"method": method, "lag": lag, "seed": seed, "lr": lr} for seed in SEEDS for lag in LAGS for method in METHODS
    ]


def tables(runs: Sequence[Job]) -> dict[str, list[dict[str, Any]]]:
    """Return one table per figure, with a row per method and a column per lag."""
    cells = {(m, lag): [r for r in runs if (r["method"], r["lag"]) == (m, lag)] for m in METHODS for lag in LAGS}

    def table(of: Any) -> list[dict[str, Any]]:
        return [{"method": m, **{f"lag {lag}": of(cells[m, lag]) for lag in LAGS}} for m in METHODS]

    return {
        "final accuracy": table(lambda cell: spread([round(final(run), 4) for run in cell])),
        "collapsed runs": table(lambda cell: f"{sum(map(collapsed, cell))} of {len(cell)}"),
        "effective sample size": table(lambda cell: round(fmean(run["ess"] for run in cell), 4)),
        "mean ratio": table(lambda cell: _number(fmean(run["ratio_mean"] for run in cell))),
        "largest ratio": table(lambda cell: _number(max(run["ratio_max"] for run in cell))),
        "clipped tokens": table(lambda cell: round(fmean(run["clipped"] for run in cell), 4)),
    }


def _number(value: float) -> float | str:
    return float(f"{value:.4g}") if isfinite(value) else "over 1e308"


def findings(runs: Sequence[Job]) -> list[dict[str, str]]:
    """Compare AIPO with the others at each lag: its place by mean accuracy, and the methods all of whose seeds are
    above its best or below its worst."""
    found = []
    for lag in LAGS:
        of = {m: [final(r) for r in runs if (r["method"], r["lag"]) == (m, lag)] for m in METHODS}
        order = sorted(METHODS, key=lambda m: -fmean(of[m]))
        row = {
            "lag": str(lag),
            "mean final accuracy, best first": ", ".join(f"{m} {fmean(of[m]):.3f}" for m in order),
            "AIPO's place": f"{1 + sum(fmean(of[m]) > fmean(of['AIPO']) for m in METHODS)} of {len(METHODS)}",
            "above AIPO in all seeds": ", ".join(m for m in order if min(of[m]) > max(of["AIPO"])) or "none",
            "below AIPO in all seeds": ", ".join(m for m in order if max(of[m]) < min(of["AIPO"])) or "none",
        }
        found.append(row)
    return found


def picture(result: Mapping[str, Any]) -> str:
    """Draw final accuracy over lag, with a line per method: the median of the seeds, with their range."""
    rows = result["final accuracy"]
    lines = {row["method"]: [row[f"lag {lag}"] for lag in LAGS] for row in rows}
    title = "Final accuracy by lag: median of three seeds, with smallest and largest"
    before = result["setup"]["accuracy_before"]
    return line_chart(lines, [str(lag) for lag in LAGS], title, "lag in updates", ("base", before))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["pilot", "table", "serve"])
    parser.add_argument("--scratch", type=Path, default=cache_folder() / "offpolicy", help="another for another set-up")
    parser.add_argument("--processes", type=int, default=2, help="runs at once, one thread each")
    parser.add_argument("--keep", action=Keep, help="write the results and the picture")
    args = parser.parse_args()
    if args.what == "serve":
        serve(partial(work, base=str(shared_base(args.scratch))))
        return
    shared_base(args.scratch)
    worker = [__file__, "serve", "--scratch", str(args.scratch)]
    pilot = spread_out(pilot_jobs(), worker, args.processes, args.scratch / "pilot.jsonl")
    lr = chosen_rate(pilot)
    print(f"learning rate {lr:g}", flush=True)
    if args.what == "pilot":
        return
    runs = spread_out(table_jobs(lr), worker, args.processes, args.scratch / "runs.jsonl")
    shown = ("lr", "method", "lag", "accuracy_after", "ess", "ratio_max")
    pilots = [{name: run[name] for name in shown} for run in pilot]
    setup = {
        "learning rate": lr,
        "accuracy_before": runs[0]["accuracy_before"],
        "updates": UPDATES,
        "prompts": BATCH,
        "samples": SAMPLES,
        "optimizer steps per update": MINIBATCHES,
        "max_tokens": MAX_TOKENS,
        "seeds": len(SEEDS),
    }
    result = {"setup": setup, **tables(runs), "order": findings(runs), "pilot": pilots}
    if args.keep:
        PICTURE.write_text(picture(result))
        lines = "".join(json.dumps(run) + "\n" for run in runs)
        (RESULTS / "offpolicy.jsonl").write_text(lines)
    publish("offpolicy", result, args.keep)


if __name__ == "__main__":
    main()
