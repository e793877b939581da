"""The generator: continuous batching in fixed slots, with the trainer's own model.

One step decodes one token for every slot, then fills free slots from the queue, then samples. Shapes never change
(all slots are computed, used or not; prompts are padded to a power of two and computed a fixed number of rows at a
time), so a response is the same bits whatever its neighbours, its slot or its place in the queue, for a given number
of slots and threads.

The prompt of a group is computed once and copied into a slot for each sample. Weights may change between two steps;
each token records the version that made it. Left out: pages, segments of responses, speculative decoding.

Shapes: S slots, V vocabulary, T tokens of a response, M samples that get a slot, R rows of a prefill, P padded prompt
length. Names without a shape are Python or numpy values on the host, where all bookkeeping is done.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.graph.types import Context, Metrics, Prompts, Rollouts, Weights
from penstock.nodes.generate.cache import Cache, Prefix
from penstock.nodes.generate.group import Group, Response
from penstock.nodes.generate.mismatch import mismatch
from penstock.nodes.generate.sampling import Sampler, keyed_uniform
from penstock.nodes.model import Llama
from penstock.nodes.model.hf import point_at
from penstock.nodes.tokenizer import Tokenizer

ROW_TILE = 16
"""Slots come in multiples of it: element-wise kernels treat the last, odd elements of a tensor differently."""
SHORTEST_PREFIX = 8
PREFILL_TOKENS = {"cpu": 128, "cuda": 4096}
"""Tokens of a prefill, padding included, by kind of device; a longer prompt is computed alone."""


@dataclass
class Request:
    """A prompt of a group; `placed` of its samples have got a slot."""

    group: Group
    index: int
    placed: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.group.tokens[self.index]

    @property
    def ordinal(self) -> int:
        return self.group.prompts.ordinals[self.index]


@dataclass
class Staged:
    """Prompts that are computed and wait for slots: each with its row in the prefix, and the next token's logits."""

    requests: deque[tuple[int, Request]]
    prefix: Prefix
    logits_RV: Tensor


