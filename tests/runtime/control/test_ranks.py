"""How a rank executes commands: it fires nodes, keeps values, saves, and offloads."""

import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.graph import Context
from penstock.graph.ir import Firing
from penstock.graph.node import UntrustedError
from penstock.graph.types import Rewards
from penstock.nodes.curriculum import Varied
from penstock.nodes.fake import FakePolicy, FakePrompts
from penstock.runtime.cluster.placement import Plan, Rank
from penstock.runtime.control import checkpointing
from penstock.runtime.control.executor import Executor, GpuLostError
from penstock.runtime.control.messages import Order, Result
from penstock.runtime.control.rank_setup import InputRead, RankSetup
from penstock.runtime.control.rank_state import HeldValues, History, join, private
from penstock.runtime.control.weight_channels import LocalChannels
from penstock.runtime.record.checkpoints import StateError
from penstock.runtime.schedule.events import Abort, Command, Copied, Done, Failed, Fire, Free, Save, Saved
from penstock.runtime.tensor import offload, streams
from penstock.runtime.tensor.checkpoint import CheckpointShard
from penstock.runtime.tensor.codec import CodecError, decode, encode
from penstock.runtime.tensor.shm import ObjectRef

from .nodes_for_tests import backing, baskets, graded, listing, make_setup, noting, owned, speaking, weighed
from .nodes_that_leave import Cupboard, Heavy, make_leaving

# `RankSetup` answers all questions about names in graphs and plan.


def test_the_names_of_nodes_and_arguments_are_found_in_all_graphs(tmp_path: Path) -> None:
    setup = make_setup(tmp_path)
    assert (setup.pool, setup.holds) == ("worker", ("policy", "prompts", "basket", "doubled", "learn"))
    assert set(setup.outputs) == {"policy", "prompts", "basket", "doubled", "learn"}
    assert setup.declared(Firing("basket", 3), "out") is Rewards
    assert setup.declared(Firing("prompts", 3), "out") is FakePrompts
    assert setup.makes == {"learn": {"policy": "out"}}
    with pytest.raises(KeyError, match="'judge'"):
        setup.declared(Firing("judge", 0), "out")


def test_only_what_another_process_reads_is_exported(tmp_path: Path) -> None:
    assert make_setup(tmp_path).exported == frozenset()
    assert make_setup(tmp_path, replicas=2).exported >= {"prompts", "basket", "doubled"}


def test_a_rank_is_asked_from_afar_if_its_readers_are_on_other_hosts(tmp_path: Path) -> None:
    setup = make_setup(tmp_path, replicas=2)
    (pool,) = setup.plan.pools

    def spread(*hosts: str) -> RankSetup:
        replicas = tuple(replace(r, ranks=(Rank(h),)) for r, h in zip(pool.replicas, hosts, strict=True))
        return replace(setup, plan=Plan((replace(pool, replicas=replicas),)))

    assert spread("a", "b").asked_from_afar
    assert not spread("b", "b").asked_from_afar
    assert not make_setup(tmp_path).asked_from_afar


def test_an_edge_is_typed_by_a_class(tmp_path: Path) -> None:
    setup = make_setup(tmp_path)
    (graph,) = setup.graphs
    wrong = [replace(n, outputs=tuple(replace(o, type="math:pi") for o in n.outputs)) for n in graph.nodes]
    with pytest.raises(TypeError, match="math:pi: given a float, needed the class of an edge"):
        replace(setup, graphs=(replace(graph, nodes=tuple(wrong)),)).declared(Firing("basket", 0), "out")


# A rank executes commands. What a node raises fails each of its firings once, and the rank continues.


Answers = list[tuple[str, Firing]]


