"""A plan's schedule with the seconds of the cost model, for `penstock simulate --cluster …` and `--plan FILE`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from textwrap import wrap
from typing import Any

from penstock.graph.ir import Graph
from penstock.runtime.cli.figures import figure, many, percent, seconds
from penstock.runtime.cli.flags import PlanFlags, Planning, SimulateFlags
from penstock.runtime.cli.plan import search
from penstock.runtime.cli.simulate_given import duration
from penstock.runtime.cli.simulate_text import depth_lines, lag_lines, pool_lines
from penstock.runtime.cli.traced import CommandError
from penstock.runtime.plan.roles import roles_of
from penstock.runtime.plan.simulated import Scene, Simulated
from penstock.runtime.plan.simulated_plan import read_costed
from penstock.runtime.schedule.durations import Duration, Lognormal
from penstock.runtime.schedule.simulator import Simulation

COMPARED = 24
"""Updates of each run that shows the effect of lag; no more than were asked for."""


@dataclass(frozen=True)
class Planned:
    """A schedule of a plan. `effect`: seconds per update by lag; empty where shared GPUs leave it without any."""

    found: Simulated
    effect: Mapping[int, float]

    @property
    def result(self) -> Simulation:
        return self.found.result

    @property
    def title(self) -> str:
        plan = self.found.scene.plan
        what = f"{plan.program} with {plan.work.shape.name} on {plan.gpus} GPUs"
        return f"{what}: {len(self.result.ends)} updates of {plan.work.prompts} groups"

    def facts(self) -> Mapping[str, object]:
        plan, full = self.found.scene.plan, self.found.filling
        return {
            "program": plan.program,
            "model": plan.work.shape.name,
            "gpus": plan.gpus,
            "updates": len(self.result.ends),
            "batch": plan.work.prompts,
            "lag": self.found.scene.lag,
            "period_s": self.result.steady_s,
            "period_of": "steady updates" if self.result.steady else "all updates",
            "planned_s": plan.period_s,
            "planned_lag": plan.lag,
            "planned_bound": plan.bound,
            "tokens_per_s": self.found.tokens_per_s,
            "tokens_per_s_per_gpu": self.found.tokens_per_s / plan.gpus,
            "groups_per_s": self.found.groups_per_s,
            "slots": {field.name: getattr(full, field.name) for field in fields(full)},
            "effect_of_lag": [
                {"lag": lag, "period_s": period, "gain": self._gain(period)} for lag, period in self.effect.items()
            ],
        }

    def lines(self, width: int) -> list[str]:
        found, plan, full = self.found, self.found.scene.plan, self.found.filling
        rates = f"{many(found.tokens_per_s)} tokens and {figure(found.groups_per_s)} groups per second"
        occupied = f"{percent(full.occupancy)} of {full.slots} in use"
        tails = f"{percent(full.tail_occupancy)} in tails, which take {seconds(full.tail_s)}"
        return [
            f"{self.title}, {seconds(self.result.wall_s)} in all",
            "",
            *_wrapped("period", f"{seconds(self.result.steady_s)} per update, {self._of()}; {self._against()}", width),
            *_wrapped("rate", f"{rates}, {many(found.tokens_per_s / plan.gpus)} tokens per second and GPU", width),
            *lag_lines(self.result.lags),
            *_wrapped("", f"the bound is {found.scene.lag}", width),
            *_wrapped("slots", f"{occupied}; {tails}", width),
            *depth_lines(self.result),
            *pool_lines(self.result, width),
            *self._effects(width),
        ]

    def _of(self) -> str:
        return "once the pipeline is full" if self.result.steady else f"the mean of all {len(self.result.ends)}"

    def _against(self) -> str:
        """What the planner says, where it speaks of the same lag."""
        plan, scene = self.found.scene.plan, self.found.scene
        if not plan.shared and plan.lag != scene.lag:
            return f"the plan is for lag {plan.lag}"
        above = 1 - plan.period_s / self.result.steady_s
        return f"the planner says {seconds(plan.period_s)}, {percent(abs(above))} {'less' if above >= 0 else 'more'}"

    def _effects(self, width: int) -> list[str]:
        if not self.effect:
            return _wrapped("by lag", "all the same: the pools share GPUs and take turns", width)
        return [
            f"{'by lag' if not row else '':<8}{lag:>2}  {seconds(period):>8}  {percent(self._gain(period)):>8} faster"
            for row, (lag, period) in enumerate(self.effect.items())
        ]

    def _gain(self, period: float) -> float:
        """How much more is done in the same time than at the smallest lag."""
        return next(iter(self.effect.values())) / period - 1


def planned(graph: Graph, flags: SimulateFlags) -> Planned | None:
    """None where the flags ask for no plan. Raises CommandError for flags that contradict each other, and what planning
    raises."""
    said = _said(flags)
    if not (flags.cluster or flags.plan):
        if said := [name for name in said if name != "slots"]:
            raise CommandError(f"{_flag(said[0])}: given without a plan; needed --cluster with it, or none of both", 2)
        return None
    others = ("drop", "again", "generators", "versions")
    if said and flags.plan:
        raise CommandError(f"{_flag(said[0])}: given beside --plan, which says it; needed one of both", 2)
    if contrary := [name for name in others if getattr(flags, name) != _default(name)]:
        raise CommandError(f"{_flag(contrary[0])}: given with a plan; needed none, since plans do not cover it", 2)
    if flags.plan:
        plan = read_costed(Path(flags.plan), graph.name)
    else:
        plan = search(graph, flags, flags.batch or _batch()).costed
    scene = Scene(graph, plan, flags.seed, _small(graph, flags.duration))
    effect = {} if plan.shared else dict(scene.effect_of_lag(min(flags.updates, COMPARED)))
    return Planned(scene.run(flags.updates), effect)


def _small(graph: Graph, given: tuple[str, ...]) -> dict[str, Duration]:
    """Seconds of nodes that the cost model has none for."""
    costed = roles_of(graph).cycle
    names = [node.name for node in graph.nodes if node.fires and node.name not in costed]
    found = (duration(word, names) for word in given)
    return {name: Lognormal(mean, sigma) if sigma else mean for name, mean, sigma in found}


def _said(flags: SimulateFlags) -> list[str]:
    """The flags of a plan that are not as they are by default."""
    names = [field.name for field in fields(Planning)] + ["batch"]
    planning = [name for name in names if getattr(flags, name) != _default(name)]
    return [name for name in planning if name != "batch" or flags.plan]


def _default(name: str) -> Any:
    return getattr(SimulateFlags(), name)


def _batch() -> int:
    return PlanFlags().batch


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _wrapped(label: str, words: str, width: int) -> list[str]:
    return wrap(words, width, initial_indent=f"{label:<8}", subsequent_indent=" " * 8)
