"""Seconds of log-probabilities and their gradient, by the logits that are kept at once: the basis of `LOGIT_ELEMENTS`.

    python benchmarks/logprobs.py [--dtype float32] [--seconds 150] [--keep]

Each case has a number of tokens, a width and a vocabulary, and runs on all cores. Chunks have 2^22 to 2^28 logits; if
all logits fit into one, autograd keeps them. The chunk sizes take turns, so that other load on the machine affects all
of them. New rounds over all cases begin until `--seconds` have passed, with at least three besides the one that warms
up.
"""

import argparse
import os
import time
from statistics import median
from typing import Any

import torch
from report import Keep, publish, spread

from penstock.nodes.learn.logprobs import token_logprobs
from penstock.nodes.model.decoder import LOGIT_ELEMENTS

# Tokens, width, vocabulary: micro-batches of models with a vocabulary of 32,768 and of 128,256.
CASES = ((4096, 256, 32768), (1024, 256, 128256))
CHUNKS = tuple(range(22, 30, 2))
DEFAULT = LOGIT_ELEMENTS.bit_length() - 1


class Case:
    """A forward and a backward pass of some tokens."""

    def __init__(self, tokens: int, width: int, vocab: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.given = [
            torch.randn(rows, width, generator=generator).to(dtype).requires_grad_() for rows in (tokens, vocab)
        ]
        self.targets_P = torch.randint(vocab, (tokens,), generator=generator)
        self.said = {"dtype": str(dtype).partition(".")[2], "tokens": tokens, "width": width, "vocabulary": vocab}

    def seconds(self, chunk: int) -> float:
        began = time.perf_counter()
        hidden_PD, weight_VD = self.given
        logprobs_P, _ = token_logprobs(hidden_PD, weight_VD, self.targets_P, chunk_elements=chunk)
        torch.autograd.grad(logprobs_P.sum(), self.given)
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--keep", action=Keep, help="write benchmarks/results/logprobs.json")
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    cases = [Case(*shape, getattr(torch, args.dtype)) for shape in CASES]
    taken: list[dict[int, list[float]]] = [{power: [] for power in CHUNKS} for _ in cases]
    began, rounds = time.monotonic(), 0
    while rounds < 4 or time.monotonic() - began < args.seconds:
        for case, found in zip(cases, taken, strict=True):
            for power in CHUNKS if rounds % 2 else CHUNKS[::-1]:
                found[power].append(case.seconds(1 << power))
        rounds += 1
        print(f"{rounds} rounds, {time.monotonic() - began:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for case, found in zip(cases, taken, strict=True):
        # The first round warms up. A ratio is of two passes of one round.
        kept = {power: values[1:] for power, values in found.items()}
        over = {p: [a / b for a, b in zip(v, kept[DEFAULT], strict=True)] for p, v in kept.items()}
        times = {f"2^{power}, s": round(median(values), 3) for power, values in kept.items()}
        ratios = {f"2^{p} over 2^{DEFAULT}": {k: round(x, 2) for k, x in spread(v).items()} for p, v in over.items()}
        rows.append({**case.said, **times, **{k: v for k, v in ratios.items() if f"2^{DEFAULT} over" not in k}})
    publish("logprobs", {"default": f"2^{DEFAULT}", "rounds": rounds - 1, "rows": rows}, args.keep)


if __name__ == "__main__":
    main()
