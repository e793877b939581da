"""Llama 3.1, as it lies on trainers and generators: for the benchmarks of resharding."""

from penstock.nodes.model.config import ModelConfig
from penstock.nodes.model.tensor_parallel import parameter_shapes, pipeline_stages, tensor_parallel
from penstock.runtime.tensor.layout import Layout, Mesh, sharded

MODELS = {
    "8B": ModelConfig(128256, 4096, 14336, 32, 32, 8, 128),
    "70B": ModelConfig(128256, 8192, 28672, 80, 64, 8, 128),
    "405B": ModelConfig(128256, 16384, 53248, 126, 128, 8, 128),
}


def layout(name: str, mesh: Mesh, wire: str = "bfloat16") -> Layout:
    """All matrices travel in `wire`, norms in bfloat16."""
    model = MODELS[name]
    tensors = [(n, s, wire if len(s) > 1 else "bfloat16") for n, s in parameter_shapes(model).items()]
    return sharded(tensors, mesh, tensor_parallel(model), pipeline_stages(model, mesh.extent("pp")))
