"""Each family of models computes the same as in `transformers`, and can do all that a model can."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from penstock.graph.context import Context, Origin
from penstock.graph.protocols import rule_of
from penstock.graph.types import Advantages, Replies, Rollouts, Weights
from penstock.nodes.generate import attention, generate, make_engine
from penstock.nodes.generate.engines import engine_lacks
from penstock.nodes.generate.kv_cache import Cache, CacheSize
from penstock.nodes.learn.logprobs import route_of
from penstock.nodes.learn.update import policy_update
from penstock.nodes.model import CausalLM, Lora, ModelConfig, ModelError, Scorer, causal, load_model, read_config
from penstock.nodes.model.config import RopeScaling
from penstock.nodes.model.families import FAMILIES
from penstock.nodes.model.lora import ATTENTION, TARGETS
from penstock.nodes.model.mlp import Route
from penstock.nodes.model.tensor_parallel import stages_of, tensor_parallel
from penstock.nodes.open_model import ModelSpec
from penstock.nodes.policy import FrozenPolicy, LanguagePolicy, make_policy, make_reference, require_policy
from penstock.runtime.cluster import capabilities
from penstock.runtime.plan.model_shape import read_shape, shape_of
from penstock.runtime.plan.model_shape import stages_of as planned_stages
from penstock.runtime.plan.sync_cost import stages, tensors
from tests.nodes.family_cases import CONFIGS, config_of, directory, random_model
from tests.nodes.rank_cases import OPTIONS
from tests.nodes.ranked import spawn
from tests.nodes.test_generate import CACHE_CONFIG, SLOTS, Operations, drain, prompts, run
from tests.nodes.tiny_model import TOKENIZER, export, save
from tests.nodes.updating import batch, equal

# None of these sizes divides another.
ODD = ModelConfig(301, 36, 52, 3, 6, 2, 10, 128)
YARN = RopeScaling("yarn", 4.0, original_max_position_embeddings=32, attention_factor=1.125)
TOKENS = torch.randint(0, 301, (3, 50), generator=torch.Generator().manual_seed(0))
SHAPES: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 6},
    "yarn": {"rope_scaling": YARN},
    "yarn in parts of pairs": {"rope_scaling": replace(YARN, truncate=False, beta_fast=8.0, beta_slow=2.0)},
    "llama3": {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 16)},
    # Padding in a text learns nothing as an input, and as an output what other words learn.
    **{f"padding {tied}": {"pad_token_id": int(TOKENS[0, 3]), "tie_word_embeddings": tied} for tied in (True, False)},
}
families = pytest.mark.parametrize("family", FAMILIES)
others = pytest.mark.parametrize("family", CONFIGS)
slow = pytest.mark.slow


def theirs_of(folder: Path | str, kind: str = "AutoModelForCausalLM", **changes: Any) -> Any:
    # transformers' faster products of experts do not take odd sizes.
    return getattr(transformers, kind).from_pretrained(folder, experts_implementation="eager", **changes)


def with_adapters(base: Any, folder: Path) -> Any:
    import peft  # takes seconds, which only workers with these tests spend

    return peft.PeftModel.from_pretrained(base, folder)


def logits(made: CausalLM) -> Tensor:
    with torch.no_grad():
        return made.logits(made(TOKENS)).float()


def assert_computes(ours: CausalLM, theirs: Any) -> Tensor:
    """Assert that logits and gradients are the same, and return the logits."""
    found, needed = ours.logits(ours(TOKENS)), theirs(TOKENS).logits
    torch.testing.assert_close(found, needed, rtol=0, atol=1e-4)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)) / found.shape[0]
    (found * weight).sum().backward()  # type: ignore[no-untyped-call]
    (needed * weight).sum().backward()
    expected = gradients_of(theirs)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-4, msg=name)
    return found.detach()


def gradients_of(theirs: Any) -> dict[str, Tensor]:
    """Return gradients by the names in files: in memory, transformers joins the experts, and gate with up."""
    found = {}
    for name, parameter in theirs.named_parameters():
        place, _, kind = name.rpartition(".")
        if not place.endswith("experts"):
            found[name] = parameter.grad
            continue
        for expert, gradient in enumerate(parameter.grad):
            parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for part, own in zip(parts, gradient.chunk(len(parts)), strict=True):
                found[f"{place}.{expert}.{part}.weight"] = own
    return found


@families
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_family_has_the_logits_and_gradients_of_transformers_and_its_files(
    family: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    config = config_of(family, ODD, **shape)
    ours = random_model(config)
    save(ours, tmp_path / "ours")
    assert read_config(tmp_path / "ours") == config
    theirs = theirs_of(tmp_path / "ours")
    assert type(theirs).__name__ == ours.architecture
    found = assert_computes(ours, theirs)
    # The files that transformers writes can be read.
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_model(CausalLM, tmp_path / "theirs")
    assert replace(again.config, initializer_range=config.initializer_range) == config
    assert torch.equal(logits(again), found)


@families
def test_bfloat16_is_no_further_from_float32_than_that_of_transformers(family: str, tmp_path: Path) -> None:
    exact = random_model(config_of(family, ODD))
    save(exact, tmp_path)
    theirs = theirs_of(tmp_path, dtype=torch.bfloat16)
    with torch.no_grad():
        far = (theirs(TOKENS).logits.float() - logits(exact)).square().mean()
    assert (logits(load_model(CausalLM, tmp_path, "bfloat16")) - logits(exact)).square().mean() <= far


@others
def test_a_model_that_gives_a_number_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    scorer = Scorer(config_of(family, ODD, pad_token_id=0))
    scorer.init_weights(1)
    torch.nn.init.normal_(scorer.score.weight)
    save(scorer, tmp_path)
    theirs = theirs_of(tmp_path, "AutoModelForSequenceClassification")
    assert type(theirs).__name__ == scorer.architecture
    with torch.no_grad():
        row_S = TOKENS[:1].clamp(min=1)
        torch.testing.assert_close(scorer.values(scorer(row_S))[:, -1:], theirs(row_S).logits, rtol=0, atol=1e-4)


SMALL = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "mistral"}, None),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral", "max_position_embeddings": 4096}, None),
        ({"model_type": "qwen2", "sliding_window": 64}, None),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True}, None),
        ({"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 1}, None),
        ({"model_type": "qwen3_moe", "use_sliding_window": True}, None),
        ({"model_type": "qwen3_moe", "max_window_layers": 48}, None),
        (
            {"model_type": "qwen3_moe", "use_sliding_window": True, "max_window_layers": 1},
            "max_window_layers 1 with sliding_window 4096, needed none: all layers of a qwen3_moe have the window",
        ),
        (
            {"model_type": "qwen3_moe", "use_sliding_window": True, "layer_types": ["full_attention"] * 2},
            "layer_types ['full_attention', 'full_attention'] with sliding_window 4096, needed none",
        ),
        ({"model_type": "mistral", "use_sliding_window": False}, "use_sliding_window False with sliding_window 4096"),
        (
            {"model_type": "mistral", "max_window_layers": 2},
            "max_window_layers 2 with sliding_window 4096, needed none",
        ),
        ({"model_type": "qwen3"}, None),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias True, needed False"),
        ({"model_type": "llama", "sliding_window": 64}, "sliding_window 64, needed null, or at least max_position_emb"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias True, needed False"),
        ({"model_type": "llama", "attention_dropout": 0.1}, "attention_dropout 0.1, needed 0.0"),
        (
            {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2},
            "layer_types ['sliding_attention', 'sliding_attention'] without use_sliding_window, needed it true",
        ),
        ({"model_type": "qwen3", "layer_types": ["full_attention"] * 2}, None),
        ({"model_type": "qwen3_moe", "layer_types": ["sliding_attention"] * 2}, None),
        ({"model_type": "llama", "is_causal": True}, None),
        ({"model_type": "llama", "is_causal": False}, "is_causal False, needed True"),
        ({"model_type": "llama", "num_key_value_heads": 0}, "num_key_value_heads 0, needed a positive"),
        ({"model_type": "llama", "head_dim": 0}, "head_dim 0, needed a positive"),
        (
            {"model_type": "qwen3", "rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "rope_parameters of full_attention, needed one for all layers",
        ),
        ({"model_type": "qwen3_moe", "num_local_experts": 9}, None),
        ({"model_type": "qwen3_moe", "num_experts_per_tok": 200}, "at most as many for a token as there are"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [1]}, "mlp_only_layers [1], needed []"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step 2, needed 1"),
        ({"model_type": "gemma2"}, "model_type 'gemma2' (it caps scores and logits, which this decoder does not), nee"),
        ({"model_type": "gemma3"}, "(it sees images; its language model alone is a gemma3_text), needed one of: llama"),
        ({"model_type": "qwen2_moe"}, "model_type 'qwen2_moe', needed one of"),
    ],
)
def test_what_a_config_leaves_out_is_what_transformers_takes_and_what_is_computed_otherwise_is_refused(
    config: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "num_attention_heads": 32, **config}))
    if said is not None:
        with pytest.raises(ModelError, match=re.escape(said)):
            read_config(tmp_path)
        return
    ours, theirs = read_config(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    for name in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 2)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    slides = "sliding_attention" in getattr(theirs, "layer_types", ["sliding_attention"])
    window = getattr(theirs, "sliding_window", None) if slides else None
    # A window that no text outgrows is none.
    assert ours.sliding_window == (window if window and window < ours.max_position_embeddings else None)
    if ours.num_experts:
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"):
            assert getattr(ours, name) == getattr(theirs, name)
    shape = read_shape(str(tmp_path))
    assert (shape.experts, shape.active) == (ours.num_experts, ours.num_experts_per_tok)
    assert (shape.kv_heads, shape.head_dim) == (ours.num_key_value_heads, ours.head_dim)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text"])
def test_a_sliding_window_is_that_of_transformers_in_each_layer_that_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, compiled: bool
) -> None:
    """In logits and gradients, in a generator and in files, with compiled kernels and with torch's operations."""
    if not compiled:
        monkeypatch.setattr(causal, "suits", lambda *given: False)
        monkeypatch.setattr(attention, "compiled", lambda *given: None)
    window, kinds = 13, ("full_attention", "sliding_attention", "full_attention")
    own = {"layer_types": kinds} if FAMILIES[family].windowed[1:] else {}
    config = config_of(family, ODD, sliding_window=window, **own)
    # The kinds of Gemma 3's layers have other effects, too, so they stay.
    none = config.layer_types if FAMILIES[family].local_rope else ()
    whole = replace(config, sliding_window=TOKENS.shape[1], layer_types=none)
    ours, full = random_model(config), random_model(whole)
    save(ours, tmp_path / "ours")
    TOKENIZER.save(tmp_path / "ours")
    assert read_config(tmp_path / "ours") == config
    theirs = theirs_of(tmp_path / "ours")
    found = assert_computes(ours, theirs)
    assert torch.equal(found[:, :window], logits(full)[:, :window])
    assert not torch.allclose(found[:, window:], logits(full)[:, window:], rtol=0, atol=1e-2)
    theirs.save_pretrained(tmp_path / "theirs")
    again = read_config(tmp_path / "theirs")
    assert (again.sliding_window, again.layer_types) == (config.sliding_window, config.layer_types)
    # The responses outgrow the window.
    context = Context(node="generate", seed=3, model=str(tmp_path / "ours"), slots=16, max_tokens=40, batch=1)
    made = run(make_engine(context, samples=2), range(4), Weights(0, ours.state_dict()))
    assert max(int(rollouts.response_lengths_N.max()) for rollouts, _ in made.values()) > window
    assert max(metrics["mismatch"] for _, metrics in made.values()) < 1e-5


