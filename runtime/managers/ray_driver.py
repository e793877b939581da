"""Ray's driver for a run: `python -m penstock.runtime.managers.ray_driver`, a child of the launcher.

`ray` describes its messages. It asks Ray for a placement group with a bundle on each node, of all its CPUs and GPUs,
and has an actor with an agent in each bundle. If an agent ends before the run, it reports that at once and starts
another one in the bundle, a limited number of times. Ray moves the bundle to another node if its own is gone.
"""

import json
import os
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

import ray
from ray.util import get_node_ip_address, placement_group_table
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from penstock.runtime.cluster.endpoints import own_address, resolved_endpoint, why_unreachable
from penstock.runtime.control.enrolment import HOSTNAME, ORDER, plain_name
from penstock.runtime.managers.ray_actor import AgentHolder

# Seconds for agents to end by themselves after their run has.
LEAVE_S = 5.0
# Seconds from an agent's end to the start of another one: a run that needs it has mostly ended by then.
AGAIN_S = 3.0
# Most starts in a row of an agent that lives no longer than `LIVED_S` seconds.
STARTS, LIVED_S = 3, 60.0
# Seconds that an agent waits for the launcher, which existed when the actor was started; less than `LIVED_S`.
WAIT_S = 30.0
# Seconds between two looks at the agents, and between two looks at the cluster's resources.
LOOK_S, STATE_S = 0.1, 1.0

Bundle = dict[str, float]


# Only for the launcher: Ray and its libraries print on the normal stdout, which becomes stderr.
LAUNCHER = os.fdopen(os.dup(1), "w")


def say(kind: str, **facts: object) -> None:
    print(json.dumps({"kind": kind, **facts}), file=LAUNCHER, flush=True)


@dataclass
class BundleAgent:
    """A bundle, by its number, and the agent in it. `ref` is the future of its actor, done when the agent has ended;
    `again` is the time to start another one."""

    number: int
    bundle: Bundle
    name: str = ""
    actor: Any = None
    ref: Any = None
    began: float = 0.0
    again: float = 0.0
    starts: int = 0


class Driver:
    def __init__(self, count: int | None) -> None:
        # Nodes without a CPU, as often Ray's head, take no actors.
        self.nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        self.places = [BundleAgent(number, bundle) for number, bundle in enumerate(bundles(self.nodes, count))]
        self.group: PlacementGroup | None = None
        self.ticket, self.folder = b"", ""
        self._ready = False
        self._state, self._stated = "", -inf

    def begin(self, ticket: str, folder: str) -> None:
        self.ticket, self.folder = ticket.encode(), folder
        self.group = placement_group([place.bundle for place in self.places], strategy="STRICT_SPREAD")
        self._tell_state()
        say("note", text=f"asked Ray for {spelled([place.bundle for place in self.places])}")

    def look(self) -> None:
        """Report what has changed since the last look, and start agents. Takes a moment."""
        assert self.group is not None
        now = monotonic()
        if not self._ready:
            table = placement_group_table(self.group)
            if table.get("state") == "CREATED":
                self._ready = True
                self._name(table["bundles_to_node_id"])
                self._change("")
            elif now - self._stated > STATE_S:
                self._tell_state()
            return
        for place in self.places:
            if place.ref is None and now >= place.again:
                self._start(place)
        refs = {place.ref: place for place in self.places if place.ref is not None}
        ended = ray.wait(list(refs), num_returns=len(refs), timeout=LOOK_S)[0] if refs else ()
        for ref in ended:
            self._end(refs[ref], ref)

    def close(self) -> None:
        """Free all resources of Ray. Agents have got the run's goodbye, and have some seconds to end."""
        refs = [place.ref for place in self.places if place.ref is not None]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=LEAVE_S)
        for place in self.places:
            if place.actor is not None:
                ray.kill(place.actor)
        if self.group is not None:
            remove_placement_group(self.group)

    def _start(self, place: BundleAgent) -> None:
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=place.number)
        kind = ray.remote(AgentHolder).options(
            num_cpus=place.bundle["CPU"],
            num_gpus=place.bundle.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=strategy,
        )
        place.actor, place.began, place.starts = kind.remote(), monotonic(), place.starts + 1
        # The ticket is an argument of a call, not of the constructor, whose arguments Ray keeps for restarts.
        environment = {HOSTNAME: place.name, ORDER: str(place.number)}
        place.ref = place.actor.run.remote(self.ticket, environment, self.folder, WAIT_S)

    def _end(self, place: BundleAgent, ref: Any) -> None:
        try:
            status, why = ray.get(ref)
        except ray.exceptions.RayError as error:
            status, why = 1, f"its actor of Ray died: {first_reason(str(error))}"
        ray.kill(place.actor)
        place.actor = place.ref = None
        lived = monotonic() - place.began
        place.starts = 0 if lived > LIVED_S else place.starts
        place.again = monotonic() + AGAIN_S if status and place.starts < STARTS else inf
        if status:  # 0: it got the run's goodbye
            say("ended", host=place.name, why=why)

    def _name(self, nodes: dict[int, str]) -> None:
        """Name the agents, by the host names of their nodes."""
        hosts = {node["NodeID"]: plain_name(node["NodeManagerHostname"]) for node in ray.nodes()}
        names: list[str] = []
        for place in self.places:
            host = hosts.get(nodes[place.number], "host")
            tried = (host if number == 1 else f"{host}-{number}" for number in range(1, len(self.places) + 1))
            place.name = next(name for name in tried if name not in names)
            names.append(place.name)
        say("names", names=names)

    def _tell_state(self) -> None:
        """Report what the group waits for, by resource."""
        self._stated = monotonic()
        asked = [place.bundle for place in self.places]
        nodes = [node for node in ray.nodes() if node["Alive"]]
        has, free = ray.cluster_resources(), ray.available_resources()
        lines = [f"the placement group is not ready: asked for {spelled(asked)}"]
        able = sum(any(fits(one, node["Resources"]) for one in asked) for node in nodes)
        lines.append(f"  nodes: asked for {len(asked)}, the cluster has {len(nodes)}, of which {able} are large enough")
        for resource in sorted({name for one in asked for name in one}):
            given = sum(one.get(resource, 0) for one in asked)
            found = f"the cluster has {has.get(resource, 0):g}, of which {free.get(resource, 0):g} are free"
            lines.append(f"  {resource}: asked for {given:g}, {found}")
        self._change("\n".join(lines))

    def _change(self, state: str) -> None:
        if state != self._state:
            self._state = state
            say("state", text=state)


