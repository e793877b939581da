"""Generators that compute in eight bits: products, engines over several ranks, and what they refuse."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.graph import check, trace
from penstock.graph.context import Context, Origin
from penstock.graph.node import NodeDef
from penstock.graph.requires import requirements
from penstock.graph.types import Policy, Weights
from penstock.nodes.evaluate import measure
from penstock.nodes.generate import generate, make_engine, reply
from penstock.nodes.generate.engine import Engine
from penstock.nodes.generate.sampling import mismatch
from penstock.nodes.model import CausalLM, Lora, ModelConfig, ModelError, eight_bit
from penstock.nodes.model.eight_bit import DTYPES, QuantisedRows, product, quantised_parameters, require_products
from penstock.nodes.open_model import ModelSpec, check_precision, computes
from penstock.nodes.policy import make_policy
from penstock.programs.aipo import aipo
from penstock.runtime.tensor.weight_sync import WeightPublisher, WeightReceiver, sync_in_process

from .family_cases import CONFIGS, random_model
from .ranked import spawn
from .test_generate import assert_equal, run
from .tiny_model import CONFIG, TOKENIZER, model, save


def _overflows() -> bool:
    try:
        require_products("int8", "cpu")
    except ModelError:
        return True
    return False


needs_int8 = pytest.mark.skipif(_overflows(), reason="a CPU without VNNI, whose sums of products of int8 overflow")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@needs_int8
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_of_int8_is_that_of_the_integers(dtype: torch.dtype) -> None:
    x, weight, bias = random(19, 40, dtype=dtype), random(24, 40, seed=1), random(24, seed=2, dtype=dtype)
    rows, columns = QuantisedRows.of(x, torch.int8), QuantisedRows.of(weight, torch.int8)
    made = product(x, rows, columns.elements, columns.scales[:, 0], bias)
    sums = (rows.elements.double() @ columns.elements.double().t()).float()
    assert made.dtype == dtype
    assert torch.equal(made, (sums * columns.scales[:, 0] * rows.scales + bias).to(dtype))
    assert (rows.elements.abs().amax(1) == 127).all()
    torch.testing.assert_close(made, x @ weight.to(dtype).t() + bias, atol=0.3, rtol=0)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_of_int8_is_the_same_bits_whatever_the_rows_beside_it(threads: int) -> None:
    x, weight = random(64, 96), QuantisedRows.of(random(80, 96, seed=1), torch.int8)

    def made(rows: Tensor) -> Tensor:
        return product(rows, QuantisedRows.of(rows, torch.int8), weight.elements, weight.scales[:, 0], None)

    whole = made(x)
    torch.set_num_threads(threads)
    try:
        assert all(torch.equal(made(x[a:b]), whole[a:b]) for a, b in ((0, 1), (3, 4), (5, 21), (16, 64), (0, 64)))
    finally:
        torch.set_num_threads(1)


def test_a_product_of_fp8_is_that_of_the_numbers_and_rounds_once() -> None:
    x, weight = random(16, 64), QuantisedRows.of(random(32, 64, seed=1), torch.float8_e4m3fn)
    rows = QuantisedRows.of(x, torch.float8_e4m3fn)
    made = product(x, rows, weight.elements, weight.scales[:, 0], None)
    exact = (rows.elements.double() * rows.scales) @ (weight.elements.double() * weight.scales).t()
    torch.testing.assert_close(made.double(), exact, rtol=2**-8, atol=1e-6)


def test_what_is_no_number_stays_none() -> None:
    weight = QuantisedRows.of(random(8, 16), torch.int8)
    for bad in (torch.nan, torch.inf):
        x = random(2, 16)
        x[1, 3] = bad
        made = product(x, QuantisedRows.of(x, torch.int8), weight.elements, weight.scales[:, 0], None)
        assert made.isfinite().all(1).tolist() == [True, False]


def sent(policy: Any, precision: str) -> tuple[Weights, Mapping[str, int]]:
    """Return a policy's weights as a generator gets them, and their digests on the sender."""
    publisher = WeightPublisher("w", policy, wire=precision)
    receiver = WeightReceiver("w", restores=False)
    receiver.describe(publisher.description)
    digests = publisher.publish(0)
    sync_in_process(publisher, receiver, 0, digests)
    receiver.swap(0)
    return receiver.weights, digests


def reading(context: Context, precision: str) -> Context:
    origin = Origin(Policy.maker, replace(context, node="policy"), precision)
    return replace(context, weights={"behaviour": origin})


def in_eight_bits(config: ModelConfig, weights: Weights, precision: str, dtype: torch.dtype) -> CausalLM:
    """Return a model that computes with these weights by its plain forward pass."""
    made = model(1, dtype, config)
    made.quantise(precision)
    for name, parameter in made.own_parameters().items():
        parameter.data = weights.tensors[name]
    return made.requires_grad_(False)


