"""The model that a run starts from, an HF directory or a small untrained one made from the seed; and the `ModelSpec` of
a carried value's model, which is known before its weights are.

A `ModelSpec` checks from the shape alone whether a model fits on a mesh.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from heapq import nlargest
from itertools import islice
from typing import Any, TypeVar

from penstock.graph.context import Context, problems_made, rounds
from penstock.graph.errors import Fault, GraphError
from penstock.graph.imports import imported, short
from penstock.graph.protocols import EXPERT, STAGE, TENSOR, Axes, num_ranks, rule_of
from penstock.graph.requires import PREFIXES, Call, opened
from penstock.graph.types import Prefixes, Rollouts
from penstock.nodes.data import Demonstrations, FileRows, Pairs
from penstock.nodes.model import (
    CausalLM,
    Decoder,
    Lora,
    ModelConfig,
    ModelError,
    Scorer,
    load_model,
    read_config,
    torch_dtype,
)
from penstock.nodes.model.eight_bit import FP8_TILE, require_products
from penstock.nodes.model.hf import digest, read_adapters
from penstock.nodes.model.tensor_parallel import (
    CausalLMPart,
    CausalLMWithOwnExperts,
    check_experts,
    check_tensor_parallel,
    part_config,
    part_of,
    stages_of,
    tensor_parallel,
)
from penstock.nodes.parallel.mesh import Ranks
from penstock.nodes.tokenizer import Tokenizer, TokenizerError, byte_tokenizer, load_tokenizer

# The characters of arithmetic.
ALPHABET = "0123456789+-=:"
# Tokens of prompt and response together; attention over a cache costs as much as the cache can hold.
ARITHMETIC_CONTEXT, BYTE_CONTEXT = 32, 2048


M = TypeVar("M", bound=Decoder)


def open_model(
    kind: type[M], context: Context, dtype: str | None = None, lora: Lora | None = None, *, unread: bool = False
) -> tuple[M, Tokenizer]:
    """The run's model in `dtype` (the run's, if None) on the run's device, and its tokenizer. A `Scorer` has the
    decoder of that model and a new head, which is zero. With `lora` the model has adapters (see `load_model`); a model
    from a directory of adapters has them in any case. Adapters are float32. `unread`: read no weights of a directory;
    the model's `source` reads them later.

    Without `context.model` it is `initial_model`, with weights drawn from the seed alone: every pool makes the same.
    """
    dtype = dtype or context.dtype
    if context.model:
        unread = unread or num_ranks(context.mesh) > 1  # each rank reads the regions that it keeps
        more: dict[str, Any] = {"new_head": issubclass(kind, Scorer), "unread": unread}
        model = load_model(kind, context.model, dtype, context.device, lora=lora, seed=context.seed, **more)
        return model, load_tokenizer(str(read_adapters(context.model)[0]), context.chat_template_kwargs)
    config, tokenizer = initial_model(context.data)
    model = kind(config, torch_dtype(dtype), context.device, lora=lora)
    model.init_weights(context.seed)
    return model, tokenizer


def open_frozen_model(kind: type[M], context: Context) -> tuple[M, Tokenizer]:
    """As `open_model`, with all weights in the run's dtype, and none that learns."""
    model, tokenizer = open_model(kind, context)
    return model.to(torch_dtype(context.dtype)).requires_grad_(False), tokenizer


def require_model(kind: type[Decoder]) -> Callable[[Context], None]:
    """Requirement of makers that open the run's model as one of this kind. It raises ModelError for a directory without
    such a model, or with weights that are not finite; it reads one row of each tensor. It raises TokenizerError for
    variables that the chat template does not read."""

    def check(context: Context) -> None:
        _, tokenizer = open_model(kind, replace(context, device="meta"))
        tokenizer.require_variables(context.chat_template_kwargs)

    return check


