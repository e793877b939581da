"""Lazily read batches: they have the values of a batch in memory, and each rank reads only its share."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from copy import copy, deepcopy
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.graph import load, trace
from penstock.graph.deferred import StackedColumns, columns_of, deferred, is_deferred, shape_of, widened
from penstock.graph.ir import Firing
from penstock.graph.types import Advantages, Batchable, Rollouts
from penstock.nodes.learn.batching import pack, token_counts
from penstock.nodes.learn.update import Scored
from penstock.nodes.parallel.mesh import assign
from penstock.runtime.cluster.cluster import Cluster, Host
from penstock.runtime.control.rank_setup import InputRead, input_reads
from penstock.runtime.control.rank_state import HeldValues
from penstock.runtime.control.run_config import RunConfig, RunOptions
from penstock.runtime.schedule.events import Fire
from penstock.runtime.tensor.object_store import ObjectReader, ObjectStore
from penstock.runtime.tensor.shm import ObjectRefError
from tests.nodes.rollouts import random_rollouts

RANKS, ROWS, GROUPS = 4, 8, 12


def group(ordinal: int, random: Random, longest: int) -> Rollouts:
    lengths = [(random.randint(1, 5), random.randint(1, longest)) for _ in range(ROWS)]
    made = random_rollouts(lengths, [(0, 0)], seed=ordinal)
    texts = tuple(f"{ordinal}.{row} " * random.randint(1, 60) for row in range(ROWS))
    return replace(made, ordinals=(ordinal,) * ROWS, texts=texts, transcripts=tuple([text] for text in texts))


def scattered(parts: Sequence[Rollouts]) -> Rollouts:
    columns = [(columns_of(part), len(part)) for part in parts]
    found = {
        name: None if column is None else StackedColumns(tuple((own[name], count) for own, count in columns))  # type: ignore[misc]
        for name, column in columns[0][0].items()
    }
    return deferred(Rollouts, found, range(sum(map(len, parts))))


def assert_equal(first: Any, second: Any) -> None:
    """Assert equal classes, values, dtypes and bits."""
    assert first.__class__ is second.__class__
    for name in (*(field.name for field in fields(second)), *type(second).derived):
        one, other = getattr(first, name), getattr(second, name)
        if isinstance(other, Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other), name
        else:
            assert one == other, name


@given(st.randoms(use_true_random=False))
def test_a_batch_that_is_read_as_it_is_used_is_the_batch(random: Random) -> None:
    parts = [group(ordinal, random, 9) for ordinal in range(random.randint(1, 4))]
    whole = Rollouts.concat(parts)
    chosen = [random.randrange(len(whole)) for _ in range(random.randrange(12))]
    again = [random.randrange(len(chosen)) for _ in range(3)] if chosen else []
    marks = torch.tensor([random.random() < 0.5 for _ in range(len(whole))])
    assert_equal(scattered(parts), whole)
    assert_equal(scattered(parts).take(chosen), whole.take(chosen))
    assert_equal(scattered(parts).take(chosen).take(again), whole.take(chosen).take(again))
    assert_equal(scattered(parts).take(marks), whole.take(marks))
    for made in (copy(scattered(parts)), deepcopy(scattered(parts)), replace(scattered(parts))):
        assert not is_deferred(made)
        assert_equal(made, whole)
    assert asdict(scattered(parts)).keys() == vars(scattered(parts)).keys() == vars(whole).keys()
    with pytest.raises(ValueError, match=r"Rollouts\.take: given row"):
        scattered(parts).take([len(whole)])


def test_what_a_node_changes_of_a_batch_is_in_all_that_it_makes_of_it() -> None:
    parts = [group(ordinal, Random(5), 9) for ordinal in range(3)]
    values_N = torch.randn(3 * ROWS)
    found = []
    for batch in (scattered(parts), Rollouts.concat(parts)):
        batch.prompt_lengths_N.add_(1)
        batch.logprobs_NT = batch.logprobs_NT * 2
        # Mark some positions as not sampled.
        batch.versions_NT = batch.versions_NT - (batch.tokens_NS[:, :1] > 6).long()
        found.append([batch.take([20, 3]).take([1]), widened(Scored, batch, values_N=values_N).take([20])])
    for own, other in zip(*found, strict=True):
        assert_equal(own, other)


def test_columns_of_two_batches_become_one_of_which_nothing_is_read() -> None:
    parts, values_N = [group(ordinal, Random(3), 9) for ordinal in range(3)], torch.randn(3 * ROWS)
    made = widened(Scored, scattered(parts), values_N=(Advantages(values_N), "values_N"), reference_NT=None)
    assert is_deferred(made)
    assert shape_of(made, "tokens_NS") == list(Rollouts.concat(parts).tokens_NS.shape)
    assert shape_of(made, "reference_NT") is None
    assert torch.equal(made.take([7, 2]).values_N, values_N[[7, 2]])
    whole = widened(Scored, Rollouts.concat(parts), values_N=values_N)
    assert not is_deferred(whole)
    assert_equal(made.take([3, 20]), whole.take([3, 20]))


class Run:
    """A store with a batch, and the ranks of a trainer that read it."""

    def __init__(self, folder: Path, stack: ExitStack, longest: int) -> None:
        graph = trace(load("aipo"), {})
        cluster = Cluster(hosts=(Host(name="a", cores=4),))
        options = RunOptions(mesh=(f"trainer=fsdp{RANKS}",), device="cpu")
        self.config, self.folder = RunConfig.make(graph, None, cluster, options), folder
        self.run, self.stack = f"s{secrets.token_hex(6)}", stack
        self.store = ObjectStore(self.run, "generator.0", host="a")
        stack.callback(self.store.close)
        self.groups = [group(ordinal, Random(ordinal), longest) for ordinal in range(GROUPS)]
        self.handles = {(Firing("generate", each), "out"): self.store.put(one) for each, one in enumerate(self.groups)}
        self.nbytes = sum(handle.nbytes for handle in self.handles.values())
        self.fire = Fire(Firing("update", 0), "trainer/0", tuple(range(GROUPS)))

    def rank(self, index: int) -> tuple[Rollouts, ObjectReader]:
        graph = self.config.graph
        node = next(node for node in graph.nodes if node.clock == "update" and node.fires)
        read = next(one for one in input_reads(graph, node) if one.name == "rollouts")
        setup = self.config.setup(self.config.plan.replica("trainer/0"), index, self.folder, None)
        reader = ObjectReader(self.run, host="a")
        self.stack.callback(reader.close)
        values = HeldValues(setup, {}, reader.get, rows=reader.rows)
        handles = {
            (Firing(read.node, firing.index), read.output): handle for (firing, _), handle in self.handles.items()
        }
        found = values.read(read, self.fire, handles, scattered=True)
        assert is_deferred(found)
        return found, reader


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def test_each_rank_reads_its_share_of_a_batch_and_makes_the_same_micro_batches(
    tmp_path: Path, stack: ExitStack
) -> None:
    run = Run(tmp_path, stack, longest=1500)
    whole = pack(Rollouts.concat(run.groups), 1600, multiple=RANKS)
    shares, copied = assign(token_counts(whole), RANKS), []
    for rank in range(RANKS):
        rollouts, reader = run.rank(rank)
        items = pack(rollouts, 1600, multiple=RANKS)
        assert token_counts(items) == token_counts(whole)
        for number in shares[rank]:
            own, other = items[number], whole[number]
            for name in ("tokens_RW", "at_P", "targets_P", "sequence_P", "step_P", "row_P"):
                assert torch.equal(getattr(own, name), getattr(other, name)), name
            assert own.rollouts is not None
            assert other.rollouts is not None
            place = own.row_P, own.step_P
            assert torch.equal(own.rollouts.logprobs_NT[place], other.rollouts.logprobs_NT[place])
        copied.append(reader.copied)
    assert sorted(number for share in shares for number in share) == list(range(len(whole)))
    # Besides its share, each rank reads the index, which is the same for all.
    assert max(copied) < run.nbytes * 0.5
    assert sum(copied) < run.nbytes * 1.2


@dataclass
class Notes(Batchable):
    """A user's class whose first column may be missing."""

    late_N: Any = None
    texts: tuple[str, ...] = ()