def make(folder: Path, restore: Path | None = None, traced: Any = baskets, **options: Any) -> Executor:
    setup = make_setup(folder, restore=restore, traced=traced, **options)
    return Executor(setup, LocalChannels({}, "worker/0", 0, "cpu", {}), HeldValues(setup, {}))


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
    """The context is not an option: the graph does not have it."""
    executor = make(tmp_path, traced=speaking)
    held = executor.held.nodes["spoken"]
    assert dict(held.node.options) == {"times": 2}
    fire(executor, "prompts", [3])
    fire(executor, "basket", [3])
    executor.step()
    (result,) = fire(executor, "spoken", [3])
    assert result.metrics["max_tokens"] == Context().max_tokens
    assert held.options["context"].node == "spoken"


def test_a_group_goes_from_its_source_to_its_update(tmp_path: Path) -> None:
    executor = make(tmp_path)
    assert answers(fire(executor, "prompts", [3, 4])) == of("Done", "prompts", 3, 4)
    assert fire(executor, "basket", [3, 4]) == []
    assert executor.busy()
    assert answers(executor.step()) == of("Done", "basket", 3, 4)
    assert not executor.busy()
    results = fire(executor, "doubled", [3, 4])
    assert [result.metrics for result in results] == [
        {"reward_mean": mean, "doubled_reward_mean": 2 * mean} for mean in (3.0, 4.0)
    ]
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


class Card:
    """Stands in for a GPU's stream; `fault` is the driver's error on every call."""

    fault = ""

    def current_stream(self, device: torch.device) -> "Card":
        return self

    def query(self) -> bool:
        if self.fault:
            raise RuntimeError(self.fault)
        return True


def test_a_rank_whose_gpu_is_lost_ends_instead_of_failing_firing_after_firing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card()
    monkeypatch.setattr(streams, "streams_of", lambda device: card)
    setup = make_setup(tmp_path, bad=1)
    (pool,) = setup.plan.pools
    replicas = tuple(replace(each, ranks=(Rank(device="cuda:0"),)) for each in pool.replicas)
    setup = replace(setup, plan=Plan((replace(pool, replicas=replicas),)))
    executor = Executor(setup, LocalChannels({}, "worker/0", 0, "cpu", {}), HeldValues(setup, {}))
    fire(executor, "prompts", range(4))
    fire(executor, "basket", [1])
    assert answers(executor.step()) == of("Failed", "basket", 1)
    card.fault = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(GpuLostError, match="cuda:0"):
        fire(executor, "doubled", [3])  # although this basket was never filled


def test_groups_given_up_in_a_step_that_raised_are_never_answered(tmp_path: Path) -> None:
    executor = make(tmp_path, bad=1)
    fire(executor, "prompts", range(4))
    fire(executor, "basket", range(3))
    executor.step()
    order(executor, Free(tuple(Firing("prompts", group) for group in range(3)), "worker/0"))
    fire(executor, "basket", [3])
    assert answers(executor.step()) == of("Done", "basket", 3)


def test_a_firing_that_pauses_goes_on_from_what_it_left(tmp_path: Path) -> None:
    executor = make(tmp_path, slow=1)
    fire(executor, "prompts", [1, 2])
    fire(executor, "basket", [1, 2])
    paused, done = executor.step()
    assert paused.event == Done(Firing("basket", 1), "worker/0", paused=True)
    assert answers([done]) == of("Done", "basket", 2)
    # Its output so far goes to the next segment; the whole firing is called as if it had one segment.
    second = Firing("basket", 1, segment=1)
    order(executor, Fire(second, "worker/0", (1,)))
    assert answers(executor.step()) == [("Done", second)]
    order(executor, Free((second,), "worker/0"))
    (result,) = fire(executor, "doubled", [1])
    assert result.metrics == {"reward_mean": 1.0, "doubled_reward_mean": 2.0}


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


