"""Whether the models of a program fit on the meshes that its pools were given, before any rank is there.

Needs torch, so the command line asks a child (see `try_inputs`).
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from penstock.graph import load
from penstock.graph.ir import Graph
from penstock.graph.requirement import opened
from penstock.graph.sharding import num_ranks
from penstock.graph.types import Context
from penstock.runtime.control.run_config import RunOptions, context_of
from penstock.runtime.plan.cluster import ClusterError
from penstock.runtime.plan.meshes import read_meshes, spelled

CHECK_MESH = "penstock.nodes.parallel.fits:check_mesh"


def check_meshes(graphs: Sequence[Graph], flags: RunOptions) -> None:
    """Raises ClusterError for a pool's mesh on which a model of that pool does not fit, with given and needed.

    A model is known where its maker says which it opens (`opens`). Of others, their ranks say what they lack.
    """
    meshes = {pool: axes for pool, axes in read_meshes(flags.mesh).items() if num_ranks(axes) > 1}
    for pool, spec, decodes in _models(graphs, flags, meshes):
        try:
            load(CHECK_MESH)(spec, meshes[pool], decodes=decodes)
        except ValueError as error:
            raise ClusterError(f"--mesh {pool}={spelled(meshes[pool])}: {error}") from error


def _models(graphs: Sequence[Graph], flags: RunOptions, pools: Collection[str]) -> Iterator[tuple[str, Any, bool]]:
    """The pool, of those given, and the spec of each model that is known, and whether it decodes there: the carried
    values, and what streams compute with the weights of."""
    for graph in graphs:
        for argument in graph.carried:
            if argument.pool in pools and (found := opened(argument.maker)):
                yield argument.pool, found[0](context_of(argument.name, graphs, flags, Context())), False
        for node in graph.nodes:
            if not node.stream or node.pool not in pools:
                continue
            for origin in context_of(node.name, graphs, flags, Context()).weights.values():
                if found := opened(origin.maker):
                    yield node.pool, found[0](origin.context), True
