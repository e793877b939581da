"""A rank's place follows from the mesh; what a model cannot run on is refused before anything starts."""

import re
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch

from penstock.graph.protocols import Axes
from penstock.graph.types import Context
from penstock.nodes.generate import make_engine
from penstock.nodes.model import Llama, ModelConfig, ModelError
from penstock.nodes.model.tensor_parallel import check_tensor_parallel, part_config, tensor_parallel
from penstock.nodes.parallel.mesh import Ranks
from penstock.nodes.parallel.pipeline import Stage
from penstock.runtime.tensor.layout import Mesh, Split

CONFIG = ModelConfig(97, 24, 40, 5, 8, 4, 4)


@pytest.mark.parametrize("axes", list(permutations((("dp", 2), ("fsdp", 3), ("tp", 2)))))
def test_places_are_row_major(axes: Axes) -> None:
    every = [Ranks(axes, rank) for rank in range(12)]
    coordinates = Mesh(axes).coordinates()
    for rank, ranks in enumerate(every):
        assert [ranks.place(axis) for axis, _ in axes] == coordinates[:, rank].tolist()
    assert sorted((ranks.share(), ranks.place("tp")) for ranks in every) == [(s, t) for s in range(6) for t in (0, 1)]
    speakers = every[0].speakers()
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
    assert all(ranks.place("pp", speaker) == 2 for speaker in ranks.speakers())


def test_tied_embeddings_and_more_stages_than_layers_are_refused() -> None:
    ranks, tied = Ranks((("pp", 6),), 0), replace(CONFIG, tie_word_embeddings=True)
    with pytest.raises(ModelError, match="given tied embeddings over 6 stages, needed a head of its own or one stage"):
        Stage(Llama(tied), ranks, torch.float32)
    with pytest.raises(ValueError, match="given 6 stages, needed 1 to 5"):
        Stage(Llama(CONFIG), ranks, torch.float32)


def test_one_rank_has_no_mesh() -> None:
    ranks = Ranks.of(Context())
    assert (ranks.count, ranks.shares, ranks.share(), ranks.size("tp"), ranks.speakers()) == (1, 1, 0, 1, [0])


@pytest.mark.parametrize(
    ("axes", "rank", "given"),
    [
        ((("ep", 2),), 0, "given a mesh of ep 2, needed each of the axes"),
        ((("tp", 2), ("tp", 2)), 0, "given a mesh of tp 2 × tp 2, needed each of the axes"),
        ((("tp", 0),), 0, "given a mesh of tp 0, needed sizes of 1 or more"),
        ((("tp", 2),), 2, "given a mesh of tp 2 and rank 2, needed a rank of 0 to 1"),
    ],
)
def test_what_means_nothing_to_a_model_is_refused(axes: Axes, rank: int, given: str) -> None:
    with pytest.raises(ValueError, match=given):
        Ranks(axes, rank)


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
            edges = Mesh((("tp", parts),)), Split("tp", 0, rule[1])
            assert local == _length(*edges, part, whole)


def _length(mesh: Mesh, split: Split, part: int, whole: int) -> int:
    start, stop = split.apply(np.array([0]), np.array([whole]), np.array([part]), mesh.extent("tp"))
    return int((stop - start)[0])


@pytest.mark.parametrize(
    ("parts", "shared", "given"),
    [
        (3, True, "given 8 attention heads, 4 key-value heads, an intermediate_size of 40, needed numbers that tp 3"),
        (8, False, "given 4 key-value heads, needed numbers that tp 8 divides"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(parts: int, shared: bool, given: str) -> None:
    with pytest.raises(ModelError, match=re.escape(given)):
        check_tensor_parallel(CONFIG, parts, shared_heads=shared)


def test_a_vocabulary_of_which_a_rank_would_have_nothing_is_refused() -> None:
    with pytest.raises(ModelError, match="given 5 words over tp 4, needed some for each"):
        part_config(ModelConfig(5, 16, 16, 1, 4, 4, 4), 4, 0)


def test_a_generator_is_cut_by_tensor_parallelism_alone() -> None:
    with pytest.raises(ValueError, match="given a mesh of fsdp 2 × tp 2, needed the axis tp alone"):
        make_engine(Context(mesh=(("fsdp", 2), ("tp", 2))))
