"""Tokens per second of our engine compared with `transformers`' `generate` and this machine's roofline, in one run.

    python benchmarks/generate.py [--models 3M 25M 200M] [--dtypes float32 bfloat16] [--threads 1] [--keep] [--tiny]

Llamas with random weights (those of `train.py`), all rows of the same length, sampled at temperature 1. The two take
turns, with prompts that neither has seen. On one thread, seconds are processor time, which excludes the time of other
processes, but not their use of the memory bandwidth.

The roofline of a decode step is the longer of two times: that of reading its weights and the cache's live entries once,
at the bandwidth of a large sum; and that of its products, at the fastest rate of a product with as many rows whose
weight stays in the processor's cache. `of the roofline` is that time over our median step, of those in which all slots
sample. `roofline over transformers` is the most that an engine could reach that did nothing but such steps, and the
products of the prompts at that rate.

`lengths` has responses of lognormal lengths, many more than its 64 slots: seconds of batches of 64 over those of
continuous batching. A static batch computes all its rows until the longest response ends; with `begin together`, rows
of a batch that have ended are left out.
"""

import argparse
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from products import inner_size
from report import Keep, by_processor, publish
from torch import Tensor
from train import ALPHABET, write_model

from penstock.graph.context import Context
from penstock.graph.types import Prompts, Weights
from penstock.nodes.generate import make_engine
from penstock.nodes.generate.engine import Engine
from penstock.nodes.generate.kv_cache import zeros
from penstock.nodes.model import CausalLM, load_model
from penstock.nodes.model.kernels import linear, multiplied, packed

MODELS = {"3M": (256, 4, 64), "25M": (512, 8, 48), "200M": (1024, 16, 16)}
"""Width, layers, and tokens of a response."""
BATCHES = (1, 16, 64, 128)
PROMPT = 16
SECONDS = 6.0
"""A case is repeated until it has taken this long, one to three times after a round that warms up."""
LENGTHS_SLOTS, LENGTHS_ROWS, LENGTHS_MOST, LENGTHS_SIGMA = 64, 512, 96, 0.8


def clock() -> float:
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def seconds(work: Callable[[], Any], repeats: int = 7) -> float:
    work()
    found = []
    for _ in range(repeats):
        began = clock()
        work()
        found.append(clock() - began)
    return median(found)


class Ours:
    """An engine whose responses end at the limit, or after the lengths given to `end_after` by ordinal."""

    def __init__(self, folder: Path, dtype: str, slots: int, tokens: int) -> None:
        # As in a run, the engine measures the mismatch of one group of each batch.
        context = Context(node="generate", model=str(folder), dtype=dtype, slots=slots, batch=slots, max_tokens=tokens)
        self.engine = Engine(context, make_engine(context).sampler)
        self.weights = Weights(0, load_model(CausalLM, folder, dtype).state_dict())
        self.steps: list[float] = []
        self.engine.slots.stops[:] = False

    def end_after(self, lengths: dict[int, int]) -> None:
        """End each row after the given number of tokens."""
        # The tokens that replace sampled ones, to end rows or not, have other log-probabilities.
        self.engine.measured = lambda *given: {}  # type: ignore[method-assign]
        slots = self.engine.slots
        take, record, wanted = slots.take, slots.record, dict[int, int]()
        slots.stops[0] = True

        def taken(holder: Any, prefix: Any, said: int = 0) -> int:
            slot = take(holder, prefix, said)
            wanted[slot] = lengths[holder.key[0]]
            return slot

        def recorded(sampling: Any, *found: Any) -> None:
            record(sampling, *found)
            for slot in sampling.nonzero()[0].tolist():
                end = int(slots.lengths[slot])
                slots.tokens[slot, end - 1] = 0 if end - slots.begins[slot] >= wanted[slot] else 5

        slots.take, slots.record = taken, recorded  # type: ignore[method-assign, assignment]

    def run(self, prompts: dict[int, str]) -> None:
        """Generate a response to each prompt."""
        for ordinal, text in prompts.items():
            given = Prompts((ordinal,), (text,), ("",))
            self.engine.submit(ordinal, {"prompts": given, "behaviour": self.weights})
        while self.engine.busy():
            began, all_sample = clock(), self.engine.slots.sampling.sum() == len(prompts)
            self.engine.step()
            if all_sample:
                self.steps.append(clock() - began)


def texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(ALPHABET, k=PROMPT)) for _ in range(count)]


def theirs(folder: Path, dtype: str) -> Callable[[list[str], int], Tensor]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model.generation_config.eos_token_id = None

    def generate(prompts: list[str], tokens: int) -> Tensor:
        given = tokenizer(prompts, return_tensors="pt", return_token_type_ids=False)
        options = {"max_new_tokens": tokens, "do_sample": True, "temperature": 1.0, "top_k": 0}
        made: Tensor = model.generate(**given, **options)
        assert made.shape == (len(prompts), PROMPT + tokens)
        return made

    return generate


def bandwidth() -> float:
    """Measure the bytes per second that a sum of 512 MiB reads, in pages like those of the engine."""
    numbers = zeros((128 << 20,), torch.float32)
    return numbers.nbytes / seconds(numbers.sum)


