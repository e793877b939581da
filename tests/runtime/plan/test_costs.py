"""The cost model checked by hand: a training step and the cost of each mesh axis, bytes by component, a model's
tensors, and the traffic of a weight sync."""

import json
import random
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.graph.protocols import rule_of
from penstock.nodes.model import CausalLM, Lora, decoder
from penstock.nodes.model.config import ModelConfig
from penstock.nodes.model.tensor_parallel import stages_of as trainer_stages
from penstock.nodes.model.tensor_parallel import tensor_parallel
from penstock.runtime.cluster.gpus import GPUS
from penstock.runtime.plan.collectives import Cost, bandwidth, exchange_s, gather_s, reduce_s
from penstock.runtime.plan.decode_cost import Generator, generator_memory
from penstock.runtime.plan.model_shape import SHAPES, Parallel, Shape, ShapeError, read_shape, shape_of, stages_of
from penstock.runtime.plan.roles import Models
from penstock.runtime.plan.sync_cost import layout, stages, switch_cost, sync_cost, tensors, traffic
from penstock.runtime.plan.train_cost import (
    RESERVED,
    Trainer,
    beside_memory,
    elementwise_bytes,
    layer_bytes,
    step_memory,
    trainer_memory,
)
from penstock.runtime.tensor.reshard import chain, nccl_round, reshard
from tests.nodes.tiny_model import parameter_shapes

H100, LLAMA = GPUS["H100"], SHAPES["llama-8b"]
ALONE = Trainer(LLAMA, H100, Parallel(), micro_tokens=8192, recompute=0.0)
TRAINER = Trainer(LLAMA, H100, Parallel(fsdp=8))
GENERATOR = Generator(LLAMA, H100, Parallel(), slots=256)
BATCH = np.full(64, 4096)
CONFIG = ModelConfig(128256, 4096, 14336, 32, 32, 8, 128)


def test_the_flops_of_a_step_are_six_per_parameter_and_token_and_attention() -> None:
    parts = ALONE.update(BATCH).parts
    tokens = 64 * 4096
    assert parts["products"] == pytest.approx(6 * LLAMA.active_parameters * tokens / (989e12 * 0.6))
    forward = 2 * 32 * 64 * 4096**2 * 4096
    assert parts["attention"] == pytest.approx(forward * 3.5 / (989e12 * 0.35))


