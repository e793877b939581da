"""Where the seconds of an update of `train.py` go: each operation's own time on one core, by kind.

    python benchmarks/train_profile.py [--models 3M 11M 25M] [--dtype bfloat16 | float32] [--keep]

The work of one update at lag 1, in one process on one thread: the engine samples the responses of `train.py`, eight per
prompt, and `aipo_update` learns from them. `products` are matrix products except those of attention; `of the peak` is
their rate over that of a large product in the same run. `between operations` is the rest of the seconds that the work
takes without a profiler: Python, autograd, transposed factors. A pass of generation is one call of C: the functions
that it calls are timed (`timed_parts.c`), and the rest of it are `products`, with the activations and sums that follow
them. While both cores of a pair work, as in `train.py`, everything takes longer.
"""

import argparse
import ctypes
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from products import Batch, flops, peak
from report import Keep, by_processor, publish
from torch.profiler import ProfilerActivity, profile
from train import MODELS, PROMPT_TOKENS, PROMPTS, SAMPLES, TOKENS, multiplies_bfloat16, problems, write_model

from penstock.graph.context import Context
from penstock.graph.types import Advantages, Prompts, Rollouts, Weights
from penstock.nodes.generate import make_engine
from penstock.nodes.generate.decode import DecodePass
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.model import CausalLM
from penstock.nodes.model.compiled import compile_c
from penstock.nodes.open_model import open_model
from penstock.nodes.policy import make_policy

KINDS = {
    "products": ("aten::mm", "aten::addmm", "mkldnn::_linear_pointwise", "mkldnn::_reorder_linear_weight"),
    "attention": ("penstock::attend", "penstock::causal", "penstock::causal_backward"),
    "norms, gates, rotations": ("penstock::rms_norm", "penstock::gated", "penstock::rotate"),
}
"""Prefixes of the names of operations; a name belongs to the first kind that matches."""
PRODUCTS, ATTENTION, NORMS = KINDS
OTHER, REST = "other operations", "between operations"
IN_A_PASS = {"rms_norm": NORMS, "rotate": NORMS, "attend": ATTENTION, "draw": OTHER}
"""The functions that a pass of generation calls, in the order of `timed_parts.c`."""
REPEATS = 3


def sampling(folder: Path, dtype: str) -> tuple[Callable[[], Rollouts], DecodePass]:
    """Return a function that samples the responses of a batch, and the passes that it makes."""
    context = Context(node="generate", model=str(folder), dtype=dtype, slots=PROMPTS * SAMPLES, max_tokens=TOKENS)
    engine = make_engine(context, samples=SAMPLES)
    weights = Weights(0, open_model(CausalLM, context)[0].state_dict())
    rows = problems(PROMPTS)

    def sample() -> Rollouts:
        found: list[Rollouts] = []
        for ordinal, row in enumerate(rows):
            given = Prompts((ordinal,), (row["question"],), (row["answer"],))
            engine.submit(ordinal, {"prompts": given, "behaviour": weights})
        while engine.busy():
            found += [rollouts for _, (rollouts, _) in engine.step()]
        engine.slots.forget()  # otherwise the next round finds its prompts already computed
        return Rollouts.concat(found)

    assert engine.decode is not None, "needed a C compiler, and a CPU with AVX2"
    return sample, engine.decode


def learning(folder: Path, dtype: str, given: Rollouts) -> Callable[[], object]:
    """Return a function that learns from the responses."""
    context = Context(node="policy", model=str(folder), dtype=dtype, updates=1000)
    policy, advantage = make_policy(context), Advantages(torch.linspace(-1, 1, len(given)))
    return lambda: aipo_update.fn(policy, given, advantage, lr=1e-6)


