"""Checks that the interpreters of a plan's pools have what their ranks and engines import.

A pool may have an interpreter of its own, `[pools.generator] python = "…"`, with packages that conflict with those of
this one, such as an engine that needs another torch. Its ranks run this package's code, wherever that is installed,
with that interpreter's libraries.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from subprocess import TimeoutExpired

import msgspec

from penstock.graph.engines import ENGINES, OURS, EngineKind
from penstock.graph.errors import Fault
from penstock.graph.ir import Graph
from penstock.graph.protocols import described
from penstock.runtime.cluster.cluster import Cluster
from penstock.runtime.cluster.placement import Plan

# What a rank imports: package name and module name.
NEEDED = {
    "torch": "torch",
    "numpy": "numpy",
    "networkx": "networkx",
    "msgspec": "msgspec",
    "pyzmq": "zmq",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "huggingface-hub": "huggingface_hub",
    "jinja2": "jinja2",
    "pydantic": "pydantic",
    "psutil": "psutil",
}
OLDEST = (3, 11)


_PROBE = """
import json, sys
from importlib.util import find_spec
print(json.dumps([sys.version_info[:2], [name for name in sys.argv[1:] if find_spec(name) is None]]))
"""
# Python's version, and the missing modules.
_Answer = tuple[tuple[int, int], list[str]]
# Seconds to start an interpreter and look for modules; it imports none.
PROBE_S = 30.0


def engines_of(graphs: Sequence[Graph], plan: Plan, engine: str) -> dict[str, set[str]]:
    """The engines of each pool whose nodes have an option `engine`; the argument `engine` is the default of nodes
    without a value."""
    found: dict[str, set[str]] = {}
    for graph in graphs:
        for node in graph.nodes:
            if "engine" in (options := dict(node.options)):
                found.setdefault(plan.pool_of(node.name).name, set()).add(str(options["engine"] or engine))
    return found


def interpreter_lacks(graphs: Sequence[Graph], plan: Plan, cluster: Cluster, engine: str) -> Iterator[Fault]:
    """What the interpreters of pools on this machine lack, and meshes that an engine cannot have. Interpreters on other
    machines fail by themselves."""
    here = {host.name for host in cluster.hosts if host.agent == "local"}
    engines = engines_of(graphs, plan, engine)
    for pool in plan.pools:
        kinds = {name: ENGINES[name] for name in sorted(engines.get(pool.name, ())) if name in ENGINES}
        packages = [kind for kind in kinds.values() if kind.module]
        mesh = pool.replicas[0].mesh
        for name, kind in kinds.items():
            if other := {axis for axis, _ in mesh} - set(kind.axes):
                given = f"a mesh of {described(mesh)} for replicas of pool {pool.name}"
                needed = f"no axis {', '.join(sorted(other))}: more replicas (--generators), or --engine {OURS}"
                yield Fault("engine-cannot", f"--engine {name}", given, needed)
        if (pool.python or packages) and any(host in here for host, _ in pool.places):
            yield from _lacks(pool.name, pool.python, packages)


def _lacks(pool: str, python: str, packages: Sequence[EngineKind]) -> Iterator[Fault]:
    what, modules = f"pools.{pool}.python", [*NEEDED.values(), *(package.module for package in packages)]
    if python:
        command = [python, "-P", "-c", _PROBE, *modules]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PROBE_S)
            why = f"status {done.returncode}: {(done.stdout or done.stderr).strip()[-200:]!r}"
            version, missing = msgspec.json.decode(done.stdout, type=_Answer)
        except (OSError, TimeoutExpired, msgspec.DecodeError) as error:
            if not isinstance(error, msgspec.DecodeError):
                why = f"nothing within {PROBE_S:g} s" if isinstance(error, TimeoutExpired) else f"{error.strerror}"
            given = f"{python!r}, which does not answer as an interpreter ({why})"
            yield Fault("no-interpreter", what, given, "the path of a Python that can be started here")
            return
    else:
        version, missing = sys.version_info[:2], [name for name in modules if find_spec(name) is None]
    if tuple(version) < OLDEST:
        given, needed = f"{python!r}, of version {version[0]}.{version[1]}", f"{OLDEST[0]}.{OLDEST[1]} or later"
        yield Fault("no-interpreter", what, given, needed)
    elif lost := [package for package, module in NEEDED.items() if module in missing]:
        needed = f"what ranks import: {python} -m pip install {' '.join(lost)}"
        yield Fault("no-interpreter", what, f"{python!r}, without {', '.join(lost)}", needed)
    own = python or sys.executable
    for package in packages:
        if package.module in missing:
            what, given = f"the engine of pool {pool}", f"{own} without {package.module}"
            needed = f"{own} {package.install}, or an interpreter that has it: [pools.{pool}] python = … in --cluster"
            yield Fault("no-engine", what, given, needed)
