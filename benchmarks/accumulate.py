"""Seconds per update at lag 0 with the batch whole and in parts, if responses have lognormal lengths.

    python benchmarks/accumulate.py [--keep] [--repeats N]

The trainer is real: AIPO's update of the small untrained model, in a process of its own. The generator is fake, so that
it takes no cores from the trainer, as on separate machines: it has room for `ROOM` groups at once, sleeps in proportion
to the tokens of a group's longest response, and returns random tokens. Runs with whole batches and in parts alternate;
the table has the median seconds between rows of `metrics.jsonl` after the first `WARM`, and what the simulator predicts
for the same lengths with the median seconds of the whole updates.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import exp
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch

from penstock.graph import Context, Policy, Program, Rewards, Rollouts, Weights, broadcast, load, node, program, trace
from penstock.graph.types import Prompts
from penstock.nodes.advantage import group_advantage
from penstock.nodes.fake import FakePrompts
from penstock.nodes.learn.update import aipo_update
from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.cluster.placement import Plan, place
from penstock.runtime.schedule.compile import Rules, Tables
from penstock.runtime.schedule.simulator import Durations, draw, simulate

SAMPLES, BATCH, UPDATES, WARM = 4, 16, 12, 2
PARTS = (0, 8, 4)
"""Groups per part; 0 is the whole batch."""
MEAN, SIGMA, LONGEST, TOKEN_S = 60.0, 1.0, 256, 0.005
ROOM = 4
VOCABULARY, PROMPT = 200, 4


def lengths(ordinal: int) -> list[int]:
    """Return the numbers of tokens of a group's responses: lognormal, keyed by the group."""
    normal = (NormalDist().inv_cdf(draw(f"{ordinal}/{sample}")) for sample in range(SAMPLES))
    return [max(1, min(LONGEST, round(MEAN * exp(SIGMA * x - SIGMA**2 / 2)))) for x in normal]


def seconds(ordinal: int) -> float:
    """Return the seconds in which a group is generated."""
    return max(lengths(ordinal)) * TOKEN_S


class SleepingEngine:
    """Generates up to `ROOM` groups at once, each for its own seconds, while the others wait in a queue."""

    def __init__(self) -> None:
        self.groups: dict[Any, tuple[float, int, int]] = {}
        self.waiting: deque[tuple[Any, int, int]] = deque()

    def submit(self, tag: Any, inputs: Mapping[str, Any]) -> None:
        self.waiting.append((tag, inputs["prompts"].ordinals[0], inputs["behaviour"].version))

    def step(self) -> Sequence[tuple[Any, Any]]:
        while self.waiting and len(self.groups) < ROOM:
            tag, ordinal, version = self.waiting.popleft()
            self.groups[tag] = time.monotonic() + seconds(ordinal), ordinal, version
        time.sleep(max(0.0, min(0.002, min(due for due, _, _ in self.groups.values()) - time.monotonic())))
        over = [tag for tag, (due, _, _) in self.groups.items() if due <= time.monotonic()]
        return [(tag, responses(*self.groups.pop(tag)[1:])) for tag in over]

    def busy(self) -> bool:
        return bool(self.groups or self.waiting)

    def reset(self) -> None:
        self.groups.clear()
        self.waiting.clear()


def responses(ordinal: int, version: int) -> Rollouts:
    count_N = torch.tensor(lengths(ordinal))
    width, numbers = int(count_N.max()), torch.Generator().manual_seed(ordinal)
    within_NT = torch.arange(width) < count_N[:, None]
    return Rollouts(
        ordinals=(ordinal,) * SAMPLES,
        prompts=("",) * SAMPLES,
        answers=("",) * SAMPLES,
        texts=("",) * SAMPLES,
        tokens_NS=torch.randint(VOCABULARY, (SAMPLES, PROMPT + width), generator=numbers),
        prompt_lengths_N=torch.full((SAMPLES,), PROMPT),
        response_lengths_N=count_N,
        logprobs_NT=torch.full((SAMPLES, width), -2.5) * within_NT,
        versions_NT=torch.full((SAMPLES, width), version) * within_NT,
        finished_N=torch.ones(SAMPLES, dtype=torch.bool),
    )


def make_engine(context: Context, **options: Any) -> SleepingEngine:
    return SleepingEngine()


