"""Low-rank adapters: peft's results, peft's files; the base does not change, and only adapters are trained and sent."""

import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from penstock.graph import trace
from penstock.graph.context import Context, Origin
from penstock.graph.types import Weights
from penstock.nodes.ema import ema, make_average
from penstock.nodes.generate import make_engine
from penstock.nodes.learn.update import policy_update
from penstock.nodes.model import CausalLM, Lora, ModelError, Scorer, hf, load_model
from penstock.nodes.model.hf import read_adapters, saved_adapters
from penstock.nodes.open_model import base_digest, initial_model, lora_of, run_spec
from penstock.nodes.policy import LanguagePolicy, make_lora_policy, make_policy, make_reference, require_policy
from penstock.programs.aipo import aipo
from penstock.runtime.plan.model_shape import ShapeError, read_shape
from penstock.runtime.plan.roles import with_adapters
from penstock.runtime.tensor.weight_sync import WeightPublisher, WeightReceiver, sync_in_process
from tests.nodes.ranked import spawn

from .rank_cases import OPTIONS
from .test_generate import run
from .tiny_model import CONFIG, TOKENIZER, export, model, save
from .updating import batch, equal

Patch = pytest.MonkeyPatch
LORA = Lora(3, 12.0, ("q_proj", "o_proj", "up_proj", "down_proj"))
MESHES = [(2, "fsdp=2"), (2, "tp=2"), (2, "pp=2"), (4, "dp=2,tp=2"), (4, "fsdp=2,tp=2"), (4, "pp=2,fsdp=2")]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    save(model(1), tmp_path / "base")
    TOKENIZER.save(tmp_path / "base")
    return tmp_path / "base"


def context(base: Path, **changes: Any) -> Context:
    sizes: dict[str, Any] = {"lora": LORA.rank, "lora_alpha": LORA.alpha, "lora_targets": LORA.targets}
    return Context(**{"node": "policy", "seed": 1, "updates": 10, "model": str(base), **sizes, **changes})


def policy(base: Path, **changes: Any) -> LanguagePolicy:
    made = make_policy(context(base, **changes))
    assert isinstance(made, LanguagePolicy)
    return made


def learnt(base: Path, updates: int = 2, **changes: Any) -> LanguagePolicy:
    made = policy(base, **changes)
    for _ in range(updates):
        policy_update.fn(made, *batch(), **OPTIONS, lr=1e-2)
    return made


def sent(learner: LanguagePolicy) -> Weights:
    return Weights(learner.version, dict(learner.weights()), learner.about())


def base_of(learner: LanguagePolicy) -> dict[str, Tensor]:
    return {name: p for name, p in learner.model.state_dict().items() if "lora" not in name}


def logits(made: CausalLM, tokens_BS: Tensor) -> Tensor:
    with torch.no_grad():
        return made.logits(made(tokens_BS))


TOKENS = torch.randint(CONFIG.vocab_size, (3, 17), generator=torch.Generator().manual_seed(3))


def test_logits_and_gradients_are_those_of_peft(base: Path, tmp_path: Path) -> None:
    """peft reads our files after some updates, so that neither matrix has its first values."""
    import peft  # takes seconds, which only workers with these tests spend

    learner = learnt(base)
    export(learner, tmp_path / "ours")
    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "ours", is_trainable=True)
    found = theirs(TOKENS).logits
    ours = learner.model.logits(learner.model(TOKENS))
    torch.testing.assert_close(ours, found, rtol=1e-5, atol=1e-5)
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(5))
    own = dict(learner.model.own_parameters())
    given = torch.autograd.grad((ours * weight).sum(), list(own.values()))
    named = {n.removeprefix("base_model.model.").replace(".default", ""): p for n, p in theirs.named_parameters()}
    learns = {name: p for name, p in named.items() if p.requires_grad}
    needed = dict(zip(learns, torch.autograd.grad((found * weight).sum(), list(learns.values())), strict=True))
    assert own.keys() == needed.keys()
    for name, gradient in zip(own, given, strict=True):
        size = float(needed[name].abs().max())
        torch.testing.assert_close(gradient, needed[name], rtol=0, atol=1e-5 * size, msg=name)