@pytest.mark.parametrize("way", ["submit", "step", "answer"])
def test_a_rank_that_does_not_trust_a_result_answers_for_none_of_its_firings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Whether its stream raises it, or answers with it for one group: the other groups of the step are not answered."""
    executor, doubt = make(tmp_path), UntrustedError("other weights")
    (held,) = executor.held.streams
    monkeypatch.setattr(held.state, way, Mock(**{"return_value" if way == "answer" else "side_effect": doubt}))
    fire(executor, "prompts", range(3))
    with pytest.raises(UntrustedError, match=r"^worker/0 rank 0: other weights$"):
        [*fire(executor, "basket", range(3)), *executor.step()]


def fate_of_rewards(folder: Path, given: int, traced: Any = graded, node: str = "grade") -> Any:
    executor = make(folder, traced=traced, given=given)
    fire(executor, "prompts", [0])
    fire(executor, "say", [0])
    return fire(executor, node, [0])[0].event


@pytest.mark.parametrize("given", [1, 3])
@pytest.mark.parametrize(("traced", "node", "kind"), [(graded, "grade", "rewards"), (weighed, "weigh", "advantages")])
def test_rewards_that_are_not_one_for_each_response_fail_their_group(
    tmp_path: Path, given: int, traced: Any, node: str, kind: str
) -> None:
    assert isinstance(fate_of_rewards(tmp_path, 2, traced, node), Done)
    said = f"{node} returned {given} {kind}, needed 2, one for each response"
    assert said in fate_of_rewards(tmp_path, given, traced, node).error


def test_values_that_do_not_join_are_told_with_the_node_that_made_them(tmp_path: Path) -> None:
    executor = make(tmp_path, traced=listing)
    fire(executor, "prompts", [0, 1])
    fire(executor, "speak", [0, 1])
    (failed,) = order(executor, Fire(Firing("learn_words", 0), "worker/0", (0, 1)))
    assert isinstance(failed.event, Failed)
    assert "speak.out of 2 groups cannot be joined: given a list, needed an array or a tuple" in failed.event.error


def test_rewards_may_be_of_other_responses_than_those_that_a_node_reads_beside_them(tmp_path: Path) -> None:
    executor = make(tmp_path, traced=backing)
    for name in ("prompts", "basket", "say"):
        fire(executor, name, [0])
    executor.step()
    assert isinstance(fire(executor, "backed", [0])[0].event, Done)


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
    assert resumed.restored == []  # no other process reads them
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


# Values are kept until they are freed, joined for an update, and exported only if another process reads them.


OWN = InputRead("rewards", "basket", "out", joined=False, at_turn=False, back=False)
HANDLE = ObjectRef("segment", 0, 8, 1, "worker/0")


def rewards(*values: float) -> Rewards:
    return Rewards(torch.tensor(values))


def test_a_group_s_reader_gets_its_own_and_an_update_s_the_batch(tmp_path: Path) -> None:
    values = HeldValues(make_setup(tmp_path), {})
    for group in range(3):
        assert values.keep(Firing("doubled", group), {"out": rewards(float(group))}) == {}
    batch = InputRead("rewards", "doubled", "out", joined=True, at_turn=False, back=False)
    update = Fire(Firing("learn", 0), "worker/0", (0, 2))
    assert values.read(batch, update, {}).values_N.tolist() == [0.0, 2.0]
    values.keep(Firing("basket", 1), {"out": rewards(7.0)})
    alone = Fire(Firing("doubled", 1), "worker/0", (1,))
    assert values.read(OWN, alone, {}).values_N.tolist() == [7.0]


@dataclass
class Everything:
    """A value with one field of each kind."""

    tensor: torch.Tensor
    array: Any
    words: list[str]
    nested: tuple[list[dict[str, list[int]]], ...]
    plain: tuple[int, ...]


def test_a_value_is_private_to_each_reader_and_apart_from_its_maker(tmp_path: Path) -> None:
    values, firing = HeldValues(make_setup(tmp_path), {}), Firing("basket", 0)
    whole = torch.arange(6.0).view(2, 3)
    made = Everything(whole.T, np.arange(3), ["a"], ([{"x": [1]}],), (1, 2))
    values.keep(firing, {"out": made})

    def change(value: Everything) -> None:
        value.tensor.zero_()
        value.array[:] = 9
        value.words.append("b")
        value.nested[0][0]["x"].append(2)
        value.plain = (3,)

    change(made)
    alone = Fire(Firing("doubled", 0), "worker/0", (0,))
    for _ in range(2):
        found = values.read(OWN, alone, {})
        assert found.tensor.equal(torch.arange(6.0).view(2, 3).T)
        assert found.tensor.is_contiguous()  # as if from another process: the bits of sums depend on the strides
        assert found.array.tolist() == [0, 1, 2]
        assert (found.words, found.nested, found.plain) == (["a"], ([{"x": [1]}],), (1, 2))
        change(found)


def test_a_reader_of_the_same_process_finds_what_one_of_another_does(tmp_path: Path) -> None:
    made = Everything(torch.ones(2, requires_grad=True), np.array([1.5], np.float32), ["a"], (), (1,))
    encoded, meta = encode(made)
    away, here = decode(Everything, encoded, meta), private(made)
    for name in ("tensor", "array"):
        one, other = getattr(away, name), getattr(here, name)
        assert (type(one), one.dtype, one.requires_grad) == (type(other), other.dtype, other.requires_grad)
        assert one.equal(other)
    assert (away.words, away.nested, away.plain) == (here.words, here.nested, here.plain)


def test_what_cannot_be_copied_for_its_readers_is_refused(tmp_path: Path) -> None:
    values = HeldValues(make_setup(tmp_path), {})
    with pytest.raises(CodecError, match="given a lock that cannot be copied"):
        values.keep(Firing("basket", 0), {"out": threading.Lock()})


def test_a_delayed_value_is_private_to_each_reader() -> None:
    history = History({"varied": 1})
    history.note("varied", 0, cast(Any, Varied()))
    cast(Varied, history.of("varied", 0)).variances["+"] = 1.0
    assert cast(Varied, history.of("varied", 0)).variances == {}


def test_what_another_process_reads_is_exported_and_released_with_the_value(tmp_path: Path) -> None:
    released: list[ObjectRef] = []
    values = HeldValues(make_setup(tmp_path, replicas=2), {}, export=lambda value: HANDLE, release=released.append)
    firing = Firing("basket", 0)
    assert values.keep(firing, {"out": rewards(1.0)}) == {"out": HANDLE}
    assert values.of([firing]).keys() == {(firing, "out")}
    values.free([firing])
    assert released == [HANDLE]
    assert values.of([firing]) == values.kept == values.handles == {}
    values.free([firing])
    assert released == [HANDLE]


def test_a_value_of_another_rank_is_fetched_as_the_class_that_the_graph_declares(tmp_path: Path) -> None:
    fetched: list[tuple[ObjectRef, type]] = []

    def fetch(handle: ObjectRef, cls: type) -> Rewards:
        fetched.append((handle, cls))
        return rewards(4.0)

    values = HeldValues(make_setup(tmp_path), {}, fetch=fetch)
    fire = Fire(Firing("doubled", 0), "worker/0", (0,))
    found = values.read(OWN, fire, {(Firing("basket", 0), "out"): HANDLE})
    assert (found.values_N.tolist(), fetched) == ([4.0], [(HANDLE, Rewards)])
    with pytest.raises(KeyError, match=r"worker/0: no value basket\[0\]\.out, and no handle of it"):
        values.read(OWN, fire, {})


def test_values_of_a_class_without_concat_are_joined_as_a_tuple() -> None:
    assert join([1.0, 2.0]) == (1.0, 2.0)
    assert join([rewards(1.0), rewards(2.0)]).values_N.tolist() == [1.0, 2.0]


# Offloaded state is on the host between updates and on the device while a node uses it; a checkpoint reads either.


STEPS = ("peek", "grow", "look_back")


def offloading(folder: Path, restore: Path | None = None, *, on: bool = True, **options: Any) -> Executor:
    setup = make_leaving(folder, restore, offload="on" if on else "off", patience=30.0)
    return Executor(setup, LocalChannels({}, "worker/0", 0, "cpu", {}), HeldValues(setup, {}), **options)


def order_one(executor: Executor, *commands: Command) -> list[Result]:
    return [result for results in executor.carry_out(Order(commands, (), "00000001")) for result in results]


def update(executor: Executor, number: int, steps: Iterable[str] = STEPS) -> list[Result]:
    """Run an update on one group."""
    for node in ("prompts", "basket"):
        order_one(executor, Fire(Firing(node, number), "worker/0", (number,)))
    executor.step()
    return order_one(executor, *(Fire(Firing(step, number), "worker/0", (number,)) for step in steps))


def value(executor: Executor) -> Heavy:
    found = executor.held.carried["policy"]
    assert isinstance(found, Heavy)
    return found


def where(executor: Executor) -> str:
    executor.offloading.fence()
    return executor.offloading._offloads["policy"].where


def written(folder: Path) -> Tensor:
    return CheckpointShard(folder, "worker/0", 0).carried("policy")[0]["momentum"]


def test_it_is_away_but_for_those_who_work_with_it(tmp_path: Path) -> None:
    executor = offloading(tmp_path)
    assert where(executor) == "host"
    host = value(executor).place
    for number in range(3):
        results = update(executor, number)
        assert [type(result.event) for result in results] == [Done] * 3
        assert where(executor) == "host"
        assert value(executor).place == host
    assert len(value(executor).seen) == 9
    assert host not in value(executor).seen
    # One move at the start; for each update two, and two more for the node that reads the value afterwards.
    assert executor.offloading.counts()["moves"] == 1 + 3 * 4


def test_it_stays_for_its_update_once_somebody_has_read_it(tmp_path: Path) -> None:
    executor = offloading(tmp_path)
    update(executor, 0, ["peek"])
    assert where(executor) == "device"
    order_one(executor, Fire(Firing("grow", 0), "worker/0", (0,)))
    assert where(executor) == "host"


def test_a_checkpoint_that_is_written_while_it_is_away_is_that_of_one_that_stayed(tmp_path: Path) -> None:
    folders = []
    for name, on in (("away", True), ("stayed", False)):
        (tmp_path / name).mkdir()
        executor = offloading(tmp_path / name, on=on)
        update(executor, 0)
        (saved,) = order_one(executor, Save(1, "worker/0", ()))
        assert isinstance(saved.event, Saved)
        folders.append(tmp_path / name / "checkpoints" / "00000001")
        assert not on or where(executor) == "host"
    assert written(folders[0]).tolist() == written(folders[1]).tolist()
    ends = []
    for folder, on in zip(folders, (True, False), strict=True):
        executor = offloading(tmp_path / "again", folder, on=on)
        assert not on or where(executor) == "host"
        update(executor, 1)
        ends.append(value(executor).momentum_W.tolist())
    assert ends[0] == ends[1] != written(folders[0]).tolist()


class Writing:
    """A rank whose background write of a checkpoint waits until `go` is set."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, on: bool = False) -> None:
        self.go, self.woken, self.notes = threading.Event(), threading.Event(), list[str]()
        self.executor = offloading(folder, on=on, wake=self.woken.set, warn=self.notes.append)

        def export(folder: str) -> Callable[[], None]:
            return self.finish

        patch.setattr(value(self.executor), "export", export)

    def finish(self) -> None:
        assert self.go.wait(30)

    def answer(self) -> Result:
        self.go.set()
        assert self.woken.wait(30)
        # The thread ends shortly after it has woken the rank.
        while not (found := self.executor.step()):
            pass
        (result,) = found
        return result


