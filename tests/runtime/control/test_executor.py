"""A rank carries out commands. What a node raises fails its firings, each of them once, and the rank goes on."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from penstock.graph import Context
from penstock.graph.ir import Firing
from penstock.nodes.fake import FakePolicy
from penstock.runtime.control.executor import Executor
from penstock.runtime.control.messages import Order, Result
from penstock.runtime.control.weight_channels import LocalWays
from penstock.runtime.schedule.events import Command, Done, Failed, Fire, Free, Save, Saved

from .nodes_for_tests import baskets, graded, make_setup, noting, owned, speaking

Answers = list[tuple[str, Firing]]


def make(folder: Path, restore: Path | None = None, traced: Any = baskets, **options: Any) -> Executor:
    setup = make_setup(folder, restore=restore, traced=traced, **options)
    return Executor(setup, LocalWays({}, "worker/0", 0, "cpu", {}), {})


def order(executor: Executor, *commands: Command) -> list[Result]:
    return [result for results in executor.carry_out(Order(commands, (), "00000000")) for result in results]


def fire(executor: Executor, node: str, groups: Iterable[int]) -> list[Result]:
    return order(executor, *(Fire(Firing(node, group), "worker/0", (group,)) for group in groups))


def answers(results: Iterable[Result]) -> Answers:
    found = []
    for result in results:
        assert isinstance(result.event, Done | Failed)
        assert 0 < result.began <= result.ended
        found.append((type(result.event).__name__, result.event.firing))
    return found


def of(kind: str, node: str, *groups: int) -> Answers:
    return [(kind, Firing(node, group)) for group in groups]


def test_a_node_that_asks_for_the_context_is_given_its_own(tmp_path: Path) -> None:
    """It is no option: the graph does not have it."""
    executor = make(tmp_path, traced=speaking)
    held = executor.held.nodes["spoken"]
    assert dict(held.node.options) == {"times": 2}
    fire(executor, "prompts", [3])
    fire(executor, "basket", [3])
    executor.step()
    (result,) = fire(executor, "spoken", [3])
    assert result.metrics == {"max_tokens": Context().max_tokens}
    assert held.options["context"].node == "spoken"


def test_a_group_goes_from_its_source_to_its_update(tmp_path: Path) -> None:
    executor = make(tmp_path)
    assert answers(fire(executor, "prompts", [3, 4])) == of("Done", "prompts", 3, 4)
    assert fire(executor, "basket", [3, 4]) == []
    assert executor.busy()
    assert answers(executor.step()) == of("Done", "basket", 3, 4)
    assert not executor.busy()
    results = fire(executor, "doubled", [3, 4])
    assert [result.metrics for result in results] == [{"reward_mean": 3.0}, {"reward_mean": 4.0}]
    (learnt,) = order(executor, Fire(Firing("learn", 0), "worker/0", (3, 4)))
    assert learnt.metrics == {"reward_sum": 14.0}
    policy = executor.held.carried["policy"]
    assert isinstance(policy, FakePolicy)
    assert policy.version == 1


def test_firings_of_a_step_that_raises_fail_once_and_may_be_submitted_again(tmp_path: Path) -> None:
    executor = make(tmp_path, bad=1)
    fire(executor, "prompts", range(4))
    fire(executor, "basket", range(3))
    failures = executor.step()
    assert answers(failures) == of("Failed", "basket", 0, 1, 2)
    for failure in failures:
        assert isinstance(failure.event, Failed)
        assert f"{failure.event.firing} on worker/0 rank 0" in failure.event.error
        assert "ZeroDivisionError: the basket fell" in failure.event.error
    assert not executor.busy()
    assert executor.step() == []
    assert executor.doing == ""
    fire(executor, "basket", [2, 0, 1, 3])
    assert answers(executor.step()) == of("Done", "basket", 2, 0, 1, 3)
    assert executor.step() == []


def test_groups_given_up_in_a_step_that_raised_are_never_answered(tmp_path: Path) -> None:
    executor = make(tmp_path, bad=1)
    fire(executor, "prompts", range(4))
    fire(executor, "basket", range(3))
    executor.step()
    order(executor, Free(tuple(Firing("prompts", group) for group in range(3)), "worker/0"))
    fire(executor, "basket", [3])
    assert answers(executor.step()) == of("Done", "basket", 3)


def test_an_output_that_does_not_fit_fails_its_own_firing(tmp_path: Path) -> None:
    executor = make(tmp_path, odd=1)
    fire(executor, "prompts", range(3))
    fire(executor, "basket", range(3))
    done, failed, other = executor.step()
    assert answers([done, other]) == of("Done", "basket", 0, 2)
    assert isinstance(failed.event, Failed)
    assert failed.event.firing == Firing("basket", 1)
    assert "basket returned str, needed tuple[" in failed.event.error


def test_an_exception_that_a_stream_answers_with_fails_that_firing_alone(tmp_path: Path) -> None:
    executor = make(tmp_path, cracked=1)
    fire(executor, "prompts", range(3))
    fire(executor, "basket", range(3))
    done, failed, other = executor.step()
    assert answers([done, other]) == of("Done", "basket", 0, 2)
    assert isinstance(failed.event, Failed)
    assert (failed.event.firing, failed.event.replica, failed.event.rank) == (Firing("basket", 1), "worker/0", 0)
    where, _, said = failed.event.error.partition(":\n")
    assert re.fullmatch(r"basket\[1\] on worker/0 rank 0, written at .+\.py:\d+", where)
    assert said == "ZeroDivisionError: one egg cracked\n"


def fate_of_rewards(folder: Path, given: int) -> Any:
    executor = make(folder, traced=graded, given=given)
    fire(executor, "prompts", [0])
    fire(executor, "say", [0])
    return fire(executor, "grade", [0])[0].event


@pytest.mark.parametrize("given", [1, 3])
def test_rewards_that_are_not_one_for_each_response_fail_their_group(tmp_path: Path, given: int) -> None:
    assert isinstance(fate_of_rewards(tmp_path, 2), Done)
    assert f"grade returned {given} rewards, needed 2, one for each response" in fate_of_rewards(tmp_path, given).error


def test_a_node_that_leaves_the_process_has_failed_with_its_traceback(tmp_path: Path) -> None:
    error = fate_of_rewards(tmp_path, -1).error
    assert "in grade" in error
    assert "SystemExit: enough of this" in error


def test_an_input_that_is_not_there_fails_the_firing(tmp_path: Path) -> None:
    (failed,) = fire(make(tmp_path), "doubled", [5])
    assert isinstance(failed.event, Failed)
    assert "worker/0: no value basket[5].out, and no handle of it" in failed.event.error


def test_what_is_saved_is_taken_up_again(tmp_path: Path) -> None:
    executor = make(tmp_path)
    fire(executor, "prompts", [0, 1])
    fire(executor, "basket", [0, 1])
    executor.step()
    save = Save(0, "worker/0", (Firing("basket", 1), Firing("prompts", 0)))
    (saved,) = order(executor, save)
    assert saved.event == Saved(0, "worker/0")
    resumed = make(tmp_path, restore=tmp_path / "checkpoints" / "00000000")
    assert resumed.values.kept.keys() == {(Firing("basket", 1), "out"), (Firing("prompts", 0), "out")}
    assert resumed.restored == []  # nobody else reads them
    assert answers(fire(resumed, "doubled", [1])) == of("Done", "doubled", 1)


@pytest.mark.parametrize("kind", ["set", "by number", "no field"])
def test_a_state_that_no_checkpoint_can_hold_is_refused_at_the_start_by_its_node(tmp_path: Path, kind: str) -> None:
    make(tmp_path, traced=noting, kind="list")
    with pytest.raises(
        TypeError, match=r"the state of node noted, written at .*\.py:\d+, cannot be kept in a checkpoint"
    ):
        make(tmp_path, traced=noting, kind=kind)


def test_facts_that_no_checkpoint_can_hold_are_refused_at_the_start_by_their_carried_value(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"the state of policy cannot be kept in a checkpoint: .* not JSON"):
        make(tmp_path, traced=owned)


def test_what_is_no_rank_s_command_is_refused(tmp_path: Path) -> None:
    from penstock.runtime.schedule.events import Finish

    with pytest.raises(TypeError, match="given Finish, needed a command for a rank"):
        order(make(tmp_path), Finish("done"))