YARNS: list[dict[str, Any]] = [
    {},
    {"attention_factor": 0.7},
    {"mscale": 0.8, "mscale_all_dim": 1.4},
    {"mscale": 0.8},
    {"beta_fast": None, "beta_slow": 4},
    {"truncate": False},
]


@pytest.mark.parametrize("more", YARNS)
def test_yarn_turns_as_in_transformers(more: dict[str, Any], tmp_path: Path) -> None:
    """Also if a file leaves some numbers out."""
    config = replace(ODD, model_type="qwen2")
    save(random_model(config), tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    data["rope_parameters"] = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, **more}
    (tmp_path / "config.json").write_text(json.dumps(data))
    theirs = theirs_of(tmp_path)
    ours = load_model(CausalLM, tmp_path)
    cos_1SK, sin_1SK = theirs.model.rotary_emb(torch.zeros(1), torch.arange(128)[None])
    torch.testing.assert_close(ours.cos_PK, cos_1SK[0], rtol=0, atol=1e-5)
    # The table's sine carries the signs of a rotation.
    torch.testing.assert_close(ours.sin_PK.abs(), sin_1SK[0].abs(), rtol=0, atol=1e-5)


@others
def test_a_policy_of_a_family_learns_goes_on_and_is_written_back(family: str, tmp_path: Path) -> None:
    given = Context(node="policy", seed=1, updates=10, model=directory(family, tmp_path))
    learner, other = make_policy(given), make_policy(replace(given, seed=2))
    assert isinstance(learner, LanguagePolicy)
    assert isinstance(other, LanguagePolicy)
    before = {name: tensor.clone() for name, tensor in learner.weights().items()}
    policy_update.fn(learner, *batch(), **OPTIONS)
    other.restore(*learner.state())
    for each in (learner, other):
        policy_update.fn(each, *batch(), **OPTIONS)
    assert equal(learner, other)
    assert not any(torch.equal(tensor, before[name]) for name, tensor in learner.weights().items())
    export(learner, tmp_path / "out")
    theirs = theirs_of(tmp_path / "out")
    tokens_BS = batch()[0].tokens_NS
    with torch.no_grad():
        ours = learner.model.logits(learner.model(tokens_BS))
        torch.testing.assert_close(ours, theirs(tokens_BS).logits, rtol=0, atol=1e-4)


