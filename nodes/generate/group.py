"""Prompts in work, and the rollouts that they become.

Shapes: N responses (the samples of each prompt in turn), S tokens of prompt and response, T tokens of a response.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.graph.types import Metrics, Prompts, Rollouts
from penstock.nodes.tokenizer import Tokenizer

IntArray = np.ndarray[Any, np.dtype[np.int64]]
FloatArray = np.ndarray[Any, np.dtype[np.float32]]


class Response(NamedTuple):
    """One sample: what `Rollouts` says of each token, and whether it ended by itself."""

    tokens: IntArray
    logprobs: FloatArray
    versions: IntArray
    finished: bool

    @property
    def drifted(self) -> bool:
        """Did the weights change while it was sampled?"""
        return bool(self.versions[0] != self.versions[-1])


@dataclass
class Group:
    """A firing in work: `samples` responses to each of its prompts (one, unless a caller joined several)."""

    tag: Any
    prompts: Prompts
    tokens: list[list[int]]
    samples: int
    responses: dict[int, Response] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return len(self.tokens) * self.samples

    @property
    def complete(self) -> bool:
        return len(self.responses) == self.rows

    @property
    def versions(self) -> set[int]:
        """All versions that made its tokens."""
        return {version for response in self.responses.values() for version in response.versions.tolist()}

    def rollouts(self, tokenizer: Tokenizer) -> Rollouts:
        rows = [self.responses[row] for row in range(self.rows)]
        prompts = [prompt for prompt in self.tokens for _ in range(self.samples)]
        lengths = np.array([len(row.tokens) for row in rows])
        prompt_lengths = np.array([len(prompt) for prompt in prompts])
        tokens_NS = np.zeros((len(rows), int((prompt_lengths + lengths).max())), dtype=np.int64)
        logprobs_NT = np.zeros((len(rows), int(lengths.max())), dtype=np.float32)
        versions_NT = np.zeros(logprobs_NT.shape, dtype=np.int64)
        for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
            begin, length = len(prompt), len(row.tokens)
            tokens_NS[index, :begin] = prompt
            tokens_NS[index, begin : begin + length] = row.tokens
            logprobs_NT[index, :length] = row.logprobs
            versions_NT[index, :length] = row.versions
        return Rollouts(
            ordinals=self._each(self.prompts.ordinals),
            prompts=self._each(self.prompts.texts),
            answers=self._each(self.prompts.answers),
            texts=tuple(tokenizer.decode(row.tokens[: len(row.tokens) - row.finished].tolist()) for row in rows),
            tokens_NS=torch.from_numpy(tokens_NS),
            prompt_lengths_N=torch.from_numpy(prompt_lengths),
            response_lengths_N=torch.from_numpy(lengths),
            logprobs_NT=torch.from_numpy(logprobs_NT),
            versions_NT=torch.from_numpy(versions_NT),
            finished_N=torch.tensor([row.finished for row in rows]),
        )

    def metrics(self) -> Metrics:
        """`stale_cache` is the share of tokens decoded on a cache that holds entries of older weights."""
        tokens = sum(len(response.tokens) for response in self.responses.values())
        stale = sum(int((r.versions != r.versions[0]).sum()) for r in self.responses.values() if r.drifted)
        return {"response_length": tokens / self.rows, "stale_cache": stale / tokens}

    def _each(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(value for value in values for _ in range(self.samples))