class _Unattended(torch.autograd.Function):
    """Attention without any operation: the output's gradient serves for queries, keys and values."""

    @staticmethod
    def forward(ctx: Any, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor) -> Tensor:
        return q_BSHK.view_as(q_BSHK)

    @staticmethod
    def backward(ctx: Any, grad_BSHK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return grad_BSHK, grad_BSHK[:, :, :8], grad_BSHK[:, :, :8]


class _Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write, except for matrix products and views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        given, made = ([x for x in tree_leaves(each) if isinstance(x, Tensor)] for each in ((args, kwargs), out))
        held = {x.untyped_storage()._cdata for x in given}
        viewed = all(x.untyped_storage()._cdata in held for x in made) and not function._schema.is_mutable
        if not viewed and function is not torch.ops.aten.mm.default:
            self.bytes += sum(x.numel() * x.element_size() for x in (*given, *made))
        return out


def test_between_products_as_much_is_read_and_written_as_by_this_projects_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A layer of 8B, forward and backward; a norm is one kernel on a GPU, so it counts as one operation."""
    monkeypatch.setattr(decoder, "rms_norm", lambda x, *_: -x)
    unattended: Any = _Unattended.apply
    tokens, found = 64, []
    for layers in (1, 2):
        config = ModelConfig(256, 4096, 14336, layers, 32, 8, 128)
        model = decoder.CausalLM(config, dtype=torch.bfloat16, device="meta")
        model.cos_PK, model.sin_PK = (x.to("meta", torch.bfloat16) for x in (model.cos_PK, model.sin_PK))
        with _Traffic() as traffic:
            given = torch.zeros(1, tokens, dtype=torch.long, device="meta")
            hidden = decoder.Decoder.forward(model, given, attend=lambda _, *given: unattended(*given[:3]))
            hidden.sum().backward()  # type: ignore[no-untyped-call]
        found.append(traffic.bytes)
    fused = 3 * elementwise_bytes(SHAPES["llama-8b"]) / 32
    assert (found[1] - found[0]) / tokens == pytest.approx(fused, rel=0.05)


def test_recomputing_adds_a_forward_pass_and_frozen_weights_save_one() -> None:
    base = ALONE.update(BATCH).parts["products"]
    assert replace(ALONE, recompute=1.0).update(BATCH).parts["products"] == pytest.approx(base * 4 / 3)
    assert replace(ALONE, frozen=True).update(BATCH).parts["products"] == pytest.approx(base * 2 / 3)
    assert ALONE.logprobs(BATCH).parts["products"] == pytest.approx(base / 3)


def test_a_packed_batch_costs_attention_by_the_square_of_each_sequence() -> None:
    long, short = (ALONE.update(np.full(8 * n, 8192 // n)).parts for n in (1, 8))
    assert long["products"] == pytest.approx(short["products"])
    assert long["attention"] == pytest.approx(8 * short["attention"])


def test_a_pipelines_bubble_is_a_micro_batch_on_the_other_stages() -> None:
    """The slowest stage, which has the head, adds no bubble; its layers and head count in full."""
    piped = replace(ALONE, mesh=Parallel(pp=4), zero3=False)
    parts = piped.update(BATCH)
    micro = 64 * 4096 // 8192
    work = parts.seconds - sum(parts.parts[once] for once in ("bubble", "optimizer", "stage"))
    layer = (LLAMA.active_parameters - 128256 * 4096 - 4096) / 32
    slowest = 8 * layer + 128256 * 4096 + 4096
    assert parts.parts["bubble"] == pytest.approx(work / micro * 24 * layer / slowest)
    assert parts.parts["products"] == pytest.approx(6 * slowest * 64 * 4096 / H100.flops("bf16"))


def test_stages_hold_whole_layers_cut_as_the_trainer_cuts_them() -> None:
    """For example, 61 layers on 40 stages put two on most of them, which then hold twice the mean."""
    for name, count in (("deepseek-v3", 40), ("llama-8b", 3), ("qwen3-4b", 36), ("llama-1b", 2)):
        shape = SHAPES[name]
        found, own = stages_of(shape, count), stages(shape, count)
        for place, stage in enumerate(found):
            held = [size for name, (size, _) in tensors(shape).items() if place in own[name]]
            assert stage.parameters == pytest.approx(sum(prod(size) for size in held), rel=1e-4)
        assert sum(stage.layers for stage in found) == shape.layers
        assert sum(stage.active for stage in found) == pytest.approx(shape.active_parameters, rel=1e-4)
    deep = replace(ALONE, shape=SHAPES["deepseek-v3"], mesh=Parallel(pp=40), zero3=False)
    assert max(stage.layers for stage in deep.stages) == 2
    assert trainer_memory(deep).parts["moments"] > 1.25 * 8 * deep.shape.parameters / 40


def test_a_stage_holds_what_the_trainer_gives_it_on_models_and_stages_that_are_drawn() -> None:
    """The stage cut is defined once (`graph.protocols.stage_of_layer`), the parameter counts twice."""
    draw = random.Random(8)
    for _ in range(60):
        layers, kv_heads, tied = draw.randint(1, 24), draw.choice((1, 2, 4)), draw.random() < 0.3
        heads, head_dim, inner, vocab = kv_heads * draw.choice((1, 2)), 8, draw.randint(1, 9), draw.randint(2, 9)
        hidden, count = heads * head_dim, draw.randint(1, layers)
        config = ModelConfig(vocab, hidden, inner, layers, heads, kv_heads, head_dim, tie_word_embeddings=tied)
        held = parameter_shapes(config)
        cut = trainer_stages(config, held, count)
        own = [sum(prod(held[name]) for name, places in cut.items() if place in places) for place in range(count)]
        shape = Shape("drawn", vocab, hidden, layers, heads, kv_heads, head_dim, inner, tied)
        assert [stage.parameters for stage in stages_of(shape, count)] == own


def test_experts_over_ranks_save_gathers_and_memory_and_cost_exchanges() -> None:
    alone = replace(TRAINER, shape=SHAPES["qwen3-30b-a3b"], micro_tokens=4096)
    spread = replace(alone, mesh=replace(alone.mesh, ep=8))
    assert spread.shard == alone.shard == alone.shape.parameters / 8
    dense, experts = alone.shape.dense_parameters, alone.shape.expert_parameters
    assert (alone.local, spread.local) == pytest.approx((dense + experts, dense + experts / 8))
    assert spread.update(BATCH).parts["ep"] > 0
    assert "ep" not in alone.update(BATCH).parts
    # The host waits four times for each micro-batch and layer: forward, recomputation, and twice backward.
    assert spread.update(BATCH).parts["routing"] == pytest.approx(4 * 48 * 8 * H100.engine.experts_ms * 1e-3)
    assert spread.update(BATCH).parts["products"] == alone.update(BATCH).parts["products"]
    before, after = (step_memory(each, 0)["layer backward"].parts for each in (alone, spread))
    assert after["unsharded blocks"] < before["unsharded blocks"] / 2
    # Rows of a micro-batch that are sent to experts and received back.
    assert after["activations"] - before["activations"] == 2 * 4096 * 2 * alone.shape.active * alone.shape.hidden
    apart = {"unsharded blocks": 0, "activations": 0}
    assert {**after, **apart} == {**before, **apart}


def test_a_generators_ranks_share_out_experts_and_each_has_the_rest() -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    one, four = (Generator(shape, H100, Parallel(fsdp=ep, ep=ep), 64) for ep in (1, 4))
    assert (four.mesh.ranks, four.mesh.axes) == (4, (("ep", 4),))
    dense, experts = shape.dense_parameters, shape.expert_parameters
    assert (one.bytes_each, four.bytes_each) == pytest.approx((2 * (dense + experts), 2 * (dense + experts / 4)))
    held = [generator_memory(each, 1000.0, 1).parts for each in (one, four)]
    assert held[0]["weights"] - held[1]["weights"] == pytest.approx(2 * 0.75 * experts)
    assert {**held[0], "weights": 0} == {**held[1], "weights": 0}
    before, after = (each.step(64, 64_000).parts for each in (one, four))
    assert after["weights"] < before["weights"] / 2
    assert after["cache"] == before["cache"]
    assert after["ep"] > 0
    assert "ep" not in before
    moved = traffic(shape, Parallel(fsdp=4), four.mesh, "bf16")
    assert moved.received == pytest.approx(four.bytes_each, rel=1e-3)


def test_ranks_that_share_sequences_share_their_activations_and_their_work() -> None:
    shared = replace(TRAINER, cp=2)
    assert shared.update(BATCH).parts["products"] == pytest.approx(TRAINER.update(BATCH).parts["products"])
    # A single sequence is processed by one rank, or by two.
    one = np.array([8192])
    for part in ("products", "attention"):
        assert shared.update(one).parts[part] == pytest.approx(TRAINER.update(one).parts[part] / 2)
    assert shared.update(one).parts["cp"] == 0  # hidden behind attention
    assert replace(shared, mesh=Parallel(fsdp=16), cp=16).update(np.full(64, 512)).parts["cp"] > 0
    halved, whole = (step_memory(each, 0)["head backward"].parts["activations"] for each in (shared, TRAINER))
    assert halved == pytest.approx(whole / 2)


def test_gathers_of_weights_hide_behind_computation_until_it_is_too_short() -> None:
    wide = replace(ALONE, mesh=Parallel(fsdp=64))
    assert wide.update(np.full(64, 8192)).parts["fsdp"] == 0
    assert wide.update(np.full(64, 256)).parts["fsdp"] > 0


def test_collectives_by_hand() -> None:
    assert gather_s(H100, 8e9, 1) == reduce_s(H100, 8e9, 1) == 0
    assert gather_s(H100, 8e9, 8) == pytest.approx(7 / 8 * 8e9 / 360e9 + 1e-5)
    assert reduce_s(H100, 8e9, 8) == pytest.approx(2 * gather_s(H100, 8e9, 8))
    assert exchange_s(H100, 1e9, 1) == 0
    assert exchange_s(H100, 1e9, 16) == pytest.approx(0.5e9 / H100.nic + H100.latency_s + H100.network_s)
    assert bandwidth(H100, 16) == pytest.approx(8 * 40e9)  # eight NICs of a machine in parallel
    assert bandwidth(H100, 16, stride=8) == pytest.approx(40e9)  # one GPU of each machine has its own NIC
    # Few bytes go through a tree: up and down within a host, and between 32 hosts.
    assert reduce_s(H100, 1.0, 256) == pytest.approx(2 * (H100.latency_s + 5 * H100.network_s), rel=1e-3)
    assert gather_s(H100, 0.0, 16) == pytest.approx(H100.latency_s + H100.network_s)
    assert switch_cost(H100, 40e9, 20e9).seconds == pytest.approx(1.5 + H100.engine.switch_s)


def test_a_mesh_divides_heads_and_layers() -> None:
    assert [Parallel(tp=tp).divides(LLAMA) for tp in (8, 16, 32, 64, 3)] == [True, True, True, False, False]
    assert [Parallel(pp=pp).divides(LLAMA) for pp in (3, 32, 33)] == [True, True, False]
    assert Parallel(fsdp=4, tp=8, pp=2).axes == (("pp", 2), ("fsdp", 4), ("tp", 8))


def test_costs_add_up_and_name_what_bounds_them() -> None:
    cost = Cost({"a": 1.0, "b": 2.0}) + Cost({"b": 1.0}) * 2
    assert (cost.seconds, cost.bound, cost.parts["b"]) == (5.0, "b", 4.0)
    assert Cost().bound == "nothing"


def test_a_trainer_holds_sixteen_bytes_per_parameter_of_its_shard_and_eighteen_alone() -> None:
    """A rank without shards also has a copy of its master weights to compute with, unless it computes in fp32."""
    alone = replace(TRAINER, mesh=Parallel())
    for trainer, size in ((TRAINER, 16 / 8), (alone, 18), (replace(alone, precision="fp32"), 16)):
        parts = trainer_memory(trainer).parts
        state = parts["weights"] + parts["gradients"] + parts["moments"]
        assert state == pytest.approx(size * LLAMA.parameters)
    parts = trainer_memory(TRAINER).parts
    whole = trainer_memory(replace(TRAINER, zero3=False)).parts
    assert whole["weights"] + whole["gradients"] == pytest.approx(6 * LLAMA.parameters)
    assert whole["moments"] == pytest.approx(1.5 * parts["moments"])


def test_ranks_of_tp_share_the_logits_of_a_chunk() -> None:
    """With tp a chunk has more tokens, and the gradient of a rank's part of the head is allocated at another time."""
    trainer = replace(TRAINER, micro_tokens=16384, logit_elements=1 << 28)
    whole, cut = (
        step_memory(replace(trainer, mesh=mesh), 0)["head backward"].parts["logits"]
        for mesh in (Parallel(fsdp=8), Parallel(2, 1, 4))
    )
    assert whole - cut == pytest.approx(4 * LLAMA.vocab * LLAMA.hidden, rel=0.01)


def test_a_pass_alone_keeps_weights_and_what_one_layer_needs() -> None:
    passing = trainer_memory(replace(TRAINER, frozen=True)).parts
    assert passing["gradients"] == passing["moments"] == 0
    assert passing["weights"] == 2 * LLAMA.parameters / 8
    longer = trainer_memory(replace(TRAINER, frozen=True, shape=replace(LLAMA, layers=64))).parts
    assert longer["activations"] == passing["activations"]


PARTS = "head", "layer"


def test_recomputation_keeps_the_inputs_of_layers_and_one_layer() -> None:
    """8B with flash attention and bfloat16: without recomputation 139 kB per token and layer."""
    assert layer_bytes(ALONE, ALONE.stages[0]) == 139_400
    kept, again = (
        [step_memory(replace(ALONE, recompute=share), 0)[f"{part} backward"].parts["activations"] for part in PARTS]
        for share in (0.0, 1.0)
    )
    assert kept[0] - again[0] == 8192 * 32 * (139_400 - 2 * 4096)
    assert (again[1] - again[0]) - (kept[1] - kept[0]) == 8192 * (139_400 - 2 * 4096)


def test_a_generators_cache_is_a_token_of_every_layer_for_each_slot() -> None:
    """Each rank holds a latent cache whole; heads are divided among ranks."""
    parts = generator_memory(GENERATOR, 1000).parts
    assert parts["cache"] == 256 * 1000 * 32 * 2 * 8 * 128 * 2
    assert parts["weights"] == 2 * 2 * LLAMA.parameters
    assert generator_memory(GENERATOR, 1000, copies=1).parts["weights"] == parts["weights"] / 2
    for name, width in (("llama-70b", 80 * 2 * 128), ("deepseek-v3", 61 * 576)):
        assert generator_memory(Generator(SHAPES[name], H100, Parallel(tp=8), 1), 1).parts["cache"] == width * 2


def test_a_trainer_has_a_snapshot_of_the_weights_that_it_sends() -> None:
    """Each rank of its shard (`WeightPublisher`)."""
    for trainer, shard in ((ALONE, LLAMA.parameters), (TRAINER, LLAMA.parameters / TRAINER.mesh.fsdp)):
        sending, alone = trainer_memory(trainer, snapshots=2.0), trainer_memory(trainer)
        assert sending.parts["snapshots"] == pytest.approx(2 * shard)
        assert sending.bytes - alone.bytes == pytest.approx(2 * shard)
    assert not trainer_memory(replace(TRAINER, frozen=True), snapshots=2.0).parts["snapshots"]


def test_roles_that_share_a_gpu_add_up_and_reserve_once() -> None:
    own, other = trainer_memory(TRAINER), generator_memory(GENERATOR, 1000)
    assert (own + other).bytes == pytest.approx(own.bytes + other.bytes - RESERVED)
    assert own.used == own.bytes - RESERVED
    beside = beside_memory(TRAINER, Models(frozen=2, critics=1))
    assert beside.used == beside.bytes == pytest.approx((2 * 2 + 16) * LLAMA.parameters / 8)


def test_a_sync_moves_what_its_plan_says() -> None:
    """Each of 8 generators receives all weights; each of 8 trainers sends its eighth to all of them."""
    moved = traffic(LLAMA, Parallel(fsdp=8), Parallel(), "bf16")
    assert moved.received == 2 * LLAMA.parameters
    assert 8 * moved.sent == pytest.approx(2 * LLAMA.parameters, rel=0.01)
    assert traffic(LLAMA, Parallel(fsdp=8), Parallel(), "fp8").received < moved.received * 0.51
    apart, together = (sync_cost(moved, 8, H100, H100, together=way).seconds for way in (False, True))
    assert together < apart == pytest.approx(moved.received / 40e9 + H100.engine.swap_s, rel=0.02)
    mixture = SHAPES["deepseek-v3"]
    assert traffic(mixture, Parallel(fsdp=4, pp=4), Parallel(tp=16), "bf16").received >= 2 * mixture.parameters / 16


@pytest.mark.parametrize(("trainers", "heads"), [(8, 8), (4, 4), (1, 1)])
def test_few_trainers_feed_chains_of_many_replicas_as_a_run_does(trainers: int, heads: int) -> None:
    shape = LLAMA
    moved = traffic(shape, Parallel(fsdp=trainers), Parallel(), "bf16")
    plan = reshard(layout(shape, Parallel(fsdp=trainers), "bfloat16"), layout(shape, Parallel(), "bfloat16"))
    assert chain(plan, 8).count(None) == heads
    direct, chained = (sync_cost(moved, 8, H100, H100, chained=chained).parts for chained in (False, True))
    assert direct["wire"] == pytest.approx(8 / heads * moved.received / 40e9, rel=0.01)
    assert chained["wire"] == pytest.approx(moved.received / 40e9, rel=0.01)
    assert ("chain" in chained) == (heads < 8)
    assert chained.get("chain", 0.0) == pytest.approx(
        (8 // heads - 1) * (nccl_round(moved.received, 1) / 40e9 + H100.latency_s)
    )


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [("llama-8b", 8.03, 7.5), ("llama-70b", 70.55, 69.5), ("llama-405b", 405.85, 403.8), ("qwen3-0.6b", 0.596, 0.596),
     ("qwen3-30b-a3b", 30.53, 3.04), ("qwen3-235b-a22b", 235.09, 21.6), ("deepseek-v3", 671.03, 36.6),
     ("glm-4.5-air", 106.85, 12.8)],
)  # fmt: skip
def test_parameters_are_those_that_the_makers_say(name: str, billions: float, active: float) -> None:
    shape = SHAPES[name]
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=1e-3)
    assert shape.active_parameters / 1e9 == pytest.approx(active, rel=5e-3)
    assert sum(prod(size) for size, _ in tensors(shape).values()) == pytest.approx(shape.parameters, rel=1e-6)
    # Experts are divided whole: the sharding rule has their number as the maximum number of parts.
    rules = {rule for name, (_, rule) in tensors(shape).items() if ".experts." in name}
    assert rules == ({(0, shape.experts)} if shape.experts else set())