@pytest.fixture(params=["llama", "qwen2", "qwen3_moe", "gemma3_text"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Context:
    """Return the context of a generator with a model of a family."""
    family: str = request.param
    save(model() if family == "llama" else random_model(CONFIGS[family]), tmp_path)
    TOKENIZER.save(tmp_path)
    return Context(node="generate", seed=3, model=str(tmp_path), slots=32, max_tokens=8, max_prompt=64)


@needs_int8
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_computes_in_int8_with_what_has_travelled(written: Context, dtype: str) -> None:
    context = reading(replace(written, dtype=dtype), "int8")
    policy: Any = make_policy(replace(context, node="policy"))
    weights, digests = sent(policy, "int8")
    assert digests.keys() == weights.tensors.keys()
    engine = make_engine(context, samples=3)
    found = run(engine, range(6), weights)
    own = engine.model.own_parameters()
    for name, parameter in own.items():
        assert parameter.data_ptr() == weights.tensors[name].data_ptr()
    # The matrices of layers exist in eight bits only.
    wide = [name for name, p in engine.model.named_parameters() if p.dim() == 2 and p.is_floating_point()]
    assert all("embed" in name or "head" in name or name.endswith("mlp.gate.weight") for name in wide)
    assert all(
        layer.packed is None is layer.joined for layer in engine.model.model.modules() if hasattr(layer, "joined")
    )
    # Log-probabilities are those of a plain forward pass with the same weights.
    plain = in_eight_bits(policy.model.config, weights, "int8", getattr(torch, dtype))
    for rollouts, metrics in found.values():
        assert "mismatch" not in metrics
        for row in range(len(rollouts)):
            begin, length = int(rollouts.prompt_lengths_N[row]), int(rollouts.response_lengths_N[row])
            tokens_S = rollouts.tokens_NS[row, : begin + length]
            with torch.inference_mode():
                logits_TV = plain.logits(plain(tokens_S[None]))[0, begin - 1 : -1].float()
            expected_T = logits_TV.log_softmax(-1).gather(1, tokens_S[begin:, None]).squeeze(1)
            near = 0.05 if dtype == "float32" else 0.3  # a value may round to the other side
            torch.testing.assert_close(rollouts.logprobs_NT[row, :length], expected_T, rtol=0, atol=near)


@needs_int8
def test_responses_in_int8_are_the_same_bits_whatever_their_neighbours(context: Context) -> None:
    given = reading(context, "int8")
    weights, _ = sent(make_policy(replace(given, node="policy")), "int8")
    together = run(make_engine(given, samples=3), range(8), weights)
    for ordinal in (6, 0, 3):
        assert_equal(run(make_engine(given, samples=3), [ordinal], weights), together, [ordinal])
    wide: Any = make_policy(replace(context, node="policy"))
    # They are near to those of the float weights, but not equal.
    assert all(0 < mismatch(wide.model, rollouts) < 0.2 for rollouts, _ in together.values())


@needs_int8
@pytest.mark.parametrize("groups", [2, 1])
def test_ranks_of_a_generator_in_int8_hold_slices_and_sample_alike(groups: int, tmp_path: Path) -> None:
    spawn(2, "tests.nodes.part_cases:in_int8", str(groups), folder=tmp_path)


def test_what_no_device_or_model_computes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight_bit, "_exact", lambda: True)
    spec = ModelSpec(CONFIG, TOKENIZER)
    check_precision(spec, "int8")
    with pytest.raises(ModelError, match=r"given fp8 with matrices 40 wide .*needed multiples of 16"):
        check_precision(spec, "fp8")
    even = replace(spec, config=replace(CONFIG, intermediate_size=64))
    check_precision(even, "fp8")
    with pytest.raises(ModelError, match=r"given fp8 with matrices 8 wide \(on each of 2 ranks\)"):
        check_precision(even, "fp8", 2)
    with pytest.raises(ModelError, match=r"given int8 with adapters of rank 2.*needed no such precision beside"):
        check_precision(replace(spec, lora=Lora(2, 4.0)), "int8")
    require_products("int8", "cpu")
    for precision, device in (("fp8", "cpu"), ("int8", "cuda")):
        with pytest.raises(ModelError, match=f"given {precision} on {device}"):
            require_products(precision, device)


def test_an_engine_whose_device_lacks_the_precision_is_not_made(context: Context) -> None:
    with pytest.raises(ModelError, match="given fp8"):
        make_engine(reading(context, "fp8"))


def test_the_parameters_of_eight_bits_take_a_byte_each() -> None:
    for precision, dtype in DTYPES.items():
        elements, scales = quantised_parameters(torch.empty(6, 10), precision)
        assert (elements.dtype, elements.nbytes, scales.shape, scales.dtype) == (dtype, 60, (6,), torch.float32)


def test_fp8_decodes_by_the_same_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a CPU emulates the products of a GPU; a run would refuse that."""
    config = replace(CONFIG, intermediate_size=64)
    save(model(1, config=config), tmp_path)
    TOKENIZER.save(tmp_path)
    context = Context(node="generate", seed=3, model=str(tmp_path), slots=32, max_tokens=8)
    monkeypatch.setattr("penstock.nodes.generate.engine.require_products", lambda *_: None)
    weights, _ = sent(make_policy(replace(context, node="policy")), "fp8")
    engine: Engine = make_engine(reading(context, "fp8"), samples=3)
    assert sum(parameter.untyped_storage().nbytes() for parameter in engine.model.parameters()) < 4096
    found = run(engine, range(4), weights)
    assert {p.dtype for name, p in engine.model.named_parameters() if "_proj.weight" in name} == {torch.float8_e4m3fn}
    assert all(0 < mismatch(model(1, config=config), rollouts) < 0.5 for rollouts, _ in found.values())


def test_a_cpu_whose_sums_of_int8_overflow_is_refused_by_the_check(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eight_bit, "_exact", lambda: False)
    contexts = {"generate": reading(context, "int8")}
    found = check(trace(aipo, {}), contexts=contexts)
    assert "no-precision" in [fault.code for fault in found]


def test_every_node_that_decodes_requires_what_its_precision_takes() -> None:
    nodes: list[NodeDef[..., Any]] = [generate, reply, measure]
    for node in nodes:
        assert node.precisions == ("int8", "fp8")
        assert computes in requirements(node)
