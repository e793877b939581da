"""vLLM as the engine of generators, on a CPU: `make vllm` makes an interpreter with it, and names it in PENSTOCK_VLLM.

`vllm_cases.py` runs once in that interpreter, and records what vLLM computes with our weights: for a model with a head
of its own, for one with a tied head, and for ranks that share a model.
"""

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.nodes.tiny_model import CONFIG, TOKENIZER, model, save

from .running import HERE, penstock, replayed, rows, summary

PYTHON = os.environ.get("PENSTOCK_VLLM", "")
# Nats: the rounding of float32.
CLOSE = 1e-5

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(480),
    pytest.mark.skipif(not PYTHON, reason="needs an interpreter with vLLM in PENSTOCK_VLLM: make vllm"),
]

Found = Mapping[str, Any]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[Found]]:
    """Run the cases, and return the findings of each rank, by kind of model."""
    folder, root = tmp_path_factory.mktemp("cases"), HERE.parent.parent
    # On a CPU, vLLM runs eagerly and needs no compiler.
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1", "CXX": "none"}
    command = [PYTHON, "-m", "tests.gates.vllm_cases", str(folder)]
    pipes: Mapping[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, cwd=root, start_new_session=True, **pipes) as process:
        try:
            _, errors = process.communicate(timeout=400)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors[-4000:]
    return {
        kind.name: [json.loads(path.read_text()) for path in sorted(kind.glob("[0-9].json"))]
        for kind in folder.iterdir()
    }


@pytest.fixture(scope="module")
def untied(cases: Mapping[str, list[Found]]) -> Found:
    return cases["untied"][0]


@pytest.fixture(scope="module")
def tied(cases: Mapping[str, list[Found]]) -> Found:
    return cases["tied"][0]


@pytest.fixture(scope="module")
def ranks(cases: Mapping[str, list[Found]]) -> list[Found]:
    """The findings of the two ranks that share a model."""
    first, second = cases["shared"]
    return [first, second]


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_weights_that_come_within_a_response_make_its_next_tokens(kind: str, request: pytest.FixtureRequest) -> None:
    """Every token has the log-probability that the trainer computes with the weights of its version."""
    assert_swapped_within(request.getfixturevalue(kind))


def assert_swapped_within(every: Found) -> None:
    found = every["swapped_within"]
    assert set(found["first"]) == {"0", "1"}
    assert set(found["second"]) == {"1"}
    assert max([*found["first"].values(), *found["second"].values()]) < CLOSE
    assert found["mixed_rows"] > 0
    assert found["sorted"]
    assert found["distinct_rows"] == 4
    assert found["stale"] == [0.0, 0.0]
    # Received weights are packed in place.
    assert found["copied"] == 0


