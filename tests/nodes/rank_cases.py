"""The work of each rank in the tests of ranks: a model over several ranks is compared with the same model on one."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.graph.context import Context
from penstock.graph.types import Metrics, Rewards
from penstock.nodes.critic import critic_update, critic_values, gae, make_critic
from penstock.nodes.distill import policy_logprobs, reference_logprobs
from penstock.nodes.ema import FollowingPolicy, ema, make_average
from penstock.nodes.learn.losses import aipo, imitate
from penstock.nodes.learn.update import policy_update, term
from penstock.nodes.model import CausalLM, load_model
from penstock.nodes.policy import LanguagePolicy, make_policy, make_reference
from penstock.nodes.trainable import SequenceModel
from penstock.runtime.tensor.layout import Layout, Mesh, Region, sharded

from .rollouts import random_rollouts
from .tiny_model import export
from .updating import batch

OPTIONS: dict[str, Any] = {"loss": partial(aipo, rho=1.1), "micro_tokens": 12}


def context(mesh: str = "", rank: int = 0, **changes: Any) -> Context:
    """Return the context of a rank of a mesh such as "fsdp=2,tp=2"."""
    axes = tuple((name, int(size)) for name, _, size in (axis.partition("=") for axis in mesh.split(",") if axis))
    return Context(**{"node": "policy", "seed": 1, "updates": 10, "mesh": axes, "rank": rank, **changes})


def policy(mesh: str = "", rank: int = 0, **changes: Any) -> LanguagePolicy:
    made = make_policy(context(mesh, rank, **changes))
    assert isinstance(made, LanguagePolicy)
    return made


def update(rank: int, folder: Path, mesh: str) -> None:
    parted, one = policy(mesh, rank), policy()
    assert_boxes(parted, one, rank)
    beside = (term.fn(batch()[0].take([0, 2]), loss=imitate, weight=0.5),)
    for options in ({"beside": beside}, {"epochs": 2, "minibatches": 2, "average": "sequence_mean", "entropy": 0.2}):
        ours = policy_update.fn(parted, *batch(), **OPTIONS, **options)[1]
        theirs = policy_update.fn(one, *batch(), **OPTIONS, **options)[1]
        assert_same_everywhere(ours)
        assert_near(ours, theirs)
        logprobs = [policy_logprobs.fn(each, batch()[0], micro_tokens=12).logprobs_NT for each in (parted, one)]
        torch.testing.assert_close(*logprobs, rtol=1e-4, atol=1e-4)
        assert_whole(parted, one)
    assert_boxes(parted, one, rank, exactly=False)
    goes_on(parted, policy(mesh, rank, seed=2))
    # An export that is written later has the weights of its call, whatever updates change meanwhile.
    now = {name: tensor.clone() for name, tensor in parted.workers.whole(parted.shapes)}
    later = parted.export(str(folder / "exported"))
    policy_update.fn(parted, *batch(), **OPTIONS)
    if later is not None:
        later()
    dist.barrier()
    directory: dict[str, Any] = {"model": str(folder / "exported")}  # each rank keeps its parts of it
    assert_boxes(policy(mesh, rank, **directory), policy(**directory), rank)
    if rank == 0:
        exported = dict(load_model(CausalLM, folder / "exported").named_parameters())
        for name, tensor in one.masters.items():
            assert torch.equal(exported[name], now[name]), name
            torch.testing.assert_close(exported[name], tensor, rtol=1e-3, atol=2e-4, msg=name)


def few_rows(rank: int, folder: Path, mesh: str) -> None:
    """A batch with fewer micro-batches than ranks, after a loss that fails."""
    parted, one = policy(mesh, rank), policy()
    rollouts, advantage = (part.take([2]) for part in batch())

    def failing(*_: Any) -> Tensor:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        policy_update.fn(parted, rollouts, advantage, loss=failing)
    ours, theirs = (policy_update.fn(each, rollouts, advantage, **OPTIONS)[1] for each in (parted, one))
    assert_same_everywhere(ours)
    assert_near(ours, theirs)
    assert_whole(parted, one)


def other_models(rank: int, folder: Path, mesh: str) -> None:
    """A critic, a frozen reference, and a moving average, all in one process."""
    rollouts, rewards = random_rollouts(), Rewards(torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0]))
    critics = [make_critic(context(*place)) for place in ((mesh, rank), ())]
    figures = []
    for critic in critics:
        for _ in range(3):
            values = critic_values.fn(critic, rollouts, micro_tokens=12)
            _, returns, _ = gae.fn(rewards, values, rollouts)
            figures.append(critic_update.fn(critic, rollouts, values, returns, minibatches=2, micro_tokens=12)[1])
    assert_near(figures[2], figures[5])
    assert_same_everywhere(figures[2])
    assert_whole(*critics)
    references = [make_reference(context(*place)) for place in ((mesh, rank), ())]
    logprobs = [reference_logprobs.fn(each, rollouts, micro_tokens=12).logprobs_NT for each in references]
    torch.testing.assert_close(*logprobs, rtol=1e-4, atol=1e-5)
    follow(mesh, rank)


def follow(mesh: str, rank: int) -> None:
    found = []
    for place in ((mesh, rank), ()):
        average, learner = make_average(context(*place)), policy(*place)
        assert isinstance(average, FollowingPolicy)
        reference_logprobs.fn(average, random_rollouts())  # the gathered weights must not be used again
        for _ in range(2):
            policy_update.fn(learner, *batch(), **OPTIONS)
            figures = ema.fn(average, learner, decay=0.5)[1]
        found.append((average, figures, reference_logprobs.fn(average, random_rollouts()).logprobs_NT))
    (parted, ours, logprobs), (one, theirs, needed) = found
    assert_near(ours, theirs)
    assert_whole(parted, one)
    torch.testing.assert_close(logprobs, needed, rtol=1e-4, atol=1e-4)


def half_precision(rank: int, folder: Path, mesh: str) -> None:
    """Masters stay float32. Weights that are sent or computed with are the masters in the run's dtype."""
    parted, one = policy(mesh, rank, dtype="bfloat16"), policy(dtype="bfloat16")
    for _ in range(2):
        ours, theirs = (policy_update.fn(each, *batch(), **OPTIONS)[1] for each in (parted, one))
    torch.testing.assert_close(ours["loss"], theirs["loss"], rtol=0.02, atol=0.02)
    for name, tensor in parted.weights().items():
        assert parted.masters[name].dtype == torch.float32
        assert torch.equal(tensor, parted.masters[name].bfloat16())
    goes_on(parted, policy(mesh, rank, dtype="bfloat16", seed=2))