@pytest.mark.parametrize("on", [False, True])
def test_a_checkpoint_is_that_of_its_cut_whatever_updates_change_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: bool
) -> None:
    rank = Writing(tmp_path, monkeypatch, on)
    update(rank.executor, 0)
    (copied,) = order_one(rank.executor, Save(1, "worker/0", ()))
    cut = value(rank.executor).momentum_W.tolist()
    assert copied.event == Copied(1, "worker/0")
    update(rank.executor, 1)
    assert rank.executor.step() == []
    assert rank.answer().event == Saved(1, "worker/0")
    assert rank.executor.step() == []
    assert written(tmp_path / "checkpoints" / "00000001").tolist() == cut != value(rank.executor).momentum_W.tolist()
    # The next checkpoint uses the copy's memory again.
    rank.go.clear()
    rank.woken.clear()
    (copied,) = order_one(rank.executor, Save(2, "worker/0", ()))
    assert (copied.event, rank.answer().event) == (Copied(2, "worker/0"), Saved(2, "worker/0"))


def test_what_cannot_be_written_in_the_background_is_raised_by_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Writing(tmp_path, monkeypatch)
    order_one(rank.executor, Save(1, "worker/0", ()))
    (tmp_path / "checkpoints").rename(tmp_path / "moved")
    with pytest.raises((OSError, StateError), match="checkpoints/00000001"):
        rank.answer()
    assert rank.executor.doing == "Save"