def clock(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def seconds_by_kind(work: Callable[[], object], one_round: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Return the median processor seconds of the work: in total as `seconds`, and by kind, which `one_round` measures
    with the work done once."""
    work()
    seconds = median(clock(work) for _ in range(REPEATS))
    rounds = [one_round() for _ in range(REPEATS)]
    found = {kind: median(kinds[kind] for kinds in rounds) for kind in rounds[0]}
    return {"seconds": seconds, **found, REST: max(0.0, seconds - sum(found.values()))}


def operations(work: Callable[[], object]) -> Callable[[], dict[str, float]]:
    """Rounds of work that calls operations of PyTorch."""

    def one_round() -> dict[str, float]:
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            work()
        kinds = dict.fromkeys([*KINDS, OTHER], 0.0)
        for event in seen.key_averages():
            if "::" in event.key and not event.key.startswith(("autograd::", "torch::")):
                kind = next((kind for kind, names in KINDS.items() if event.key.startswith(names)), OTHER)
                kinds[kind] += event.self_cpu_time_total / 1e6
        return kinds

    return one_round


def passes_of(work: Callable[[], object], passes: DecodePass) -> Callable[[], dict[str, float]]:
    """Rounds of work that makes passes of generation, which call the timing functions from now on."""
    timed = compile_c(Path(__file__).with_name("timed_parts.c"), passes.model.dtype)
    called = (ctypes.c_void_p * len(IN_A_PASS)).in_dll(timed, "called")
    took = (ctypes.c_double * len(IN_A_PASS)).in_dll(timed, "seconds")
    for number, name in enumerate(IN_A_PASS):
        called[number] = getattr(passes.given, name)
        setattr(passes.given, name, ctypes.cast(getattr(timed, name), ctypes.c_void_p).value)
    in_all = 0.0

    def adding(call: Callable[..., Any]) -> Callable[..., Any]:
        def added(*given: Any) -> Any:
            nonlocal in_all
            began = time.perf_counter()
            found = call(*given)
            in_all += time.perf_counter() - began
            return found

        return added

    for name in ("hidden", "logits", "sample"):
        setattr(passes, name, adding(getattr(passes, name)))

    def one_round() -> dict[str, float]:
        nonlocal in_all
        took[:], in_all = [0.0] * len(IN_A_PASS), 0.0
        work()
        kinds = dict.fromkeys([*KINDS, OTHER], 0.0)
        for own, kind in zip(took, IN_A_PASS.values(), strict=True):
            kinds[kind] += own
        kinds[PRODUCTS] = in_all - sum(kinds.values())
        return kinds

    return one_round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="bfloat16 if the CPU multiplies it")
    parser.add_argument("--keep", action=Keep, help="write benchmarks/results/train_profile.json")
    args = parser.parse_args()
    dtype = args.dtype or ("bfloat16" if multiplies_bfloat16() else "float32")
    torch.set_num_threads(1)
    most, rows = peak(dtype, 1), []
    with tempfile.TemporaryDirectory() as scratch:
        for name in args.models:
            hidden, layers, *_ = MODELS[name]
            folder = Path(scratch) / name
            write_model(folder, hidden, layers)
            sample, passes = sampling(folder, dtype)
            given = sample()
            tokens = float(given.response_lengths_N.float().mean())
            # One pass samples, one learns, and the backward pass has twice the products of a pass.
            whole = flops(hidden, layers, Batch(PROMPTS, SAMPLES, PROMPT_TOKENS, tokens))
            for work, share in ((sample, 1 / 4), (learning(folder, dtype, given), 3 / 4)):
                found = seconds_by_kind(work, passes_of(work, passes) if work is sample else operations(work))
                seconds = found.pop("seconds")
                row: dict[str, Any] = {"model": name, "work": "generate" if work is sample else "update"}
                shares = {kind: f"{part / seconds:.0%}" for kind, part in found.items()}
                shares["products, of the peak"] = f"{share * whole / found['products'] / most:.0%}"
                row |= {"seconds": round(seconds, 2)} | shares
                row["all, of the peak"] = f"{share * whole / seconds / most:.0%}"
                rows.append(row)
                print(json.dumps(row), flush=True)
    setup = {"dtype": dtype, "prompts": PROMPTS, "samples": SAMPLES, "max_tokens": TOKENS}
    figures = {"setup": setup, "peak, TFLOP/s": round(most / 1e12, 3), "rows": rows}
    publish(by_processor("train_profile"), figures, args.keep)


if __name__ == "__main__":
    main()
