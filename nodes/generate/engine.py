"""The generator: continuous batching in fixed slots, with the trainer's own model.

Each row of a pass is one token of some slot: slots that sample have a row each, and the other rows are for tokens of
prompts. On a CPU a pass of most models, with its draws, is one call of C for the rows that there are (`decode.py`);
elsewhere it is the model's own operations over a fixed number of rows, some of them empty. Weights may change between
two steps; each token records the version that sampled it. Left out: speculative decoding.

A slot keeps its cached tokens after its response ends, until another row needs the slot (prefix cache). A row that
begins with the same tokens continues in that slot, or in a slot with a copy. So the prompt of a group is computed once,
and a conversation continues from its earlier turns, if the weights have not changed since.

Invariants:
- The shapes of torch's operations never change, and a token has the same bits in any row, beside any other rows: as a
  token of a prompt, as a sampled one, or cached from an earlier turn. So a response has the same bits for any
  neighbours, slot or place in the queue, for a given number of slots and threads. On a GPU this needs
  `--deterministic`: otherwise a pass over prompts only has more rows, and its products may round differently.
- Ranks that share a model (`CausalLMPart`) each have an engine. Given the same groups in the same order they sample the
  same tokens, each with a cache of its own heads.
- `EngineSlots` is numpy on the host: one step costs the same few operations for any number of slots.

Shapes: R rows of a pass, S slots, V vocabulary, T tokens of a response, M rows that get a slot. Names without a shape
are values on the host.
"""

import copy
import warnings
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.graph.protocols import TENSOR
from penstock.graph.types import Metrics, NodeWarning, Rollouts
from penstock.nodes.generate.conversation import Response, SampledGroup, StopStrings
from penstock.nodes.generate.decode import DecodePass
from penstock.nodes.generate.groups import GroupStream, Holder
from penstock.nodes.generate.kv_cache import PROMPT_ROWS, WIDE, CacheSize, DecodeMemory
from penstock.nodes.generate.sampling import MOST_MISMATCH, keyed_uniform, mismatch
from penstock.nodes.model.eight_bit import require_products
from penstock.nodes.model.hf import point_at
from penstock.nodes.model.mlp import RouteRecorder
from penstock.nodes.open_model import check_decoding, check_precision, open_part
from penstock.nodes.parallel.mesh import Ranks

# The number of slots is a multiple of this: element-wise kernels treat the last, odd elements of a tensor differently.
ROW_TILE = 16
# A shorter common beginning is computed faster than copied.
SHORTEST_COPY = 8