def test_a_host_without_room_for_a_copy_writes_while_training_waits_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Writing(tmp_path, monkeypatch)
    rank.go.set()
    monkeypatch.setattr(checkpointing, "free_memory", lambda: 0)
    for _ in range(2):
        (saved,) = order_one(rank.executor, Save(1, "worker/0", ()))
        assert saved.event == Saved(1, "worker/0")
    assert len(rank.notes) == 1


def test_a_host_with_a_run_folder_of_its_own_removes_the_checkpoints_that_do_not_stay(tmp_path: Path) -> None:
    executor = offloading(tmp_path)
    executor.setup = executor.checkpoints._held.setup = replace(executor.setup, run="ours")
    names = [f"0000000{number}-{run}-{number:016x}" for number, run in enumerate(["ours", "ours", "theirs"])]
    for name in (*names, "00000001"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    new = f"00000009-ours-{9:016x}"
    list(executor.carry_out(Order((Save(9, "worker/0", ()),), (), new, (names[1],))))
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {*names[1:], "00000001", new}


def test_a_stream_gives_up_its_memory_when_it_has_nothing_left(tmp_path: Path) -> None:
    for on in (True, False):
        executor = offloading(tmp_path, on=on)
        for group in range(3):
            order_one(executor, *(Fire(Firing(node, group), "worker/0", (group,)) for node in ("prompts", "basket")))
        executor.step()
        executor.step()
        (held,) = executor.held.streams
        assert isinstance(held.state, Cupboard)
        assert held.state.released == int(on)


def test_a_move_that_fails_is_told_once_and_fails_whoever_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(offload, "touched", refuse)
    executor = offloading(tmp_path)
    executor.offloading._offloads["policy"]._over.wait(30)  # type: ignore[union-attr]
    (told,) = executor.step()
    why = r"^policy of worker/0 rank 0: 1 tensors, \d+ bytes, to the host: no room"
    assert isinstance(told.event, Abort)
    assert executor.step() == []
    (saved,) = order_one(executor, Save(0, "worker/0", ()))
    assert isinstance(saved.event, Abort)
    for abort in (told.event, saved.event):
        with pytest.raises(ValueError, match=why):
            raise ValueError(abort.error)
    executor = offloading(tmp_path)
    (failed,) = update(executor, 0, ["peek"])
    assert isinstance(failed.event, Failed)
    assert "no room" in failed.event.error


def test_a_rank_that_must_offload_and_has_nothing_that_can_leave_is_refused(tmp_path: Path) -> None:
    channels = LocalChannels({}, "worker/0", 0, "cpu", {})
    setup = replace(make_setup(tmp_path), offload="on")
    with pytest.raises(ValueError, match="--offload on: worker/0 rank 0: given policy, a FakePolicy, needed a value"):
        Executor(setup, channels, HeldValues(setup, {}))
    assert Executor(replace(setup, offload="auto"), channels, HeldValues(setup, {})).offloading.counts() == {}
