"""Which engine a call of `generate` has, and what one that is not ours cannot do: `check` says so before a run."""

from penstock.graph.errors import Fault, GraphError
from penstock.graph.requires import Call
from penstock.graph.types import Context
from penstock.nodes.open_model import spec_of

OURS, VLLM = "penstock", "vllm"
# vLLM takes any temperature below for this one.
COLDEST = 0.01


def engine_of(context: Context | None, option: str) -> str:
    """The engine that a call says, or else that of the run."""
    return option or (OURS if context is None else context.engine)


def vllm_lacks(context: Context, temperature: float, *, adapters: bool) -> list[tuple[str, str]]:
    """What of a run and of a call vLLM cannot do here, as (given, needed)."""
    origin = context.weights.get("behaviour")
    precision = "" if origin is None else origin.precision
    exact = f"--engine {OURS}: with {VLLM} no run is repeatable to the bit"
    kinds = {
        "--versions pinned": (context.versions == "pinned", f"--versions free, or {exact}"),
        "--deterministic": (context.deterministic, exact),
        "--invariant": (context.invariant, exact),
        "--replay-routing": (context.replay_routing, f"--engine {OURS}: {VLLM}'s experts are not recorded"),
        "adapters (LoRA)": (adapters, f"all weights, or --engine {OURS}: adapters are not sent to {VLLM}"),
        f"weights in {precision}": (bool(precision), f"those of the run's dtype, or --engine {OURS}"),
        f"temperature {temperature}": (0 < temperature < COLDEST, f"0, or at least {COLDEST}, as {VLLM} has it"),
        "a mesh of several ranks": (bool(context.mesh), f"more replicas (--generators), or --engine {OURS}"),
    }
    return [(given, needed) for given, (lacks, needed) in kinds.items() if lacks]


def can_decode(call: Call) -> None:
    """Requirement of a node with the option `engine`. Raises GraphError at the line of the call."""
    temperature = call.options.get("temperature", 1.0)
    if call.context is None or engine_of(call.context, str(call.options.get("engine", ""))) != VLLM:
        return
    spec = spec_of(call, "behaviour")
    number = float(temperature) if isinstance(temperature, int | float) else 1.0  # else told of the option itself
    lacks = vllm_lacks(call.context, number, adapters=spec is not None and spec.lora is not None)
    if lacks:
        what = f"{call.what}: engine {VLLM}"
        raise GraphError(*(Fault("engine-cannot", what, given, needed, call.node.where) for given, needed in lacks))
