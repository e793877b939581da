"""Two models in one program: each decodes with its own shape and tokenizer, whatever the run's model is."""

from pathlib import Path

import pytest

from penstock.graph import Program, check, load, trace
from penstock.runtime.cli.try_inputs import try_inputs
from penstock.runtime.control.config import Flags

from .programs_with_two_models import write_judge
from .running import HERE, assert_equal_bits, final_state, make_run, rows, run_here, run_to_end, with_updates

PROGRAMS = HERE / "programs_with_two_models.py"
FLAGS = Flags(updates=2, batch=2, max_tokens=6, slots=16)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_judge(tmp_path_factory.mktemp("models") / "judge")


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


def test_a_run_is_refused_before_its_start_for_what_a_makers_spec_shows() -> None:
    graph = trace(program_of("wide"))
    assert not try_inputs([graph], FLAGS)[1]
    (fault,) = try_inputs([graph], Flags(batch=2, max_tokens=256))[1]
    assert fault.what == "--max-tokens"