@others
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_generator_of_a_family_samples_what_the_trainer_scores(family: str, dtype: str, tmp_path: Path) -> None:
    """It samples the same bits whatever its neighbours."""
    context = Context(
        node="generate", seed=3, model=directory(family, tmp_path), slots=32, max_tokens=8, dtype=dtype, batch=1
    )
    behaviour = Weights(0, random_model(CONFIGS[family]).to(getattr(torch, dtype)).state_dict())
    together = run(make_engine(context, samples=5), range(6), behaviour)
    alone = run(make_engine(context, samples=5), [4], behaviour)
    assert torch.equal(alone[4][0].tokens_NS, together[4][0].tokens_NS)
    assert torch.equal(alone[4][0].logprobs_NT, together[4][0].logprobs_NT)
    assert max(metrics["mismatch"] for _, metrics in together.values()) < (1e-5 if dtype == "float32" else 0.05)


@pytest.mark.parametrize("family", [name for name in CONFIGS if not FAMILIES[name].experts])
def test_adapters_of_a_family_are_those_of_peft(family: str, tmp_path: Path) -> None:
    given = Context(node="policy", seed=1, updates=10, model=directory(family, tmp_path), lora=3)
    learner = make_policy(given)
    assert isinstance(learner, LanguagePolicy)
    policy_update.fn(learner, *batch(), **OPTIONS, lr=1e-2)
    export(learner, tmp_path / "adapters")
    assert load_model(CausalLM, tmp_path / "adapters").lora == Lora(3, 6.0)
    plain = theirs_of(given.model)
    theirs = with_adapters(plain, tmp_path / "adapters")
    tokens_BS = batch()[0].tokens_NS
    with torch.no_grad():
        ours = learner.model.logits(learner.model(tokens_BS))
        torch.testing.assert_close(ours, theirs(tokens_BS).logits, rtol=0, atol=1e-4)