class Engine:
    """State of the node `generate`: a `Stream`."""

    def __init__(self, model: Llama, tokenizer: Tokenizer, context: Context, sampler: Sampler, samples: int) -> None:
        self.model, self.tokenizer, self.context = model.requires_grad_(False), tokenizer, context
        self.sampler, self.samples = sampler, samples
        self.length = _cache_length(model, context)
        self.slots = -(-context.slots // ROW_TILE) * ROW_TILE
        self.queue: deque[Request] = deque()
        self.staged: Staged | None = None
        self.free = list(range(self.slots))[::-1]
        self.holders: list[tuple[Request, int]] = [(_NOBODY, 0)] * self.slots
        self.behaviour = Weights(-1, {})
        self.version = self.scored = -1
        self.now = 0
        self.live = np.zeros(self.slots, dtype=bool)
        self.positions, self.begun = (np.zeros(self.slots, dtype=np.int64) for _ in range(2))
        # Columns of these are steps, modulo the bound on a response's length.
        shape = (self.slots, context.max_tokens)
        self.tokens, self.logprobs = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.float32)
        self.versions = np.zeros(context.max_tokens, dtype=np.int64)
        self.stops = np.zeros(model.config.vocab_size, dtype=bool)
        self.stops[list(tokenizer.stops)] = True
        self._allocated = False
        self.cache: Cache
        self.tokens_S: Tensor
        self.logits_SV: Tensor
        self.uniform_TS: Tensor

    def submit(self, tag: Any, inputs: Mapping[str, Any]) -> None:
        """Queue a group of `prompts`, sampled with `behaviour`. Raises ValueError for one that cannot fit."""
        prompts: Prompts = inputs["prompts"]
        self.behaviour = inputs["behaviour"]
        tokens = [self.tokenizer.encode_prompt(text) for text in prompts.texts]
        for ordinal, prompt in zip(prompts.ordinals, tokens, strict=True):
            self._check(ordinal, prompt)
        group = Group(tag, prompts, tokens, self.samples)
        self.queue.extend(Request(group, index) for index in range(len(tokens)))

    def busy(self) -> bool:
        return bool(self.queue or self.staged or self.live.any())

    def step(self) -> Sequence[tuple[Any, tuple[Rollouts, Metrics]]]:
        """One token for each live slot; the groups that are finished with it."""
        if not self._allocated:
            self._allocate()
        self._use_weights()
        column = self.now % self.context.max_tokens
        with torch.inference_mode():
            if self.live.any():
                self.logits_SV = self._decode()
            while self.free and (self.staged or self.queue):
                self.staged = self.staged or self._stage()
                self._place(self.staged)
            self._sample(column)
        finished = self._collect(column)
        self.now += 1
        return finished

    # Weights -----------------------------------------------------------------------------------------------

    def _use_weights(self) -> None:
        """Go on with the live weights. Prompts that wait for a slot are computed again with them."""
        if self.behaviour.version == self.version:
            return
        point_at(self.model, self.behaviour.tensors, f"weights of version {self.behaviour.version}")
        self.version = self.behaviour.version
        if self.staged:
            self.queue.extendleft(request for _, request in reversed(self.staged.requests))
            self.staged = None

    # Device work -------------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        """Memory is taken at the first step: a node that never fires costs none."""
        config, device = self.model.config, self.context.device
        dtype = self.model.head_weight().dtype
        self.cache = Cache(config, self.slots, self.length, dtype, device)
        self.tokens_S = torch.zeros(self.slots, dtype=torch.long, device=device)
        self.logits_SV = torch.zeros(self.slots, config.vocab_size, dtype=dtype, device=device)
        self.uniform_TS = torch.zeros(self.context.max_tokens, self.slots, dtype=torch.float64, device=device)
        self._allocated = True

    def _decode(self) -> Tensor:
        """Logits [S, V] after the last tokens; every slot is computed, used or not."""
        positions_S = self._to_device(self.positions)
        reach = int(self.positions[self.live].max()) + 1
        self.cache.begin(positions_S, reach)
        hidden_S1D = self.model(self.tokens_S[:, None], positions_S[:, None], self.cache.attend)
        self.positions += self.live
        return self.model.logits(hidden_S1D[:, 0])

    def _stage(self) -> Staged:
        """Compute the prompt at the head of the queue, with others that are padded to the same length."""
        width = self._padded(self.queue[0])
        rows = max(1, PREFILL_TOKENS[torch.device(self.context.device).type] // width)
        chosen: list[Request] = []
        others: deque[Request] = deque()
        while self.queue and len(chosen) < rows:
            request = self.queue.popleft()
            (chosen if self._padded(request) == width else others).append(request)
        self.queue.extendleft(reversed(others))
        tokens, last = np.zeros((rows, width), dtype=np.int64), np.zeros(rows, dtype=np.int64)
        for row, request in enumerate(chosen):
            tokens[row, : len(request.tokens)] = request.tokens
            last[row] = len(request.tokens) - 1
        prefix = Prefix()
        hidden_RPD = self.model(self._to_device(tokens), None, prefix.attend)
        hidden_RD = hidden_RPD[torch.arange(rows), self._to_device(last)]
        return Staged(deque(enumerate(chosen)), prefix, self.model.logits(hidden_RD))

    def _padded(self, request: Request) -> int:
        """A function of the prompt alone, so that its bits are."""
        return min(self.length, max(SHORTEST_PREFIX, 1 << (len(request.tokens) - 1).bit_length()))

    def _place(self, staged: Staged) -> None:
        """Give free slots to samples of staged prompts, in order."""
        slots, rows, keys = [], [], []
        while self.free and staged.requests:
            row, request = staged.requests[0]
            slot = self.free.pop()
            self.holders[slot] = (request, request.placed)
            self.positions[slot] = len(request.tokens)
            slots.append(slot)
            rows.append(row)
            keys.append(self.context.key(request.ordinal, request.placed))
            request.placed += 1
            if request.placed == self.samples:
                staged.requests.popleft()
        if not staged.requests:
            self.staged = None
        self.live[slots], self.begun[slots] = True, self.now
        slots_M, rows_M = self._to_device(np.array(slots)), self._to_device(np.array(rows))
        self.cache.place(staged.prefix, rows_M, slots_M)
        self.logits_SV.index_copy_(0, slots_M, staged.logits_RV[rows_M])
        self._draw(slots, slots_M, self._to_device(np.array(keys)))

    def _draw(self, slots: list[int], slots_M: Tensor, keys_M: Tensor) -> None:
        """Uniforms of whole responses: row t is for the step that is t modulo the bound on a response's length."""
        bound = self.context.max_tokens
        steps_T1 = torch.arange(bound, device=slots_M.device)[:, None]
        positions_TM = self._to_device(self.positions[slots]) + (steps_T1 - self.now) % bound
        self.uniform_TS.index_copy_(1, slots_M, keyed_uniform(keys_M, positions_TM))

    def _sample(self, column: int) -> None:
        """The next token of every slot, copied to the host: the one wait for the device in a step."""
        self.tokens_S, logprobs_S = self.sampler(self.logits_SV, self.uniform_TS[column])
        self.tokens[:, column] = self.tokens_S.numpy(force=True)
        self.logprobs[:, column] = logprobs_S.numpy(force=True)
        self.versions[column] = self.version
        if not np.isfinite(self.logprobs[self.live, column]).all():
            raise FloatingPointError(f"weights of version {self.version} give probabilities that are not numbers")

    def _to_device(self, values: Any) -> Tensor:
        return torch.from_numpy(values).to(self.context.device)

    # Host work ---------------------------------------------------------------------------------------------

    def _collect(self, column: int) -> list[tuple[Any, tuple[Rollouts, Metrics]]]:
        """Take finished responses out of their slots; the groups that are complete."""
        stopped = self.stops[self.tokens[:, column]]
        ended = self.live & (stopped | (self.now - self.begun == self.context.max_tokens - 1))
        slots = np.flatnonzero(ended)
        columns = (self.begun[slots, None] + np.arange(self.context.max_tokens)) % self.context.max_tokens
        tokens, logprobs = self.tokens[slots[:, None], columns], self.logprobs[slots[:, None], columns]
        versions, lengths = self.versions[columns], self.now + 1 - self.begun[slots]
        finished = []
        for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
            request, sample = self.holders[slot]
            taken = tokens[row, :length], logprobs[row, :length], versions[row, :length]
            group = request.group
            group.responses[request.index * self.samples + sample] = Response(*taken, bool(stopped[slot]))
            self.holders[slot] = (_NOBODY, 0)
            self.free.append(slot)
            if group.complete:
                finished.append((group.tag, self._result(group)))
        self.live &= ~ended
        return finished

    def _result(self, group: Group) -> tuple[Rollouts, Metrics]:
        rollouts, metrics = group.rollouts(self.tokenizer), group.metrics()
        comparable = self.sampler.temperature > 0 and not self.sampler.cuts
        if comparable and self.scored != self.version and group.versions == {self.version}:
            self.scored = self.version
            metrics["mismatch"] = mismatch(self.model, rollouts, self.sampler.temperature)
        return rollouts, metrics

    def _check(self, ordinal: int, prompt: list[int]) -> None:
        given = f"generate, group {ordinal}: given a prompt of {len(prompt)} tokens"
        if not prompt:
            raise ValueError(f"{given}, needed at least one")
        needed = self.length - self.context.max_tokens
        if len(prompt) > needed:
            raise ValueError(
                f"{given}, needed at most {needed}: the context of {self.length} tokens less max_tokens "
                f"{self.context.max_tokens}"
            )


_NOBODY = Request(Group(None, Prompts((), (), ()), [], 0), 0)


def _cache_length(model: Llama, context: Context) -> int:
    """Positions of a slot: the model's context, or `max_prompt` of the context's options and a response."""
    length = model.config.max_position_embeddings
    if context.max_tokens < 1 or context.max_tokens >= length:
        raise ValueError(
            f"generate: given max_tokens {context.max_tokens}, needed 1 to {length - 1}: the model's context has "
            f"{length} tokens, and a prompt takes at least one"
        )
    max_prompt = context.options.get("max_prompt")
    return length if max_prompt is None else min(length, int(max_prompt) + context.max_tokens)
