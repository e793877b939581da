"""Settings of all tests: Hypothesis has no deadline, since a shared machine may be slow at any moment; with several
workers, the longest tests begin first; without a GPU, Triton's kernels run in its interpreter.
"""

import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")

# Set before anything imports Triton, as torch sometimes does. Asking CUDA itself would break it in forked processes.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# Imported modules stay: searching them for garbage would take a quarter of the time in which tests are collected.
gc.disable()

# Any worker takes a slow test, but one worker takes all tests of a group: those that share something that takes long to
# make, and those that wait for deadlines, which would leave the cores idle if they ran at the same time. The keys are
# names of tests, which win, or of files; "" is no group.
SHARING = {
    "test_ray": "a Ray cluster",
    "test_slurm": "a Slurm cluster",
    "test_ppo_learns_and_its_critic_comes_to_expect_the_reward": "a taught policy",
    "test_a_student_comes_closer_to_its_teacher": "a taught policy",
    "test_a_reward_model_learns_to_tell_right_from_wrong": "a reward model",
    "test_rlhf_finds_right_answers_by_the_reward_model_alone": "a reward model",
    "test_failures": "deadlines",
    "test_vllm": "processes with vLLM",
    "test_aipo_runs_with_vllm_in_an_interpreter_of_the_generators_own": "",
    "test_a_run_samples_with_ranks_that_share_a_model": "",
    "test_a_generator_that_dies_within_a_swap_is_named_and_the_run_goes_on_from_its_checkpoint": "",
    "test_what_vllm_cannot_do_is_refused_before_a_run": "",
}
# Files and tests that begin first, the longest first. If they began last, all other workers would wait for them.
LONGEST = (
    "test_ray",
    "test_vllm",
    "test_slurm",
    "test_what_the_command_and_all_programs_print_is_what_it_was",
    "test_pods",
    "test_torchrun",
    "test_models_learn",
    "test_a_policy_that_seldom_calls_a_tool_learns_to_call_it",
    "test_an_algorithm_makes_the_base_better",
    "test_failures",
    "test_run_plan",
    "test_equal_bits",
    "test_broadcast_chain",
    "test_trackers",
    "test_processes",
    "test_desk",
)


def names(nodeid: str) -> tuple[str, str]:
    """Return the name of a test and that of its file."""
    path, _, name = nodeid.partition("::")
    return name.partition("[")[0], Path(path).stem


def group(nodeid: str) -> str:
    """Return the group of a test: one worker takes all tests of a group."""
    found = [SHARING[name] for name in names(nodeid) if name in SHARING]
    return (found and found[0]) or nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Replace the scheduler of `--dist loadgroup`: xdist's own does not know pytest 9's names of tests."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    made = LoadScopeScheduling(config, log)
    made._split_scope = group
    return made


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """For `-m slow`, files that mark no test so are not imported: each worker would take seconds for it."""
    if config.option.markexpr != "slow" or not collection_path.match("test_*.py"):
        return None
    return "mark.slow" not in collection_path.read_text() or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        place = {name: number for number, name in enumerate(LONGEST)}
        items.sort(key=lambda item: min(place.get(name, len(LONGEST)) for name in names(item.nodeid)))


def pytest_collection_finish() -> None:
    """Search for garbage only among what tests make, so that imported modules do not slow them down."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # some libraries warn of objects that are still there at exit


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put the temporary files of tests, libraries and their processes into pytest's folder, which pytest removes: many
    of these processes are killed, and remove nothing."""
    folder = tmp_path_factory.getbasetemp() / "t"  # short: the path of a Unix socket has a limit
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield


@pytest.fixture(scope="session", autouse=True)
def signals_that_work() -> None:
    """Restore the handlers of signals that tests send. `nohup` or a script's `&` starts processes that ignore some of
    them, and all child processes inherit that."""
    for number, act in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, act)
