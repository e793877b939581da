"""The base of all engines of `generate`: it splits firings into rows, and makes rollouts of finished rows.

An engine is a `Stream` for the model whose weights `behaviour` is. It derives from `GroupStream` and adds five methods.
"""

import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.graph.context import Context
from penstock.graph.node import Paused
from penstock.graph.types import Metrics, NodeWarning, Prefixes, Prompts, Rollouts, Weights
from penstock.nodes.generate.conversation import SampledGroup, SampledRow, StopStrings
from penstock.nodes.generate.kv_cache import cache_length, needed_prompt
from penstock.nodes.generate.sampling import Sampler
from penstock.nodes.model import ModelError
from penstock.nodes.open_model import about_adapters, weights_spec

CUT = ", cut to a part of the vocabulary"
# After this many responses the user is warned if more than half of them have reached the limit of tokens.
FIRST_RESPONSES = 64


@dataclass(frozen=True)
class Holder:
    """A row of a group that waits for a slot or has one."""

    group: SampledGroup
    index: int

    @property
    def row(self) -> SampledRow:
        return self.group.rows[self.index]

    @property
    def key(self) -> tuple[int, ...]:
        """The key of the row's draws: the ordinal of its group, the number of the sample, and, if it is not 0, the
        number of the prefix, or else of the prompt among those of that ordinal."""
        prompt, sample = divmod(self.index, self.group.samples)
        ordinals, prefixes = self.group.prompts.ordinals, self.group.prefixes
        # A first prompt adds nothing, so that a group of one prompt draws the same alone and joined with others.
        before = ordinals[:prompt].count(ordinals[prompt]) if prefixes is None else prefixes[prompt]
        return (ordinals[prompt], sample, before) if before else (ordinals[prompt], sample)


