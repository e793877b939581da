"""Seconds of an update if responses have lognormal lengths: in order, as they are ready, in segments, and both.

    python benchmarks/partial.py [--repeats 3] [--updates 20] [--keep] [--tiny]

Real runs of AIPO with the real engine, with one generator and one trainer in separate processes. The model is untrained
and would not end its responses, so a group's responses end after a number of tokens that is drawn from its ordinal, the
same in all runs. The model is small, and each step of the engine waits until PACE_S have passed, as for a GPU, so that
other load on a shared machine affects the figures less. `room` is the share of the groups that the lag allows in flight
that have slots: all, or a third. All cases take turns; a gain compares runs of one round.

`simulated` is the scheduler on a virtual clock: the seconds of a group or segment are its tokens times the engine's
mean step; scoring, updates and weight syncs take as long as in the run in order.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, exp
from pathlib import Path
from statistics import NormalDist, fmean, median
from time import perf_counter, sleep
from typing import Any

import numpy as np
from report import Keep, publish, spread
from train import write_model

from penstock.graph import broadcast, node, program
from penstock.graph.context import Context
from penstock.graph.node import Paused
from penstock.graph.types import Metrics, Policy, Prompts, Rollouts, Weights
from penstock.nodes.advantage import group_advantage
from penstock.nodes.generate.conversation import SampledGroup
from penstock.nodes.generate.engine import Engine
from penstock.nodes.generate.sampling import Sampler
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.score import math_answer, score
from penstock.runtime.control.run_config import RunConfig
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.record.metrics import read_rows
from penstock.runtime.report.run_history import read_facts
from penstock.runtime.report.what_if import fit, with_replicas
from penstock.runtime.schedule.compile import Tables
from penstock.runtime.schedule.simulator import draw, simulate

BATCH, SAMPLES, SEGMENT, MOST = 8, 4, 32, 256
MEAN, SIGMA = 32.0, 1.0
"""Tokens of a group's responses, and the spread of their logarithm."""
WIDTH, LAYERS, PROMPT_TOKENS, PACE_S = 64, 2, 24, 0.02
LAGS = (1, 2)
ROOMS = {"all": 1.0, "a third": 1 / 3}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "strict": {},
    "ready": {"order": "ready"},
    "segments": {"segment": SEGMENT},
    "both": {"order": "ready", "segment": SEGMENT},
}
Case = tuple[int, str, str]
# If all groups have room, the scheduler has no choice to make, so segments are left out.
CASES: Sequence[Case] = [
    (lag, room, name)
    for lag in LAGS
    for room in ROOMS
    for name in VARIANTS
    if room != "all" or "segment" not in VARIANTS[name]
]


WORK = {"batch": BATCH, "samples": SAMPLES, "segment": SEGMENT, "mean": MEAN, "sigma": SIGMA, "most": MOST}
WORK |= {"pace_s": PACE_S}


def length(ordinal: int) -> int:
    """Return the number of tokens of each response of a group."""
    drawn = MEAN * exp(SIGMA * NormalDist().inv_cdf(draw(f"group/{ordinal}")) - SIGMA**2 / 2)
    return min(MOST, max(1, round(drawn)))


def slots(lag: int, room: str) -> int:
    return ceil((lag + 1) * BATCH * ROOMS[room]) * SAMPLES


class DrawnLengths(Engine):
    """An engine whose rows end after `length` tokens. The metric `step_s` is the mean seconds of its steps so far."""

    def __init__(self, context: Context, *, samples: int) -> None:
        super().__init__(context, Sampler(1.0, 0, 1.0), samples, segment=context.segment)
        self.spent, self.steps = 0.0, 0
        slots, stop, other = self.slots, 0, 5
        take, record, wanted = slots.take, slots.record, np.zeros(len(self.slots.live), dtype=np.int64)
        slots.stops[:] = False
        slots.stops[stop] = True

        def taken(holder: Any, prefix: Sequence[int], said: int = 0) -> int:
            slot = take(holder, prefix, said)
            wanted[slot] = length(holder.key[0])
            return slot

        def recorded(sampling: Any, *found: Any) -> None:
            record(sampling, *found)
            for slot in np.flatnonzero(sampling):
                last = slots.lengths[slot] - 1
                if last + 1 - slots.begins[slot] >= wanted[slot]:
                    slots.tokens[slot, last] = stop
                elif slots.tokens[slot, last] == stop:
                    slots.tokens[slot, last] = other

        slots.take, slots.record = taken, recorded  # type: ignore[method-assign, assignment]

    def step(self) -> Sequence[tuple[Any, Any]]:
        began = perf_counter()
        made = super().step()
        sleep(max(0.0, PACE_S - (perf_counter() - began)))
        self.spent, self.steps = self.spent + perf_counter() - began, self.steps + 1
        return made

    def result(self, group: SampledGroup) -> Any:
        made = super().result(group)
        return made if isinstance(made, Paused) else (made[0], made[1] | {"step_s": self.spent / self.steps})


def make_drawn(context: Context, *, samples: int = SAMPLES) -> DrawnLengths:
    return DrawnLengths(context, samples=samples)


