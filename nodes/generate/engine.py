"""The generator: continuous batching in fixed slots, with the trainer's own model.

One step decodes one token for every slot, then fills free slots from the queue, then samples. The prompt of a group is
computed once and copied into a slot for each sample. In a later turn of a conversation each row's own prefix is
computed again: no cache is kept between turns. Weights may change between two steps; each token records the version
that made it. Left out: pages, segments of responses, speculative decoding.

Invariants:
- Shapes never change: all slots are computed, used or not; prompts are padded to a power of two and computed a fixed
  number of rows at a time. So a response has the same bits whatever its neighbours, its slot or its place in the queue,
  for a given number of slots and threads.
- Ranks that share a model (`CausalLMPart`) each have an engine. Given the same groups in the same order they sample the
  same tokens, each from a cache of its own heads.
- `EngineSlots` is numpy on the host: one step costs the same few operations however many slots there are.

Shapes: S slots, V vocabulary, T tokens of a response, M samples that get a slot, R rows of a prefill, P padded prompt
length. Names without a shape are values on the host.
"""

import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.graph.types import Context, NodeWarning, Prompts, Rollouts, Weights
from penstock.nodes.generate.conversation import Response, SampledGroup, SampledRow
from penstock.nodes.generate.kv_cache import DecodeMemory, Prefix, cache_length, needed_prompt
from penstock.nodes.generate.sampling import Sampler, keyed_uniform, mismatch
from penstock.nodes.model import ModelError
from penstock.nodes.model.hf import point_at
from penstock.nodes.model.mlp import RouteRecorder
from penstock.nodes.open_model import about_adapters, check_decoding, open_part, weights_spec
from penstock.nodes.parallel.mesh import Ranks

Holder = tuple[SampledGroup, SampledRow]

# Slots come in multiples of it: element-wise kernels treat the last, odd elements of a tensor differently.
ROW_TILE = 16
SHORTEST_PREFIX = 8
CUT = ", cut to a part of the vocabulary"
# Tokens of a prefill, padding included; a longer prompt is computed alone.
CPU_PREFILL_TOKENS, PREFILL_TOKENS = 128, 4096


@dataclass
class Request:
    """Rows of a group that go on from the same tokens; the first `placed` of them have got a slot."""

    group: SampledGroup
    rows: range
    tokens: list[int]
    placed: int = 0

    @property
    def key(self) -> tuple[int, ...]:
        """What keys the draws of the next row to be placed: the ordinal of its group, the number of the sample, and the
        number of the prompt among those of that ordinal, if that is not 0."""
        prompt, sample = divmod(self.rows[self.placed], self.group.samples)
        ordinals = self.group.prompts.ordinals
        # A first prompt adds nothing, so that a group of one prompt draws the same alone and joined with others.
        before = ordinals[:prompt].count(ordinals[prompt])
        return (ordinals[prompt], sample, before) if before else (ordinals[prompt], sample)


@dataclass
class Staged:
    """Prompts that are computed and wait for slots: each with its row in the prefix, and the next token's logits."""

    requests: deque[tuple[int, Request]]
    prefix: Prefix
    logits_RV: Tensor
    experts_RPLK: Tensor | None


