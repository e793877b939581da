"""The memory of a trainer's rank, by component, as torch's memory tracker counts it during our update."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker

from penstock.graph.context import Context
from penstock.graph.types import Advantages, Rollouts
from penstock.nodes.learn.losses import reinforce
from penstock.nodes.learn.update import policy_update
from penstock.nodes.model import CausalLM, ModelConfig, decoder, kernels, torch_dtype
from penstock.nodes.model.lora import Lora
from penstock.nodes.model.vocab_parallel import own_part
from penstock.nodes.open_model import initial_model
from penstock.nodes.policy import LanguagePolicy
from penstock.runtime.cluster.gpus import GPUS
from penstock.runtime.plan.model_shape import Parallel, shape_of
from penstock.runtime.plan.train_cost import RESERVED, Trainer, step_memory

from .family_cases import config_of
from .rank_cases import context
from .rollouts import random_rollouts

TOKENS = 256
# Relative error of each component, and of the peak.
NEAR = 0.05


class Counter(MemTracker):  # type: ignore[no-untyped-call]
    """Counts the bytes that are alive, and their maximum since `lap`."""

    most = 0

    # MemTracker's hooks allow one call of each module. It counts live bytes without them.
    def _pre_fw_hook(self, *_: Any) -> None: ...
    def _post_fw_hook(self, *_: Any) -> None: ...
    def _pre_bw_hook(self, *_: Any) -> None: ...
    def _post_bw_hook(self, *_: Any) -> None: ...

    @property
    def live(self) -> int:
        return sum(each["Total"] for each in self._curr_mem_snap.values())

    def lap(self) -> int:
        found, self.most = self.most, self.live
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        self.most = max(self.most, self.live)
        return found


def attend(layer: int, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, window: int) -> Tensor:
    """Attend in the run's dtype, as on a GPU: on a CPU, autograd keeps float32 copies of bfloat16."""
    q_BHSK, k_BGSK, v_BGSK = (x.transpose(1, 2) for x in (q_BSHK, k_BSGK, v_BSGK))
    grouped = q_BHSK.shape[1] != k_BGSK.shape[1]
    return F.scaled_dot_product_attention(q_BHSK, k_BGSK, v_BGSK, is_causal=True, enable_gqa=grouped).transpose(1, 2)


@dataclass
class Marks:
    """Bytes before and after each forward pass, and the peaks while the head works and while the layers do. `gathered`
    is the size of the head's weights while it works."""

    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    head: list[int] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    gathered: int = 0
    given: int = 0


