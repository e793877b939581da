"""The engine of a call of `generate`, and what another engine than ours cannot do, which `check` reports."""

from penstock.graph.context import Context
from penstock.graph.engines import ENGINES, OURS, EngineKind
from penstock.graph.errors import Fault, GraphError
from penstock.graph.requires import Call
from penstock.nodes.generate.kv_cache import cache_length
from penstock.nodes.model.config import ModelConfig
from penstock.nodes.open_model import ModelSpec, spec_of

# How a user chooses our engine, where no call names one.
FLAG = f"--engine {OURS}"


def engine_of(context: Context | None, option: str) -> str:
    """The engine that a call names, or else that of the run."""
    return option or (OURS if context is None else context.engine)


def engine_lacks(
    engine: str, context: Context, temperature: float, spec: ModelSpec | None, ours: str = FLAG
) -> list[tuple[str, str]]:
    """The settings of a run, of a call and of its model that an engine does not support, as (given, needed). `ours` is
    how the user chooses our engine."""
    kind, origin = ENGINES[engine], context.weights.get("behaviour")
    precision = "" if origin is None else origin.precision
    exact = f"{ours}: with {engine} no run is repeatable to the bit"
    other = {axis for axis, _ in context.mesh} - set(kind.axes)
    family = None if spec is None else spec.config.family
    needs = {
        "--versions pinned": (context.versions == "pinned" and not kind.exact, f"--versions free, or {exact}"),
        "--deterministic": (context.deterministic and not kind.exact, exact),
        "--invariant": (context.invariant and not kind.exact, exact),
        "--replay-routing": (
            context.replay_routing and not kind.mixtures,
            f"{ours}: {engine}'s experts are not recorded",
        ),
        f"a mixture of experts ({family.model_type if family else ''})": (
            family is not None and family.experts and not kind.mixtures,
            f"a model without, or {ours}: no reload of experts is proved for {engine}",
        ),
        f"a {family.model_type if family else ''}": (
            family is not None and family.model_type in kind.untested_families,
            f"another model, or {ours}: no reload of these is proved for {engine}",
        ),
        "adapters (LoRA)": (
            spec is not None and spec.lora is not None and not kind.adapters,
            f"all weights, or {ours}: adapters are not sent to {engine}",
        ),
        f"weights in {precision}": (
            bool(precision) and not kind.eight_bit,
            f"those of the run's dtype, or {ours}",
        ),
        **(_of_heads(kind, context, spec.config, ours) if spec is not None else {}),
        **(_of_long_texts(kind, context, spec.config, ours) if spec is not None else {}),
        f"temperature {temperature}": (
            0 < temperature < kind.coldest or temperature > kind.hottest,
            f"0, or {kind.coldest:g} to {kind.hottest:g}, as {engine} has it",
        ),
        "a mesh of several ranks": (bool(other), f"more replicas (--generators), or {ours}"),
    }
    return [(given, needed) for given, (lacks, needed) in needs.items() if lacks]


def _of_heads(kind: EngineKind, context: Context, config: ModelConfig, ours: str) -> dict[str, tuple[bool, str]]:
    """Widths of a model's heads that the engine does not support: given → (whether it lacks this, needed)."""
    width, own = config.head_dim, config.hidden_size // config.num_attention_heads
    known = ", ".join(map(str, kind.heads_on_cpu))
    return {
        f"a {config.model_type} with heads {width} wide": (
            width != own and config.model_type in kind.fixed_heads,
            f"hidden_size / num_attention_heads, {own}, as it takes them to be, or {ours}",
        ),
        f"heads {width} wide on a CPU": (
            context.device == "cpu" and bool(kind.heads_on_cpu) and width not in kind.heads_on_cpu,
            f"heads {known} wide, which it has kernels for there, or {ours}",
        ),
    }


def _of_long_texts(kind: EngineKind, context: Context, config: ModelConfig, ours: str) -> dict[str, tuple[bool, str]]:
    """What the engine does not support in texts as long as a run's: given → (whether it lacks this, needed)."""
    length, window = cache_length(config.max_position_embeddings, context), config.sliding_window
    scaling = config.rope_scaling
    shorter = f"(less --max-tokens, or --max-prompt), or {ours}"
    mixed = len({*config.layer_types}) > 1 and config.model_type in kind.one_window
    told = {
        f"a {config.model_type} some of whose layers have a window, and texts of {length} tokens": (
            mixed and window is not None and length > window,
            f"texts of at most {window} tokens, which need none {shorter}",
        )
    }
    if scaling is not None and scaling.rope_type == "yarn":
        most = int(scaling.factor * scaling.original_max_position_embeddings)
        told[f"rotary scaling yarn for {most} positions, and texts of {length} tokens"] = (
            length > most and not kind.extrapolates_yarn,
            f"at most {most} tokens {shorter}",
        )
    return told


def can_decode(call: Call) -> None:
    """Requirement of a node with the option `engine`. Raises GraphError at the line of the call."""
    temperature = call.options.get("temperature", 1.0)
    engine = engine_of(call.context, str(call.options.get("engine", "")))
    # An unknown name is reported for the option itself.
    if call.context is None or engine == OURS or engine not in ENGINES:
        return
    number = float(temperature) if isinstance(temperature, int | float) else 1.0  # else reported for the option itself
    # The flag does not change a call that names its engine.
    ours = f'engine="{OURS}" here' if call.options.get("engine") else FLAG
    if lacks := engine_lacks(engine, call.context, number, spec_of(call, "behaviour"), ours):
        what = f"{call.what}: engine {engine}"
        raise GraphError(*(Fault("engine-cannot", what, given, needed, call.node.where) for given, needed in lacks))