def test_the_families_that_runs_have_are_those_of_the_table() -> None:
    assert tuple(FAMILIES) == capabilities.FAMILIES
    assert tuple(name for name, family in FAMILIES.items() if family.experts) == capabilities.MIXTURES


class Seen:
    """A `Route` that only records the experts of each token, [N, K] by layer."""

    def __init__(self, route: Route | None) -> None:
        self.route, self.layers = route, dict[int, Tensor]()

    def __call__(self, layer: int, chosen_NK: Tensor) -> Tensor:
        self.layers[layer] = chosen_NK if self.route is None else self.route(layer, chosen_NK)
        return self.layers[layer]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_go_through_the_experts_that_their_generator_chose(dtype: str, tmp_path: Path) -> None:
    """This holds whatever the routers of a changed policy choose. Tokens without recorded experts go by the router."""
    model = directory("qwen3_moe", tmp_path)
    given = Context(node="policy", seed=3, updates=9, model=model, dtype=dtype, replay_routing=True)
    learner = make_policy(given)
    assert isinstance(learner, LanguagePolicy)
    made = replace(given, node="generate", slots=32, max_tokens=8, batch=1)
    found = run(make_engine(made, samples=5), range(4), Weights(0, learner.weights()))
    rollouts = Rollouts.concat([each for each, _ in found.values()])
    assert max(metrics["mismatch"] for _, metrics in found.values()) < (1e-5 if dtype == "float32" else 0.05)
    plain = run(make_engine(replace(made, replay_routing=False), samples=5), range(4), Weights(0, learner.weights()))
    assert all(each.experts_NSLK is None for each, _ in plain.values())
    assert torch.equal(plain[3][0].tokens_NS, found[3][0].tokens_NS)
    # Experts are recorded for all tokens except the last of a row, which the generator has not read.
    lengths_N = rollouts.prompt_lengths_N + rollouts.response_lengths_N - 1
    read_NS = torch.arange(rollouts.tokens_NS.shape[1]) < lengths_N[:, None]
    assert torch.equal((rollouts.experts_NSLK > 0).all(-1).all(-1), read_NS)
    with torch.no_grad():
        for name, parameter in learner.model.named_parameters():
            if name.endswith("mlp.gate.weight"):  # now the router chooses other experts
                parameter.copy_(-parameter)
    for packed in learner.pack(rollouts):
        routes = [Seen(route_of(learner.model, packed)), Seen(None)]
        for route in routes:
            learner.model(packed.tokens_RW, route=route)
        assert packed.rollouts is not None
        recorded_NLK = packed.rollouts.experts_NSLK[:, : packed.tokens_RW.shape[1]].flatten(0, 1).long()
        read_N = recorded_NLK.all(-1).all(-1)
        for layer, chosen_NK in routes[0].layers.items():
            assert torch.equal(chosen_NK[read_N] + 1, recorded_NLK[read_N, layer])
            assert not torch.equal(routes[1].layers[layer], chosen_NK)
    policy_update.fn(learner, rollouts, Advantages(torch.ones(len(rollouts))), **OPTIONS)
    reference = make_reference(replace(given, node="reference"))
    assert isinstance(reference, FrozenPolicy)
    assert not reference.model.replays_routing