def counted(config: ModelConfig, how: Context, lora: Lora | None = None) -> tuple[dict[str, int], int]:
    """Return the bytes of each component on this rank in a step of equal micro-batches, and the peak."""
    counter, marks, freed = Counter(), Marks(), dict[str, int]()
    data = prod(size for axis, size in how.mesh if axis in ("dp", "fsdp"))
    # Matrix products as on a GPU, too: oneDNN's may make copies in float32.
    with counter, mock.patch.object(decoder, "attend_causal", attend), mock.patch.object(kernels, "_onednn", None):
        # With adapters, the base is read in the run's dtype.
        model = CausalLM(config, torch_dtype(how.dtype) if lora else torch.float32, how.device, lora=lora)
        learner = LanguagePolicy(model, initial_model("")[1], how)
        # The values make no difference, but uninitialised ones may not be finite.
        for parameter in (*learner.workers.parameters.values(), *learner.masters.values()):
            torch.nn.init.constant_(parameter.detach(), 0.01)
        weights = counter.live - sum(buffer.nbytes for buffer in model.buffers())
        masters = sum(master.nbytes for master in learner.offloadable().values())
        # The second micro-batch adds to the gradients of the first one. With the third, a stage that kept more of them
        # than stages follow would be seen.
        micros = 3 if "pp" in dict(how.mesh) else 2
        rows, fewer = (random_rollouts([(1, TOKENS - 1)] * count * data) for count in (micros, 1))

        def difference(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **kwargs: Any) -> Any:
                before = counter.live
                found = call(*args, **kwargs)
                freed.setdefault(name, abs(counter.live - before))
                return found

            return called

        learner.optimizer.step = difference("moments", learner.optimizer.step)  # type: ignore[method-assign]

        def update(rows: Rollouts) -> None:
            policy_update.fn(learner, rows, Advantages(torch.ones(len(rows))), loss=reinforce, micro_tokens=TOKENS)

        update(fewer)  # makes the moments
        gc.collect()  # else cycles would be freed at some moment of the next step
        held = counter.live

        def begin(*_: Any) -> None:
            marks.layers.append(counter.lap())
            marks.before.append(counter.live)

        def end(module: Any, given: Any, hidden_BSD: Tensor) -> None:
            marks.after.append(counter.live)
            # A stage's input is there before its forward pass begins.
            marks.given = getattr(module.model.embed_tokens, "hidden_BSD", torch.empty(0)).nbytes
            counter.lap()
            hidden_BSD.register_hook(lambda _: marks.head.append(counter.lap()))  # type: ignore[no-untyped-call]

        # `begin` runs before FSDP's hook.
        learner.model.register_forward_pre_hook(begin, prepend=True)
        learner.model.register_forward_hook(end)
        # The hook on the head runs when FSDP has gathered it. FSDP frees its copies when it gathers the next block.
        head = learner.model.model.embed_tokens if config.tie_word_embeddings else learner.model.lm_head
        if how.mesh and head is not None:

            def whole(*_: Any) -> None:
                marks.gathered = own_part(head.weight).nbytes

            head.register_forward_pre_hook(whole)
        learner.apply = difference("gradients", learner.apply)  # type: ignore[method-assign]
        update(rows)
        marks.layers.append(counter.lap())
    # A stage has its most activations once as many micro-batches are in flight as stages follow.
    ahead = dict(how.mesh).get("pp", 1) - 1 - how.rank * ("pp" in dict(how.mesh))
    kept = marks.gathered if config.tie_word_embeddings else 0
    found = {"weights": weights - masters, "moments": freed["moments"] + masters, "gradients": freed["gradients"]}
    found["activations"] = marks.after[ahead] - marks.before[0] - kept + marks.given
    if marks.gathered:
        found["unsharded blocks"] = marks.gathered
    if not ahead:
        found["logits"] = marks.head[0] - marks.after[0] - (marks.gathered - kept)
    return found, weights + freed["moments"] + max(*marks.head, *marks.layers[1:]) - held


def agrees(
    rank: int, folder: Path, mesh: str, tied: str, groups: str, dtype: str, lora: str, family: str = "llama"
) -> None:
    """Assert that the memory model has the counted bytes: by component while the head works, and at the peak."""
    # Cases: logits that autograd keeps; chunks of logits, with kept layers; with recomputed layers; and a vocabulary
    # that makes the peak.
    for vocab, bits, again in ((2048, 22, "layer"), (1024, 16, "none"), (1024, 16, "layer"), (4096, 16, "layer")):
        config = ModelConfig(vocab, 128, 344, 4, 4, int(groups), 32, tie_word_embeddings=tied == "tied")
        config = config_of(family, config)
        how = context(mesh, rank, recompute=again, logit_elements=1 << bits, dtype=dtype)
        found, most = counted(config, how, Lora(int(lora), 16.0) if int(lora) else None)
        shape = shape_of(config.to_json(), "tiny")
        trainer = Trainer(
            shape.with_lora(int(lora)) if int(lora) else shape, GPUS["H100"], Parallel.of(how.mesh),
            "fp32" if dtype == "float32" else "bf16", TOKENS, float(again == "layer"), logit_elements=1 << bits,
        )  # fmt: skip
        moments = step_memory(trainer, rank if "pp" in mesh else 0)
        forward, head = (moments[f"head {way}"].parts for way in ("forward", "backward"))
        # In the forward pass, the gathered weights are there twice.
        most_logits = max(parts["logits"] + parts["unsharded blocks"] for parts in (forward, head))
        head = {**head, "logits": most_logits - head["unsharded blocks"]}
        whole = max(memory.bytes for memory in moments.values()) - RESERVED
        # The model leaves out the copy of a gradient that is summed over "tp", since not all peaks have it.
        summed = 4 * TOKENS * 128 * ("tp" in mesh)
        wrong = {
            n: (x, head[n]) for n, x in found.items() if abs(x - head[n]) > NEAR * head[n] + summed * (n == "logits")
        }
        assert not wrong, (again, wrong)
        assert abs(most / whole - 1) <= NEAR, (
            vocab,
            again,
            most,
            whole,
            {name: memory.parts for name, memory in moments.items()},
        )
