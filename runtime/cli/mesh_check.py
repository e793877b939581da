"""Whether the models of a program fit on the meshes that its pools were given, before any rank is there.

Needs torch, so the command line asks a child (see `try_inputs`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from penstock.graph import load
from penstock.graph.ir import Argument, Graph
from penstock.graph.sharding import num_ranks
from penstock.graph.types import Context
from penstock.runtime.control.config import Flags
from penstock.runtime.plan.cluster import ClusterError
from penstock.runtime.plan.meshes import read_meshes, spelled

CHECK_MESH = "penstock.nodes.parallel.fits:check_mesh"
GENERATE = "penstock.nodes.generate:generate"
MODELS: Mapping[str, str] = {
    "penstock.nodes.policy:make_policy": "",
    "penstock.nodes.policy:make_reference": "",
    "penstock.nodes.average:make_average": "",
    "penstock.nodes.critic:make_critic": "",
    "penstock.nodes.reward_model:make_preference_model": "",
    "penstock.nodes.reward_model:open_reward_model": "reward_model",
    "penstock.nodes.distillation:open_teacher": "teacher_model",
}
"""Who makes models that several ranks may hold, and of which option's directory; "" for that of `--model`."""


def check_meshes(graphs: Sequence[Graph], flags: Flags) -> None:
    """Raises ClusterError for a pool's mesh on which a model of that pool does not fit, with given and needed.

    A user's own models are not looked at: their ranks say what they lack.
    """
    meshes = {pool: axes for pool, axes in read_meshes(flags.mesh).items() if num_ranks(axes) > 1}
    for graph in graphs if meshes else ():
        for pool, context, decodes in _held(graph, flags):
            if pool not in meshes:
                continue
            try:
                load(CHECK_MESH)(replace(context, mesh=meshes[pool]), decodes=decodes)
            except ValueError as error:
                raise ClusterError(f"--mesh {pool}={spelled(meshes[pool])}: {error}") from error


def _held(graph: Graph, flags: Flags) -> Iterator[tuple[str, Context, bool]]:
    """The pool of each model that is known here, what it is opened with, and whether it decodes there."""
    base = Context(model=flags.model, data=flags.data)
    for argument in graph.carried:
        context = replace(base, model=_folder(argument, graph, flags))
        if argument.maker in MODELS and (context.model or not MODELS[argument.maker]):
            yield argument.pool, context, False
    for node in graph.nodes:
        if node.op == GENERATE:
            yield node.pool, base, True


def _folder(argument: Argument, graph: Graph, flags: Flags) -> str:
    option = MODELS.get(argument.maker)
    return str(dict(graph.options).get(option) or "") if option else flags.model
