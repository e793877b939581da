"""A model that transformers wrote learns on GSM8K's own file, and transformers reads the exported model."""

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from penstock.nodes.model import CausalLM, load_model
from penstock.nodes.tokenizer import load_tokenizer

from .running import FAULTS, final_state, make_run, model_flags, penstock, replayed, rows, run_here

transformers = pytest.importorskip("transformers")
DATA = Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "train.jsonl"
pytestmark = [
    pytest.mark.timeout(480),
    pytest.mark.slow,
    pytest.mark.skipif(not DATA.exists(), reason=f"needs GSM8K's training problems at {DATA}"),
]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"


def write_model(folder: Path) -> None:
    """Let transformers save a random Llama with a tokenizer and a chat template."""
    with DATA.open() as file:
        texts = [json.loads(line)["question"] for _, line in zip(range(300), file, strict=False)]
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=["<s>", "</s>"], initial_alphabet=letters)
    backend.train_from_iterator(texts, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = TEMPLATE
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=640,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_three_updates_on_gsm8k_from_and_to_transformers(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "run"
    write_model(model)
    flags = "--lag 2 --generators 2 --updates 3 --batch 4 --samples 4 --max-tokens 24 --slots 16 --eval-groups 8"
    paths = ["--model", str(model), "--data", str(DATA), "--out", str(out)]
    ended = penstock("run", "aipo", *flags.split(), *paths, "--json", timeout=400.0)
    assert ended.returncode == 0, ended.stderr
    summary = json.loads(ended.stdout.splitlines()[-1])
    assert (summary["status"], summary["updates"], summary["groups"]) == ("done", 3, 12)
    assert 0 <= summary["accuracy_before"] <= 1
    assert [row["lag_max"] <= 2 for row in rows(out)] == [True] * 3
    assert [stage.stage for stage in replayed(out)] == ["before", "train", "save", "after"]
    compare(out / "checkpoints" / "00000003" / "policy", model)


def test_weights_that_have_moved_come_out_as_they_are(tmp_path: Path) -> None:
    """An untrained model solves no problem of GSM8K. Here an easier reward makes its weights change."""
    model = tmp_path / "model"
    write_model(model)
    flags = model_flags(updates=3, max_tokens=8, seed=0, model=str(model), data=str(DATA))
    run = run_here(make_run(tmp_path / "r", f"{FAULTS}digits", {"lag": 2, "lr": 1e-2}, flags, generators=2))
    # 500 of the 7,473 problems are held out.
    assert [row["epoch"] for row in rows(run)] == [round(2 * update / 6973, 6) for update in (1, 2, 3)]
    exported = run / "checkpoints" / "00000003" / "policy"
    compare(exported, model)
    state = final_state(run, 3)
    before, after = (load_model(CausalLM, folder).state_dict() for folder in (model, exported))
    for name, tensor in after.items():
        assert not torch.equal(tensor, before[name])
        assert torch.equal(tensor, state[f"master.{name}"])


def compare(exported: Path, model: Path) -> None:
    """Assert that the exported directory gives the same logits and tokens in transformers as here."""
    theirs, ours = transformers.AutoModelForCausalLM.from_pretrained(exported), load_model(CausalLM, exported)
    tokens = torch.arange(96).view(2, 48) * 5
    with torch.no_grad():
        expected, given = theirs(tokens).logits, ours.logits(ours(tokens))
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)
    text = "Natalia sold 48 clips."
    chat = [{"role": "user", "content": text}]
    encoded = transformers.AutoTokenizer.from_pretrained(exported).apply_chat_template(chat, return_dict=False)
    assert load_tokenizer(exported).encode_prompt(text) == encoded == load_tokenizer(model).encode_prompt(text)
