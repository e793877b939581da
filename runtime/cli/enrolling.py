"""A run on agents that enrol (`--on`): its desk, the manager that starts the agents, and the resulting hosts."""

import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from penstock.graph.ir import Graph
from penstock.runtime.cli.flags import AgentsFlags
from penstock.runtime.cli.tracing import CommandError
from penstock.runtime.cluster.cluster import Cluster, explain
from penstock.runtime.cluster.endpoints import LOOPBACK, AddressError, resolved, tcp_endpoint
from penstock.runtime.control.agents import Agents
from penstock.runtime.control.desk import Desk, EnrolmentError
from penstock.runtime.control.listener import WireError
from penstock.runtime.control.run_config import RunOptions
from penstock.runtime.control.security import DeskKeys
from penstock.runtime.record.errors import visible
from penstock.runtime.record.folder import RunFolder

if TYPE_CHECKING:
    from penstock.runtime.plan.run_plan import RunPlan

# By default, all agents but the first have replicas of this pool.
GENERATOR = "generator"
# The classes of `Agents`, by the word of --on. Each is imported when it is needed.
MANAGERS = {
    "agents": "control.agents:ExternalAgents",
    "ray": "managers.ray:RayAgents",
    "slurm": "managers.slurm:SlurmAgents",
}


@dataclass
class Enrolled:
    """The enrolled agents: the `desk` where they wait, the manager that started them (`agents`), and the `cluster` of
    their hosts. `again`: a run that loses a process restarts by itself, and then needs them again; `goes_on`: this is
    happening now."""

    desk: Desk
    agents: Agents
    bind: str
    cluster: Cluster | None = None
    reason: str = "the run was stopped before it began"
    over: bool = False
    again: bool = False
    goes_on: bool = False

    def await_agents(self, seconds: float, total: int = 0, fewest: int = 0) -> Cluster:
        """Wait for the agents. Returns their hosts, and reserved hosts for later agents up to `total`. With `fewest`,
        the run goes on with that many after a while. Raises CommandError if they do not come in time."""
        try:
            came = self.desk.wait(self.agents.slots, seconds, self.agents.poll, tell, fewest=fewest)
        except EnrolmentError as error:
            self.reason = "not all agents joined in time"
            raise CommandError("\n".join(filter(None, [str(error), self.agents.lacking()])), 1) from None
        if came < total:
            self.desk.reserve(total - came)
        self.cluster = self.desk.cluster(self.bind)
        return self.cluster