@node(pool="generator", init=make_engine)
def sleep_and_say(
    engine: SleepingEngine, prompts: Prompts, behaviour: Weights, *, samples: int
) -> tuple[SleepingEngine, Rollouts]:
    raise AssertionError("a stream is not called")


@node(pool="scorer")
def toss(rollouts: Rollouts) -> Rewards:
    """1 or 0 at random: what is learnt does not matter."""
    numbers = torch.Generator().manual_seed(rollouts.ordinals[0])
    return Rewards(torch.randint(2, (len(rollouts),), generator=numbers).float())


@program
def tailed(policy: Policy, prompts: FakePrompts, *, accumulate: int = 0) -> Policy:
    """One update on responses of lognormal lengths, at lag 0."""
    rollouts = sleep_and_say(prompts, broadcast(policy), samples=SAMPLES)
    return aipo_update.accumulate(accumulate)(policy, rollouts, group_advantage(toss(rollouts)))


PROGRAM = f"{Path(__file__).resolve()}:tailed"


def measured(accumulate: int, folder: Path) -> tuple[list[float], list[float]]:
    """Run for real; return the seconds between rows, and the seconds of its updates."""
    # Text as data, for a model of bytes: the model of arithmetic has too short a context.
    texts = folder.with_suffix(".jsonl")
    texts.write_text('{"question": "one and one", "answer": "two"}\n')
    command = [sys.executable, "-m", "penstock.runtime.cli.main", "run", PROGRAM, "--out", str(folder), "--plain"]
    command += [
        "--data",
        str(texts),
        "--model",
        "new",
        "--updates",
        str(UPDATES),
        "--batch",
        str(BATCH),
        f"--accumulate={accumulate}",
    ]
    command += ["--max-tokens", str(LONGEST), "--eval-groups", "0"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(row["groups"] == BATCH for row in rows)
    return [row["seconds"] for row in rows[WARM:]], [row["update_s"] for row in rows[WARM:]]


def simulated(accumulate: int, update_s: float) -> float:
    """Simulate the run; return the median seconds between two updates."""
    made = load(PROGRAM)
    assert isinstance(made, Program)
    graph = trace(made, {"accumulate": accumulate})
    pools = place([graph], Cluster(hosts=(Host(name="local", cores=2),))).pools
    room = {"generator": ROOM, "scorer": BATCH, "trainer": 1}
    plan = Plan(tuple(replace(p, replicas=(replace(p.replicas[0], capacity=room[p.name]),)) for p in pools))
    own: Callable[[str, int], float] = lambda name, ordinal: seconds(ordinal)  # noqa: E731
    nodes: dict[str, Any] = {"sleep_and_say": own, "toss": 0.0, "group_advantage": 0.0, "aipo_update": update_s}
    ends = simulate(Tables(graph, plan), Rules(BATCH, UPDATES), Durations(nodes)).ends
    return statistics.median(later - before for before, later in zip(ends[WARM - 1 :], ends[WARM:], strict=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", action=Keep, help="write benchmarks/results/accumulate.json")
    args = parser.parse_args()
    found: dict[int, list[tuple[list[float], list[float]]]] = {parts: [] for parts in PARTS}
    with tempfile.TemporaryDirectory() as scratch:
        for repeat in range(args.repeats):
            for parts in PARTS:
                found[parts].append(measured(parts, Path(scratch) / f"{parts}-{repeat}"))
    update_s = statistics.median(took for _, each in found[0] for took in each)
    rows = []
    for parts, runs in found.items():
        medians = [statistics.median(periods) for periods, _ in runs]
        taken = statistics.median(took for _, each in runs for took in each)
        row = {"groups of a part": parts or BATCH, "period s": statistics.median(medians), "least": min(medians)}
        row |= {"most": max(medians), "update s": taken, "simulated s": simulated(parts, update_s)}
        rows.append({name: round(value, 3) for name, value in row.items()})
        print(rows[-1])
    lognormal = {"mean": MEAN, "sigma": SIGMA, "longest": LONGEST, "token_s": TOKEN_S, "at_once": ROOM}
    setup = {"samples": SAMPLES, "batch": BATCH, "updates": UPDATES, "repeats": args.repeats, "lengths": lognormal}
    publish("accumulate", {**setup, "rows": rows}, args.keep)


if __name__ == "__main__":
    from report import Keep, publish

    main()