def rate(rows: int, hidden: int, dtype: str) -> float:
    """Measure the FLOP/s of the fastest product with `rows` rows: with a weight that is packed for it, or plain."""
    width = 4 * hidden
    x, weight = (
        torch.randn(rows, hidden).to(getattr(torch, dtype)),
        torch.randn(width, hidden).to(getattr(torch, dtype)),
    )
    ordered = packed(weight, rows)
    with torch.inference_mode():
        times = [seconds(lambda: [linear(x, weight) for _ in range(20)])]
        if ordered is not None:
            times.append(seconds(lambda: [multiplied(x, ordered) for _ in range(20)]))
    return 20 * 2.0 * rows * hidden * width / min(times)


def case(folder: Path, name: str, dtype: str, batch: int, tokens: int, read: float, other: Any) -> dict[str, Any]:
    hidden, layers, _ = MODELS[name]
    ours = Ours(folder, dtype, batch, tokens)
    found: dict[str, list[float]] = {"ours": [], "transformers": []}
    began, rounds = clock(), 0
    while rounds < 2 or (rounds < 4 and clock() - began < SECONDS):
        prompts = texts(batch, rounds)
        for system in ("ours", "transformers")[:: 1 if rounds % 2 else -1]:
            start = clock()
            if system == "ours":
                ours.run(dict(enumerate(prompts)))
            else:
                other(prompts, tokens)
            found[system].append(clock() - start)
        rounds += 1
        if rounds == 1:  # the first round warms up
            found = {"ours": [], "transformers": []}
            ours.steps.clear()
    step, size = median(ours.steps), torch.finfo(getattr(torch, dtype)).bits // 8
    weights = layers * hidden * (4 * hidden + 3 * inner_size(hidden)) + 128 * hidden
    entries = 2 * layers * hidden * batch * (PROMPT + tokens / 2)
    by_memory = size * (weights + entries) / read
    by_products = 2.0 * (batch * weights + entries) / rate(batch, hidden, dtype)
    least = max(by_memory, by_products)
    whole = tokens * least + PROMPT * by_products
    per_s = {system: batch * tokens / median(times) for system, times in found.items()}
    return {
        "model": name,
        "dtype": dtype,
        "batch": batch,
        "tokens/s": round(per_s["ours"]),
        "transformers": round(per_s["transformers"]),
        "over transformers": round(per_s["ours"] / per_s["transformers"], 2),
        "roofline over transformers": round(batch * tokens / whole / per_s["transformers"], 2),
        "step, ms": round(1e3 * step, 2),
        "of the roofline": round(least / step, 2),
        "bound by": "memory" if by_memory > by_products else "products",
    }


def lengths(folder: Path, name: str, dtype: str, count: int) -> dict[str, Any]:
    """Measure responses of lognormal lengths, by continuous and by static batching."""
    rng = random.Random(1)
    wanted = {
        i: min(LENGTHS_MOST, max(1, round(rng.lognormvariate(math.log(16), LENGTHS_SIGMA)))) for i in range(count)
    }
    batches = [range(begin, begin + LENGTHS_SLOTS) for begin in range(0, count, LENGTHS_SLOTS)]
    longest = {i: max(wanted[j] for j in batch) for batch in batches for i in batch}
    kinds = {"static": (longest, batches), "together": (wanted, batches), "continuous": (wanted, [range(count)])}
    taken: dict[str, list[float]] = {kind: [] for kind in kinds}
    engines = {kind: Ours(folder, dtype, LENGTHS_SLOTS, LENGTHS_MOST) for kind in kinds}
    for kind, (ends, _) in kinds.items():
        engines[kind].end_after(ends)
    for round_ in range(2):
        prompts = texts(count, round_)
        for kind, (_, parts) in kinds.items():
            began = clock()
            for part in parts:
                engines[kind].run({i: prompts[i] for i in part})
            taken[kind].append(clock() - began)
    static, together, continuous = (min(times) for times in taken.values())
    told = {"mean length": round(sum(wanted.values()) / count, 1), "longest": max(wanted.values())}
    return {
        **{"model": name, "dtype": dtype, **told, "static, s": round(static, 2), "continuous, s": round(continuous, 2)},
        "static over continuous": round(static / continuous, 2),
        "begin together over continuous": round(together / continuous, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="one small case of each kind: that it runs")
    parser.add_argument("--keep", action=Keep, help="write benchmarks/results/generate_MODEL.json")
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(args.threads)
    if args.tiny:
        args.models, args.batches = ["3M"], [16]
    read = bandwidth()
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.models:
            hidden, layers, tokens = MODELS[name]
            folder = Path(scratch) / name
            write_model(folder, hidden, layers)
            rows: list[dict[str, Any]] = []
            drawn: list[dict[str, Any]] = []
            for dtype in args.dtypes:
                other = theirs(folder, dtype)
                for batch in args.batches:
                    rows.append(case(folder, name, dtype, batch, 8 if args.tiny else tokens, read, other))
                    print(json.dumps(rows[-1]), flush=True)
                if name != "200M":
                    drawn.append(lengths(folder, name, dtype, 128 if args.tiny else LENGTHS_ROWS))
                    print(json.dumps(drawn[-1]), flush=True)
            figures = {"threads": args.threads, "read, GB/s": round(read / 1e9, 1), "rows": rows, "lengths": drawn}
            publish(by_processor(f"generate_{name}"), figures, args.keep)


if __name__ == "__main__":
    main()
