"""The work of each rank in the tests of ranks: each kind of update over several ranks is compared with one rank."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.graph.types import Logprobs, Metrics, Rewards
from penstock.nodes.data import Demonstrations, Pairs
from penstock.nodes.distill import FrozenTeacher, distill_update, open_teacher, policy_logprobs, reference_logprobs
from penstock.nodes.learn.dpo import dpo_update
from penstock.nodes.learn.sft import sft_update
from penstock.nodes.learn.update import policy_update
from penstock.nodes.model import CausalLM, hf, save_model
from penstock.nodes.policy import LanguagePolicy, make_reference
from penstock.nodes.reward_model import make_preference_model, open_reward_model, preference_update, reward_scores
from penstock.runtime.tensor.layout import Mesh, sharded

from .rank_cases import (
    OPTIONS,
    assert_boxes,
    assert_gradients_near,
    assert_near,
    assert_same_everywhere,
    assert_whole,
    context,
    policy,
)
from .rollouts import random_rollouts
from .tiny_model import export
from .updating import batch

DEMONSTRATIONS = Demonstrations(("12+34=", "50-9=", "7+8="), ("046", "041", "15"))
PAIRS = Pairs(("12+34=", "50-9=", "7+8="), ("046", "041", "15"), ("45", "1:041", "16"))


def lessons(rank: int, folder: Path, mesh: str) -> None:
    """Imitation, preferences for a policy and for a reward model, distillation."""
    ranked: list[list[Metrics]] = []
    places = ((mesh, rank), ("", 0))
    learners = [(policy(*place), make_preference_model(context(*place))) for place in places]
    for (learner, reward_model), place in zip(learners, places, strict=True):
        rollouts = replace(random_rollouts(), ordinals=(4, 4, 9, 9, 9))
        reference, rewards = Logprobs(rollouts.logprobs_NT), Rewards(torch.tensor([0.0, 2.0, 1.0, 0.5, -1.0]))
        teacher = make_reference(context(*place, seed=5))
        ranked.append(
            [
                sft_update.fn(learner, DEMONSTRATIONS, micro_tokens=12)[1],
                dpo_update.fn(learner, rollouts, rewards, reference, micro_tokens=12)[1],
                distill_update.fn(learner, teacher, rollouts, micro_tokens=12)[1],
                preference_update.fn(reward_model, PAIRS, micro_tokens=20)[1],
            ]
        )
    for ours, theirs in zip(*ranked, strict=True):
        assert_same_everywhere(ours)
        assert_near(ours, theirs)
    for models in zip(*learners, strict=True):
        assert_whole(*models)


class Slices:
    """A tensor of a file. Counts the bytes that are read, by tensor name."""

    read: ClassVar[Counter[str]] = Counter()

    def __init__(self, file: Any, name: str) -> None:
        self.piece, self.name = file.get_slice(name), name

    def get_shape(self) -> list[int]:
        return list(self.piece.get_shape())

    def get_dtype(self) -> str:
        return str(self.piece.get_dtype())

    def __getitem__(self, region: Any) -> Tensor:
        tensor: Tensor = self.piece[region]
        self.read[self.name] += tensor.nbytes
        return tensor


class CountedFile:
    def __init__(self, *given: Any, **named: Any) -> None:
        self.file: Any = safe_open(*given, **named)

    def keys(self) -> list[str]:
        return list(self.file.keys())

    def get_slice(self, name: str) -> Slices:
        return Slices(self.file, name)


def frozen(rank: int, folder: Path, mesh: str) -> None:
    """Models of a directory: each rank reads only what it keeps, and all results are those of one rank."""
    if rank == 0:
        export(policy(seed=5), folder / "teacher")
        learnt = make_preference_model(context())
        preference_update.fn(learnt, PAIRS, micro_tokens=20)
        export(learnt, folder / "reward_model")
    dist.barrier()
    options = {"teacher_model": str(folder / "teacher"), "reward_model": str(folder / "reward_model")}
    said, totals, rollouts = [], [], random_rollouts()
    setattr(hf, "safe_open", CountedFile)  # noqa: B010 (mypy)
    for place in ((mesh, rank), ("", 0)):
        Slices.read.clear()
        teacher = open_teacher(context(*place, options=options))
        assert isinstance(teacher, FrozenTeacher)
        kept = {name: part.nbytes for name, part in teacher.weights().items() if part.numel()}
        assert Slices.read == kept, "a rank reads what it keeps"
        totals.append(sum(kept.values()))
        judge = open_reward_model(context(*place, options=options))
        logprobs = reference_logprobs.fn(teacher, rollouts, micro_tokens=12)
        said.append((logprobs.logprobs_NT, reward_scores.fn(judge, rollouts, micro_tokens=20)[0].values_N))
    torch.testing.assert_close(*said, rtol=1e-4, atol=1e-4)
    # Together the ranks read the model once, except for norms, which all ranks of "tp" have.
    own, whole = torch.tensor(totals[0]), totals[1]
    dist.all_reduce(own)
    norms = sum(size for name, size in kept.items() if name.endswith("norm.weight"))
    assert whole <= int(own) <= whole + (dist.get_world_size() - 1) * norms
    assert max(totals[0], whole - totals[0]) < 0.6 * whole


def three_stages(rank: int, folder: Path, mesh: str) -> None:
    """A stage in the middle has neither embedding nor head."""
    if rank == 0:
        one = policy()
        model = CausalLM(replace(one.model.config, num_hidden_layers=5))
        model.init_weights(3)
        save_model(model, model.state_dict(), folder / "model")
        one.tokenizer.save(folder / "model")
    dist.barrier()
    parted, one = (policy(*place, model=str(folder / "model")) for place in ((mesh, rank), ()))
    for _ in range(2):
        ours, theirs = (policy_update.fn(each, *batch(), **OPTIONS)[1] for each in (parted, one))
        assert_near(ours, theirs)
        assert_same_everywhere(ours)
    assert_whole(parted, one)


def no_number(rank: int, folder: Path, mesh: str, dtype: str) -> None:
    """A gradient is not finite, because of the loss or on one rank alone: all ranks raise, and do not change their
    weights."""
    learner = policy(mesh, rank, dtype=dtype)
    before = {name: tensor.clone() for name, tensor in learner.weights().items()}
    with pytest.raises(FloatingPointError, match=r"norm nan: elements of model.embed_tokens.weight .* on rank 0"):
        policy_update.fn(learner, *batch(), **{**OPTIONS, "loss": lambda logprobs_P, sampled: logprobs_P * torch.nan})
    collect = learner.workers.collect
    # Each rank of `tp` has the whole second tensor, which counts once.
    for wrong in ("model.layers.1.mlp.down_proj.weight", "model.norm.weight"):

        def damaged(wrong: str = wrong) -> dict[str, torch.Tensor]:
            found = collect()
            if rank == 1 and wrong in found:
                found[wrong].view(-1)[0] = torch.inf
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(learner.workers, "collect", damaged)
            with pytest.raises(FloatingPointError, match=f"norm (inf|nan): elements of {wrong} that are .*: 1 on rank"):
                policy_update.fn(learner, *batch(), **OPTIONS)
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.weights().items())
    policy_update.fn(learner, *batch(), **OPTIONS)
    assert all(tensor.isfinite().all() for tensor in learner.weights().values())


def replicas(rank: int, folder: Path, mesh: str) -> None:
    """Ranks with the same part of a tensor have the same bits."""
    learner = policy(mesh, rank)
    for _ in range(3):
        policy_update.fn(learner, *batch(), **OPTIONS)
    for name, held in _held(learner, mesh).items():
        own = torch.zeros(max(count for _, count in held), dtype=torch.float32)
        part = learner.weights()[name].flatten()
        own[: len(part)] = part
        every = [torch.empty_like(own) for _ in held]
        dist.all_gather(every, own)
        for (place, _), tensor in zip(held, every, strict=True):
            (first, *_) = [t for (other, _), t in zip(held, every, strict=True) if other == place]
            assert torch.equal(first, tensor), name


def _held(learner: LanguagePolicy, mesh: str) -> dict[str, list[tuple[object, int]]]:
    """Return, for each tensor, the box of every rank and its number of elements."""
    facts = learner.sharding()
    named = [(name, shape, "float32") for name, shape in facts.shapes.items()]
    tensors = sharded(named, Mesh(tuple(facts.mesh)), facts.rules).tensors
    ranks = range(dist.get_world_size())
    found: dict[str, list[tuple[object, int]]] = {}
    for tensor in tensors:
        boxes = [tensor.held_by(rank) for rank in ranks]
        found[tensor.name] = [(box, sum(b.size for b in box)) for box in boxes]
    return found


class Dimensions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the dimensions of all plain tensors that are computed meanwhile."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        for each in given if isinstance(given, (tuple, list)) else (given,):
            if isinstance(each, Tensor) and not isinstance(each, DTensor):
                self.found |= set(each.shape)
        return given


VOCABULARY = 61


def words(rank: int, folder: Path, mesh: str, tied: str) -> None:
    """A vocabulary that "tp" does not divide, with a head of its own or a tied one: losses that read one word of each
    distribution, and losses that read all words; and a rank's parts of embedding and head."""
    if rank == 0:
        one = policy()
        config = replace(one.model.config, vocab_size=VOCABULARY, num_attention_heads=4, num_key_value_heads=4)
        for name, seed in (("model", 3), ("teacher", 4)):
            model = CausalLM(replace(config, tie_word_embeddings=tied == "tied"))
            model.init_weights(seed)
            save_model(model, model.state_dict(), folder / name)
            one.tokenizer.save(folder / name)
    dist.barrier()
    places: tuple[Any, ...] = ((mesh, rank), ())
    parted, one = (policy(*place, model=str(folder / "model")) for place in places)
    assert_boxes(parted, one, rank)
    rollouts = random_rollouts()
    logprobs = [policy_logprobs.fn(each, rollouts, micro_tokens=12).logprobs_NT for each in (parted, one)]
    torch.testing.assert_close(*logprobs, rtol=1e-5, atol=1e-5)
    for _ in range(2):
        with Dimensions() as dimensions:
            ours = policy_update.fn(parted, *batch(), **OPTIONS)[1]
        theirs = policy_update.fn(one, *batch(), **OPTIONS)[1]
        assert parted.model.vocab.count in dimensions.found
        assert VOCABULARY not in dimensions.found, "whole logits, or a whole embedding, on a rank"
        assert_near(ours, theirs)
        assert_same_everywhere(ours)
    assert_gradients_near(parted, one)
    # The temperature divides logits before they are summed.
    warm = replace(rollouts, temperature_N=torch.full((len(rollouts),), 0.7))
    for learner, place in zip((parted, one), places, strict=True):
        teacher = make_reference(context(*place, model=str(folder / "teacher")))
        distill_update.fn(learner, teacher, warm, micro_tokens=12)
    assert_gradients_near(parted, one)
    assert_whole(parted, one)
