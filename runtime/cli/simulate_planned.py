"""A plan's schedule with the seconds of the cost model, for `penstock simulate --cluster …` and `--plan FILE`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from penstock.graph.ir import Graph
from penstock.runtime.cli.figures import figure, many, percent, seconds
from penstock.runtime.cli.flags import PlanFlags, Planning, SimulateFlags
from penstock.runtime.cli.labelled import assumed, labelled
from penstock.runtime.cli.planning import search
from penstock.runtime.cli.simulate_given import duration
from penstock.runtime.cli.simulate_text import depth_lines, lag_lines, pool_lines
from penstock.runtime.cli.traced import CommandError
from penstock.runtime.plan.assumptions import assumptions
from penstock.runtime.plan.roles_of import roles_of
from penstock.runtime.plan.simulated import Scene, Simulated
from penstock.runtime.plan.simulated_plan import Costed, read_costed
from penstock.runtime.schedule.durations import Duration, Lognormal
from penstock.runtime.schedule.simulation import Simulation

COLUMN = 8
"""Where the words begin."""
OTHERWISE = {"drop": "--kept says what its filters leave", "generators": "the plan says it"}
"""What stands for flags of given seconds in a plan."""
COMPARED = 24
"""Updates of each run that shows the effect of lag; no more than were asked for."""


@dataclass(frozen=True)
class Planned:
    """A schedule of a plan. `effect`: runs of at most `COMPARED` updates by lag; empty where shared GPUs leave it
    without any."""

    found: Simulated
    effect: Mapping[int, Simulation]

    @property
    def result(self) -> Simulation:
        return self.found.result

    @property
    def title(self) -> str:
        plan = self.found.scene.plan
        what = f"{self.found.scene.graph.name} with {plan.work.shape.name} on {plan.gpus} GPUs"
        return f"{what}: {len(self.result.ends)} updates of {plan.work.prompts} groups"

    def facts(self) -> Mapping[str, object]:
        plan, full = self.found.scene.plan, self.found.filling
        return {
            "program": self.found.scene.graph.name,
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
            "assumptions": list(assumptions(self.found.scene.roles, plan.work)),
            "slots": {field.name: getattr(full, field.name) for field in fields(full)},
            "effect_of_lag": [
                {"lag": lag, "period_s": result.steady_s, "gain": self._gain(result), "updates": len(result.ends),
                 "period_of": "steady updates" if result.steady else "all updates"}
                for lag, result in self.effect.items()
            ],
        }  # fmt: skip

    def lines(self, width: int) -> list[str]:
        found, plan, full = self.found, self.found.scene.plan, self.found.filling
        rates = f"{many(found.tokens_per_s)} tokens and {figure(found.groups_per_s)} groups per second"
        each = f", {many(found.tokens_per_s / plan.gpus)} tokens per second and GPU"
        occupied = f"{percent(full.occupancy)} of {full.slots} in use"
        tails = f"{percent(full.tail_occupancy)} in tails, which take {seconds(full.tail_s)}"
        return [
            f"{self.title}, {seconds(self.result.wall_s)} in all",
            "",
            *labelled(
                "period", f"{seconds(self.result.steady_s)} per update, {self._of()}; {self._against()}", width, COLUMN
            ),
            *labelled("rate", f"{rates}{each}", width, COLUMN),
            *assumed(assumptions(found.scene.roles, plan.work), width, COLUMN),
            *lag_lines(self.result.lags),
            *labelled("", f"the bound is {found.scene.lag}", width, COLUMN),
            *labelled("slots", f"{occupied}; {tails}", width, COLUMN),
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
        """The same figure as the period, of runs that may be shorter."""
        if not self.effect:
            return labelled("by lag", "all the same: the pools share GPUs and take turns", width, COLUMN)
        done = len(next(iter(self.effect.values())).ends)
        of = f" of runs of {done} updates, while that above is of {len(self.result.ends)}"
        head = f"the period{of if done < len(self.result.ends) else ''}; how much faster than at lag {min(self.effect)}"
        lines = labelled("by lag", head, width, COLUMN)
        for row, (lag, result) in enumerate(self.effect.items()):
            filling = "" if result.steady else "  the filling of the pipeline included"
            gain = f"{percent(self._gain(result)):>8}" if row else " " * 8
            lines.append(f"{lag:>10}  {seconds(result.steady_s):>8}  {gain}{filling}".rstrip())
        return lines

    def _gain(self, result: Simulation) -> float:
        """How much more is done in the same time than at the smallest lag."""
        return next(iter(self.effect.values())).steady_s / result.steady_s - 1


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
        why = OTHERWISE.get(contrary[0], "plans do not cover it")
        raise CommandError(f"{_flag(contrary[0])}: given with a plan; needed none, since {why}", 2)
    scene = _scene(graph, flags)
    effect = {} if scene.plan.shared else dict(scene.effect_of_lag(min(flags.updates, COMPARED)))
    return Planned(scene.run(flags.updates), effect)


def _scene(graph: Graph, flags: SimulateFlags) -> Scene:
    small = _small(graph, flags.duration)
    if flags.plan:
        return Scene(graph, _read(graph, flags.plan), flags.seed, small)
    return Scene(graph, search(graph, flags, flags.batch or PlanFlags().batch).costed, flags.seed, small)


def _read(graph: Graph, file: str) -> Costed:
    """The plan in a file. Raises PlanError for one of another program, CommandError for one of other work."""
    found, roles = read_costed(Path(file), graph.name), roles_of(graph)
    for name in ("samples", "epochs", "minibatches"):
        given, needed = getattr(found.work, name), getattr(roles, name)
        if given != needed:
            what = f"given a plan for {name} {given}, needed {needed}, as the program has"
            raise CommandError(f"--plan {file}: {what}", 2)
    return found


def _small(graph: Graph, given: tuple[str, ...]) -> dict[str, Duration]:
    """Seconds of nodes that the cost model has none for."""
    roles = roles_of(graph)
    costed = {*roles.cycle, *roles.learners, *roles.rereads, *roles.followers, *(node for node, _ in roles.baselines)}
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


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