def tell(text: str) -> None:
    with suppress(OSError):  # the pipe or terminal may be closed
        print(visible(f"penstock: {text}"), file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Need:
    """How many agents a run needs: to begin, and in total. `why` says what for, `fewer` what would need fewer."""

    first: int
    total: int
    why: str
    fewer: str


def needed_agents(flags: AgentsFlags, options: RunOptions, plan: "RunPlan | None" = None) -> Need | None:
    """The agents that a run needs by its --plan, its range of generators, or --place; None if any number will do.
    Raises CommandError for an invalid --place."""
    if plan is not None:
        hosts = plan.num_hosts
        fewer = f"a plan for fewer hosts (it was made for --cluster {plan.source})"
        return Need(hosts, hosts, f"the hosts of --plan {getattr(flags, 'plan', '')}", fewer)
    places = [_place(word) for word in flags.place]
    numbers = [number for _, given in places for number in given]
    first, most = options.first_generators, options.generators
    if first and not numbers:
        why = f"--generators {first}..{most}: one for the other pools, and one for each of the first generators"
        return Need(first + 1, most + 1, why, "a range that begins with fewer")
    if not numbers:
        return None
    # The agents that may be late have the highest numbers.
    own = {number for pool, given in places if pool == GENERATOR for number in given}
    late = max(0, len(own) - first) if first else 0
    count = max(numbers) + 1
    return Need(count - late, count, f"--place {' '.join(flags.place)}", "other numbers in --place")


@contextmanager
def enrolment(flags: AgentsFlags, folder: RunFolder, name: str, need: Need | None = None) -> Iterator[Enrolled]:
    """Open the desk of a run in `folder`, and start its agents; both end with the context. `name` is the job's. Raises
    CommandError for invalid flags or too few agents, and AgentsError."""
    module, _, attribute = MANAGERS[flags.on].partition(":")
    count = flags.agents or (need.first if need is not None and flags.on == "agents" else None)
    agents: Agents = getattr(importlib.import_module(f"penstock.runtime.{module}"), attribute)(count)
    with ExitStack() as stack:
        stack.callback(agents.stop)
        if need is not None and agents.slots < need.first:
            plural = "s" * (agents.slots > 1)
            given = f"given {agents.slots} agent{plural}, needed {need.first} for {need.why}"
            raise CommandError(f"--on {flags.on}: {given} (--agents {need.first}); or {need.fewer}")
        keys = DeskKeys.read(Path(flags.ticket_keys)) if flags.ticket_keys else DeskKeys.make(name)
        port = 0
        if not flags.bind:
            host = agents.address or LOOPBACK
        else:
            try:
                host, _, given = tcp_endpoint(flags.bind).removeprefix("tcp://").rpartition(":")
            except ValueError as error:
                raise CommandError(f"--bind: {error}") from None
            port = int(given)
        try:
            ip = resolved(host)
            desk = Desk(keys, f"{ip}:{port}", folder.path, host, agents.slots)
        except AddressError as error:
            raise CommandError(f"--bind: {error}" if flags.bind else str(error)) from None
        except WireError as error:
            raise CommandError(str(error.strerror)) from None
        # The controller has the port after the desk's, so that a firewall needs to open only these two.
        found = Enrolled(desk, agents, f"{ip}:{port + 1 if port else 0}")
        stack.callback(lambda: desk.close(found.reason, over=found.over, again=found.goes_on))
        try:
            agents.start(folder.path / "ticket.json", tell)
            yield found
        except BaseException as error:
            if isinstance(error, CommandError | ValueError):
                found.reason = f"the run was refused: {error}"
            raise


def agents_words(flags: AgentsFlags) -> list[str]:
    """The words of a command line about agents: a command that goes on with the run must repeat them."""
    words = []
    for name in ("on", "agents", "bind", "ticket_keys", "place"):
        if value := getattr(flags, name):
            given = value if isinstance(value, tuple) else (value,)
            words += [f"--{name.replace('_', '-')}", *map(str, given)]
    return words


def check_agents(flags: AgentsFlags, cluster: str) -> None:
    """Raises CommandError for flags about agents without --on, and for --on with flags that contradict it."""
    given = {"--agents": flags.agents, "--bind": flags.bind, "--ticket-keys": flags.ticket_keys, "--place": flags.place}
    for flag, value in given.items():
        if value and not flags.on:
            raise CommandError(f"given {flag} without --on, needed who starts the agents (--on agents)")
    if flags.on and cluster:
        raise CommandError("given --on and --cluster, needed one of them: agents say what their hosts have")
    if flags.on and flags.in_process:
        raise CommandError("given --on and --in-process, needed one of them")


def placed(
    place: Sequence[str], graph: Graph | None, cluster: Cluster, generators: int | None
) -> tuple[Cluster, dict[str, Any]]:
    """The cluster with its pools placed by --place, and the options that follow. By default the first agent has all
    pools but the generator, and each other agent has a replica of it, up to `generators` replicas. Raises
    CommandError."""
    names = [host.name for host in cluster.hosts]
    pools: dict[str, tuple[str, ...]] = {}
    for word in place:
        pool, numbers = _place(word)
        if wrong := [number for number in numbers if number >= len(names)]:
            needed = f"needed 0 to {len(names) - 1}, or more agents (--agents {max(wrong) + 1} is the fewest)"
            raise CommandError(f"--place {word}: given agent {wrong[0]} of {len(names)}, {needed}")
        pools[pool] = tuple(names[number] for number in dict.fromkeys(numbers))
    options: dict[str, Any] = {}
    if not pools and len(names) > 1 and graph is not None and GENERATOR in graph.pools():
        # With more hosts than replicas, a replica would be placed on several hosts.
        pools[GENERATOR] = tuple(names[1:][:generators])
        options["generators"] = generators or len(names) - 1
    try:
        return Cluster.model_validate({**cluster.model_dump(), "pools": pools}), options
    except ValidationError as error:
        raise CommandError(explain(error, "--place")) from None


def _place(word: str) -> tuple[str, list[int]]:
    """Parse a word of --place: a pool and the numbers of its agents. Raises CommandError."""
    pool, equals, said = word.partition("=")
    numbers: list[int] = []
    for part in said.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        own = range(int(match[1]), int(match[2] or match[1]) + 1) if match else ()
        if not (pool and equals and own):
            raise CommandError(f"--place: given {word!r}, needed POOL=NUMBERS, such as generator=1-3,5")
        numbers += own
    return pool, numbers
