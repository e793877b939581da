"""vLLM as the engine of `generate` compared with ours: completions per second, log-probabilities, and weight swaps.

    PYTHONPATH=src VLLM_PYTHON benchmarks/vllm_engine.py [--models 3M 25M 200M] [--threads 1] [--keep] [--tiny]

VLLM_PYTHON is an interpreter with vLLM. Llamas with random weights (those of `generate.py`), 64 prompts, responses of
the same length, sampled at temperature 1. The two take turns, in one process for each model and format. On one thread,
seconds are processor time.

A swap is the time between the last token of one version and the first of the next, in which received weights become
live and are packed for the kernels. `reload` is vLLM's own layerwise reload of the same tensors, `nats` the mean
absolute difference from the trainer's log-probabilities.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from report import Keep, publish
from train import ALPHABET, write_model

MODELS = {"3M": (256, 4, 64), "25M": (512, 8, 48), "200M": (1024, 16, 16)}
"""Width, layers, and tokens of a response."""
ROWS, PROMPT, SWAPS = 64, 16, 9
CASE_S = 900.0


def case(folder: Path, name: str, dtype: str, threads: int, tiny: bool) -> dict[str, Any]:
    import torch

    torch.set_num_threads(threads)
    from torch import Tensor

    from penstock.graph.context import Context
    from penstock.graph.types import Prompts, Rollouts
    from penstock.nodes.generate import open_engine
    from penstock.nodes.generate.groups import GroupStream
    from penstock.nodes.generate.sampling import mismatch
    from penstock.nodes.generate.vllm_engine import VllmEngine
    from penstock.nodes.model import CausalLM, load_model
    from penstock.runtime.tensor.weight_sync import WeightPublisher, WeightReceiver, sync_in_process

    clock = time.process_time if threads == 1 else time.perf_counter
    model, tokens = load_model(CausalLM, folder, dtype), 8 if tiny else MODELS[name][2]

    class Carried:
        """A policy that is whole on one rank, with other weights in each version."""

        def weights(self) -> Mapping[str, Tensor]:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.001)
            return {n: parameter.detach() for n, parameter in model.named_parameters()}

        def state(self) -> Any: ...
        def restore(self, tensors: Any, facts: Any) -> None: ...
        def export(self, folder: str) -> None: ...

    context = Context(node="generate", model=str(folder), dtype=dtype, slots=ROWS, max_tokens=tokens, batch=ROWS)
    engines: dict[str, GroupStream] = {
        "vllm": open_engine(context, engine="vllm", samples=1),
        "ours": open_engine(context, engine="penstock", samples=1),
    }
    theirs = engines["vllm"]
    assert isinstance(theirs, VllmEngine)
    theirs.tokenizer.stops = ()
    engines["ours"].slots.stops[:] = False  # type: ignore[attr-defined]
    publisher = WeightPublisher("policy>generator", Carried())
    receiver = WeightReceiver("policy>generator", fused=theirs.fused())
    receiver.describe(publisher.description)
    weights, version, swaps = receiver.weights, 0, dict[str, list[float]]()

    def arrive() -> None:
        nonlocal version
        version += 1
        sync_in_process(publisher, receiver, version, publisher.publish(version))

    def timed(what: str, work: Callable[[], Any]) -> None:
        began = clock()
        work()
        swaps.setdefault(what, []).append(clock() - began)

    def theirs_live() -> None:
        receiver.swap(version)
        theirs.vllm.renew(version, weights.tensors)

    def reload() -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        vllm, config = theirs.vllm.model, theirs.vllm.engine.vllm_config
        initialize_layerwise_reload(vllm)
        vllm.load_weights(iter(weights.tensors.items()))
        finalize_layerwise_reload(vllm, config.model_config)
        theirs.vllm.engine.reset_prefix_cache(reset_running_requests=True)

    def ours_live() -> None:
        engines["ours"].behaviour = weights
        engines["ours"]._renew()  # type: ignore[attr-defined]

    from vllm.config import set_current_vllm_config

    arrive()
    receiver.swap(version)
    with set_current_vllm_config(theirs.vllm.engine.vllm_config):
        for _ in range(SWAPS):
            timed("reload", reload)
    for _ in range(SWAPS):
        arrive()
        timed("vllm", theirs_live)
        timed("ours", ours_live)

    rng = random.Random(0)
    texts = ["".join(rng.choices(ALPHABET, k=PROMPT)) for _ in range(ROWS)]

    def run(system: str) -> list[Rollouts]:
        engine, made = engines[system], list[Rollouts]()
        for ordinal, text in enumerate(texts):
            engine.submit(ordinal, {"prompts": Prompts((ordinal,), (text,), ("",)), "behaviour": weights})
        while engine.busy():
            made += [result[0] for _, result in engine.step()]
        assert sum(int(rollouts.response_lengths_N.sum()) for rollouts in made) == ROWS * tokens
        return made

    taken: dict[str, list[float]] = {"vllm": [], "ours": []}
    nats: dict[str, float] = {}
    for rounds in range(2 if tiny else 4):
        for system in list(taken)[:: 1 if rounds % 2 else -1]:
            began = clock()
            made = run(system)
            if rounds:  # the first round warms up
                taken[system].append(clock() - began)
            nats[system] = sum(mismatch(model, rollouts) for rollouts in made) / ROWS
    per_s = {system: ROWS / median(times) for system, times in taken.items()}
    ms = {what: round(1e3 * median(times), 1) for what, times in swaps.items()}
    return {
        "model": name,
        "dtype": dtype,
        "vllm, completions/s": round(per_s["vllm"], 1),
        "ours, completions/s": round(per_s["ours"], 1),
        "vllm over ours": round(per_s["vllm"] / per_s["ours"], 2),
        "vllm, nats": float(f"{nats['vllm']:.2g}"),
        "ours, nats": float(f"{nats['ours']:.2g}"),
        "vllm's swap, ms": ms["vllm"],
        "its reload, ms": ms["reload"],
        "our swap, ms": ms["ours"],
        "bytes copied": theirs.vllm.copied,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="one small case: that it runs")
    parser.add_argument("--keep", action=Keep, help="write benchmarks/results/vllm_engine.json")
    parser.add_argument("--case", nargs=3, metavar=("FOLDER", "MODEL", "DTYPE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        folder, name, dtype = args.case
        print(json.dumps(case(Path(folder), name, dtype, args.threads, args.tiny)))
        return
    rows: list[dict[str, Any]] = []
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(args.threads)}
    with tempfile.TemporaryDirectory() as scratch:
        for name in ["3M"] if args.tiny else args.models:
            folder = Path(scratch) / name
            write_model(folder, *MODELS[name][:2])
            for dtype in ("float32", "bfloat16"):
                words = [sys.executable, __file__, "--threads", str(args.threads), *(["--tiny"] * args.tiny)]
                words += ["--case", str(folder), name, dtype]
                out = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, timeout=CASE_S)
                if out.returncode:
                    raise SystemExit(f"{name} {dtype}: exit status {out.returncode}")
                rows.append(json.loads(out.stdout.strip().splitlines()[-1]))
                # Published after each case: the largest takes minutes, and earlier figures are not lost.
                publish("vllm_engine", {"threads": args.threads, "rows": rows}, args.keep)


if __name__ == "__main__":
    main()
