"""Runs with `--lora`: every program can train adapters; they have the same bits in processes, and after a stop."""

from functools import partial
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock import programs
from penstock.graph import Program, load
from penstock.nodes.model import CausalLM, Scorer, load_model, save_model
from penstock.nodes.open_model import initial_model
from penstock.runtime.cli.base_model import base_model

from .running import (
    FAULTS,
    assert_equal_bits,
    final_state,
    interrupt_at,
    make_run,
    model_flags,
    penstock,
    rows,
    run_here,
    run_to_end,
    status_here,
    summary,
)

pytestmark = pytest.mark.timeout(400)
# Programs that only read a policy, have a fake one, or train another model.
NO_POLICY = {"evaluate", "toy", "reward_model"}
NAMES = [m.name for m in iter_modules(programs.__path__) if m.name not in NO_POLICY]
SMALL = {"samples": 4, "max_length": 6, "buffer": 2, "high": 4, "turns": 2, "look": 2, "minibatches": 2, "kl": 0.1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save an untrained model, as a policy's base and a teacher, and a reward model; return their folder."""
    folder = tmp_path_factory.mktemp("models")
    for kind, name in ((CausalLM, "policy"), (Scorer, "reward")):
        config, tokenizer = initial_model("arithmetic")
        model = kind(config)
        model.init_weights(1)
        save_model(model, model.state_dict(), folder / name)
        tokenizer.save(folder / name)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_program_learns_adapters_alone(tmp_path: Path, models: Path, name: str) -> None:
    program = load(name)
    assert isinstance(program, Program)
    has, folders = {flag.name for flag in program.flags}, {"teacher_model": "policy", "reward_model": "reward"}
    options: dict[str, Any] = {key: value for key, value in SMALL.items() if key in has}
    options |= {key: str(models / folder) for key, folder in folders.items() if key in has}
    data = {"tool_use": "calculator", "tool_sft": "calculator"}.get(name, "arithmetic")
    model = str(models / "policy") if data == "arithmetic" else ""
    if name == "dapo":  # the untrained model solves too few problems for DAPO to keep a group
        model = str(base_model("", lambda line: None))
    folder = make_run(tmp_path / "r", name, options, model_flags(updates=2, drops=500, lora=16, model=model, data=data))
    run_here(folder)
    assert summary(folder)["status"] == "done"
    assert all(row.get("mismatch", 0.0) < 1e-5 for row in rows(folder))
    state = final_state(folder, 2)
    assert {name for name in state if "weight" in name and "lora_" not in name} == set()


def lora_run(path: Path, updates: int = 4, **more: Any) -> Path:
    flags = model_flags(updates=updates, max_tokens=4, lora=4, lora_targets=("q_proj", "down_proj"), **more)
    return make_run(path, f"{FAULTS}digits", {"lag": 0, "samples": 4, "lr": 1e-2}, flags)


def test_adapters_in_processes_are_those_in_one(tmp_path: Path, models: Path) -> None:
    here, apart = (lora_run(tmp_path / name, model=str(models / "policy")) for name in ("here", "apart"))
    run_here(here)
    run_to_end(apart)
    assert_equal_bits(final_state(here, 4), final_state(apart, 4))
    base = load_file(models / "policy" / "model.safetensors")
    # The master weights are those of the adapters alone, and both matrices of each have learnt.
    state = {name: t for name, t in final_state(here, 4).items() if name.startswith("master.")}
    assert len(state) == 2 * 2 * 2
    assert all(t.any() for t in state.values())
    # Merged into one model, the exported adapters compute the same as applied to their base.
    adapters = here / "checkpoints" / "00000004" / "policy"
    done = penstock("export", str(here), "--to", "merged", "--out", str(tmp_path / "merged"))
    assert done.returncode == 0, done.stderr
    tokens = torch.randint(len(base["model.embed_tokens.weight"]), (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        applied, merged, plain = (
            model.logits(model(tokens))
            for model in (load_model(CausalLM, f) for f in (adapters, tmp_path / "merged", models / "policy"))
        )
    torch.testing.assert_close(merged, applied, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(merged, plain, rtol=1e-2, atol=1e-2)
    # Another run begins with such a directory, and has its adapters' rank.
    run_here(make_run(tmp_path / "again", "aipo", {"samples": 4}, model_flags(updates=1, model=str(adapters))))
    again = final_state(tmp_path / "again", 1)
    assert {name: t.shape for name, t in again.items() if "master" in name} == {n: t.shape for n, t in state.items()}


def test_adapters_go_on_exactly(tmp_path: Path) -> None:
    whole, parted = (lora_run(tmp_path / name, updates=6, checkpoint_every=2) for name in ("whole", "parted"))
    run_here(whole)
    assert status_here(parted, partial(interrupt_at, 2))[0] == "stopped"
    run_here(parted)
    assert_equal_bits(final_state(parted, 6), final_state(whole, 6))