def test_adapters_that_peft_has_written_are_read(base: Path, tmp_path: Path) -> None:
    import peft  # takes seconds, which only workers with these tests spend

    plain = transformers.AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(7)
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM"
    )
    theirs = peft.get_peft_model(plain, config)
    theirs.save_pretrained(str(tmp_path / "theirs"))
    started = policy(tmp_path / "theirs", lora=0, lora_alpha=None, lora_targets=())
    assert started.model.lora == Lora(4, 6)
    torch.testing.assert_close(logits(started.model, TOKENS), theirs(TOKENS).logits.detach(), rtol=1e-5, atol=1e-5)
    reference: Any = make_reference(context(tmp_path / "theirs", lora=0, lora_alpha=None, lora_targets=()))
    assert torch.equal(logits(reference.model, TOKENS), logits(started.model, TOKENS))
    # A scorer has the adapters merged into its weights.
    merged: Any = theirs.merge_and_unload()
    scorer = load_model(Scorer, tmp_path / "theirs", new_head=True)
    torch.testing.assert_close(scorer(TOKENS), merged.model(TOKENS).last_hidden_state.detach(), rtol=1e-5, atol=1e-5)


def test_first_matrices_are_drawn_as_peft_draws_them(base: Path) -> None:
    learner = policy(base)
    for name, tensor in learner.weights().items():
        if name.endswith("lora_B.weight"):
            assert not tensor.any()
        else:
            bound = tensor.shape[1] ** -0.5
            assert 0.5 * bound < tensor.abs().max() <= bound
    assert torch.equal(logits(learner.model, TOKENS), logits(load_model(CausalLM, base), TOKENS))
    assert equal(policy(base), learner)
    assert not equal(policy(base, seed=2), learner)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_alone_change_and_are_sent(base: Path, dtype: str) -> None:
    learner = policy(base, dtype=dtype)
    before = {name: tensor.clone() for name, tensor in base_of(learner).items()}
    first = {name: tensor.clone() for name, tensor in learner.weights().items()}
    policy_update.fn(learner, *batch(), **OPTIONS, lr=1e-2)
    policy_update.fn(learner, *batch(), **OPTIONS, lr=1e-2)
    after = base_of(learner)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(p.grad is None for p in learner.model.parameters() if not p.requires_grad)
    assert not any(torch.equal(tensor, first[name]) for name, tensor in learner.weights().items())
    # For each layer and target: the rank times the sum of inputs and outputs.
    wide, heads, inner = CONFIG.hidden_size, CONFIG.num_attention_heads * CONFIG.head_dim, CONFIG.intermediate_size
    numbers = 2 * 3 * (2 * (wide + heads) + 2 * (wide + inner))
    assert sum(tensor.numel() for tensor in learner.weights().values()) == numbers
    assert sum(t.numel() for t in learner.state()[0].values()) == 3 * numbers
    assert {p.dtype for p in learner.masters.values()} == {torch.float32}
    assert {tensor.dtype for tensor in learner.weights().values()} == {getattr(torch, dtype)}
    publisher, receiver = WeightPublisher("w", learner), WeightReceiver("w")
    receiver.describe(publisher.description)
    moved = sync_in_process(publisher, receiver, 2, publisher.publish(2))
    assert moved.nbytes == numbers * getattr(torch, dtype).itemsize
    assert receiver.weights.about == learner.about()


def test_exported_adapters_are_the_masters_beside_the_whole_path_of_their_base(
    base: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(base.parent)
    learner = policy(Path(base.name), dtype="bfloat16")
    assert learner.model.lora == LORA
    policy_update.fn(learner, *batch(), **OPTIONS, lr=1e-2)
    export(learner, tmp_path / "adapters")
    saved = saved_adapters(tmp_path / "adapters", LORA)
    assert saved.keys() == learner.masters.keys()
    assert all(torch.equal(saved[name], master) for name, master in learner.masters.items())
    monkeypatch.chdir("/")
    assert read_adapters(tmp_path / "adapters") == (base, LORA)


def test_adapters_of_a_model_that_no_directory_has_are_refused_with_what_to_do(tmp_path: Path) -> None:
    export(policy(Path(), model=""), tmp_path / "adapters")
    with pytest.raises(ModelError, match="--model DIR"):
        read_adapters(tmp_path / "adapters")


def test_one_process_of_a_host_reads_a_base_for_its_digest(base: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    read, real = [], hashlib.file_digest

    def counted(file: Any, name: str) -> Any:
        read.append(file.name)
        return real(file, name)

    def found(settled_s: float) -> str:
        """Return the digest as another process finds it."""
        monkeypatch.setattr(hf, "SETTLED_S", settled_s)
        hf.digest.cache_clear()
        return hf.digest(base)

    (tmp_path / "notes").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "notes"))
    monkeypatch.setattr(hashlib, "file_digest", counted)
    # At first the file counts as just written, so its digest is not noted.
    assert found(1e9) == found(-1.0) == found(-1.0)
    assert len(read) == 2
    before = hf.digest(base)
    save(model(2), base)
    assert found(-1.0) != before
    # Notes in a folder that others may write are not used.
    (home,) = (tmp_path / "notes").iterdir()
    home.chmod(0o777)
    assert found(-1.0) == hf.digest(base)
    assert len(read) == 4