def test_the_experts_of_a_conversation_stay_those_that_its_tokens_were_sampled_with(tmp_path: Path) -> None:
    context = Context(
        node="generate", seed=3, model=directory("qwen3_moe", tmp_path), slots=32, max_tokens=8, replay_routing=True
    )
    behaviour, newer = (Weights(v, random_model(CONFIGS["qwen3_moe"], seed=3 + v).state_dict()) for v in (0, 1))
    engine = make_engine(context, samples=3)
    first = run(engine, [0], behaviour)[0][0]
    pieces = generate.fn(make_engine(replace(context, segment=3), samples=3), prompts(0), behaviour, samples=3)[1]
    assert torch.equal(pieces.experts_NSLK, first.experts_NSLK)
    replies = Replies(("1", "2", "3"), ("user",) * 3, torch.tensor([False, False, True]))
    inputs = {"prompts": prompts(0), "behaviour": newer, "conversation": first, "replies": replies}
    engine.submit("next", inputs)
    second = drain(engine)["next"][0]  # type: ignore[index]
    for row in range(3):
        length = int(first.prompt_lengths_N[row] + first.response_lengths_N[row]) - 1
        assert torch.equal(second.experts_NSLK[row, :length], first.experts_NSLK[row, :length])
        read = int(second.prompt_lengths_N[row] + second.response_lengths_N[row]) - 1
        assert second.experts_NSLK[row, :read].all()


def test_only_a_mixture_has_routing_to_replay(tmp_path: Path) -> None:
    given = Context(node="policy", model=directory("qwen3", tmp_path), replay_routing=True)
    with pytest.raises(ModelError, match="--replay-routing: given a qwen3, needed a model with experts"):
        require_policy(given)


@pytest.mark.parametrize("mesh", ["pp=2", pytest.param("tp=2", marks=slow), pytest.param("fsdp=2", marks=slow)])
def test_routing_is_replayed_over_ranks(mesh: str, tmp_path: Path) -> None:
    spawn(2, "tests.nodes.family_cases:replayed", mesh, folder=tmp_path)


