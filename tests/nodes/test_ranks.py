"""A model over several ranks learns and samples the same as on one, within rounding."""

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.graph import Context
from penstock.graph.protocols import Axes
from penstock.nodes.generate import make_engine
from penstock.nodes.generate.engines import engine_lacks
from penstock.nodes.model import CausalLM, ModelConfig, Scorer
from penstock.nodes.model.tensor_parallel import (
    check_experts,
    check_tensor_parallel,
    part_config,
    stages_of,
    tensor_parallel,
)
from penstock.nodes.parallel.mesh import Ranks, assign
from penstock.nodes.parallel.pipeline import PipelineStage
from penstock.runtime.tensor.layout import Mesh, Split
from tests.nodes.ranked import spawn
from tests.nodes.tiny_model import parameter_shapes

# A rank's place, work and part of a model follow from the mesh; a mesh that a model cannot run on is refused.


CONFIG = ModelConfig(97, 24, 40, 5, 8, 4, 4)
TIED = replace(CONFIG, tie_word_embeddings=True)


@pytest.mark.parametrize("axes", list(permutations((("dp", 2), ("fsdp", 3), ("tp", 2)))))
def test_places_are_row_major(axes: Axes) -> None:
    every = [Ranks(axes, rank) for rank in range(12)]
    coordinates = Mesh(axes).coordinates()
    for rank, ranks in enumerate(every):
        assert [ranks.place(axis) for axis, _ in axes] == coordinates[:, rank].tolist()
    assert sorted((ranks.share(), ranks.place("tp")) for ranks in every) == [(s, t) for s in range(6) for t in (0, 1)]
    speakers = every[0].reporting_ranks()
    assert [every[rank].share() for rank in speakers] == list(range(6))
    assert all(every[rank].place("tp") == 0 for rank in speakers)


@pytest.mark.parametrize("rank", range(12))
def test_a_neighbour_is_one_further_along_an_axis_alone(rank: int) -> None:
    ranks = Ranks((("dp", 2), ("pp", 3), ("tp", 2)), rank)
    if ranks.place("pp") < 2:
        other = ranks.neighbour("pp", 1)
        assert ranks.place("pp", other) == ranks.place("pp") + 1
        assert [ranks.place(axis, other) for axis in ("dp", "tp")] == [ranks.place(axis) for axis in ("dp", "tp")]
        assert Ranks(ranks.mesh, other).neighbour("pp", -1) == rank
    assert all(ranks.place("pp", speaker) == 2 for speaker in ranks.reporting_ranks())
    alone = Ranks.of(Context())
    assert (alone.count, alone.shares, alone.share(), alone.size("tp"), alone.reporting_ranks()) == (1, 1, 0, 1, [0])


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (lambda: Ranks((("cp", 2),)), "given a mesh of cp 2, needed each of the axes"),
        (lambda: check_experts(CONFIG, 2), "given a llama without experts, needed a number of experts that ep 2"),
        (
            lambda: check_experts(replace(CONFIG, model_type="qwen3_moe", num_experts=6), 4),
            "given 6 experts, needed a number of experts that ep 4 divides",
        ),
        (lambda: Ranks((("tp", 2), ("tp", 2))), "given a mesh of tp 2 × tp 2, needed each of the axes"),
        (lambda: Ranks((("tp", 0),)), "given a mesh of tp 0, needed sizes of 1 or more"),
        (lambda: Ranks((("tp", 2),), 2), "given a mesh of tp 2 and rank 2, needed a rank of 0 to 1"),
        (
            lambda: PipelineStage(CausalLM(TIED), Ranks((("pp", 2),)), torch.float32),
            "given tied embeddings over 2 stages, needed a head of its own or one stage",
        ),
        (lambda: PipelineStage(CausalLM(CONFIG), Ranks((("pp", 6),)), torch.float32), "given 6 stages, needed 1 to 5"),
        (lambda: stages_of(CONFIG, (), 0), "given 0 stages, needed 1 to 5"),
        (
            lambda: check_tensor_parallel(CONFIG, 3, shared_heads=True),
            "given 8 attention heads, 4 key-value heads, an intermediate_size of 40, needed numbers that tp 3",
        ),
        (
            lambda: check_tensor_parallel(CONFIG, 8, shared_heads=False),
            "given 4 key-value heads, needed numbers that tp 8 divides",
        ),
        (
            lambda: part_config(ModelConfig(5, 16, 16, 1, 4, 4, 4), 4, 0),
            "given 5 words over tp 4, needed some for each",
        ),
        (
            lambda: make_engine(Context(mesh=(("fsdp", 2), ("tp", 2)))),
            "given a mesh of fsdp 2 × tp 2, needed the axis tp or the axis ep alone",
        ),
    ],
)
def test_what_means_nothing_to_a_model_or_cannot_be_cut_is_refused(make: Callable[[], Any], given: str) -> None:
    with pytest.raises(ValueError, match=re.escape(given)):
        make()


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_a_part_has_the_shapes_that_the_rules_say(parts: int) -> None:
    rules = tensor_parallel(CONFIG)
    for part in range(parts):
        own = part_config(CONFIG, parts, part)
        for end, whole, local in (
            ("embed_tokens.weight", CONFIG.vocab_size, own.vocab_size),
            ("q_proj.weight", CONFIG.num_attention_heads * 4, own.num_attention_heads * 4),
            ("k_proj.weight", CONFIG.num_key_value_heads * 4, own.num_key_value_heads * 4),
            ("up_proj.weight", CONFIG.intermediate_size, own.intermediate_size),
        ):
            rule = rules[end]
            assert rule is not None
            split, extent = Split("tp", 0, rule[1]), Mesh((("tp", parts),)).extent("tp")
            start, stop = split.apply(np.array([0]), np.array([whole]), np.array([part]), extent)
            assert local == stop - start