def test_merged_weights_are_applied_ones_within_rounding(base: Path, tmp_path: Path) -> None:
    learner = learnt(base)
    export(learner, tmp_path / "adapters")
    whole = load_model(Scorer, tmp_path / "adapters", new_head=True)
    with torch.no_grad():
        torch.testing.assert_close(whole(TOKENS), learner.model(TOKENS), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(whole(TOKENS), load_model(CausalLM, base)(TOKENS), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_generator_applies_what_it_is_sent(base: Path, dtype: str) -> None:
    learner = learnt(base, dtype=dtype)
    made = replace(context(base, dtype=dtype), node="generate", slots=32, max_tokens=8)
    origin = {"behaviour": Origin("penstock.nodes.policy:make_policy", context(base))}
    engine = make_engine(replace(made, weights=origin), samples=3)
    found = run(engine, range(4), sent(learner))
    assert max(metrics.get("mismatch", 0.0) for _, metrics in found.values()) < (1e-5 if dtype == "float32" else 0.05)
    ours, theirs = engine.model.state_dict(), learner.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    # Adapters are float32, whatever the model computes in.
    rounded = {"behaviour": replace(origin["behaviour"], wire="bfloat16")}
    found = run(make_engine(replace(made, weights=rounded), samples=3), range(4), sent(learner))
    assert all("mismatch" not in metrics for _, metrics in found.values())


def test_other_weights_under_the_adapters_are_named(base: Path, tmp_path: Path) -> None:
    save(model(2), tmp_path / "other")
    TOKENIZER.save(tmp_path / "other")
    made = replace(context(tmp_path / "other"), node="generate", slots=32, max_tokens=8)
    origin = {"behaviour": Origin("penstock.nodes.policy:make_policy", context(tmp_path / "other"))}
    engine = make_engine(replace(made, weights=origin), samples=1)
    with pytest.raises(ModelError, match="'base': "):
        run(engine, range(1), sent(policy(base)))
    learner, other = learnt(base), policy(tmp_path / "other")
    with pytest.raises(ModelError, match="'base': "):
        other.restore(*learner.state())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_goes_on_to_the_bit(base: Path, dtype: str) -> None:
    learner, other = learnt(base, dtype=dtype), policy(base, dtype=dtype, seed=2)
    other.restore(*learner.state())
    for each in (learner, other):
        policy_update.fn(each, *batch(), **OPTIONS)
    assert equal(learner, other)


def test_an_average_follows_the_adapters(base: Path) -> None:
    learner, average = policy(base), make_average(context(base, node="average"))
    first = {name: tensor.clone() for name, tensor in learner.masters.items()}
    policy_update.fn(learner, *batch(), **OPTIONS)
    ema.fn(average, learner, decay=0.5)
    for name, tensor in average.weights().items():
        torch.testing.assert_close(tensor, (first[name] + learner.masters[name].detach()) / 2)
    with pytest.raises(ValueError, match="rank 3"):
        ema.fn(make_average(context(base, lora=0, lora_alpha=None, lora_targets=())), learner)


def test_options_of_a_program_and_flags_say_which_adapters(base: Path) -> None:
    plain = context(base, lora=0, lora_alpha=None, lora_targets=())
    assert lora_of(plain) is None
    made: Any = make_lora_policy(plain)
    assert made.model.lora == Lora(16, 32.0)
    said = replace(plain, options={"policy_rank": 2, "policy_targets": ["v_proj", "q_proj"]}, lora=5)
    assert lora_of(said) == Lora(2, 4.0, ("q_proj", "v_proj"))
    assert lora_of(replace(said, node="other")) == Lora(5, 10.0)
    with pytest.raises(ModelError, match=r"an alpha of 0\.0, needed a number above 0"):
        lora_of(replace(said, options={"policy_alpha": 0.0}))


def test_new_adapters_have_no_rank_above_the_shorter_side_of_every_matrix(base: Path, tmp_path: Path) -> None:
    narrow, most = CONFIG.num_key_value_heads * CONFIG.head_dim, CONFIG.hidden_size
    require_policy(context(base, lora=most, lora_targets=()))
    graph, shape = trace(aipo, {}), read_shape(str(base))
    assert with_adapters(shape, graph, "policy", most, ()).lora is not None
    for side, targets in ((most, ()), (narrow, ("k_proj",))):
        said = rf"rank {side + 1} for matrices whose shorter sides are at most {side}, needed at most {side}"
        with pytest.raises(ModelError, match=said):
            require_policy(context(base, lora=side + 1, lora_targets=targets))
        # A plan knows the same limit.
        with pytest.raises(ShapeError, match=said):
            with_adapters(shape, graph, "policy", side + 1, targets)
    # Those that a directory has are as they are.
    export(learnt(base), tmp_path / "adapters")
    require_policy(context(tmp_path / "adapters"))


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: Lora(0, 1.0), "a rank of 0"),
    (lambda: Lora(2**70, 1.0), "a rank of 1180591620717411303424"),
    (lambda: Lora(2, -1.0), "an alpha of -1"),
    (lambda: Lora.from_json({"target_modules": ["q_proj"], "lora_alpha": True}), "an alpha of True"),
    (lambda: Lora.from_json({"target_modules": ["q_proj"], "r": True}), "a rank of True"),
    (lambda: Lora(2, 1.0, ("qproj",)), "nearest: q_proj"),
    (lambda: lora_of(Context(lora_alpha=2.0)), "--lora RANK"),
    (lambda: Lora.from_json({"target_modules": "q.*"}), "target_modules"),
    (lambda: Lora.from_json({"target_modules": ["q_proj"], "peft_type": "LOHA"}), "peft_type"),
    *(
        (lambda key=key, value=value: Lora.from_json({"target_modules": ["q_proj"], key: value}), key)
        for key, value in {
            "use_dora": True,
            "corda_config": {"corda_method": "kpm"},
            "use_rslora": True,
            "modules_to_save": ["lm_head"],
            "bias": "all",
            "rank_pattern": {"q_proj": 3},
            "layers_to_transform": [0],
            "layers_pattern": "",
            "layer_replication": 0,
            "init_lora_weights": "pissa",
            "something_new": 1,
        }.items()
    ),
    (lambda: Lora.from_json({"target_modules": ["q_proj"], "init_lora_weights": 0}), "init_lora_weights"),
    (lambda: Lora.from_json({"target_modules": ["q_proj"], "layers_to_transform": 0}), "layers_to_transform"),
]


