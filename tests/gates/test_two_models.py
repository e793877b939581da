"""Two models in one program: each decodes with its own shape and tokenizer, whatever the run's model is."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.graph import Program, check, load, trace
from penstock.runtime.cli.children import try_inputs
from penstock.runtime.control.run_config import RunOptions

from .programs_with_two_models import write_model
from .running import HERE, assert_equal_bits, final_state, make_run, rows, run_here, run_to_end, with_updates

PROGRAMS = HERE / "programs_with_two_models.py"
FLAGS = RunOptions(updates=2, batch=2, max_tokens=6, slots=16)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("models") / "judge")


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a model to be trained. Its tokens are bytes, too, so it can read all that the judge says."""
    return write_model(tmp_path_factory.mktemp("models") / "speaker", width=32)


def program_of(name: str) -> Program[..., object]:
    found = load(f"{PROGRAMS}:{name}")
    assert isinstance(found, Program)
    return found


def test_a_judge_decodes_with_its_own_shape_and_tokenizer(tmp_path: Path, judge: str) -> None:
    run = run_here(make_run(tmp_path / "run", f"{PROGRAMS}:judged", {"judge_model": judge, "lag": 1}, FLAGS))
    assert len(rows(run)) == FLAGS.updates
    assert any(row["verdict"] for row in rows(run))
    assert len(rows(run_here(with_updates(run, 3)))) == 3


@pytest.mark.slow
def test_a_judge_is_the_same_bits_with_processes_as_without(tmp_path: Path, judge: str) -> None:
    options = {"judge_model": judge, "lag": 0}
    here, there = (make_run(tmp_path / name, f"{PROGRAMS}:judged", options, FLAGS) for name in ("here", "there"))
    assert_equal_bits(final_state(run_here(here), 2), final_state(run_to_end(there), 2))


@pytest.mark.parametrize(("name", "value"), [("silent", "other"), ("numbers", "reward_model")])
def test_weights_that_nothing_can_decode_with_are_refused_by_name(name: str, value: str) -> None:
    found = [fault for fault in check(trace(program_of(name))) if fault.what == "generate: input 'behaviour'"]
    assert [repr(value) in fault.given for fault in found] == [True]


def test_a_run_is_refused_before_its_start_for_what_a_makers_spec_shows(judge: str) -> None:
    graph = trace(program_of("wide"))
    assert not try_inputs([graph], replace(FLAGS, model=judge))
    (fault,) = try_inputs([graph], RunOptions(batch=2, max_tokens=256, model=judge))
    assert fault.what == "--max-tokens"


def test_two_models_talk_and_lag_zero_is_the_same_bits_whatever_pool_the_other_is_in(
    tmp_path: Path, judge: str, speaker: str
) -> None:
    flags = replace(FLAGS, model=speaker)
    states = []
    for pool in ("judge", "generator"):
        options = {"judge_model": judge, "pool": pool}
        run = run_here(make_run(tmp_path / pool, f"{PROGRAMS}:talk", options, flags))
        assert {"judge_says.answered", "judge_says.reply_length"} <= rows(run)[-1].keys()
        states.append(final_state(run, 2))
    assert_equal_bits(*states)


@pytest.mark.slow
def test_two_models_talk_the_same_bits_with_processes_as_without(tmp_path: Path, judge: str, speaker: str) -> None:
    flags, options = replace(FLAGS, model=speaker), {"judge_model": judge}
    here = make_run(tmp_path / "here", f"{PROGRAMS}:talk", options, flags)
    there = make_run(tmp_path / "there", f"{PROGRAMS}:talk", options, flags, generators=2)
    assert_equal_bits(final_state(run_here(here), 2), final_state(run_to_end(there), 2))


def test_a_policy_talks_with_itself_at_a_lag_that_is_said(tmp_path: Path) -> None:
    flags = replace(FLAGS, versions="pinned", batch=4)
    run = run_here(make_run(tmp_path / "run", f"{PROGRAMS}:self_play", {"lag": 1}, flags))
    assert [row["lag_max"] for row in rows(run)] == [0, 1]


def test_tokens_of_another_tokenizer_are_no_rollouts_to_learn_from(judge: str) -> None:
    (fault,) = try_inputs([trace(program_of("strange_words"), {"judge_model": judge})], FLAGS)
    assert fault.what == "aipo_update: rollouts"
    assert not try_inputs([trace(program_of("strange_words"), {"judge_model": judge})], replace(FLAGS, model=judge))
    assert not try_inputs([trace(program_of("judged"), {"judge_model": judge})], FLAGS)
