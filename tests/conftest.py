"""What holds for all tests: nothing of Hypothesis goes by the clock, for a shared machine is slow at any moment; with
several workers, what takes longest begins first; without a GPU, Triton's kernels run in its interpreter.
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

# Before anything imports Triton, as torch does now and then. To ask CUDA would spoil the processes that are forked.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

# What is imported for all tests stays: to look for garbage among it takes a quarter of the time of their collection.
gc.disable()

# Of tests that are marked slow each goes to any worker by itself, but for those that share what takes long to make, and
# those that wait for deadlines, which would leave the cores idle side by side: by the names of their files, or by their
# own, which go before; "" is for itself.
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
# Files and tests that would be waited for at the end if they began there, the longest first.
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
    """Of a test its own name and that of its file."""
    path, _, name = nodeid.partition("::")
    return name.partition("[")[0], Path(path).stem


def group(nodeid: str) -> str:
    """Of the tests that one worker takes."""
    found = [SHARING[name] for name in names(nodeid) if name in SHARING]
    return (found and found[0]) or nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What `--dist loadgroup` is here: xdist's own one does not know pytest 9's names of tests."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    made = LoadScopeScheduling(config, log)
    made._split_scope = group
    return made


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        place = {name: number for number, name in enumerate(LONGEST)}
        items.sort(key=lambda item: min(place.get(name, len(LONGEST)) for name in names(item.nodeid)))


def pytest_collection_finish() -> None:
    """Tests are as long as they are, whatever else there is: garbage is looked for in what they make alone."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # some libraries complain of what is still there at the end


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests, libraries and their processes put into the machine's folder of temporary files is in pytest's, which
    removes it: many of them are killed, and remove nothing."""
    folder = tmp_path_factory.getbasetemp() / "t"  # short, since the paths of Unix sockets are
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield


@pytest.fixture(scope="session", autouse=True)
def signals_that_work() -> None:
    """Tests send them. What runs tests in the background, such as nohup or a script's `&`, has some ignored, which all
    processes inherit."""
    for number, act in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, act)