@pytest.mark.parametrize(("make", "said"), WRONG)
def test_what_no_adapter_can_be_is_refused_by_name(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        make()


def test_adapters_of_another_model_or_rank_are_refused(base: Path, tmp_path: Path) -> None:
    export(learnt(base), tmp_path / "adapters")
    with pytest.raises(ModelError, match=r"rank 3.*rank 4"):
        run_spec(context(tmp_path / "adapters", lora=4), lora_of(context(tmp_path / "adapters", lora=4)))
    file = tmp_path / "adapters" / "adapter_config.json"
    facts = json.loads(file.read_text())
    save(model(1, config=replace(CONFIG, intermediate_size=48)), tmp_path / "wide")
    for change, said in (
        ({"base_model_name_or_path": str(tmp_path / "wide")}, "given shape"),
        ({"r": 2}, "given shape"),
        ({"target_modules": ["q_proj"]}, "not known"),
        ({"base_model_name_or_path": "some/name"}, "some/name"),
    ):
        file.write_text(json.dumps(facts | change))
        with pytest.raises(ModelError, match=said):
            load_model(CausalLM, tmp_path / "adapters")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "mesh"), MESHES)
def test_adapters_over_ranks_learn_what_one_rank_does(base: Path, tmp_path: Path, ranks: int, mesh: str) -> None:
    spawn(ranks, "tests.nodes.rank_cases:adapters", mesh, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
def test_a_generator_over_ranks_applies_its_parts(base: Path, tmp_path: Path, groups: int) -> None:
    spawn(2, "tests.nodes.part_cases:adapters", str(groups), folder=tmp_path)


def test_a_base_has_the_digest_that_runs_with_its_adapters_have_noted() -> None:
    """A new field of a configuration changes no digest as long as it has its default."""
    noted = "e07333cbd83e4add51ca13ab0999294b67cf81747ee7b4b70c3ce82efbf9411f"
    assert base_digest(Context()) == noted
    config = initial_model("")[0]
    assert repr(replace(config, query_pre_attn_scalar=3)) != repr(config)