def bundles(nodes: Sequence[dict[str, Any]], count: int | None) -> list[Bundle]:
    """A bundle of all resources of a node, for `count` nodes, the largest first; None: for all nodes. Bundles beyond
    the present nodes ask for as much as the largest one has: such nodes may still come."""
    shapes = [{name: float(int(node["Resources"].get(name, 0))) for name in ("GPU", "CPU")} for node in nodes]
    shapes.sort(key=lambda shape: (shape["GPU"], shape["CPU"]), reverse=True)
    wanted = len(shapes) if count is None else count
    shapes = shapes[:wanted] + (shapes[:1] or [{"CPU": 1.0}]) * (wanted - len(shapes))
    return [{name: amount for name, amount in shape.items() if amount} for shape in shapes]


def fits(bundle: Bundle, resources: dict[str, float]) -> bool:
    return all(resources.get(name, 0) >= amount for name, amount in bundle.items())


def spelled(asked: Sequence[Bundle]) -> str:
    texts = [", ".join(f"{amount:g} {name}" for name, amount in sorted(one.items())) for one in asked]
    counts = {text: texts.count(text) for text in texts}
    each = " and ".join(f"{number} × {{{text}}}" for text, number in counts.items())
    return f"{each}, each on a node of its own"


def first_reason(text: str) -> str:
    """The reason in an error of Ray, which lists facts about an actor, or ends with the exception that it raised."""
    raised = re.findall(r"(?m)^\w[\w.]*(?:Error|Exception): .*$", text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join([*lines[:1], *raised[-1:]])[:600]


def connect(where: str) -> str:
    """Connect to the cluster, and return the address at which it reaches this machine. Raises AddressError,
    ConnectionError, and Ray's errors."""
    endpoint = ""
    if re.fullmatch(r"(ray://)?.+:\d+/?", where):
        endpoint = resolved_endpoint(where.removeprefix("ray://").rstrip("/"))
        # Ray would try for half a minute or more, and not say what was wrong.
        if why := why_unreachable(endpoint):
            raise ConnectionError(why)
    # "auto" connects to an existing cluster, and never starts one in this process.
    ray.init(address=where, log_to_driver=False, logging_level="ERROR")
    return own_address(endpoint) if where.startswith("ray://") else str(get_node_ip_address())


def listen(lines: "SimpleQueue[bytes]") -> None:
    """Put each line of stdin into the queue, and b"" at its end. Runs in its own thread."""
    for line in sys.stdin.buffer:
        lines.put(line)
    lines.put(b"")


def main() -> None:
    os.dup2(2, 1)
    lines: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=listen, args=(lines,), daemon=True).start()
    asked = lines.get()
    if not asked:
        return
    where = os.environ.get("RAY_ADDRESS") or "auto"
    try:
        address = connect(where)
        driver = Driver(json.loads(asked)["agents"])
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        # ConnectionAbortedError: the process that the cluster starts for a `ray://` client has died (`ray.CONNECTS`).
        say("failed", text=str(error).strip(), again=isinstance(error, ConnectionAbortedError))
        return
    if not driver.places:
        say("failed", text="the cluster has no node with a CPU", again=False)
        return
    say("found", slots=len(driver.places), address=address)
    try:
        line = lines.get()
        if line:
            driver.begin(**json.loads(line))
        while line:
            driver.look()
            try:
                line = lines.get(timeout=LOOK_S / 2)
            except Empty:
                continue
    finally:
        driver.close()
        ray.shutdown()


if __name__ == "__main__":
    main()