@dataclass(frozen=True)
class ModelSpec:
    """What is known of a model before its weights are read: its shape and its tokenizer.

    If only its adapters are sent, `lora` describes them, and `base` is the context with which `open_model` opens the
    other weights.
    """

    config: ModelConfig
    tokenizer: Tokenizer
    lora: Lora | None = None
    base: Context = field(default_factory=Context)

    def sent_dtype(self, dtype: str) -> str:
        """The dtype of the weights that a trainer sends if the model computes in `dtype`: adapters are float32."""
        return dtype if self.lora is None else "float32"

    def check_mesh(self, mesh: Axes, *, decodes: bool = False) -> None:
        """Raises ModelError if the model does not fit on the ranks of a mesh: to decode with it (`decodes`), or to
        train or read it."""
        if decodes:
            check_decoding(self.config, mesh)
            return
        # Shards and copies may be any number. "tp" must divide the heads and "ep" the experts, and each stage needs a
        # layer.
        ranks = Ranks(mesh)
        check_experts(self.config, ranks.size(EXPERT))
        check_tensor_parallel(self.config, ranks.size(TENSOR), shared_heads=False)
        check_stages(self.config, ranks.size(STAGE))


def check_stages(config: ModelConfig, stages: int) -> None:
    """Raises ModelError if the model cannot be cut into this many pipeline stages."""
    if config.tie_word_embeddings and stages > 1:
        raise ModelError(f"given tied embeddings over {stages} stages, needed a head of its own or one stage")
    stages_of(config, (), stages)


def check_decoding(config: ModelConfig, mesh: Axes) -> None:
    """Raises ModelError if a generator's ranks cannot decode with the model."""
    ranks = Ranks(mesh)
    if ranks.count > max(ranks.size(TENSOR), ranks.size(EXPERT)):
        needed = f"the axis {TENSOR} or the axis {EXPERT} alone: replicas are more of its pool"
        raise ModelError(f"generate: given a mesh of {ranks}, needed {needed}")
    check_experts(config, ranks.size(EXPERT))
    part_config(config, ranks.size(TENSOR), 0)