class Engine(GroupStream):
    """State of the node `generate`: a `Stream` for the model whose weights `behaviour` is, or for this rank's part of
    it. Weights come with the firings. If they are adapters, the engine reads their base and computes with both without
    merging, so that its log-probabilities are the trainer's. It allocates its device memory at the first step.

    Raises ValueError if the device has too little memory left.
    """

    def prepare(self) -> None:
        spec, context = self.spec, self.context
        ranks = Ranks.of(context)
        check_decoding(spec.config, ranks.mesh)
        self.model = model = open_part(spec, context, ranks)
        origin = context.weights.get("behaviour")
        self.precision = origin.precision if origin is not None else ""
        if self.precision:
            check_precision(spec, self.precision, ranks.size(TENSOR))
            require_products(self.precision, context.device)
            model.quantise(self.precision)
        # Weights arrive in memory of their own, twice (`DoubleBuffer`): there may be no room for a third time.
        coming = model.await_weights()
        if context.invariant:
            model.be_invariant()
        # A model without experts has nothing to record.
        self.records = model.replays_routing = context.replay_routing and spec.config.family.experts
        # A model with the same weights that computes as the trainer does: `model` may use packed copies of them.
        tensors = [*model.parameters(), *model.buffers()]
        self.unpacked = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
        self.decode = DecodePass.of(model)
        num_slots = -(-context.slots // ROW_TILE) * ROW_TILE
        shape = model.attention_config, num_slots, self.length, context.max_tokens
        self.size = CacheSize(*shape, model.dtype, context.device, self.records)
        self.size.require_memory(coming + (0 if self.decode is None else self.decode.copied_bytes()))
        self.memory: DecodeMemory | None = None
        self.weights = *model.parameters(), *model.buffers()
        self.on_gpu = torch.device(context.device).type == "cuda"
        # No CUDA graphs for several ranks, which wait for each other between kernels, or for experts, whose rows are
        # counted on the host.
        alone = all(size == 1 for _, size in ranks.mesh) and not spec.config.family.experts
        self.replays = alone and self.on_gpu
        # A pass that is one call has no empty rows.
        self.rows = 0 if self.decode is None else WIDE
        self.prompt_rows = PROMPT_ROWS if self.on_gpu and not context.deterministic else 0
        stops = np.zeros(spec.config.vocab_size, dtype=bool)
        stops[list(spec.tokenizer.stops)] = True
        self.slots = EngineSlots(num_slots, self.length, context.max_tokens, stops, self.strings, self.segment)
        self.version, self.unmeasured, self.mismatched = -1, False, False
        self.addresses: tuple[int, ...] = ()

    def fused(self) -> Sequence[Sequence[str]]:
        # A GPU uses contiguous tensors as one; for a CPU they are copied (`kernels.pack`).
        return self.model.neighbours() if self.on_gpu else ()

    def busy(self) -> bool:
        return bool(self.settled or self.queue or self.slots.live.any())

    def reset(self) -> None:
        """Forget all groups, and free the device memory."""
        self.queue.clear()
        self.settled.clear()
        self.release()
        self.slots.clear()

    def release(self) -> None:
        """Free the device memory until there is something to sample again."""
        self.memory = None
        if self.decode is not None:
            self.decode.release()
        self.slots.forget()

    def step(self) -> Sequence[tuple[Any, Any]]:
        """Make one or two passes, with a token for each slot that samples. Return the groups that finished, or that had
        nothing left to sample."""
        finished = [(group.tag, self.result(group)) for group in self.settled]
        self.settled.clear()
        if not self.busy():
            return finished
        if self.behaviour.version != self.version:
            self._renew()
        memory = self.memory = self.memory or DecodeMemory(self.size, self.rows, self.prompt_rows)
        slots, num_slots = self.slots, self.size.slots
        with torch.inference_mode():
            self._place(memory)
            # Tokens of prompts use the rows of slots that do not sample. If there are enough of them for a pass of
            # their own, they get one: waiting for rows would leave more slots idle than it saves. If few slots sample,
            # they also come first.
            many = slots.unread >= memory.rows
            if many or not slots.sampling.any():
                self._pass(memory, np.zeros_like(slots.live))
            sampling = slots.sampling
            if not sampling.any() or (many and 2 * sampling.sum() < num_slots):
                return finished
            tokens, logprobs = self._pass(memory, sampling)
            slots.record(sampling, tokens, logprobs, self.version)
        for holder, response, slot in slots.release():
            kept = None
            if memory.experts_SCLK is not None:
                kept = memory.experts_SCLK[slot, : slots.computed[slot]].numpy(force=True)
            holder.row.end_segment(response, kept)
            if holder.group.complete:
                finished.append((holder.group.tag, self.result(holder.group)))
        return finished

    def _renew(self) -> None:
        """Switch to the newest weights."""
        self.check_weights()
        point_at(self.model, self.behaviour.tensors, f"weights of version {self.behaviour.version}")
        if self.decode is None:
            self.model.pack(self.size.slots)
        else:
            self.decode.pack()
        self.addresses = tuple(each.data_ptr() for each in self.weights)
        # Set the version last: if a line above raises, the next step must not take half-loaded weights for new ones.
        self.version = self.behaviour.version
        # A response begins with one version: rows that have sampled nothing begin again.
        self.queue.extendleft(reversed(self.slots.forget()))

    def _place(self, memory: DecodeMemory) -> None:
        """Give free slots to rows, in order."""
        placed = []
        while self.slots.free and self.queue:
            holder = self.queue.popleft()
            slot = self.slots.take(holder, holder.row.prefix, len(holder.row.earlier_segments.tokens))
            placed.append((slot, self.context.key(*holder.key)))
            self._copy(memory)  # before the next row takes the source's slot
        if not placed:
            return
        # All uniforms of a response at once: those of one step are too few to be worth a kernel.
        slots_M, keys_M = self._to_device(np.array(placed, dtype=np.int64).T)
        begins_M = self._to_device(self.slots.begins[[slot for slot, _ in placed]])
        steps_T = torch.arange(self.context.max_tokens, device=begins_M.device)
        memory.uniform_ST.index_copy_(0, slots_M, keyed_uniform(keys_M[:, None], begins_M[:, None] + steps_T))

    def _pass(self, memory: DecodeMemory, sampling: NDArray[np.bool_]) -> tuple[NDArray[Any], ...]:
        """Make a pass over the last tokens of the slots of `sampling` and over tokens of prompts. If any slot samples,
        return the next tokens of these slots and their log-probabilities."""
        count = int(sampling.sum())
        rows = memory.rows if count else memory.prompt_rows
        inputs_4R = self.slots.rows(rows, sampling)
        if self.decode is not None:
            found = self._decoded(self.decode, memory, inputs_4R, count)
            self._copy(memory)
            return found
        memory.inputs_4R[:, :rows].copy_(torch.from_numpy(self.slots.spread(inputs_4R, rows, sampling)))
        compute = self._sampled if count else self._read
        if self.replays:
            # If weights move between two versions, the first one moves, too.
            key = compute.__name__, self.addresses, self.weights[0].data_ptr()
            made = memory.graphs.run(key, partial(compute, memory))
        else:
            made = compute(memory)
        self._copy(memory)
        # The only synchronisation with the device in a step.
        return tuple(each.numpy(force=True)[sampling] for each in made)

    def _decoded(
        self, decode: DecodePass, memory: DecodeMemory, inputs_4R: NDArray[np.int64], count: int
    ) -> tuple[NDArray[Any], ...]:
        """Make a pass in C, and sample after its first `count` rows."""
        if self.sampler.plain:
            return decode.sample(inputs_4R, count, memory.cache, memory.uniform_ST, self.sampler.temperature)
        hidden_RD = decode.hidden(inputs_4R[:3], memory.cache)
        if not count:
            return ()
        # All slots: torch's operations have the same shapes in each step.
        _, slots_N, _, steps_N = inputs_4R[:, :count]
        hidden_SD = hidden_RD.new_zeros(self.size.slots, hidden_RD.shape[1])
        uniform_S = memory.uniform_ST.new_zeros(self.size.slots)
        hidden_SD[slots_N], uniform_S[slots_N] = hidden_RD[:count], memory.uniform_ST[slots_N, steps_N]
        drawn = self.sampler(decode.logits(hidden_SD), uniform_S)
        return tuple(each.numpy()[slots_N] for each in drawn)

    def _read(self, memory: DecodeMemory) -> tuple[Tensor, ...]:
        self._hidden(memory, memory.prompt_rows)
        return ()

    def _sampled(self, memory: DecodeMemory) -> tuple[Tensor, ...]:
        num_slots = self.size.slots
        # All slots, sampling or not: a row's bits must not depend on the number of rows.
        hidden_SD = self._hidden(memory, memory.rows)[:num_slots]
        uniform_S = memory.uniform_ST.gather(1, memory.inputs_4R[3, :num_slots, None])[:, 0]
        return self.sampler(self.model.logits(hidden_SD), uniform_S, self.model.invariant)

    def _hidden(self, memory: DecodeMemory, rows: int) -> Tensor:
        """Compute the first `rows` rows, by the model's own operations, and return their hidden states, [R, D]."""
        tokens_R, slots_R, positions_R, _ = memory.inputs_4R[:, :rows]
        memory.cache.begin(slots_R, positions_R)
        recorder = RouteRecorder() if self.records else None
        hidden_R1D = self.model(tokens_R[:, None], positions_R[:, None], memory.cache.attend, recorder)
        if recorder is not None and memory.experts_SCLK is not None:
            memory.experts_SCLK[slots_R, positions_R] = recorder.experts_NLK
        return hidden_R1D[:, 0]  # type: ignore[no-any-return]

    def _copy(self, memory: DecodeMemory) -> None:
        """Copy cached tokens to the slots that wait for them."""
        for (source, length), targets in self.slots.copies().items():
            memory.copy(source, self._to_device(np.array(targets)), length)

    def _to_device(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self.context.device)

    def measured(self, group: SampledGroup, rollouts: Rollouts) -> Metrics:
        self.unmeasured = self.unmeasured or any(o % self.context.batch == 0 for o in group.prompts.ordinals[:1])
        comparable = self.comparable and self.has_trainers_weights
        if not (comparable and self.unmeasured and group.versions == {self.version}):
            return {}
        self.unmeasured = False
        measured = mismatch(self.unpacked, rollouts)
        most = 0.0 if self.model.invariant else MOST_MISMATCH[self.model.dtype]
        if measured > most and not self.mismatched:
            self.mismatched = True
            place = f"generate, group {group.prompts.ordinals[0]}, version {self.version}"
            told = f"{place}: given a mismatch of {measured:.3g} nats to the trainer's log-probabilities"
            warnings.warn(
                f"{told}, needed at most {most:g}; ratios are wrong by as much", MismatchWarning, stacklevel=2
            )
        return {"mismatch": measured}


class EngineSlots:
    """The slots: which row of which group holds each, its tokens, and how many of them are in the cache.

    `tokens` [S, C] are conversations, of which the first `lengths` are known and the first `computed` are in the cache;
    `begins` is where the response begins, `starts` where its segment does. The cache of a `fresh` slot is from the live
    weights only. `live` slots are held by rows. The others are in `free`, the one released first at the front, and keep
    their tokens. `sources` has the slots that wait for a copy: (the source slot, the number of positions).

    Invariants: at least the last token of a slot is not computed. A live slot samples once its last token is the only
    one. A slot that others wait for is live, and has sampled nothing.
    """

    def __init__(
        self,
        num_slots: int,
        length: int,
        max_tokens: int,
        stops: NDArray[np.bool_],
        strings: StopStrings | None,
        segment: int,
    ) -> None:
        self.max_tokens, self.stops, self.strings = max_tokens, stops, strings
        self.segment = segment or max_tokens
        self.live, self.fresh = (np.zeros(num_slots, dtype=bool) for _ in range(2))
        self.lengths, self.computed, self.begins, self.starts = (np.zeros(num_slots, dtype=np.int64) for _ in range(4))
        self.tokens = np.zeros((num_slots, length), dtype=np.int64)
        self._logprobs = np.zeros((num_slots, max_tokens), dtype=np.float32)
        self._versions = np.zeros((num_slots, max_tokens), dtype=np.int64)
        self._holders: dict[int, Holder] = {}
        self._sampled = np.zeros(0, dtype=np.int64)
        self.clear()

    def clear(self) -> None:
        """Release all slots, and drop their tokens."""
        self.live[:] = self.fresh[:] = False
        self._holders.clear()
        self.sources: dict[int, tuple[int, int]] = {}
        self.free = deque(range(len(self.live)))

    def forget(self) -> list[Holder]:
        """Mark all cached tokens as stale, so that no new row uses them. Release the slots without a sampled token, and
        return their holders in the order in which they got them."""
        self.fresh[:] = False
        waiting = [slot for slot in self._holders if self.lengths[slot] == self.starts[slot]]
        self.live[waiting] = False
        self.free.extend(waiting)
        self.sources.clear()
        return [self._holders.pop(slot) for slot in waiting]

    @property
    def sampling(self) -> NDArray[np.bool_]:
        """Slots whose next token can be sampled: all tokens except the last one are computed."""
        return self.live & (self.computed == self.lengths - 1)  # type: ignore[no-any-return]

    @property
    def unread(self) -> int:
        """The number of tokens of prompts to compute before their slots sample, without those that will be copied."""
        left = (self.lengths - 1 - self.computed)[self.live].sum()
        return int(left - sum(self.lengths[slot] - 1 - self.computed[slot] for slot in self.sources))

    def take(self, holder: Holder, prefix: Sequence[int], said: int = 0) -> int:
        """Give a free slot to `holder`, whose row continues `prefix`; the last `said` tokens of that belong to the
        response itself. Return the slot."""
        given, most = np.array(prefix, dtype=np.int64), len(prefix) - 1
        # The length of the common beginning with each slot, now or soon in its cache, from the live weights only.
        equal = np.concatenate([self.tokens[:, :most] == given[:most], np.zeros((len(self.live), 1), dtype=bool)], 1)
        shared = np.minimum(equal.argmin(1), np.where(self.fresh, self.lengths - 1, 0))
        best, slot = int(shared.argmax()), self.free[0]
        if not self.live[best] and shared[best] == self.lengths[best] - 1 > 0:
            slot = best  # a conversation continues in its slot
        self.free.remove(slot)
        length = int(shared[slot])
        if shared[best] >= min(SHORTEST_COPY, most) and shared[best] > length:
            self.sources[slot], length = (best, int(shared[best])), 0
        self._holders[slot] = holder
        self.live[slot] = self.fresh[slot] = True
        self.lengths[slot] = self.starts[slot] = len(given)
        self.begins[slot] = len(given) - said
        self.computed[slot], self.tokens[slot, : len(given)] = length, given
        return slot

    def copies(self) -> dict[tuple[int, int], list[int]]:
        """The copies to make now: target slots by (source slot, number of positions). They count as computed then."""
        found: dict[tuple[int, int], list[int]] = {}
        for slot, (source, length) in list(self.sources.items()):
            if self.computed[source] >= length:
                found.setdefault((source, length), []).append(slot)
                self.computed[slot] = length
                del self.sources[slot]
        return found

    def rows(self, num_rows: int, sampling: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The rows of a pass, at most `num_rows`: token, slot, position, and the number of the next token in its
        response, each [R]. They count as computed then. The slots of `sampling` come first, then tokens of prompts."""
        slots = np.flatnonzero(sampling)
        at = self.computed[slots]
        parts = [np.array([self.tokens[slots, at], slots, at, at + 1 - self.begins[slots]])]
        self.computed[slots] += 1
        left = num_rows - len(slots)
        for slot in self._holders if self.unread else ():
            if not left:
                break
            if slot in self.sources or sampling[slot]:
                continue
            begin = int(self.computed[slot])
            end = min(begin + left, int(self.lengths[slot]) - 1)
            at = np.arange(begin, end)
            parts.append(np.array([self.tokens[slot, begin:end], np.full_like(at, slot), at, np.zeros_like(at)]))
            self.computed[slot], left = end, left - len(at)
        return np.concatenate(parts, 1)

    def spread(self, rows_4R: NDArray[np.int64], num_rows: int, sampling: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The rows of a pass whose shape is fixed, [4, num_rows]: that of slot s of `sampling` is row s, and those of
        prompts are in the other rows, in order. Empty rows are at position -1."""
        inputs = np.zeros((4, num_rows), dtype=np.int64)
        inputs[1], inputs[2] = np.arange(num_rows) % len(self.live), -1
        taken = np.zeros(num_rows, dtype=bool)
        taken[: len(sampling)] = sampling
        places = np.concatenate([np.flatnonzero(taken), np.flatnonzero(~taken)])
        inputs[:, places[: rows_4R.shape[1]]] = rows_4R
        return inputs

    def record(
        self, sampling: NDArray[np.bool_], tokens: NDArray[np.int64], logprobs: NDArray[np.float32], version: int
    ) -> None:
        """Record what was sampled in each slot of `sampling` with weights of `version`."""
        slots = self._sampled = np.flatnonzero(sampling)
        if not np.isfinite(logprobs).all():
            raise FloatingPointError(f"weights of version {version} give probabilities that are not numbers")
        at = self.lengths[slots]
        self.tokens[slots, at] = tokens
        steps = at - self.begins[slots]
        self._logprobs[slots, steps], self._versions[slots, steps] = logprobs, version
        self.lengths[slots] += 1

    def release(self) -> list[tuple[Holder, Response, int]]:
        """Release the slots whose responses ended in this step, by a stop token, by a stop string or at a bound. Return
        the holder, the response in its segment, and the slot of each."""
        slots = self._sampled
        stopped = self.stops[self.tokens[slots, self.lengths[slots] - 1]]
        if self.strings is not None:
            said = (self.tokens[slot, self.begins[slot] : self.lengths[slot]] for slot in slots)
            stopped |= np.fromiter(map(self.strings.end, said), dtype=bool, count=len(slots))
        ends = stopped | (self.lengths[slots] - self.begins[slots] == self.max_tokens)
        ends |= self.lengths[slots] - self.starts[slots] == self.segment
        ended = []
        for slot, finished in zip(slots[ends].tolist(), stopped[ends].tolist(), strict=True):
            begin, start, end = (int(each[slot]) for each in (self.begins, self.starts, self.lengths))
            tokens, steps = self.tokens[slot, start:end].copy(), slice(start - begin, end - begin)
            logprobs, versions = self._logprobs[slot, steps].copy(), self._versions[slot, steps].copy()
            ended.append((self._holders.pop(slot), Response(tokens, logprobs, versions, finished), slot))
            self.free.append(slot)
            self.live[slot] = False
        return ended


class MismatchWarning(NodeWarning):
    """A generator's log-probabilities differ from the trainer's by more than rounding explains."""