def test_a_models_own_config_gives_the_same_parameters_tensors_and_rules() -> None:
    shape = shape_of(CONFIG.to_json(), "here")
    assert shape.parameters == LLAMA.parameters
    assert {name: size for name, (size, _) in tensors(shape).items()} == parameter_shapes(CONFIG)
    assert stages(shape, 4) == trainer_stages(CONFIG, parameter_shapes(CONFIG), 4)
    own = tensor_parallel(CONFIG)
    assert {name: rule for name, (_, rule) in tensors(shape).items()} == {
        name: rule_of(name, own) for name in tensors(shape)
    }


@pytest.mark.parametrize("targets", [(), ("q_proj", "v_proj", "down_proj")])
def test_adapters_are_those_of_the_models_that_run(targets: tuple[str, ...]) -> None:
    """Their tensors and sharding rules, and a rank's share under tp."""
    lora = Lora(4, 8.0, targets) if targets else Lora(4, 8.0)
    own = {name: tuple(p.shape) for name, p in CausalLM(CONFIG, device="meta", lora=lora).own_parameters().items()}
    shape, rules = shape_of(CONFIG.to_json(), "here").with_lora(4, targets), tensor_parallel(CONFIG)
    assert {name: size for name, (size, _) in tensors(shape).items()} == own
    assert {name: rule for name, (_, rule) in tensors(shape).items()} == {name: rule_of(name, rules) for name in own}
    assert stages(shape, 4) == trainer_stages(CONFIG, own, 4)
    for tp in (1, 2):
        parts = (prod(size) / (tp if rule_of(name, rules) else 1) for name, size in own.items())
        assert shape.layers * shape.adapted(tp) == sum(parts)


