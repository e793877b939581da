"""A firing in work: one turn of each conversation of a group, and the rollouts that they become.

Shapes: N rows (the samples of each prompt in turn), S tokens of prompt and response, T tokens of a response.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.graph.types import Metrics, Prompts, Replies, Rollouts
from penstock.nodes.generate.row import NOBODY, Response, Row, resume
from penstock.nodes.generate.sampling import Sampler
from penstock.nodes.tokenizer import Tokenizer


@dataclass
class Group:
    """`samples` rows for each of its prompts (one, unless a caller joined several)."""

    tag: Any
    prompts: Prompts
    samples: int
    rows: list[Row]

    @staticmethod
    def begin(tag: Any, prompts: Prompts, samples: int, tokenizer: Tokenizer) -> "Group":
        """The first turn."""
        encoded = [tokenizer.encode_prompt(text) for text in prompts.texts]
        return Group(tag, prompts, samples, [Row(prompt) for prompt in encoded for _ in range(samples)])

    @staticmethod
    def go_on(
        tag: Any, prompts: Prompts, samples: int, conversation: Rollouts, replies: Replies, tokenizer: Tokenizer
    ) -> "Group":
        """The next turn of what an earlier firing made. Raises ValueError where the rows do not match."""
        needed, given, heard = len(prompts.texts) * samples, len(conversation), len(replies)
        if (given, heard) != (needed, needed):
            raise ValueError(
                f"generate, group {prompts.ordinals[0]}: given a conversation of {given} rows and {heard} replies, "
                f"needed {needed} of each: {samples} samples of each prompt"
            )
        return Group(tag, prompts, samples, list(resume(conversation, replies, tokenizer)))

    @property
    def complete(self) -> bool:
        return all(row.said is not None or not row.open for row in self.rows)

    @property
    def versions(self) -> set[int]:
        """All versions that made its tokens, in this turn and in earlier ones."""
        parts = [part for row in self.rows for part in (row.before, row.said) if part is not None]
        return {version for part in parts for version in part.versions.tolist()} - {NOBODY}

    def rollouts(self, tokenizer: Tokenizer, sampler: Sampler) -> Rollouts:
        """What its rows have become, of this turn and earlier ones, all sampled by `sampler`."""
        wholes = [row.whole() for row in self.rows]
        lengths = np.array([len(whole.tokens) for whole in wholes])
        prompt_lengths = np.array([len(row.prompt) for row in self.rows])
        tokens_NS = np.zeros((len(wholes), int((prompt_lengths + lengths).max())), dtype=np.int64)
        logprobs_NT = np.zeros((len(wholes), int(lengths.max())), dtype=np.float32)
        versions_NT = np.zeros(logprobs_NT.shape, dtype=np.int64)
        for index, (row, whole) in enumerate(zip(self.rows, wholes, strict=True)):
            begin, length = len(row.prompt), len(whole.tokens)
            tokens_NS[index, :begin] = row.prompt
            tokens_NS[index, begin : begin + length] = whole.tokens
            logprobs_NT[index, :length] = whole.logprobs
            versions_NT[index, :length] = whole.versions
        transcripts = tuple(row.texts(tokenizer) for row in self.rows)
        return Rollouts(
            ordinals=self._each(self.prompts.ordinals),
            prompts=self._each(self.prompts.texts),
            answers=self._each(self.prompts.answers),
            texts=tuple(transcript[-1] for transcript in transcripts),
            tokens_NS=torch.from_numpy(tokens_NS),
            prompt_lengths_N=torch.from_numpy(prompt_lengths),
            response_lengths_N=torch.from_numpy(lengths),
            logprobs_NT=torch.from_numpy(logprobs_NT),
            versions_NT=torch.from_numpy(versions_NT),
            finished_N=torch.tensor([whole.finished for whole in wholes]),
            transcripts=transcripts,
            turn_rewards=tuple(row.rewards for row in self.rows),
            temperature_N=torch.full((len(wholes),), sampler.temperature),
            cut_N=torch.full((len(wholes),), sampler.cuts),
        )

    def metrics(self) -> Metrics:
        """Of this turn: `generated_tokens` is how many were sampled, `response_length` their mean by row, `stale_cache`
        the share of them that were decoded on a cache that holds entries of older weights, `outgrown` that of the rows
        that had no room for it."""
        said: list[Response] = [row.said for row in self.rows if row.said is not None]
        tokens = sum(len(response.tokens) for response in said)
        stale = sum(int((r.versions != r.versions[0]).sum()) for r in said if r.drifted)
        metrics = {
            "generated_tokens": float(tokens),
            "response_length": tokens / max(1, len(said)),
            "stale_cache": stale / max(1, tokens),
        }
        if any(row.before is not None for row in self.rows):
            metrics["outgrown"] = sum(row.outgrown for row in self.rows) / len(self.rows)
        return metrics

    def _each(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(value for value in values for _ in range(self.samples))
