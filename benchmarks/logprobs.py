"""Seconds of log-probabilities and their gradient, by the logits that are kept at once: what `LOGIT_ELEMENTS` follows.

    python benchmarks/logprobs.py [--keep]

Each case is some tokens of a width over a vocabulary, in float32 and bfloat16, on one thread and on all cores. Chunks
are of 2^22 to 2^28 logits; where all of them fit into one, autograd keeps them.
"""

import argparse
import os
import time
from statistics import median
from typing import Any

import torch
from report import publish

from penstock.nodes.learn.logprobs import token_logprobs

# Tokens, width, vocabulary: a demo's update, and micro-batches of models with a vocabulary of 32,768 and of 128,256.
CASES = ((2048, 256, 512), (2048, 512, 32768), (512, 1024, 128256))
CHUNKS = tuple(range(22, 30, 2))


def seconds(case: tuple[int, int, int], dtype: torch.dtype, chunk: int, repeats: int) -> float:
    """The median of a forward and a backward pass."""
    tokens, width, vocab = case
    generator = torch.Generator().manual_seed(0)
    hidden_PD, weight_VD = (
        torch.randn(rows, width, generator=generator).to(dtype).requires_grad_() for rows in (tokens, vocab)
    )
    targets_P = torch.randint(vocab, (tokens,), generator=generator)
    taken = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        logprobs_P, _ = token_logprobs(hidden_PD, weight_VD, targets_P, chunk_elements=chunk)
        torch.autograd.grad(logprobs_P.sum(), (hidden_PD, weight_VD))
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/logprobs.json")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        torch.set_num_threads(threads)
        for case in CASES:
            for dtype in (torch.float32, torch.bfloat16):
                taken = {power: round(seconds(case, dtype, 1 << power, args.repeats), 4) for power in CHUNKS}
                said = {"threads": threads, "tokens, width, vocabulary": case, "dtype": str(dtype).partition(".")[2]}
                rows.append({**said, "seconds by log2 of the chunk": taken})
                print(rows[-1], flush=True)
    publish("logprobs", {"repeats": args.repeats, "rows": rows}, args.keep)


if __name__ == "__main__":
    main()
