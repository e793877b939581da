"""Completions per second of `aipo` at lag 0 and 1, and of TRL's GRPOTrainer, on the same cores, in one run.

    python benchmarks/train.py [--model 3M | 11M | 25M] [--dtype bfloat16 | float32 | both] [--keep]

Model shape (a CausalLM with the same random weights for all), prompts, samples, tokens and dtype are the same. Each
system gets all cores: TRL as threads of one process, Penstock as its own plan assigns them. The systems take turns.
Figures are for single updates: the median, the slowest and the fastest. TRL is in the extra `bench`; without it that
row is missing, and the output says so. Two cores that multiply bfloat16 take under five minutes for any of the models;
with AVX2 alone 25M takes eight.

`products alone` is the limit of `products`, which no system with this library can exceed. Over TRL it shows the largest
possible gain. `TFLOP/s` divides the FLOPs of an update's products (`products.flops`) by its seconds, and `of the peak`
divides that by the rate of a large product on all cores, measured in the same run.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from products import Batch, flops, inner_size, limit_s, peak
from report import Keep, by_processor, cpu_flags, publish, spread

MODELS = {"3M": (256, 4, 12, 2), "11M": (384, 6, 8, 2), "25M": (512, 8, 8, 1)}
"""Width, layers, updates of a run, and runs of each system."""
PROMPTS, SAMPLES, TOKENS = 16, 8, 64
PROMPT_TOKENS = 6
"""Tokens of most problems, each a sum of two numbers below a hundred, with one token per character."""
WITHIN_S = 300
"""Runs are repeated only if that ends within as many seconds."""
CORES = len(os.sched_getaffinity(0))
ALPHABET = "0123456789+-*/=?. abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ,:#$'\n"


def write_model(folder: Path, hidden: int, layers: int, positions: int = 128) -> int:
    """Write an untrained Llama for sequences of `positions` tokens, with a tokenizer of characters, in the format of
    transformers; return the number of parameters."""
    import torch
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *ALPHABET]
    tokens = Tokenizer(BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], unk_token="<unk>"))
    tokens.decoder = decoders.Fuse()
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=hidden,
        intermediate_size=inner_size(hidden),
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=max(1, hidden // 64),
        max_position_embeddings=positions,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    untyped: Any = PreTrainedTokenizerFast
    wrapped = untyped(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    wrapped.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def problems(count: int) -> list[dict[str, str]]:
    rng = random.Random(0)
    pairs = [(rng.randrange(100), rng.randrange(100)) for _ in range(count)]
    return [{"question": f"{a}+{b}=", "answer": f"#### {a + b}"} for a, b in pairs]


def penstock(model: Path, data: Path, lag: int, updates: int, dtype: str, folder: Path) -> dict[str, Any]:
    """Run Penstock; return the seconds of each update after the first few, and the mean tokens of a response."""
    command = [sys.executable, "-m", "penstock.runtime.cli.main", "run", "aipo", "--plain", f"--lag={lag}"]
    command += ["--model", str(model), "--data", str(data), "--eval-groups=0", f"--dtype={dtype}", "--lr=1e-4"]
    command += [f"--batch={PROMPTS}", f"--samples={SAMPLES}", f"--max-tokens={TOKENS}", f"--updates={updates}"]
    command += [f"--slots={PROMPTS * SAMPLES}", "--out", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=900)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = [b["time_s"] - a["time_s"] for a, b in pairwise(rows[2:])]
    return {"step_s": seconds, "tokens": fmean(row["tokens"] for row in rows[3:]) / (PROMPTS * SAMPLES)}


def trl(model: Path, data: Path, updates: int, dtype: str, folder: Path) -> dict[str, Any] | None:
    """Run TRL in a process of its own and return the same; None if TRL is not installed."""
    command = [sys.executable, __file__, "--trl", str(model), str(data), str(updates), dtype, str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_DISABLED": "true", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
    if done.returncode == 3:
        return None
    if done.returncode:
        raise RuntimeError(f"TRL ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def run_trl(model: str, data: str, updates: int, dtype: str, folder: str) -> None:
    """Run in the child process: GRPO without a KL term, with TRL's default loss and optimizer."""
    try:
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
        from trl import GRPOConfig, GRPOTrainer
    except ImportError:
        sys.exit(3)
    rows = [json.loads(line) for line in Path(data).read_text().splitlines()]
    dataset = Dataset.from_list([{"prompt": r["question"], "answer": r["answer"].removeprefix("#### ")} for r in rows])
    ends: list[float] = []
    lengths: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

        def on_log(self, *args: Any, **kwargs: Any) -> None:
            lengths.append(kwargs["logs"].get("completions/mean_length", float("nan")))

    def reward(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        return [float(c.strip() == a) for c, a in zip(completions, answer, strict=True)]

    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=PROMPTS * SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=TOKENS,
        temperature=1.0,
        max_steps=updates,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=dtype == "bfloat16",
        beta=0.0,
        learning_rate=1e-4,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    policy = AutoModelForCausalLM.from_pretrained(model)
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=reward,
        args=config,
        train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
    )
    trainer.add_callback(Clock())
    trainer.train()
    seconds = [b - a for a, b in pairwise(ends[1:])]
    print(json.dumps({"step_s": seconds, "tokens": fmean(lengths[2:updates])}))


