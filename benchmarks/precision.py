"""How eight bits change the demo's policy after `aipo`, and how fast they decode models of three sizes.

    python benchmarks/precision.py [--updates 60] [--model DIR] [--tiny] [--keep]

`formats`: responses to held-out prompts are sampled by the model in float32 and scored by it in each format. `kl` is
the mean over their tokens of KL(float32 || format), in nats, over the whole vocabulary, and `largest` the largest of
one token; `kl of bfloat16` is the same mean of KL(bfloat16 || format). `distance` is the mean absolute difference of
the sampled tokens' log-probabilities to float32; `reward` is the share of held-out problems that greedy responses of a
generator in that format solve. The sender of a weight sync converts the weights. fp8 is emulated here.

`decoding`: tokens per second of a generator with all slots in use, on one thread, with random weights: float32,
bfloat16, and int8 with activations between products in either of them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from generate import MODELS, Ours, texts
from report import Keep, publish
from torch import Tensor
from train import write_model

from penstock.graph.context import Context, Origin
from penstock.graph.types import Policy, Rollouts, Weights
from penstock.nodes.data import open_prompts
from penstock.nodes.generate import make_engine
from penstock.nodes.learn.batching import pack
from penstock.nodes.learn.logprobs import packed_distributions
from penstock.nodes.policy import make_policy
from penstock.nodes.score import math_answer, score
from penstock.runtime.tensor.weight_sync import WeightPublisher, WeightReceiver, sync_in_process

FORMATS = {
    "float32": ("float32", ""),
    "bfloat16": ("bfloat16", ""),
    "int8": ("float32", "int8"),
    "int8, bfloat16 between": ("bfloat16", "int8"),
    "fp8": ("float32", "fp8"),
}
"""The dtype of the run, and the precision of the generator's weights."""


def received(context: Context, precision: str) -> Weights:
    """Return the weights of the model as a generator receives them."""
    publisher = WeightPublisher("weights", make_policy(replace(context, node="policy")), wire=precision)
    receiver = WeightReceiver("weights", restores=not precision)
    receiver.describe(publisher.description)
    sync_in_process(publisher, receiver, 0, publisher.publish(0))
    receiver.swap(0)
    return receiver.weights


def reading(context: Context, precision: str) -> Context:
    return replace(context, weights={"behaviour": Origin(Policy.maker, replace(context, node="policy"), precision)})


class Reader:
    """A generator's engine with weights in one format."""

    def __init__(self, context: Context, name: str) -> None:
        dtype, precision = FORMATS[name]
        self.context = reading(replace(context, dtype=dtype), precision)
        self.weights = received(self.context, precision)
        self.source = open_prompts(context.evaluation())

    def answers(self, problems: int, **options: Any) -> list[Rollouts]:
        # A CPU emulates formats that a run on it refuses.
        with mock.patch("penstock.nodes.generate.engine.require_products"):
            self.engine = make_engine(self.context, **options)
        for ordinal in range(problems):
            given = {"prompts": self.source.read(ordinal), "behaviour": self.weights}
            self.engine.submit(ordinal, given)
        found: dict[int, Any] = {}
        while self.engine.busy():
            found |= dict(self.engine.step())
        return [found[ordinal][0] for ordinal in range(problems)]

    @torch.inference_mode()
    def logprobs(self, rollouts: list[Rollouts]) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of all tokens [P, V] and of the sampled ones [P], in float32."""
        all_PV, own_P = [], []
        for packed in pack(Rollouts.concat(rollouts), 8192):
            logprobs_PV = packed_distributions(self.engine.unpacked, packed)
            all_PV.append(logprobs_PV)
            own_P.append(logprobs_PV.gather(1, packed.targets_P[:, None])[:, 0])
        return torch.cat(all_PV), torch.cat(own_P)


def formats(folder: str, sampled: int, problems: int) -> list[dict[str, Any]]:
    context = Context(node="generate", seed=7, model=folder, data="arithmetic", slots=64, max_tokens=16)
    wide = Reader(context, "float32")
    rollouts = wide.answers(sampled, samples=8)
    reference_PV, reference_P = wide.logprobs(rollouts)
    half = Reader(context, "bfloat16")
    half.answers(1, samples=1)  # it needs an engine
    half_PV, _ = half.logprobs(rollouts)
    rows: list[dict[str, Any]] = []
    for name in FORMATS:
        reader = Reader(context, name)
        greedy = reader.answers(problems, samples=1, temperature=0.0)
        reward = float(score.fn(Rollouts.concat(greedy), by=math_answer)[0].values_N.mean())
        own_PV, own_P = reader.logprobs(rollouts)
        kl_P, of_half_P = ((p.exp() * (p - own_PV)).sum(-1).double() for p in (reference_PV, half_PV))
        distance_P = (own_P - reference_P).abs()
        kl = {"kl": float(kl_P.mean().clamp(min=0)), "largest": float(kl_P.max())}
        kl["kl of bfloat16"] = float(of_half_P.mean().clamp(min=0))
        distance = float(distance_P.mean())
        rows.append({"format": name, "tokens": len(own_P), **kl, "distance": distance, "reward": reward})
        print(json.dumps(rows[-1]), flush=True)
    for row in rows:
        row["over float32"] = row["reward"] - rows[0]["reward"]
    return rows


def decoding(folder: Path, name: str, batch: int, tokens: int) -> dict[str, Any]:
    """Measure one case, with the formats taking turns."""
    cases = {}
    for each in ("float32", "bfloat16", "int8", "int8, bfloat16 between"):
        dtype, precision = FORMATS[each]
        ours = Ours(folder, dtype, batch, tokens)
        if precision:
            context = reading(ours.engine.context, precision)
            ours.weights = received(context, precision)
            ours.engine = make_engine(context, samples=1)
            ours.engine.slots.stops[:] = False
        cases[each] = ours
    for _ in range(3):
        for ours in cases.values():
            ours.run(dict(enumerate(texts(batch))))
    per_s = {each: round(batch / median(ours.steps)) for each, ours in cases.items()}
    fastest = max(per_s["int8"], per_s["int8, bfloat16 between"]) / max(per_s["float32"], per_s["bfloat16"])
    row = {"model": name, "batch": batch, **per_s, "int8 over floats": round(fastest, 2)}
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--model", default="", help="a trained model of arithmetic; by default one is trained")
    parser.add_argument("--tiny", action="store_true", help="few prompts and one small case: that it runs")
    parser.add_argument("--keep", action=Keep, help="write benchmarks/results/precision.json")
    args = parser.parse_args()
    sampled, problems = (4, 8) if args.tiny else (64, 500)
    with tempfile.TemporaryDirectory() as scratch:
        if not args.model:
            run = Path(scratch) / "run"
            command = [sys.executable, "-m", "penstock.runtime.cli.main", "run", "aipo", f"--out={run}", "--plain"]
            subprocess.run([*command, f"--updates={args.updates}", "--eval-groups=0"], check=True, timeout=1800)
            args.model = str(run / "checkpoints" / f"{args.updates:08d}" / "policy")
        torch.set_num_threads(1)
        found = formats(args.model, sampled, problems)
        drawn = []
        for name in ("3M",) if args.tiny else MODELS:
            hidden, layers, tokens = MODELS[name]
            write_model(Path(scratch) / name, hidden, layers)
            batches, length = ((16,), 8) if args.tiny else ((1, 16, 64), tokens)
            drawn += [decoding(Path(scratch) / name, name, batch, length) for batch in batches]
    publish("precision", {"updates": args.updates, "formats": found, "decoding": drawn}, args.keep)


if __name__ == "__main__":
    main()