@dataclass
class Numbered(Batchable):
    """A user's class whose `concat` numbers the groups."""

    group_N: Tensor

    @classmethod
    def concat(cls, parts: Sequence["Numbered"]) -> "Numbered":
        return cls(torch.cat([torch.full_like(part.group_N, number) for number, part in enumerate(parts)]))


@pytest.mark.parametrize(
    "parts",
    [[Notes(texts=("a", "b")), Notes(texts=("c",))], [Numbered(torch.zeros(2)), Numbered(torch.zeros(3))]],
)
@pytest.mark.parametrize("own", [True, False])
def test_a_class_of_the_users_is_joined_as_it_says(stack: ExitStack, parts: list[Any], own: bool) -> None:
    """Its values were made by this rank or by another one."""
    run = f"s{secrets.token_hex(6)}"
    store, reader = ObjectStore(run, "trainer.0", host="a"), ObjectReader(run, host="a")
    stack.callback(store.close)
    stack.callback(reader.close)
    alone = SimpleNamespace(replica=lambda name: SimpleNamespace(ranks=[SimpleNamespace(host="a")]))
    setup: Any = SimpleNamespace(
        declared=lambda firing, output: type(parts[0]), replica="trainer/0", rank=0, plan=alone, perishable=()
    )
    keys = [(Firing("judge", number), "out") for number in range(len(parts))]
    kept = dict(zip(keys, parts, strict=True)) if own else {}
    handles = {} if own else {key: store.put(part) for key, part in zip(keys, parts, strict=True)}
    values = HeldValues(setup, kept, reader.get, rows=reader.rows)
    read = InputRead("notes", "judge", "out", joined=True, at_turn=False, back=False)
    fire = Fire(Firing("update", 0), "trainer/0", tuple(range(len(parts))))
    assert_equal(values.read(read, fire, handles, scattered=True), type(parts[0]).concat(parts))


def test_what_is_read_of_a_batch_after_it_was_freed_is_an_error(tmp_path: Path, stack: ExitStack) -> None:
    run = Run(tmp_path, stack, longest=1500)
    rollouts, _ = run.rank(0)
    for handle in run.handles.values():
        run.store.free(handle)
    assert len(rollouts) == GROUPS * ROWS
    with pytest.raises(ObjectRefError, match="not in use for this value"):
        rollouts.take([5]).tokens_NS  # noqa: B018 - to read it is what is tried