def test_a_mixture_has_adapters_of_attention_alone(tmp_path: Path) -> None:
    given = Context(node="policy", model=directory("qwen3_moe", tmp_path), lora=3)
    with pytest.raises(ModelError, match=r"targets gate_proj, up_proj, down_proj .*--lora-targets q_proj k_proj"):
        make_policy(given)
    made: Any = make_policy(replace(given, lora_targets=("q_proj", "o_proj")))
    for _ in range(2):
        policy_update.fn(made, *batch(), **OPTIONS, lr=1e-2)
    export(made, tmp_path / "adapters")
    base = theirs_of(given.model)
    theirs = with_adapters(base, tmp_path / "adapters")
    tokens = TOKENS % made.model.config.vocab_size
    with torch.no_grad():
        found, plain = (each.logits(each(tokens)) for each in (made.model, load_model(CausalLM, given.model)))
        torch.testing.assert_close(found, theirs(tokens).logits, rtol=0, atol=1e-4)
    assert not torch.allclose(found, plain, rtol=0, atol=1e-2)
    # A generator applies the adapters that it receives.
    origin = {"behaviour": Origin("penstock.nodes.policy:make_policy", made.context)}
    context = replace(made.context, node="generate", slots=16, max_tokens=8, batch=1, weights=origin)
    sent = Weights(made.version, dict(made.weights()), made.about())
    figures = [metrics["mismatch"] for _, metrics in run(make_engine(context, samples=2), range(2), sent).values()]
    assert max(figures) < 1e-5


@families
@pytest.mark.parametrize("tied", [True, False])
def test_the_planner_counts_a_familys_parameters(family: str, tied: bool) -> None:
    config = config_of(family, ODD, tie_word_embeddings=tied)
    held = {name: tuple(p.shape) for name, p in CausalLM(config, device="meta").named_parameters()}
    shape = shape_of(config.to_json(), "here")
    assert shape.parameters == sum(map(prod, held.values()))
    for count in (1, 3):
        cut = stages_of(config, held, count)
        own = [sum(prod(held[name]) for name, places in cut.items() if place in places) for place in range(count)]
        assert [stage.parameters for stage in planned_stages(shape, count)] == own
        # The planner takes a layer's experts as one tensor.
        assert stages(shape, count) == {re.sub(r"experts\.\d+", "experts", name): cut[name] for name in cut}
    sizes = Counter[str]()
    for name, size in held.items():
        sizes[re.sub(r"experts\.\d+", "experts", name)] += prod(size)
    assert {name: prod(size) for name, (size, _) in tensors(shape).items()} == sizes
    rules = tensor_parallel(config)
    for name, (_, rule) in tensors(shape).items():
        assert rule == rule_of(name, rules) or ".experts." in name
    targets = ATTENTION if shape.experts else TARGETS
    lora = CausalLM(config, device="meta", lora=Lora(4, 8.0, targets)).own_parameters()
    assert {name: size for name, (size, _) in tensors(shape.with_lora(4, targets)).items()} == {
        name: tuple(p.shape) for name, p in lora.items()
    }


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe", "gemma3_text"])
@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [
        (2, "tp=2"),
        pytest.param(2, "pp=2", marks=slow),
        pytest.param(4, "fsdp=2,tp=2", marks=slow),
    ],
)
def test_a_family_over_ranks_learns_what_it_does_on_one(family: str, ranks: int, mesh: str, tmp_path: Path) -> None:
    spawn(ranks, "tests.nodes.family_cases:update", mesh, family, folder=tmp_path)


@pytest.mark.parametrize(
    ("family", "ranks", "groups"),
    [
        ("qwen2", 2, 1),
        pytest.param("qwen2", 2, 2, marks=slow),
        pytest.param("qwen3", 2, 1, marks=slow),
        ("qwen3_moe", 2, 2),
        pytest.param("gemma3_text", 2, 1, marks=slow),
    ],
)
def test_a_familys_generator_over_ranks_samples_what_one_samples(
    family: str, ranks: int, groups: int, tmp_path: Path
) -> None:
    spawn(ranks, "tests.nodes.family_cases:engine", str(groups), family, folder=tmp_path)


