"""Whether a model can be cut as a mesh wants it, told from shapes alone, before any rank is there."""

from penstock.graph.sharding import STAGE, TENSOR, Axes
from penstock.nodes.base import ModelSpec
from penstock.nodes.model import ModelConfig, ModelError
from penstock.nodes.model.parallel import check_tensor_parallel, part_config, pipeline_stages
from penstock.nodes.parallel.ranks import Ranks


def check_mesh(spec: ModelSpec, mesh: Axes, *, decodes: bool = False) -> None:
    """Raises ModelError, with what was given and is needed, for a mesh on which a model does not fit: to be decoded
    with, or else to be held by ranks that train or read it."""
    check = check_decoding if decodes else check_shards
    check(spec.config, Ranks(mesh).mesh)


def check_shards(config: ModelConfig, mesh: Axes) -> None:
    """For `Shards`: any number of shards and copies, but heads that "tp" divides, and a layer for each stage."""
    sizes = dict(mesh)
    if (parts := sizes.get(TENSOR, 1)) > 1:
        check_tensor_parallel(config, parts, shared_heads=False)
    if (stages := sizes.get(STAGE, 1)) > 1:
        check_stages(config, stages)


def check_stages(config: ModelConfig, stages: int) -> None:
    """Of a pipeline."""
    if config.tie_word_embeddings:
        raise ModelError(f"given tied embeddings over {stages} stages, needed a head of its own or one stage")
    pipeline_stages(config, stages)


def check_decoding(config: ModelConfig, mesh: Axes) -> None:
    """For a generator's parts."""
    ranks = Ranks(mesh)
    if ranks.count > ranks.size(TENSOR):
        needed = f"the axis {TENSOR} alone: replicas are more of its pool"
        raise ModelError(f"generate: given a mesh of {ranks}, needed {needed}")
    if ranks.count > 1:
        part_config(config, ranks.count, 0)