def adapters(rank: int, folder: Path, mesh: str) -> None:
    """Low-rank adapters of a base that is sharded over ranks and does not change."""
    given: dict[str, Any] = {"model": str(folder / "base"), "lora": 3, "lora_alpha": 12.0}
    parted, one = policy(mesh, rank, **given), policy(**given)
    assert_boxes(parted, one, rank)
    before = {name: p.clone() for name, p in parted.workers.parameters.items() if name not in parted.shapes}
    for update in range(3):
        ours, theirs = (policy_update.fn(each, *batch(), **OPTIONS)[1] for each in (parted, one))
        assert_same_everywhere(ours)
        assert_near(ours, theirs)
        if update == 0:
            assert_gradients_near(parted, one)
    assert_whole(parted, one)
    logprobs = [policy_logprobs.fn(each, batch()[0], micro_tokens=12).logprobs_NT for each in (parted, one)]
    torch.testing.assert_close(*logprobs, rtol=1e-4, atol=1e-4)
    assert before
    assert all(torch.equal(parted.workers.parameters[name], tensor) for name, tensor in before.items())
    assert sum(t.numel() for t in parted.state()[0].values()) < sum(t.numel() for t in before.values())
    goes_on(parted, policy(mesh, rank, **given, seed=2))
    export(parted, folder / "exported")
    dist.barrier()
    again: dict[str, Any] = {"model": str(folder / "exported")}
    assert_boxes(policy(mesh, rank, **again), policy(**again), rank)
    half = policy(mesh, rank, **given, dtype="bfloat16")
    policy_update.fn(half, *batch(), **OPTIONS)
    assert {p.dtype for name, p in half.workers.parameters.items() if name in half.shapes} <= {torch.float32}
    assert {p.dtype for name, p in half.workers.parameters.items() if name not in half.shapes} == {torch.bfloat16}


def goes_on(learner: LanguagePolicy, resumed: LanguagePolicy) -> None:
    """Assert that a state that is restored into another policy goes on to the bit."""
    tensors, facts = learner.state()
    resumed.restore({name: tensor.clone() for name, tensor in tensors.items()}, dict(facts))
    for each in (learner, resumed):
        policy_update.fn(each, *batch(), **OPTIONS)
    ours, theirs = learner.state()[0], resumed.state()[0]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def layout_of(parted: SequenceModel[Any]) -> Layout:
    facts = parted.sharding()
    named = [(name, shape, "float32") for name, shape in facts.shapes.items()]
    return sharded(named, Mesh(facts.mesh), facts.rules, facts.stages, experts=facts.experts)


def assert_boxes(parted: SequenceModel[Any], one: SequenceModel[Any], rank: int, *, exactly: bool = True) -> None:
    """Assert that each rank has the boxes that the tensor plane expects."""
    given, whole = parted.weights(), one.weights()
    assert parted.sharding().shapes == {name: tuple(tensor.shape) for name, tensor in whole.items()}
    for tensor in layout_of(parted).tensors:
        boxes = tensor.held_by(rank)
        for box in boxes:
            piece = whole[tensor.name][box.slices(Region.whole(tensor.shape))]
            assert given[tensor.name].shape == piece.shape, tensor.name
            assert not exactly or torch.equal(given[tensor.name], piece), tensor.name
        assert boxes or tensor.name not in given or not given[tensor.name].numel(), tensor.name


def assert_whole(parted: Any, one: Any) -> None:
    """Assert that the whole weights are one rank's, except for rounding, which AdamW's division enlarges."""
    for name, tensor in parted.workers.whole(parted.shapes):
        if dist.get_rank() == 0:
            torch.testing.assert_close(tensor, one.masters[name].detach(), rtol=1e-4, atol=2e-5, msg=name)


def assert_gradients_near(parted: LanguagePolicy, one: LanguagePolicy) -> None:
    """Compare moments, which are means of gradients: each rank's box with that of one rank."""
    given, whole = parted.state()[0], one.state()[0]
    for tensor in layout_of(parted).tensors:
        for box in tensor.held_by(dist.get_rank()):
            name = f"exp_avg.{tensor.name}"
            piece = whole[name][box.slices(Region.whole(tensor.shape))]
            torch.testing.assert_close(given[name], piece, rtol=1e-4, atol=1e-6, msg=name)


def assert_near(ours: Metrics, theirs: Metrics) -> None:
    assert ours.keys() == theirs.keys()
    for name, figure in theirs.items():
        assert abs(ours[name] - figure) <= 1e-5 + 1e-3 * abs(figure), (name, ours[name], figure)


def assert_same_everywhere(figures: Metrics) -> None:
    own = torch.tensor(list(figures.values()), dtype=torch.float64)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    assert all(torch.equal(each, own) for each in every)