WINDOW: Mapping[str, Any] = {"sliding_window": 24, "layer_types": ("full_attention", "sliding_attention")}


@pytest.mark.parametrize(
    ("family", "changes", "most"),
    [
        ("qwen2", WINDOW, 24),
        ("qwen3", WINDOW, 24),
        ("llama", {"rope_scaling": RopeScaling("yarn", 2.0, original_max_position_embeddings=20)}, 40),
    ],
)
def test_what_vllm_computes_otherwise_in_long_texts_is_refused(
    family: str, changes: Mapping[str, Any], most: int
) -> None:
    """For some families it has one window for all layers, and no angles beyond the range of a rope scaling."""
    spec = ModelSpec(config_of(family, hidden_size=128, head_dim=32, **changes), TOKENIZER)

    def refused(engine: str, longest: int) -> int:
        context = Context(max_tokens=8, max_prompt=longest - 8)
        return len(engine_lacks(engine, context, 1.0, spec))

    assert [refused("vllm", most), refused("vllm", most + 1), refused("penstock", most + 1)] == [0, 1, 0]


def test_windows_that_vllm_gives_each_layer_as_it_is_are_not_refused() -> None:
    wide: dict[str, Any] = {"hidden_size": 128, "head_dim": 32}
    for config in (config_of("mistral", **wide, **WINDOW), config_of("qwen2", **wide, sliding_window=24)):
        assert not engine_lacks("vllm", Context(), 1.0, ModelSpec(config, TOKENIZER))


@pytest.mark.parametrize(
    ("device", "width", "refused"), [("cpu", 8, 1), ("cpu", 32, 0), ("cpu", 100, 1), ("cpu", 128, 0), ("cuda:0", 8, 0)]
)
def test_heads_that_vllm_has_no_kernels_for_on_a_cpu_are_refused_there(device: str, width: int, refused: int) -> None:
    spec = ModelSpec(config_of("llama", head_dim=width), TOKENIZER)
    lacks = engine_lacks("vllm", Context(device=device), 1.0, spec)
    assert len([given for given, _ in lacks if f"heads {width} wide" in given]) == len(lacks) == refused
    assert not engine_lacks("penstock", Context(device=device), 1.0, spec)


@pytest.mark.parametrize(("family", "hidden", "refused"), [("qwen2", 32, 1), ("qwen2", 128, 0), ("qwen3", 32, 0)])
def test_heads_whose_width_vllm_does_not_read_are_refused(family: str, hidden: int, refused: int) -> None:
    spec = ModelSpec(config_of(family, num_attention_heads=4, head_dim=32, hidden_size=hidden), TOKENIZER)
    assert len(engine_lacks("vllm", Context(), 1.0, spec)) == refused
    assert not engine_lacks("penstock", Context(), 1.0, spec)


@pytest.mark.parametrize(("temperature", "refused"), [(0.0, 0), (0.005, 1), (0.01, 0), (2.0, 0), (2.1, 1)])
def test_temperatures_that_vllm_does_not_sample_at_are_refused(temperature: float, refused: int) -> None:
    assert len(engine_lacks("vllm", Context(), temperature, None)) == refused
    assert not engine_lacks("penstock", Context(), temperature, None)


@pytest.mark.parametrize("family", sorted(name for name, own in FAMILIES.items() if not own.experts))
def test_a_layer_on_meta_tensors_is_at_most_sixteen_operations_of_a_model_with_two_norms_a_layer(family: str) -> None:
    """Gemma 3 has four: with those of queries and keys six."""
    counts = []
    for layers in (2, 3):
        model = CausalLM(config_of(family, replace(CACHE_CONFIG, num_hidden_layers=layers)), device="meta")
        cache = Cache(CacheSize(model.config, SLOTS, 64, 8, torch.float32, "meta"))
        tokens_R1, positions_R = torch.zeros(2, SLOTS, dtype=torch.long, device="meta")
        cache.begin(torch.arange(SLOTS, device="meta"), positions_R)
        with torch.inference_mode(), Operations() as seen:
            model(tokens_R1[:, None], positions_R[:, None], cache.attend)
        counts.append(seen.names)
    assert len(counts[1]) - len(counts[0]) <= (18 if family == "gemma3_text" else 16)
