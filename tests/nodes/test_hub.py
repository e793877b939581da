"""A model's name on the Hub stands for its directory in the cache; a model that cannot be had is an error at once."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.graph import load, trace
from penstock.graph.hub import HubError, model_folder
from penstock.nodes.model import CausalLM, ModelError, load_model, read_config
from penstock.nodes.model.hf import read_adapters
from penstock.nodes.open_model import directory_spec
from penstock.nodes.policy import make_policy
from penstock.runtime.cli.children import model_refusal
from penstock.runtime.cli.flags import RunFlags
from penstock.runtime.cli.run import absolute_paths
from penstock.runtime.plan.model_shape import ShapeError, read_shape
from tests.nodes import hub as hub_of_tests
from tests.nodes.hub import deaf
from tests.nodes.tiny_model import CONFIG, TOKENIZER, export, model, save
from tests.nodes.updating import CONTEXT

COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a model that is in the cache, as the Hub's client lays it out. There is no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model_folder.cache_clear()
    entry = tmp_path / "hub" / "models--some--tiny-model_1.5"
    snapshot = entry / "snapshots" / COMMIT
    save(model(), snapshot)
    TOKENIZER.save(snapshot)
    (entry / "blobs").mkdir()
    os.replace(snapshot / "model.safetensors", entry / "blobs" / "weights")
    (snapshot / "model.safetensors").symlink_to("../../blobs/weights")
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text(COMMIT)
    return "some/tiny-model_1.5"


def test_a_name_is_the_model_of_its_directory(name: str, tmp_path: Path) -> None:
    for given in (name, f"{name}@main", f"{name}@{COMMIT}"):
        loaded = load_model(CausalLM, given, torch.bfloat16)
        assert loaded.dtype == torch.bfloat16
        head, needed = (each.get_parameter("lm_head.weight") for each in (loaded, model()))
        assert torch.equal(head, needed.bfloat16())
        assert read_config(given) == directory_spec(given).config == CONFIG
        assert directory_spec(given).tokenizer.encode("1+2") == TOKENIZER.encode("1+2")
        shape = read_shape(given)
        assert (shape.hidden, shape.name) == (CONFIG.hidden_size, "tiny-model_1.5")
    learner = make_policy(replace(CONTEXT, model=name, lora=2))
    export(learner, tmp_path / "adapters")
    assert load_model(CausalLM, tmp_path / "adapters").lora is not None


def test_a_plan_asks_the_settings_of_a_name_and_of_the_base_that_adapters_name(name: str, tmp_path: Path) -> None:
    export(make_policy(replace(CONTEXT, model=name, lora=2)), tmp_path / "adapters")
    graph = trace(load("aipo"), {})
    assert model_refusal([graph], name) is None
    file = Path(model_folder(name)) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "attention_dropout": 0.1}))
    for given in (name, str(tmp_path / "adapters")):
        fault = model_refusal([graph], given)
        assert fault is not None
        assert (fault.code, "attention_dropout" in fault.given) == ("model-kind", True)


def test_a_run_keeps_the_commit_which_another_host_finds_in_a_cache_of_its_own(name: str, tmp_path: Path) -> None:
    flags = absolute_paths(RunFlags(model=name))
    assert flags.model.endswith(f"/snapshots/{COMMIT}")
    theirs = flags.model.replace(str(tmp_path), "/home/another")
    newer = Path(flags.model).with_name(COMMIT[::-1])
    save(model(2), newer)
    (newer.parents[1] / "refs" / "main").write_text(newer.name)
    model_folder.cache_clear()
    assert Path(model_folder(name)).samefile(newer)
    assert Path(model_folder(theirs)).samefile(flags.model)


def test_a_name_that_cannot_be_had_is_said_with_what_is_needed(name: str) -> None:
    for given in ("some/other-model", f"{name}@v2", f"/other/models--some--none/snapshots/{COMMIT}"):
        for error, read in ((HubError, model_folder), (ModelError, read_config), (ShapeError, read_shape)):
            with pytest.raises(error, match=rf"{given}.*needed a model's directory, or a name of the Hugging Face Hub"):
                read(given)


def test_adapters_of_a_name_are_of_the_revision_that_they_name(name: str, tmp_path: Path) -> None:
    export(make_policy(replace(CONTEXT, model=name, lora=2)), tmp_path / "adapters")
    file, first = tmp_path / "adapters" / "adapter_config.json", Path(model_folder(name))
    facts = json.loads(file.read_text())
    newer = first.with_name(COMMIT[::-1])
    save(model(2, config=replace(CONFIG, intermediate_size=48)), newer)
    (newer.parents[1] / "refs" / "main").write_text(newer.name)
    model_folder.cache_clear()

    def name_base(base: str, revision: object) -> str:
        file.write_text(json.dumps({**facts, "base_model_name_or_path": base, "revision": revision}))
        return str(file.parent)

    for base, revision, found in (
        (name, None, newer),
        (name, COMMIT, first),
        (f"{name}@main", COMMIT, first),
        # As in peft: a directory has no revisions.
        (str(first), "v2", first),
    ):
        given = name_base(base, revision)
        assert read_adapters(given)[0].samefile(found)
        assert read_shape(given).inner == read_config(found).intermediate_size
    for other, said in (("v2", rf"{name}@v2.*needed"), (3, f"given the revision 3 of {name}, needed a commit")):
        given = name_base(name, other)
        for error, read in ((ModelError, read_config), (ShapeError, read_shape)):
            with pytest.raises(error, match=rf"adapter_config\.json: .*{said}"):
                read(given)


def test_a_hub_that_does_not_answer_is_not_asked_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with deaf() as (address, asked):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        for given in ("some/other-model", f"some/other-model@{COMMIT}"):
            with pytest.raises(HubError, match=rf"{given}.*{address}"):
                model_folder(given)
        # A model in the cache is taken from there.
        assert Path(model_folder(name)).name == Path(model_folder(f"{name}@{COMMIT}")).name == COMMIT
    assert asked[0] <= 5, "it is not tried again"  # the client makes a process's first connection twice


def test_weights_are_downloaded_in_the_format_that_is_read_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    read = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}
    others = ("consolidated.safetensors", "original/params.json", "model.gguf", "pytorch_model.bin")
    monkeypatch.setattr(hub_of_tests, "FILES", {**read, **dict.fromkeys(others, b"other")})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    model_folder.cache_clear()
    with hub_of_tests.hub() as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        folder = Path(model_folder("me/sums"))
    assert {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()} == read


def test_what_is_no_name_stays_as_it_is(tmp_path: Path) -> None:
    for given in ("", "llama-8b", str(tmp_path), "./models/none", "/models/none", "a/b/c", "~/models"):
        assert model_folder(given) == given