def test_adapters_alone_have_gradients_moments_and_a_wire() -> None:
    """8B on 8 GPUs: the frozen base is held once, in bfloat16 and sharded, without computing its weight gradients."""
    full = Trainer(SHAPES["llama-8b"], H100, Parallel(fsdp=8), recompute=1.0)
    own = replace(full, shape=full.shape.with_lora(16))
    learnt = full.shape.layers * own.shape.adapted()
    ours, whole = trainer_memory(own).parts, trainer_memory(full).parts
    # Trained weights are sharded in float32, frozen ones in the compute dtype.
    assert whole["weights"] == pytest.approx(4 * own.shape.parameters / 8, rel=0.01)
    assert ours["weights"] == pytest.approx(whole["weights"] / 2 + 4 * learnt / 8)
    assert ours["moments"] == pytest.approx(8 * learnt / 8)
    assert ours["gradients"] == pytest.approx(4 * learnt / 8)
    assert beside_memory(own, Models(frozen=0, critics=1)) == beside_memory(full, Models(frozen=0, critics=1))
    lengths = np.full(64, 1000)
    # The adapters' step has three of the four products: forward, recomputed forward, and one of two backward.
    shares = own.update(lengths).parts["products"] / full.update(lengths).parts["products"]
    assert 0.75 < shares < 0.77
    moved = [traffic(t.shape, t.mesh, Parallel(tp=2), "bf16").received for t in (full, own)]
    assert moved[1] == pytest.approx(2 * full.shape.layers * own.shape.adapted(2))
    assert moved[1] < moved[0] / 50