COSTS = st.lists(st.integers(1, 1000), max_size=40)


@given(COSTS, st.integers(1, 9))
def test_each_item_is_dealt_once_and_no_part_gets_more_than_its_rounds(costs: list[int], parts: int) -> None:
    shares = assign(costs, parts)
    assert len(shares) == parts
    assert sorted(item for share in shares for item in share) == list(range(len(costs)))
    assert all(share == sorted(share) for share in shares)
    assert max(map(len, shares)) == -(-len(costs) // parts)


@given(COSTS.filter(bool), st.integers(1, 9))
def test_no_part_has_more_than_its_fair_share_and_two_items(costs: list[int], parts: int) -> None:
    totals = [sum(costs[item] for item in share) for share in assign(costs, parts)]
    assert max(totals) <= sum(costs) / parts + 2 * max(costs)


def test_the_longest_goes_first_to_who_has_least() -> None:
    assert assign([5, 5, 5, 5], 2) == [[0, 2], [1, 3]]
    assert assign([1, 9, 2, 8], 2) == [[0, 1], [2, 3]]
    assert assign([3], 3) == [[0], [], []]
    assert assign([], 2) == [[], []]


@pytest.mark.parametrize("model", [CausalLM(CONFIG), Scorer(CONFIG)])
def test_every_parameter_has_a_rule_whose_units_divide_it(model: CausalLM | Scorer) -> None:
    rules = tensor_parallel(CONFIG)
    for name, parameter in model.named_parameters():
        (*_, rule) = [rule for end, rule in sorted(rules.items(), key=lambda item: len(item[0])) if name.endswith(end)]
        assert rule is None or rule[1] == 0 or parameter.shape[rule[0]] % rule[1] == 0
        assert (rule is None) == (parameter.dim() == 1 or name == "score.weight")


def test_attention_is_cut_between_heads() -> None:
    rules = tensor_parallel(CONFIG)
    assert rules["q_proj.weight"] == (0, 8)
    assert rules["k_proj.weight"] == rules["v_proj.weight"] == (0, 4)
    assert rules["o_proj.weight"] == (1, 8)


@pytest.mark.parametrize("stages", range(1, 6))
def test_stages_are_runs_of_layers_with_both_ends(stages: int) -> None:
    found = stages_of(CONFIG, parameter_shapes(CONFIG), stages)
    assert found.keys() == parameter_shapes(CONFIG).keys()
    assert found["model.embed_tokens.weight"] == (0,)
    assert found["model.norm.weight"] == found["lm_head.weight"] == (stages - 1,)
    of_layers = [found[f"model.layers.{i}.mlp.up_proj.weight"][0] for i in range(5)]
    assert of_layers == sorted(of_layers)
    counts = [of_layers.count(stage) for stage in range(stages)]
    assert max(counts) - min(counts) <= 1
    tied = stages_of(TIED, parameter_shapes(TIED), stages)["model.embed_tokens.weight"]
    assert tied == tuple(sorted({0, stages - 1}))


# A model over several ranks learns and samples the same as on one, within rounding, and every rank reports the same.


slow = pytest.mark.slow
CASES, LESSONS, PARTS = "tests.nodes.rank_cases", "tests.nodes.lesson_cases", "tests.nodes.part_cases"


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [
        (2, "fsdp=2"),
        (2, "tp=2"),
        (2, "dp=2"),
        (2, "pp=2"),
        pytest.param(4, "fsdp=2,tp=2", marks=slow),
        pytest.param(4, "dp=2,fsdp=2", marks=slow),
        pytest.param(4, "tp=2,dp=2", marks=slow),
        pytest.param(4, "pp=2,fsdp=2", marks=slow),
        pytest.param(4, "tp=2,pp=2", marks=slow),
    ],
)
def test_an_update_over_ranks_is_one_ranks(ranks: int, mesh: str, tmp_path: Path) -> None:
    spawn(ranks, f"{CASES}:update", mesh, folder=tmp_path)