@node(pool="generator", init=make_drawn)
def generate_drawn(
    engine: DrawnLengths, prompts: Prompts, behaviour: Weights, *, samples: int = SAMPLES
) -> tuple[DrawnLengths, Rollouts, Metrics]:
    """`samples` responses to each prompt, of drawn lengths. A run uses the engine's stream instead."""
    raise NotImplementedError


@program
def drawn(policy: Policy, prompts: Prompts, *, lag: int = 1) -> Policy:
    """AIPO on responses of drawn lengths."""
    rollouts = generate_drawn(prompts, broadcast(policy, lag=lag), samples=SAMPLES)
    advantage = group_advantage(score(rollouts, by=math_answer))
    return aipo_update(policy, rollouts, advantage, lr=1e-6)


def run(model: Path, case: Case, updates: int, folder: Path) -> RunFolder:
    lag, room, variant = case
    command = [sys.executable, "-m", "penstock.runtime.cli.main", "run", f"{__file__}:drawn", "--plain"]
    command += [f"--lag={lag}", "--model", str(model), "--eval-groups=0", f"--batch={BATCH}", f"--max-tokens={MOST}"]
    command += [f"--updates={updates}", f"--slots={slots(lag, room)}", "--checkpoint-every=100000"]
    command += [f"--{name}={value}" for name, value in VARIANTS[variant].items()] + ["--out", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=900)
    return RunFolder.open(folder)


def steady(ends: Sequence[float]) -> float:
    """Return seconds per update without the first quarter, in which the pipeline fills and processes warm up."""
    first = len(ends) // 4
    return (ends[-1] - ends[first]) / (len(ends) - 1 - first)


def simulated(folder: RunFolder, case: Case) -> float:
    """Simulate a case with the durations of the run in `folder`; return seconds per update."""
    config, (lag, room, variant) = RunConfig.load(folder), case
    (stage,) = read_facts(folder).training
    fitted = fit(stage)
    assert fitted is not None
    step_s = median(row["step_s"] for row in read_rows(folder.metrics))
    nodes = {**fitted.durations.nodes, "generate_drawn": lambda node, index: step_s * (1 + length(index))}
    piece = VARIANTS[variant].get("segment", 0)
    segments = {"generate_drawn": piece * step_s} if piece else {}
    rules = replace(config.rules(0), order=VARIANTS[variant].get("order", "strict"))
    plan = with_replicas(config.plan, "generator", capacity=slots(lag, room) // SAMPLES)
    durations = replace(fitted.durations, nodes=nodes, segments=segments)
    return steady(simulate(Tables(config.graph, plan), rules, durations, verdicts=fitted.verdicts).ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--keep", action=Keep, help="write benchmarks/results/partial.json")
    parser.add_argument("--tiny", action="store_true", help="one short run of two cases: that it runs")
    args = parser.parse_args()
    cases = list(CASES)
    if args.tiny:
        args.repeats, args.updates, cases = 1, 6, [(1, "a third", "strict"), (1, "a third", "both")]
    found: dict[Case, list[dict[str, float]]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        write_model(model, WIDTH, LAYERS, positions=PROMPT_TOKENS + MOST)
        for repeat in range(args.repeats):
            # Every other round runs in reverse order, so that a machine that slows down affects all cases equally.
            for case in cases if repeat % 2 == 0 else cases[::-1]:
                folder = run(model, case, args.updates, Path(scratch) / f"{cases.index(case)}-{repeat}")
                late = (rows := read_rows(folder.metrics))[len(rows) // 4 :]
                figures = {
                    "real": steady([row["time_s"] for row in rows]),
                    "lag_mean": fmean(row["lag_mean"] for row in late),
                    "tokens": fmean(row["tokens"] for row in late),
                    "step_s": median(row["step_s"] for row in late),
                    "update_s": median(row["update_s"] for row in late),
                }
                found[case].append(figures)
                print(f"{case}: {json.dumps(figures)}", flush=True)
            for case in cases:
                strict = RunFolder.open(Path(scratch) / f"{cases.index((*case[:2], 'strict'))}-{repeat}")
                found[case][-1]["simulated"] = simulated(strict, case)
            publish("partial", {**WORK, "updates": args.updates, "rows": table(found)}, args.keep)


def table(found: Mapping[Case, Sequence[Mapping[str, float]]]) -> list[dict[str, Any]]:
    """Return a row for each case, with all rounds so far."""
    rows = []
    for case, own in found.items():
        strict = found[*case[:2], "strict"]
        gains = {
            kind: [one[kind] / other[kind] for one, other in zip(strict, own, strict=True)]
            for kind in ("real", "simulated")
        }
        rows.append(
            {
                **dict(zip(("lag", "room", "variant"), case, strict=True)),
                "seconds": spread([one["real"] for one in own]),
                "simulated_s": median(one["simulated"] for one in own),
                "gain": spread(gains["real"]),
                "simulated_gain": median(gains["simulated"]),
                **{name: median(one[name] for one in own) for name in ("lag_mean", "tokens", "step_s", "update_s")},
            }
        )
    return rows


if __name__ == "__main__":
    main()