def test_a_mixtures_config_is_read_from_its_file_or_its_directory(tmp_path: Path) -> None:
    data = {**CONFIG.to_json(), "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(data))
    for path in (tmp_path, tmp_path / "config.json"):
        shape = read_shape(str(path))
        assert (shape.experts, shape.active, shape.expert_inner, shape.moe_layers) == (8, 2, 1024, 32)


def test_what_is_no_model_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match=r"given 'llama-8', needed .*did you mean 'llama-8b'\?"):
        read_shape("llama-8")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ShapeError, match="not JSON"):
        read_shape(str(tmp_path))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([1, 2], "given list, needed an object"),
        ({"hidden_size": None}, "given no hidden_size, needed a positive whole number"),
        ({"num_key_value_heads": "x"}, "given num_key_value_heads 'x', needed a positive whole number"),
        ({"num_key_value_heads": 5}, "given num_key_value_heads 5, needed a divisor of the 32 heads"),
        ({"head_dim": 64.5}, "given head_dim 64.5, needed a positive whole number"),
        ({"num_experts": "x"}, "given num_experts 'x', needed a positive whole number"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": -1}, "given n_shared_experts -1"),
        ({"text_config": CONFIG.to_json(), "hidden_size": None}, "given no hidden_size, .*; text_config has one"),
    ],
)
def test_a_size_that_is_none_is_named(given: object, said: str) -> None:
    with pytest.raises(ShapeError, match=f"config.json: {said}"):
        shape_of({**CONFIG.to_json(), **given} if isinstance(given, dict) else given, "wrong")