EVERY = ["fsdp=2", pytest.param("tp=2", marks=slow), pytest.param("pp=2", marks=slow)]


@pytest.mark.parametrize("mesh", ["fsdp=2", pytest.param("dp=2", marks=slow)])
def test_a_rank_without_work_of_its_own_changes_nothing(mesh: str, tmp_path: Path) -> None:
    spawn(2, f"{CASES}:few_rows", mesh, folder=tmp_path)


@pytest.mark.parametrize("mesh", EVERY)
@pytest.mark.parametrize("case", [f"{CASES}:other_models", f"{CASES}:half_precision", f"{LESSONS}:frozen"])
def test_all_models_of_a_run_can_be_in_parts(case: str, mesh: str, tmp_path: Path) -> None:
    """Sharded masters are float32, and each rank reads only its shard of a frozen model."""
    spawn(2, case, mesh, folder=tmp_path)


@pytest.mark.parametrize("mesh", EVERY[:2])
def test_every_kind_of_update_can_be_over_ranks(mesh: str, tmp_path: Path) -> None:
    spawn(2, f"{LESSONS}:lessons", mesh, folder=tmp_path)


@pytest.mark.slow
def test_a_stage_in_the_middle_passes_on(tmp_path: Path) -> None:
    spawn(3, f"{LESSONS}:three_stages", "pp=3", folder=tmp_path)


@pytest.mark.parametrize(
    ("ranks", "mesh", "tied"),
    [
        (2, "tp=2", "tied"),
        pytest.param(2, "tp=2", "untied", marks=slow),
        *(pytest.param(4, mesh, tied, marks=slow) for mesh in ("tp=4", "fsdp=2,tp=2") for tied in ("untied", "tied")),
    ],
)
def test_embedding_and_head_are_cut_over_the_vocabulary(ranks: int, mesh: str, tied: str, tmp_path: Path) -> None:
    spawn(ranks, f"{LESSONS}:words", mesh, tied, folder=tmp_path)