class Engine:
    """State of the node `generate`: a `Stream`, for the model whose weights `behaviour` is, or for this rank's part of
    it. Weights come with the firings; where these are adapters, it reads their base, and computes with both: nothing is
    merged, so that its log-probabilities are the trainer's. Its memory on the device is taken at the first step.

    Raises ValueError if the device has too little memory left.
    """

    def __init__(self, context: Context, sampler: Sampler, samples: int = 1) -> None:
        if samples < 1 or context.slots < 1:
            raise ValueError(f"generate: given samples {samples} and {context.slots} slots, needed 1 or more of each")
        spec, ranks = weights_spec(context), Ranks.of(context)
        check_decoding(spec.config, ranks.mesh)
        self.spec, self.tokenizer, self.context = spec, spec.tokenizer, context
        self.model = model = open_part(spec, context, ranks)
        self.sampler, self.samples = sampler, samples
        self.length = cache_length(spec.config.max_position_embeddings, context)
        num_slots = -(-context.slots // ROW_TILE) * ROW_TILE
        # A model without experts has nothing to record.
        self.records = model.replays_routing = context.replay_routing and spec.config.family.experts
        shape = model.attention_config, num_slots, self.length, context.max_tokens
        self.size = *shape, model.dtype, context.device, self.records
        DecodeMemory.check(*self.size)
        self.memory: DecodeMemory | None = None
        stops = np.zeros(spec.config.vocab_size, dtype=bool)
        stops[list(spec.tokenizer.stops)] = True
        self.slots = EngineSlots(num_slots, context.max_tokens, stops)
        self.queue: deque[Request] = deque()
        self.settled: list[SampledGroup] = []
        self.warned = False
        self.staged: Staged | None = None
        self.behaviour = Weights(-1, {})
        self.version, self.unmeasured = -1, False

    def submit(self, tag: Any, inputs: Mapping[str, Any]) -> None:
        """Queue a group of `prompts`, or the next turn of its `conversation` after `replies`, sampled with `behaviour`.

        Raises ValueError for a prompt that cannot fit. A conversation that has outgrown its room is no error: its row
        ends there, and the first such row of a run is warned of.
        """
        prompts: Prompts = inputs["prompts"]
        conversation, replies = inputs.get("conversation"), inputs.get("replies")
        needed = needed_prompt(self.length, self.context)
        if conversation is None or replies is None:
            encoded = [self.tokenizer.encode_prompt(text) for text in prompts.texts]
            rows = [SampledRow(tokens) for tokens in encoded for _ in range(self.samples)]
            group = SampledGroup(tag, prompts, self.samples, rows)
            for ordinal, row in zip(prompts.ordinals, group.rows[:: self.samples], strict=True):
                if not 0 < len(row.prompt) <= self.max_prefix:
                    given = f"generate, group {ordinal}: given a prompt of {len(row.prompt)} tokens"
                    raise ValueError(f"{given}, needed {needed if row.prompt else 'at least one'}")
            self.enqueue(group, self.samples, inputs["behaviour"])
            return
        _check_settings(conversation, self.sampler)
        group = SampledGroup.go_on(tag, prompts, self.samples, conversation, replies, self.tokenizer, self.max_prefix)
        outgrown = next((index for index, row in enumerate(group.rows) if row.outgrown), None)
        if outgrown is not None and not self.warned:
            self.warned = True
            place = f"generate, group {prompts.ordinals[outgrown // self.samples]}, row {outgrown}"
            given = f"given a conversation of {group.rows[outgrown].outgrown} tokens"
            told = f"{place}: {given}, needed {needed}; it ends unfinished (the metric outgrown counts such rows)"
            warnings.warn(told, OutgrownWarning, stacklevel=2)
        self.enqueue(group, 1, inputs["behaviour"])

    def enqueue(self, group: SampledGroup, step: int, behaviour: Weights) -> None:
        """Queue the open rows of a group, `step` neighbours with the same tokens in one request."""
        self.behaviour = behaviour
        for index in range(0, len(group.rows), step):
            if group.rows[index].open:
                self.queue.append(Request(group, range(index, index + step), group.rows[index].prefix))
        if group.complete:
            self.settled.append(group)

    def busy(self) -> bool:
        return bool(self.settled or self.queue or self.staged or self.slots.live.any())

    def reset(self) -> None:
        """Forget all groups, and give up the memory."""
        # A NaN in the cache would outlive its row: a weight of 0 times NaN is NaN.
        self.queue.clear()
        self.settled.clear()
        self.slots.clear()
        self.staged = self.memory = None

    def release(self) -> None:
        """Give up the memory on the device until there is something to sample again."""
        self.memory = None

    def step(self) -> Sequence[tuple[Any, Any]]:
        """One token for each live slot; the groups that are finished with it, or had nothing left to sample."""
        finished = [(group.tag, self.result(group)) for group in self.settled]
        self.settled.clear()
        if not self.busy():
            return finished
        if self.behaviour.version != self.version:
            needed = about_adapters(self.spec.lora, self.spec.base)
            if self.behaviour.about != needed:
                given = f"{self.behaviour.about or 'all weights'}, needed {needed or 'all weights'}"
                raise ModelError(f"generate: weights of version {self.behaviour.version}: given {given} as here")
            self.version = self.behaviour.version
            point_at(self.model, self.behaviour.tensors, f"weights of version {self.version}")
            # Prompts that wait for a slot are computed again with the new weights: a response begins on one version.
            if self.staged:
                self.queue.extendleft(request for _, request in reversed(self.staged.requests))
                self.staged = None
        memory = self.memory = self.memory or DecodeMemory(*self.size)
        with torch.inference_mode():
            if self.slots.live.any():
                memory.logits_SV = self._decode(memory)
            while self.slots.free and (self.staged or self.queue):
                self.staged = self.staged or self._stage()
                self._place(self.staged, memory)
            # All slots, used or not: a row's bits must not depend on how many there are.
            memory.tokens_S, logprobs_S = self.sampler(memory.logits_SV, memory.uniform_TS[self.slots.column])
            # The one wait for the device in a step.
            self.slots.record(memory.tokens_S.numpy(force=True), logprobs_S.numpy(force=True), self.version)
        for (group, row), response, slot in self.slots.release():
            kept = None
            if memory.experts_SCLK is not None:
                kept = memory.experts_SCLK[slot, : self.slots.positions[slot]].numpy(force=True)
            row.say(response, kept)
            if group.complete:
                finished.append((group.tag, self.result(group)))
        return finished

    def _decode(self, memory: DecodeMemory) -> Tensor:
        """Logits [S, V] after the last tokens; every slot is computed, used or not."""
        positions_S = self._to_device(self.slots.positions)
        memory.cache.begin(positions_S, self.slots.reach)
        recorder = RouteRecorder() if self.records else None
        hidden_S1D = self.model(memory.tokens_S[:, None], positions_S[:, None], memory.cache.attend, recorder)
        if recorder is not None and memory.experts_SCLK is not None:
            slots_S = torch.arange(len(positions_S), device=positions_S.device)
            memory.experts_SCLK[slots_S, positions_S] = recorder.experts_NLK
        self.slots.positions += self.slots.live
        return self.model.logits(hidden_S1D[:, 0])

    def _stage(self) -> Staged:
        """Compute the prompt at the head of the queue, with others that are padded to the same length."""
        # The number of rows is fixed by the length alone, and is reached with empty rows: a matrix product of another
        # height may add up in another order.
        width = self._padded(self.queue[0])
        rows = max(1, (CPU_PREFILL_TOKENS if self.context.device == "cpu" else PREFILL_TOKENS) // width)
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
        prefix, recorder = Prefix(), RouteRecorder() if self.records else None
        hidden_RPD = self.model(self._to_device(tokens), None, prefix.attend, recorder)
        experts_NLK = None if recorder is None else recorder.experts_NLK
        experts_RPLK = None if experts_NLK is None else experts_NLK.view(rows, width, *experts_NLK.shape[1:])
        hidden_RD = hidden_RPD[self._to_device(np.arange(rows)), self._to_device(last)]
        return Staged(deque(enumerate(chosen)), prefix, self.model.logits(hidden_RD), experts_RPLK)

    def _padded(self, request: Request) -> int:
        """The padded length of a prompt."""
        # A function of the prompt alone: so the bits of its logits do not depend on which others it is computed with.
        return min(self.length, max(SHORTEST_PREFIX, 1 << (len(request.tokens) - 1).bit_length()))

    def _place(self, staged: Staged, memory: DecodeMemory) -> None:
        """Give free slots to samples of staged prompts, in order."""
        slots, rows, keys = [], [], []
        while self.slots.free and staged.requests:
            row, request = staged.requests[0]
            holder = request.group, request.group.rows[request.rows[request.placed]]
            slots.append(self.slots.take(holder, len(request.tokens)))
            rows.append(row)
            keys.append(self.context.key(*request.key))
            request.placed += 1
            if request.placed == len(request.rows):
                staged.requests.popleft()
        if not staged.requests:
            self.staged = None
        slots_M, rows_M, keys_M = (self._to_device(np.array(x)) for x in (slots, rows, keys))
        memory.cache.place(staged.prefix, rows_M, slots_M)
        memory.logits_SV.index_copy_(0, slots_M, staged.logits_RV[rows_M])
        if memory.experts_SCLK is not None and staged.experts_RPLK is not None:
            memory.experts_SCLK[slots_M, : staged.experts_RPLK.shape[1]] = staged.experts_RPLK[rows_M]
        # All uniforms of a response at once, since one step would have too few to be worth a kernel. Row t of the table
        # is for the step that is t modulo the bound.
        bound = self.context.max_tokens
        steps_T1 = (torch.arange(bound, device=slots_M.device)[:, None] - self.slots.now) % bound
        positions_TM = self._to_device(self.slots.positions[slots]) + steps_T1
        memory.uniform_TS.index_copy_(1, slots_M, keyed_uniform(keys_M, positions_TM))

    def _to_device(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self.context.device)

    def result(self, group: SampledGroup) -> Any:
        """The outputs of the firing that a complete group is."""
        rollouts, metrics = group.rollouts(self.tokenizer, self.sampler), group.metrics()
        # Greedy and cut samples have log-probabilities that the trainer's cannot equal.
        comparable = self.sampler.temperature > 0 and not self.sampler.cuts
        self.unmeasured = self.unmeasured or group.prompts.ordinals[0] % self.context.batch == 0
        if comparable and self.unmeasured and group.versions == {self.version}:
            self.unmeasured = False
            metrics["mismatch"] = mismatch(self.model, rollouts)
        return rollouts, metrics

    @property
    def max_prefix(self) -> int:
        """Tokens of the longest prompt, or conversation so far, that a turn has room after."""
        return self.length - self.context.max_tokens


class EngineSlots:
    """Which row of which group holds which slot, and what was sampled in it.

    `free` lists the free slots, and `live` says which are held. `positions` is where each slot's newest token stands in
    its conversation. The columns of what was sampled are steps, modulo `max_tokens`, the bound on a response's length.
    """

    def __init__(self, num_slots: int, max_tokens: int, stops: NDArray[np.bool_]) -> None:
        self.max_tokens, self.stops, self.now = max_tokens, stops, 0
        self.live = np.zeros(num_slots, dtype=bool)
        self.positions, self._begun = (np.zeros(num_slots, dtype=np.int64) for _ in range(2))
        self._holders: dict[int, Holder] = {}
        self._tokens = np.zeros((num_slots, max_tokens), dtype=np.int64)
        self._logprobs = np.zeros((num_slots, max_tokens), dtype=np.float32)
        self._versions = np.zeros(max_tokens, dtype=np.int64)
        self.clear()

    def clear(self) -> None:
        """Take all slots from their holders."""
        self.live[:] = False
        self._holders.clear()
        # The last is taken first: slots are given out from 0 on.
        self.free = list(range(len(self.live)))[::-1]

    @property
    def column(self) -> int:
        return self.now % self.max_tokens

    @property
    def reach(self) -> int:
        """One more than the farthest position of a live slot."""
        return int(self.positions[self.live].max()) + 1

    def take(self, holder: Holder, position: int) -> int:
        """Give a free slot to `holder`, whose first token this step samples for `position`; returns the slot."""
        slot = self.free.pop()
        self._holders[slot] = holder
        self.live[slot], self.positions[slot], self._begun[slot] = True, position, self.now
        return slot

    def record(self, tokens: NDArray[np.int64], logprobs: NDArray[np.float32], version: int) -> None:
        """What this step sampled in every slot, held or not, with weights of `version`."""
        self._tokens[:, self.column], self._logprobs[:, self.column] = tokens, logprobs
        self._versions[self.column] = version
        # A slot that no sample holds may decode anything, old numbers that are none included.
        if not np.isfinite(logprobs[self.live]).all():
            raise FloatingPointError(f"weights of version {version} give probabilities that are not numbers")

    def release(self) -> list[tuple[Holder, Response, int]]:
        """End the step: free the slots whose responses ended with it, by a stop token or at the bound. Returns the
        holder, the response and the slot of each."""
        stopped = self.stops[self._tokens[:, self.column]]
        slots = np.flatnonzero(self.live & (stopped | (self.now - self._begun == self.max_tokens - 1)))
        columns = (self._begun[slots, None] + np.arange(self.max_tokens)) % self.max_tokens
        tokens, logprobs = self._tokens[slots[:, None], columns], self._logprobs[slots[:, None], columns]
        versions, lengths = self._versions[columns], (self.now + 1 - self._begun[slots]).tolist()
        ended = []
        for row, (slot, n) in enumerate(zip(slots.tolist(), lengths, strict=True)):
            response = Response(tokens[row, :n], logprobs[row, :n], versions[row, :n], bool(stopped[slot]))
            ended.append((self._holders.pop(slot), response, slot))
            self.free.append(slot)
        self.live[slots] = False
        self.now += 1
        return ended


def _check_settings(conversation: Rollouts, sampler: Sampler) -> None:
    """Raises ValueError unless a conversation was sampled as its next turn will be."""
    told = "temperature {:g}{}".format
    kinds = zip(conversation.temperature_N.tolist(), conversation.cut_N.tolist(), strict=True)
    given = {told(temperature, CUT * cut) for temperature, cut in kinds}
    needed = told(sampler.temperature, CUT * sampler.cuts)
    if given - {needed}:
        where, said = f"generate, group {conversation.ordinals[0]}", f"a conversation of {'; '.join(sorted(given))}"
        raise ValueError(f"{where}: given {said}, needed {needed}: all turns of a row are sampled alike")


class OutgrownWarning(NodeWarning):
    """A conversation has no room for another turn."""
