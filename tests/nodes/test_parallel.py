"""The tables of the Llama family against the modules."""

import pytest

from penstock.nodes.model import Llama, ModelConfig, Scorer
from penstock.nodes.model.tensor_parallel import parameter_shapes, pipeline_stages, tensor_parallel

CONFIG = ModelConfig(97, 24, 40, 5, 6, 2, 4)
TIED = ModelConfig(97, 24, 40, 5, 6, 2, 4, tie_word_embeddings=True)


@pytest.mark.parametrize("config", [CONFIG, TIED])
def test_shapes_are_those_of_the_module_in_its_order(config: ModelConfig) -> None:
    found = [(name, tuple(p.shape)) for name, p in Llama(config).named_parameters()]
    assert list(parameter_shapes(config).items()) == found


@pytest.mark.parametrize("model", [Llama(CONFIG), Scorer(CONFIG)])
def test_every_parameter_has_a_rule_whose_units_divide_it(model: Llama | Scorer) -> None:
    rules = tensor_parallel(CONFIG)
    for name, parameter in model.named_parameters():
        (*_, rule) = [rule for end, rule in sorted(rules.items(), key=lambda item: len(item[0])) if name.endswith(end)]
        assert rule is None or rule[1] == 0 or parameter.shape[rule[0]] % rule[1] == 0
        assert (rule is None) == (parameter.dim() == 1 or name == "score.weight")


def test_attention_is_cut_between_heads() -> None:
    rules = tensor_parallel(CONFIG)
    assert rules["q_proj.weight"] == (0, 6)
    assert rules["k_proj.weight"] == rules["v_proj.weight"] == (0, 2)
    assert rules["o_proj.weight"] == (1, 6)


@pytest.mark.parametrize("stages", range(1, 6))
def test_stages_are_runs_of_layers_with_both_ends(stages: int) -> None:
    found = pipeline_stages(CONFIG, stages)
    assert found.keys() == parameter_shapes(CONFIG).keys()
    assert found["model.embed_tokens.weight"] == (0,)
    assert found["model.norm.weight"] == found["lm_head.weight"] == (stages - 1,)
    of_layers = [found[f"model.layers.{i}.mlp.up_proj.weight"][0] for i in range(5)]
    assert of_layers == sorted(of_layers)
    counts = [of_layers.count(stage) for stage in range(stages)]
    assert max(counts) - min(counts) <= 1


def test_a_tied_embedding_is_on_the_first_and_the_last_stage() -> None:
    assert pipeline_stages(TIED, 3)["model.embed_tokens.weight"] == (0, 2)
    assert pipeline_stages(TIED, 1)["model.embed_tokens.weight"] == (0,)


@pytest.mark.parametrize("stages", [0, 6])
def test_more_stages_than_layers_are_refused(stages: int) -> None:
    with pytest.raises(ValueError, match=f"given {stages} stages, needed 1 to 5"):
        pipeline_stages(CONFIG, stages)
