"""The layouts of Llama 3.1 on trainers and generators, for the benchmarks of resharding."""

from penstock.nodes.model import CausalLM, ModelConfig
from penstock.nodes.model.tensor_parallel import stages_of, tensor_parallel
from penstock.runtime.tensor.layout import Layout, Mesh, sharded

MODELS = {
    "8B": ModelConfig(128256, 4096, 14336, 32, 32, 8, 128),
    "70B": ModelConfig(128256, 8192, 28672, 80, 64, 8, 128),
    "405B": ModelConfig(128256, 16384, 53248, 126, 128, 8, 128),
}


def layout(name: str, mesh: Mesh, wire: str = "bfloat16") -> Layout:
    """Return the layout on `mesh`, with all matrices sent in `wire` and norms in bfloat16."""
    model = MODELS[name]
    shapes = parameter_shapes(model)
    tensors = [(n, s, wire if len(s) > 1 else "bfloat16") for n, s in shapes.items()]
    return sharded(tensors, mesh, tensor_parallel(model), stages_of(model, shapes, mesh.extent("pp")))


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in CausalLM(config, device="meta").named_parameters()}