def check_precision(spec: ModelSpec, precision: str, parts: int = 1) -> None:
    """Raises ModelError if `parts` ranks cannot decode with the model's layers in this eight-bit precision."""
    if spec.lora is not None:
        needed = "no such precision beside adapters: their base, which is not sent, has none (or no adapters, --lora 0)"
        raise ModelError(f"given {precision} with adapters of {spec.lora}, needed {needed}")
    config = spec.config
    width = config.moe_intermediate_size if config.family.experts else config.intermediate_size
    heads, groups = config.num_attention_heads // parts, max(1, config.num_key_value_heads // parts)
    sizes = {config.hidden_size, heads * config.head_dim, groups * config.head_dim, width // parts}
    if precision == "fp8" and (odd := sorted(size for size in sizes if size % FP8_TILE)):
        given = f"given fp8 with matrices {', '.join(map(str, odd))} wide (on each of {parts} ranks)"
        raise ModelError(f"{given}, needed multiples of {FP8_TILE}")


def computes(call: Call) -> None:
    """Requirement of a node that decodes: its model supports the precision of its weights, and `--invariant` if that is
    given; for int8, so does this machine's CPU. Raises GraphError at the line of the call."""
    origin = None if call.context is None else call.context.weights.get("behaviour")
    asked = origin is not None and (origin.precision or origin.context.invariant)
    spec = spec_of(call, "behaviour") if asked else None
    if origin is None or spec is None:
        return
    code = "not-invariant"
    try:
        if origin.context.invariant:
            CausalLM(spec.config, torch_dtype(origin.context.dtype), "meta").be_invariant()
            if rounds(origin.wire, spec.sent_dtype(origin.context.dtype)):
                needed = "no --wire with --invariant: weights then travel as the trainer computes with them"
                raise ModelError(f"given --wire {origin.wire}, needed {needed}")
        code = "no-precision"
        if origin.precision:
            check_precision(spec, origin.precision)
        if origin.precision == "int8":
            require_products("int8", "cpu")
    except ModelError as error:
        given, needed = str(error).partition("given ")[2].split(", needed ", 1)
        raise call.lack(given, needed, input="behaviour", code=code) from None


def run_spec(context: Context, lora: Lora | None = None) -> ModelSpec:
    """The model that `open_model` opens: that of `--model`, with `lora` or the adapters of that directory."""
    if not context.model:
        return ModelSpec(*initial_model(context.data), lora, context)
    base, saved = read_adapters(context.model)
    return ModelSpec(read_config(base), load_tokenizer(base, context.chat_template_kwargs), lora or saved, context)


def directory_spec(folder: str) -> ModelSpec:
    """The model of a directory. Raises ModelError or TokenizerError if it cannot be read."""
    return run_spec(Context(model=folder))


def lora_of(context: Context, rank: int = 0) -> Lora | None:
    """The adapters of a value that learns; None if all weights learn.

    Their rank, alpha and targets are the program's options NAME_rank, NAME_alpha and NAME_targets, where NAME is the
    value's name; else the flags `--lora`, `--lora-alpha` and `--lora-targets`; else those of a directory of adapters as
    `--model`; else `rank` and the defaults. Raises ModelError for alpha or targets without a rank, and for adapters
    that differ from those of the directory.
    """
    own = {name: context.options.get(f"{context.node}_{name}") for name in ("rank", "alpha", "targets")}
    saved = read_adapters(context.model)[1] if context.model else None
    alpha = context.lora_alpha if own["alpha"] is None else own["alpha"]
    targets = tuple(own["targets"] or context.lora_targets)
    rank = own["rank"] or context.lora or (saved.rank if saved else rank)
    if not rank:
        parts = ("" if alpha is None else f"alpha {alpha:g}", f"targets {' '.join(targets)}" if targets else "")
        if given := " and ".join(filter(None, parts)):
            raise ModelError(f"LoRA: given {given} without a rank, needed --lora RANK, too")
        return None
    like = saved if saved and saved.rank == rank else Lora(rank, 2.0 * rank)
    found = Lora(rank, like.alpha if alpha is None else alpha, targets or like.targets)
    if saved is not None and found != saved:
        raise ModelError(f"{context.model}: given adapters of {saved}, needed those that are asked for: {found}")
    return found


def base_digest(context: Context) -> str:
    """SHA-256 of the weights in the directory of the model, or of its base; for an untrained model, of the seed and the
    shape that they are drawn from."""
    if context.model:
        return digest(read_adapters(context.model)[0])
    return hashlib.sha256(repr((context.seed, initial_model(context.data)[0])).encode()).hexdigest()


def about_adapters(lora: Lora | None, base: Context) -> dict[str, str]:
    """What both ends of a weight channel must agree on if adapters are sent; nothing if all weights are sent."""
    return {} if lora is None else {"adapters": str(lora), "base": base_digest(base)}


def open_part(spec: ModelSpec, context: Context, ranks: Ranks) -> CausalLM:
    """A rank's part of a model to decode with, in the dtype and on the device of `context`. The weights of the carried
    value arrive later; the base of adapters is read now."""
    given = spec.config, torch_dtype(context.dtype), context.device
    parts = ranks.size(TENSOR)
    if ranks.size(EXPERT) > 1:
        model: CausalLM = CausalLMWithOwnExperts(*given, ranks.count, ranks.rank, spec.lora)
    elif parts > 1:
        model = CausalLMPart(*given, parts, ranks.rank, spec.lora)
    else:
        model = CausalLM(*given, lora=spec.lora)
    if spec.lora is not None:
        # The whole model, unread: this rank reads only the regions that it keeps.
        whole, _ = open_model(CausalLM, replace(spec.base, dtype=context.dtype), lora=spec.lora, unread=True)
        weights, rules = dict(whole.named_parameters()), tensor_parallel(spec.config)
        for name, parameter in model.named_parameters():
            region = part_of(weights[name].shape, rule_of(name, rules), parts, ranks.rank % parts)
            piece = whole.source(name, region) if whole.source is not None else weights[name][region]
            parameter.data.copy_(piece)
    return model.to(given[1]).requires_grad_(False)


def weights_spec(context: Context, name: str = "behaviour") -> ModelSpec:
    """The spec of the model whose weights are the input `name` of a node, from the maker of that carried value
    (`opens`).

    Outside of a graph the context names no weights: then it is the run's own model. Raises ModelError for a maker
    without `opens`, and for one that opens a model that generates no text.
    """
    origin = context.weights.get(name)
    if origin is None:
        return run_spec(context)
    if lack := _spec_lack(origin.maker, origin.context.node):
        raise ModelError(f"{context.node}: input {name!r}: given {lack[0]}, needed {lack[1]}")
    found = opened(origin.maker)
    assert found is not None
    spec = found.spec(origin.context)
    if not isinstance(spec, ModelSpec):
        given = f"the weights of {origin.context.node!r}, of which {origin.maker} says a {type(spec).__name__}"
        raise ModelError(f"{context.node}: input {name!r}: given {given}, needed a penstock.nodes.open_model.ModelSpec")
    return spec


def spec_of(call: Call, name: str) -> ModelSpec | None:
    """As `weights_spec`, for an input of a call before a run; None if the graph is not checked for a run.

    Raises GraphError, at the line of the call, for a maker without `opens`, and for one that opens a model that
    generates no text.
    """
    argument, origin = call.weights_of(name), None if call.context is None else call.context.weights.get(name)
    # The first of two graphs makes a value that they share; the run's context has that maker.
    maker, value = (argument.maker, argument.name) if argument is not None else ("", "")
    maker, value = (origin.maker, origin.context.node) if origin is not None else (maker, value)
    if maker and (lack := _spec_lack(maker, value)):
        raise call.lack(*lack, input=name, code="unknown-model")
    return None if call.context is None else weights_spec(call.context, name)


# Rows of a file that are encoded before a run starts, the longest first: a few seconds of work. The first `MOST_TOLD`
# of those that are too long are named.
MOST_ENCODED, MOST_TOLD = 20_000, 5
# (place, prompt, response or None).
TextRow = tuple[str, str, str | None]


def suspects(tokenizer: Tokenizer, rows: Iterable[TextRow], most: int) -> list[TextRow]:
    """The rows that may have more than `most` tokens, or characters that the tokenizer cannot encode, in order. At most
    the `MOST_ENCODED` longest of the former, and the first `MOST_ENCODED` of the latter."""

    def bound(prompt: str, response: str | None) -> float:
        # Cheap, and enough to pass nearly all rows.
        return tokenizer.bound(prompt) + (0 if response is None else len(response.encode()) + 2)

    rows = list(rows)
    found = [number for number, row in enumerate(rows) if bound(*row[1:]) > most]
    longest = nlargest(MOST_ENCODED, found, key=lambda number: len(rows[number][1] + (rows[number][2] or "")))
    lacks = tokenizer.lacks(text for _, prompt, response in rows for text in (prompt, response or ""))
    unsaid = (n for n, row in enumerate(rows) if not lacks.isdisjoint(row[1] + (row[2] or ""))) if lacks else ()
    return [rows[number] for number in sorted({*longest, *islice(unsaid, MOST_ENCODED)})]


def refuse_long(what: str, code: str, tokenizer: Tokenizer, rows: Sequence[TextRow], most: int, needed: str) -> None:
    """Raises GraphError for rows of more than `most` tokens, a response's end included, and for rows that the tokenizer
    cannot encode."""
    faults, found = list[Fault](), list[tuple[str, int]]()
    for place, prompt, response in rows:
        try:
            size = len(tokenizer.encode_prompt(prompt))
            size += 0 if response is None else len(tokenizer.encode_response(response)) + 1
        except TokenizerError as error:
            whose, _, said = str(error).partition("given ")
            given, _, lack = said.partition(", needed ")
            # One fault of a chat template is one of every row.
            if not any((fault.given, fault.needed) == (f"{whose}{given}", lack) for fault in faults):
                faults.append(Fault("unmet-requirement", what, f"{whose}{given}", lack, place))
            continue
        if size > most:
            found.append((place, size))
    more = f", one of {len(found)} that are too long" if len(found) > MOST_TOLD else ""
    faults += [Fault(code, what, f"{what} of {size} tokens{more}", needed, place) for place, size in found[:MOST_TOLD]]
    if faults:
        raise GraphError(*faults[:MOST_TOLD])


def rows_fit(model: str, source: str, what: str) -> Callable[[Call], None]:
    """Requirement of a node that learns from rows: prompt and response fit in the context of the model that is its
    input `model`. It checks the longest rows of a file that is its input `source`, or the first group of generated
    rows. Raises GraphError."""

    def check(call: Call) -> None:
        rows, argument = call.source(source), call.carried(model)
        if rows is None or argument is None or (made := opened(argument.maker)) is None:
            return
        if isinstance(rows, FileRows):
            texts = list(rows.texts())
        elif isinstance(group := rows.read(0), Demonstrations | Pairs):
            texts = [
                (f"group 0, row {number}", prompt, response)
                for number, (prompt, *responses) in enumerate(zip(*vars(group).values(), strict=True), 1)
                for response in responses
            ]
        else:
            return
        spec = made.spec(call.view.contexts[argument.name])
        if isinstance(spec, ModelSpec):
            most, tokenizer = spec.config.max_position_embeddings, spec.tokenizer
            needed = f"at most {most}, the context of the model"
            refuse_long(what, "row-too-long", tokenizer, suspects(tokenizer, texts, most), most, needed)

    return check


N = TypeVar("N")


def reads_tokens(definition: N) -> N:
    """Declare that a node reads the tokens of its rollouts with the models among its inputs, as updates do. These
    models need the vocabulary of the model that sampled. Other nodes may read only texts.

        @reads_tokens
        @node(pool="trainer", clock="update")
        def my_update(policy: Policy, rollouts: Rollouts) -> Policy: ...
    """
    definition.reads_tokens = True  # type: ignore[attr-defined]
    return definition


def same_words(call: Call) -> None:
    """Requirement of sampling: the nodes that read its tokens (`reads_tokens`) or continue its prefixes have models
    with the same vocabulary.

    Checked for a run only, when the models are known. Raises GraphError at the line of the reader.
    """
    origin = None if call.context is None else call.context.weights.get("behaviour")
    own = None if origin is None else opened(origin.maker)
    if origin is None or own is None:
        return
    lacks = []
    for reader in call.readers(Rollouts, Prefixes):
        models: list[tuple[str, Context]] = []
        if getattr(imported(reader.op), "reads_tokens", False):
            names = [item.ref.node for item in reader.inputs if item.ref.node in call.view.arguments]
            makers = [(call.view.arguments[name].maker, call.view.contexts.get(name)) for name in names]
            models = [(maker, context) for maker, context in makers if context is not None]
        elif any(item.type == PREFIXES for item in reader.inputs) and reader.name in call.view.contexts:
            weights = call.view.contexts[reader.name].weights.get("behaviour")
            models = [(weights.maker, weights.context)] if weights is not None else []
        for maker, context in models:
            theirs = opened(maker)
            if theirs is None:
                continue
            if theirs.spec is own.spec and replace(context, node=origin.context.node) == origin.context:
                continue  # the same model, whose tokenizer need not be read twice
            given, needed = (
                each.spec(made).tokenizer.backend.get_vocab()
                for each, made in ((own, origin.context), (theirs, context))
            )
            if given != needed:
                said = f"tokens of {origin.context.node!r}, whose tokenizer has {len(given)}, by {call.node.name}"
                words = f"those of {context.node!r}, which it reads them with; that one has {len(needed)}"
                lacks.append(Fault("other-tokenizer", f"{reader.name}: rollouts", said, words, reader.where))
    if lacks:
        raise GraphError(*lacks)


def _spec_lack(maker: str, value: str) -> tuple[str, str] | None:
    """(given, needed) if no node can decode with the weights of a carried value; else None."""
    try:
        found = opened(maker)
    except GraphError:
        return None  # there is no such maker: reported for the value itself
    if found is None:
        given = f"the weights of {value!r}, of which its maker {maker} does not say which model it opens"
        needed = f"@opens(spec) above {short(maker)}: spec(context) returns the ModelSpec (shape and tokenizer)"
        return given, f"{needed} of these weights, such as penstock.nodes.open_model.run_spec for that of --model"
    if not found.lm_head:
        return f"the weights of {value!r}, a model whose head gives a number", "those of a model that says words"
    return None


def initial_model(data: str) -> tuple[ModelConfig, Tokenizer]:
    """Two layers, 128 wide: enough for three-digit arithmetic. Other data than arithmetic is read by bytes.

    Weights start near 1 / √width: with the usual 0.02 a model this narrow stays on its first plateau for over 1000
    updates of arithmetic, instead of some 200.
    """
    arithmetic = problems_made(data) == "arithmetic"
    tokenizer = byte_tokenizer(ALPHABET if arithmetic else None)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        initializer_range=0.08,
        max_position_embeddings=ARITHMETIC_CONTEXT if arithmetic else BYTE_CONTEXT,
        eos_token_ids=tokenizer.stops,
        pad_token_id=tokenizer.pad,
    )
    return config, tokenizer