@pytest.mark.parametrize(
    ("mesh", "dtype"),
    [("tp=2", "bfloat16"), *(pytest.param(mesh, "float32", marks=slow) for mesh in ("fsdp=2", "pp=2", "dp=2"))],
)
def test_a_gradient_that_is_no_number_is_refused_by_all_ranks(mesh: str, dtype: str, tmp_path: Path) -> None:
    spawn(2, f"{LESSONS}:no_number", mesh, dtype, folder=tmp_path)


@pytest.mark.parametrize("mesh", ["tp=2", pytest.param("dp=2", marks=slow)])
def test_replicas_stay_equal_to_the_bit(mesh: str, tmp_path: Path) -> None:
    spawn(2, f"{LESSONS}:replicas", mesh, folder=tmp_path)


@pytest.mark.parametrize(
    ("ranks", "groups", "tied", "dtype"),
    [
        (2, 2, "untied", "float32"),
        (2, 1, "tied", "float32"),
        pytest.param(2, 2, "untied", "bfloat16", marks=slow),
        pytest.param(4, 2, "untied", "float32", marks=slow),  # more ranks than key-value heads
    ],
)
def test_an_engine_over_ranks_samples_one_ranks_tokens(
    ranks: int, groups: int, tied: str, dtype: str, tmp_path: Path
) -> None:
    spawn(ranks, f"{PARTS}:engine", str(groups), tied, dtype, folder=tmp_path)


# How a step is computed changes neither its results nor what the ranks report.

TRAINING = "tests.nodes.training_cases"


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [(2, "fsdp=2"), (2, "pp=2"), pytest.param(2, "tp=2", marks=slow), pytest.param(4, "fsdp=2,tp=2", marks=slow)],
)
def test_layers_that_are_computed_again_give_the_same_bits_over_ranks(ranks: int, mesh: str, tmp_path: Path) -> None:
    spawn(ranks, f"{TRAINING}:recomputed", mesh, folder=tmp_path)


@pytest.mark.parametrize("mesh", ["fsdp=2", pytest.param("tp=2", marks=slow), pytest.param("pp=2", marks=slow)])
def test_moments_that_lie_on_the_host_make_the_same_bits_over_ranks(mesh: str, tmp_path: Path) -> None:
    spawn(2, f"{TRAINING}:on_the_host", mesh, folder=tmp_path)


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [(2, "fsdp=2"), pytest.param(2, "dp=2", marks=slow), (2, "pp=2"), pytest.param(4, "dp=2,fsdp=2", marks=slow)],
)
def test_gradients_that_are_reduced_once_a_step_are_one_ranks(ranks: int, mesh: str, tmp_path: Path) -> None:
    spawn(ranks, f"{TRAINING}:reduced_once", mesh, folder=tmp_path)


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [
        (2, "fsdp=2"),
        (2, "pp=2"),
        pytest.param(2, "dp=2", marks=slow),
        pytest.param(2, "tp=2", marks=slow),
        pytest.param(4, "dp=2,fsdp=2", marks=slow),
        pytest.param(4, "pp=2,fsdp=2", marks=slow),
    ],
)
def test_parts_of_a_batch_are_one_ranks_step_on_all_of_it(ranks: int, mesh: str, tmp_path: Path) -> None:
    spawn(ranks, f"{TRAINING}:accumulated", mesh, folder=tmp_path)


def test_a_step_gathers_and_reduces_once_where_weights_stay_whole(tmp_path: Path) -> None:
    spawn(2, f"{TRAINING}:counted", "fsdp=2", folder=tmp_path)


@pytest.mark.parametrize(
    ("mesh", "refused"), [((), 0), ((("tp", 2),), 0), ((("ep", 2),), 1), ((("dp", 2), ("tp", 2)), 1)]
)
def test_an_engine_that_is_not_ours_shares_a_model_over_the_axes_of_its_row(mesh: Axes, refused: int) -> None:
    assert len(engine_lacks("vllm", Context(mesh=mesh), 1.0, None)) == refused
