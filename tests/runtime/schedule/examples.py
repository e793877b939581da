"""Short runs for examples: ranks answer in the order in which they were asked, unless a test says so."""

from collections.abc import Callable, Sequence
from random import Random

from penstock.graph.ir import Firing, Graph
from penstock.runtime.schedule.compile import Rules
from penstock.runtime.schedule.events import Begin, Command, Finish, Fire, Publish

from .graphs import place
from .world import Setting, World


def world(
    graph: Graph,
    rules: Rules,
    replicas: int = 1,
    capacity: int = 4,
    ranks: int = 1,
    drops: dict[str, float] | None = None,
) -> World:
    plan = place(graph, {"generator": replicas}, {"generator": capacity}, ranks)
    return World(Setting(graph, plan, rules, {}, drops or {}))


def begun(graph: Graph, rules: Rules, capacity: int = 4) -> World:
    made = world(graph, rules, capacity=capacity)
    made.feed(Begin())
    return made


def run_until(world: World, until: Callable[[Command], bool], but: Sequence[str] = ()) -> Command:
    """Answers in order, those that name one of `but` kept back, until a command."""
    while True:
        index = next(i for i, event in enumerate(world.pending) if not any(name in str(event) for name in but))
        if found := [command for command in world.step(index) if until(command)]:
            return found[0]


def exhaust(world: World, but: str) -> None:
    """Answers in order until only those that name `but` are left."""
    while others := [i for i, event in enumerate(world.pending) if but not in str(event)]:
        world.step(others[0])


def finish(world: World) -> Finish:
    """Answers in order until the end."""
    world.run(Random(0))
    assert world.finish is not None
    return world.finish


def fired(world: World, node: str) -> list[Fire]:
    return [c for told in world.told for c in told if isinstance(c, Fire) and c.firing.node == node]


def published(world: World, channel: str) -> list[int]:
    """The versions that a channel was told to publish."""
    return [c.version for told in world.told for c in told if isinstance(c, Publish) and c.channel == channel]


def is_fire(node: str, index: int) -> Callable[[Command], bool]:
    return lambda command: isinstance(command, Fire) and command.firing == Firing(node, index)


def versions(world: World) -> dict[int, int]:
    """The version that each consumed group was started with."""
    return {ordinal: v for (ordinal, node, *_), v in world.checker.books.versions.items() if node == "generate"}