def multiplies_bfloat16() -> bool:
    """True if this CPU has bfloat16 instructions. Without them Penstock is no faster than in float32, TRL is slower."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(cpu_flags())


def main() -> None:
    if sys.argv[1:2] == ["--trl"]:
        model, prompts, number, dtype, folder = sys.argv[2:]
        run_trl(model, prompts, int(number), dtype, folder)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="3M")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "both"], help="bfloat16 if the CPU multiplies it")
    parser.add_argument("--updates", type=int, help="of a run, 5 or more: the first ones are left out")
    parser.add_argument("--repeats", type=int, help="runs of each system, however long they take")
    parser.add_argument("--keep", action=Keep, help="write benchmarks/results/train_MODEL.json")
    args = parser.parse_args()
    if args.updates is not None and args.updates < 5:
        parser.error(f"--updates: given {args.updates}, needed 5 or more, of which the first ones are left out")
    hidden, layers, updates, repeats = MODELS[args.model]
    updates, repeats = args.updates or updates, args.repeats or repeats
    within_s = math.inf if args.repeats else WITHIN_S
    if args.dtype == "both":
        dtypes = ["float32", "bfloat16"]
    else:
        dtypes = [args.dtype or ("bfloat16" if multiplies_bfloat16() else "float32")]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        parameters = write_model(place / "model", hidden, layers)
        data = place / "problems.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in problems(2000)))
        for dtype in dtypes:
            rows += measured(place, data, dtype, hidden, layers, updates, repeats, within_s)
    shape = {"parameters": parameters, "hidden": hidden, "layers": layers}
    setup = {**shape, "prompts": PROMPTS, "samples": SAMPLES, "max_tokens": TOKENS, "runs": repeats}
    publish(by_processor(f"train_{args.model}"), {"setup": setup, "rows": rows}, args.keep)


def measured(
    place: Path, data: Path, dtype: str, hidden: int, layers: int, updates: int, repeats: int, within_s: float
) -> list[dict[str, Any]]:
    """Measure all systems in turn, `repeats` times or as often as that ends within `within_s`; return a row per system,
    with the updates of all its runs."""
    found: dict[str, list[dict[str, Any]]] = {}
    began = time.monotonic()

    def add(system: str, run: dict[str, Any]) -> None:
        found.setdefault(system, []).append(run)
        print(
            f"{dtype} {system}, run {len(found[system])} of {repeats}: {median(run['step_s']):.2f} s an update",
            flush=True,
        )

    for turn in range(repeats):
        for lag in (0, 1):
            out = place / f"penstock-{dtype}-{lag}-{turn}"
            add(f"lag {lag}", penstock(place / "model", data, lag, updates, dtype, out))
        if (other := trl(place / "model", data, max(6, updates // 2), dtype, place / "trl")) is not None:
            add("trl", other)
        if (time.monotonic() - began) * (turn + 2) / (turn + 1) > within_s:
            break
    if "trl" not in found:
        print(f"{dtype} trl: not installed (pip install 'penstock[bench]'), left out")
    tokens = found["lag 1"][-1]["tokens"]
    limit = limit_s(hidden, layers, Batch(PROMPTS, SAMPLES, PROMPT_TOKENS, tokens), dtype, CORES)
    found["products alone"] = [{"step_s": [limit], "tokens": tokens}]
    most, per_update = peak(dtype, CORES), PROMPTS * SAMPLES
    rows = []
    for system, runs in found.items():
        seconds = [second for run in runs for second in run["step_s"]]
        tokens, median_s = fmean(run["tokens"] for run in runs), median(seconds)
        rate = flops(hidden, layers, Batch(PROMPTS, SAMPLES, PROMPT_TOKENS, tokens)) / median_s
        row: dict[str, Any] = {"dtype": dtype, "system": system}
        row["completions_per_s"] = spread([per_update / each for each in seconds])
        if "trl" in found:
            theirs = median(second for run in found["trl"] for second in run["step_s"])
            row["over_trl"] = round(theirs / median_s, 2)
        row |= {"response_tokens": tokens, "TFLOP/s": round(rate / 1e12, 3), "of the peak": round(rate / most, 2)}
        rows.append(row)
        ratio = f", {row['over_trl']} times TRL" if "over_trl" in row else ""
        print(f"{dtype} {system}: {per_update / median_s:.1f} completions/s{ratio}, {rate / most:.0%} of the peak")
    return rows


if __name__ == "__main__":
    main()