class GroupStream(ABC):
    """The base class of all engines of `generate`.

    Rows to sample are in a `queue`. A `row` of a `Holder` continues `row.prefix`, samples at most `max_tokens` tokens
    in a turn and `segment` in a segment (0: no bound), and ends with a token of `tokenizer.stops` or where `strings`
    ends it. When a row has ended or paused, the engine calls `row.end_segment` with its tokens, their log-probabilities
    and versions; when a group is complete, it returns `result` of it. Groups in `settled` have no row to sample. Ranks
    that share a model (`context.mesh`) get the same groups in the same order, and the same weights before the same
    step, so all sample the same tokens.

    `behaviour` has the live weights. If its version is new, the next step computes with its tensors, and rows that
    begin use no cache of older weights. The tensors are overwritten after the next version. An engine that computes
    with copies of the weights measures `mismatch` with the tensors themselves, and raises `UntrustedError` if it is
    more than `--mismatch-limit`. An engine that fuses several tensors into one declares them in `fused`.

    Raises ValueError for invalid settings.
    """

    def __init__(
        self,
        context: Context,
        sampler: Sampler,
        samples: int = 1,
        stop: Sequence[str] = (),
        segment: int = 0,
        learn_prefix: bool = False,
    ) -> None:
        if samples < 1 or context.slots < 1:
            raise ValueError(f"generate: given samples {samples} and {context.slots} slots, needed 1 or more of each")
        self.spec, self.context = weights_spec(context), context
        self.tokenizer = self.spec.tokenizer
        self.sampler, self.samples, self.stop, self.segment = sampler, samples, tuple(stop), segment
        self.learn_prefix = learn_prefix
        self.length = cache_length(self.spec.config.max_position_embeddings, context)
        self.strings = StopStrings(self.stop, self.tokenizer) if stop else None
        self.queue: deque[Holder] = deque()
        self.settled: list[SampledGroup] = []
        self.warned = False
        self.responses = self.cut = 0
        self.behaviour = Weights(-1, {})
        self.prepare()

    @abstractmethod
    def prepare(self) -> None:
        """Set up this engine; the settings of its call are set already."""

    @abstractmethod
    def step(self) -> Sequence[tuple[Any, Any]]:
        """Sample some tokens with the live weights in `behaviour`. Return the finished groups, as (tag, result)."""

    @abstractmethod
    def busy(self) -> bool:
        """True if there is work left."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all groups."""

    @abstractmethod
    def measured(self, group: SampledGroup, rollouts: Rollouts) -> Metrics:
        """The engine's own metrics of a finished group."""

    def fused(self) -> Sequence[Sequence[str]]:
        """Names of weights that should be contiguous in memory (see `Fusing`)."""
        return ()

    def submit(self, tag: Any, inputs: Mapping[str, Any]) -> None:
        """Queue a group: responses to its `prompts`, continuations of its prefixes (`after`), or the next turn of its
        `conversation` after `replies`, sampled with `behaviour`. A group that has `paused` continues from there.

        Raises ValueError for a prompt that does not fit, and as `SampledGroup.branch`. A conversation that no longer
        fits is no error: its row ends there, with a warning for the first such row.
        """
        prompts: Prompts = inputs["prompts"]
        conversation, replies, after = (inputs.get(name) for name in ("conversation", "replies", "after"))
        needed = needed_prompt(self.length, self.context)
        if conversation is None or replies is None:
            if after is None:
                encoded = [self.tokenizer.encode_prompt(text) for text in prompts.texts]
                rows = [SampledRow(tokens) for tokens in encoded for _ in range(self.samples)]
                group = SampledGroup(tag, prompts, self.samples, rows)
            else:
                group = self._branched(tag, prompts, after)
            for ordinal, row in zip(group.prompts.ordinals, group.rows[:: self.samples], strict=True):
                if not 0 < len(row.prompt) <= self.max_prefix:
                    given = f"generate, group {ordinal}: given a prompt of {len(row.prompt)} tokens"
                    raise ValueError(f"{given}, needed {needed if row.prompt else 'at least one'}")
            self.enqueue(group, inputs["behaviour"], inputs.get("paused"))
            return
        if after is not None:
            needed = "prefixes for a first turn alone"
            raise ValueError(
                f"generate, group {prompts.ordinals[0]}: given prefixes and a conversation, needed {needed}"
            )
        _check_settings(conversation, self.sampler, "a conversation", "all turns of a row are sampled alike")
        group = SampledGroup.go_on(tag, prompts, self.samples, conversation, replies, self.tokenizer, self.max_prefix)
        outgrown = next((index for index, row in enumerate(group.rows) if row.outgrown), None)
        if outgrown is not None and not self.warned:
            self.warned = True
            place = f"generate, group {prompts.ordinals[outgrown // self.samples]}, row {outgrown}"
            given = f"given a conversation of {group.rows[outgrown].outgrown} tokens"
            told = f"{place}: {given}, needed {needed}; it ends unfinished (the metric outgrown counts such rows)"
            warnings.warn(told, OutgrownWarning, stacklevel=2)
        self.enqueue(group, inputs["behaviour"], inputs.get("paused"))

    def _branched(self, tag: Any, prompts: Prompts, after: Prefixes) -> SampledGroup:
        """A group that continues each prefix. Raises ValueError as `SampledGroup.branch`, for a prefix that a stop
        string has ended, and for one that is learnt from but was sampled with other settings."""
        words = self.spec.config.vocab_size
        group = SampledGroup.branch(tag, prompts, self.samples, after, self.tokenizer, self.context.max_tokens, words)
        group.context = not self.learn_prefix
        if self.learn_prefix:
            _check_settings(after, self.sampler, "prefixes", "what is learnt from is sampled as its row is")
        if self.strings is not None:
            for prefix, row in enumerate(group.rows[:: self.samples]):
                said = row.earlier_segments.tokens
                if any(self.strings.end(said[: step + 1]) for step in range(len(said))):
                    place = f"generate, group {group.prompts.ordinals[prefix]}, prefix {int(after.numbers_N[prefix])}"
                    raise ValueError(f"{place}: given a prefix that a stop string has ended, needed one that goes on")
        return group

    def enqueue(self, group: SampledGroup, behaviour: Weights, paused: Rollouts | None = None) -> None:
        """Queue the open rows of a group; those of a `paused` one continue after their tokens so far."""
        self.behaviour = behaviour
        if paused is not None:
            group.resume(paused, self.context.max_tokens)
        self.queue.extend(Holder(group, i) for i, row in enumerate(group.rows) if row.open and row.response is None)
        if group.complete:
            self.settled.append(group)

    def check_weights(self) -> None:
        """Raises ModelError for adapters of another base, and for adapters in place of all weights or the reverse."""
        needed = about_adapters(self.spec.lora, self.spec.base)
        if self.behaviour.about != needed:
            given = f"{self.behaviour.about or 'all weights'}, needed {needed or 'all weights'}"
            raise ModelError(f"generate: weights of version {self.behaviour.version}: given {given} as here")

    def result(self, group: SampledGroup) -> Any:
        """The outputs of a complete group's firing; `Paused` if a row has paused."""
        rollouts = group.rollouts(self.tokenizer, self.sampler)
        if any(row.paused(self.context.max_tokens) for row in group.rows):
            return Paused(rollouts)
        self._count_cut(group)
        return rollouts, {**group.metrics(self.segment), **self.measured(group, rollouts)}

    def _count_cut(self, group: SampledGroup) -> None:
        """Warn once if most of the first responses were cut. A response of one token is a choice, and has no end."""
        ended = [row.response.finished for row in group.rows if row.open and row.response is not None]
        before, self.responses = self.responses, self.responses + len(ended)
        self.cut += ended.count(False)
        first = before < FIRST_RESPONSES <= self.responses
        if first and self.cut > self.responses / 2 and self.context.max_tokens > 1:
            given = f"{self.cut} of the first {self.responses} responses cut at {self.context.max_tokens} tokens"
            needed = "a --max-tokens at which most end: a response that is cut seldom has an answer to score"
            warnings.warn(f"{self.context.node}: given {given}, needed {needed}", NodeWarning, stacklevel=2)

    @property
    def comparable(self) -> bool:
        """True if the trainer's log-probabilities can equal the recorded ones: not for greedy or cut samples."""
        return self.sampler.temperature > 0 and not self.sampler.cuts

    @property
    def has_trainers_weights(self) -> bool:
        """True if weights arrive with the bits of the trainer's, so that log-probabilities can be compared with its."""
        origin = self.context.weights.get("behaviour")
        return origin is None or origin.exact(self.spec.sent_dtype(self.context.dtype))

    @property
    def max_prefix(self) -> int:
        """Tokens of the longest prompt, or conversation so far, that leaves room for a turn."""
        return self.length - self.context.max_tokens


def _check_settings(given: Rollouts | Prefixes, sampler: Sampler, what: str, why: str) -> None:
    """Raises ValueError unless the existing tokens of rows were sampled with the settings of the rest."""
    told = "temperature {:g}{}".format
    kinds = zip(given.temperature_N.tolist(), given.cut_N.tolist(), strict=True)
    found = {told(temperature, CUT * cut) for temperature, cut in kinds}
    needed = told(sampler.temperature, CUT * sampler.cuts)
    if found - {needed}:
        where, said = f"generate, group {given.ordinals[0]}", f"{what} of {'; '.join(sorted(found))}"
        raise ValueError(f"{where}: given {said}, needed {needed}: {why}")


class OutgrownWarning(NodeWarning):
    """A conversation has no room for another turn."""