def test_ranks_that_share_a_model_sample_the_same_tokens_each_from_its_part_of_the_weights(ranks: list[Found]) -> None:
    """Each rank verifies its weights by digests of the whole, and its tokens by a forward pass with the same shards."""
    for found in ranks:
        assert_swapped_within(found)
    first, second = (found["swapped_within"] for found in ranks)
    assert first["tokens"] == second["tokens"]
    assert 0 < min(first["mismatches"]) <= max(first["mismatches"]) < CLOSE
    assert second["mismatches"] == first["mismatches"]


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_the_first_tokens_after_a_swap_are_compared(kind: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue(kind)["swapped_within"]
    assert 0 < min(found["mismatches"]) <= max(found["mismatches"]) < CLOSE
    assert found["compared"] > 0
    assert found["models"] == 1


def test_a_few_tokens_that_are_far_off_stop_no_run(untied: Found) -> None:
    """A few may be far off by rounding alone. After more comparisons the same mean difference is an error."""
    found = untied["few_tokens"]
    assert found["limits"] > 1
    assert found["passed"] == 1


def test_segments_go_on_with_newer_weights(untied: Found) -> None:
    found = untied["paused"]
    assert found["segments"] > 1
    assert len(found["differences"]) == found["segments"]
    assert max(found["differences"].values()) < CLOSE
    assert found["longest"] > 6


def test_a_conversation_goes_on_after_the_tokens_that_were_sampled(untied: Found) -> None:
    found = untied["turns"]
    assert found["kept"] == [True, True]
    assert found["turns"] == [2, 1]
    assert len(set(found["keys"])) == 3  # each turn of each row has a seed of its own
    assert max(found["differences"].values()) < CLOSE


def test_more_slots_and_prompts_than_a_step_has_tokens_are_sampled(untied: Found) -> None:
    assert set(untied["many_slots"]) == {"18", "19"}
    assert max(untied["many_slots"].values()) < CLOSE


def test_more_slots_than_the_memory_holds_are_refused_as_the_flags_name_them(untied: Found) -> None:
    assert all(said in untied["too_many_slots"]["raised"] for said in ("1000000000 slots", "--slots", "--max-prompt"))


def test_a_request_that_vllm_gives_up_is_told_with_its_reason_and_its_group(untied: Found) -> None:
    found = untied["given_up"]
    assert all(said in found["raised"] for said in ("group 6", "error", "a lost block"))
    assert not found["busy"]


def test_a_response_ends_with_a_stop_string_or_a_stop_token_or_its_bound(untied: Found) -> None:
    ended = untied["stopped"]["rows"]
    assert any(text.endswith("a") for text, _, _ in ended)
    for text, finished, length in ended:
        assert "a" not in text[:-1]
        assert finished or length == 24


def test_temperature_zero_takes_the_likeliest_token_and_is_not_measured(untied: Found) -> None:
    assert untied["greedy"] == {"alike": True, "logprobs": 0.0, "measured": False}


def test_weights_that_vllm_does_not_compute_with_stop_the_run_and_are_named(
    untied: Found, tied: Found, ranks: list[Found]
) -> None:
    for every in (untied, *ranks):
        for name in ("self_attn.k_proj", "mlp.down_proj", "input_layernorm"):
            found = every[f"wrong {name}"]
            assert "[mismatch]" in found["raised"]
            assert found["raised"].endswith(f"suspected: model.layers.1.{name}.weight")
            assert not found["busy"]
    assert tied["wrong head"]["raised"].endswith("suspected: model.embed_tokens.weight, as lm_head.weight")


def cluster_file(folder: Path) -> str:
    path = folder / "cluster.toml"
    path.write_text(f'[[hosts]]\nname = "here"\ncores = 2\n\n[pools.generator]\npython = "{PYTHON}"\n')
    return str(path)


FLAGS = ("--batch", "4", "--slots", "16", "--max-tokens", "8", "--plain", "--startup-deadline", "240")


def measured(run: Path) -> list[float]:
    return [row["mismatch"] for row in rows(run) if "mismatch" in row]


def copied(run: Path) -> set[float]:
    return {row["weights_copied"] for row in rows(run) if "weights_copied" in row}


def test_aipo_runs_with_vllm_in_an_interpreter_of_the_generators_own(tmp_path: Path) -> None:
    """The model's head is its embedding, and the evaluation uses the same engine."""
    shape: Mapping[str, Any] = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    config, folder, run = replace(CONFIG, **shape, tie_word_embeddings=True), tmp_path / "model", tmp_path / "run"
    save(model(config=config), folder)
    TOKENIZER.save(folder)
    words = ("run", "aipo", "--engine", "vllm", "--cluster", cluster_file(tmp_path), "--model", str(folder), *FLAGS)
    ended = penstock(*words, "--updates", "6", "--lr", "1e-3", "--eval-groups", "8", "--out", str(run))
    assert ended.returncode == 0, ended.stderr
    found = measured(run)
    assert len(found) >= 2
    assert max(found) < CLOSE
    assert copied(run) == {0.0}
    assert {row["stale_cache"] for row in rows(run)} == {0.0}
    assert max(row["lag_max"] for row in rows(run)) == 1
    assert summary(run)["accuracy_after"] is not None


def test_a_run_samples_with_ranks_that_share_a_model(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("run", "aipo", "--engine", "vllm", "--cluster", cluster_file(tmp_path), "--mesh", "generator=tp2")
    ended = penstock(*words, "--model", "new", *FLAGS, "--updates", "4", "--eval-groups", "0", "--out", str(run))
    assert ended.returncode == 0, ended.stderr
    found = measured(run)
    assert len(found) >= 2
    assert 0 < max(found) < CLOSE
    assert copied(run) == {0.0}
    assert max(row["lag_max"] for row in rows(run)) == 1
    (pool,) = (pool for pool in json.loads((run / "plan.json").read_text())["pools"] if pool["name"] == "generator")
    assert [len(replica["ranks"]) for replica in pool["replicas"]] == [2]


def test_a_generator_that_dies_within_a_swap_is_named_and_the_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    run, died = tmp_path / "run", tmp_path / "died"
    program = f"{HERE / 'programs_for_vllm.py'}:dies_in_a_swap"
    words = ("run", program, "--died", str(died), "--model", "new", "--cluster", cluster_file(tmp_path), *FLAGS)
    more = ("--updates", "5", "--eval-groups", "0", "--checkpoint-every", "1", "--out", str(run))
    ended = penstock(*words, *more)
    assert ended.returncode == 1
    assert died.exists()
    assert "generator/0 rank 0" in ended.stderr
    assert "SIGKILL" in ended.stderr
    before = summary(run)["updates"]
    assert 0 < before < 5
    again = penstock("resume", str(run), "--plain")
    assert again.returncode == 0, again.stderr
    assert summary(run)["updates"] == 5
    assert 0 < max(measured(run)) < CLOSE


def test_no_update_learns_from_tokens_of_weights_that_vllm_does_not_compute_with(tmp_path: Path) -> None:
    """Half of the rows wait for a slot when the first comparison fails; firings that fail would be tried again."""
    run, program = tmp_path / "run", f"{HERE / 'programs_for_vllm.py'}:loads_wrong_weights"
    words = ("run", program, "--model", "new", "--cluster", cluster_file(tmp_path), *FLAGS, "--retries", "3")
    ended = penstock(*words, "--updates", "4", "--max-tokens", "24", "--eval-groups", "0", "--out", str(run))
    assert ended.returncode == 1
    found = summary(run)
    assert found["cause"] == "untrusted"
    assert "[mismatch]" in found["error"]
    assert found["error"].endswith("suspected: model.layers.1.mlp.down_proj.weight")
    assert found["error"] in ended.stderr
    assert "Traceback" not in ended.stderr
    assert (found["updates"], rows(run)) == (0, [])
    assert replayed(run)[-1].outcomes["consumed"] == 0


def test_what_vllm_cannot_do_is_refused_before_a_run(tmp_path: Path) -> None:
    """`penstock run` refuses it, too, on a cluster that has vLLM."""
    cluster = cluster_file(tmp_path)
    ended = penstock("run", "aipo", "--engine", "vllm", "--cluster", cluster, "--versions", "pinned", "--model", "new")
    assert ended.returncode != 0
    assert "[engine-cannot]" in ended.stderr
