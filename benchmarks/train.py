"""Completions per second of `aipo` at lag 0 and 1, and of TRL's GRPOTrainer, on the same cores, in one run.

    python benchmarks/train.py [--hidden 256 --layers 4] [--dtype float32] [--keep]

Same model shape (a CausalLM, randomly initialised, the same weights for all), prompts, samples, tokens and dtype; each
system is given all cores: TRL as threads of one process, Penstock as its own plan shares them out. Without `--dtype`
both are measured: float32, and bfloat16 where the CPU multiplies it. TRL is the extra `bench`; without it that row is
missing, and said so. The row `products alone` is the limit of `products`: what no system can pass with this library.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from products import inner_size, limit_s
from report import publish, spread

PROMPTS, SAMPLES, TOKENS = 16, 8, 64
PROMPT_TOKENS = 6
"""Of most problems: a sum of two numbers below a hundred, character by character."""
CORES = len(os.sched_getaffinity(0))
ALPHABET = "0123456789+-*/=?. abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ,:#$'\n"


def write_model(folder: Path, hidden: int, layers: int, positions: int = 128) -> int:
    """An untrained Llama for sequences of `positions` tokens, with a tokenizer of characters, as transformers writes
    them; the number of parameters."""
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
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    wrapped.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def problems(count: int) -> list[dict[str, str]]:
    rng = random.Random(0)
    pairs = [(rng.randrange(100), rng.randrange(100)) for _ in range(count)]
    return [{"question": f"{a}+{b}=", "answer": f"#### {a + b}"} for a, b in pairs]


def penstock(model: Path, data: Path, lag: int, updates: int, dtype: str, folder: Path) -> dict[str, float]:
    """Seconds of the median update after the first few, and the tokens of a response."""
    command = [sys.executable, "-m", "penstock.runtime.cli.main", "run", "aipo", "--plain", f"--lag={lag}"]
    command += ["--model", str(model), "--data", str(data), "--eval-groups=0", f"--dtype={dtype}", "--lr=1e-4"]
    command += [f"--batch={PROMPTS}", f"--samples={SAMPLES}", f"--max-tokens={TOKENS}", f"--updates={updates}"]
    command += [f"--slots={PROMPTS * SAMPLES}", "--out", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=900)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = sorted(b["time_s"] - a["time_s"] for a, b in pairwise(rows[2:]))
    return {"step_s": seconds[len(seconds) // 2], "tokens": rows[-1]["tokens"] / (PROMPTS * SAMPLES)}


def trl(model: Path, data: Path, updates: int, dtype: str, folder: Path) -> dict[str, float] | None:
    """The same of TRL in a process of its own; None where TRL is not installed."""
    command = [sys.executable, __file__, "--trl", str(model), str(data), str(updates), dtype, str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_DISABLED": "true", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800)
    if done.returncode == 3:
        return None
    if done.returncode:
        raise RuntimeError(f"TRL ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def run_trl(model: str, data: str, updates: int, dtype: str, folder: str) -> None:
    """The child's part. GRPO without a KL term, loss and optimizer as TRL has them by default."""
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

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            lengths.append(logs.get("completions/mean_length", float("nan")))

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
    seconds = sorted(b - a for a, b in pairwise(ends[1:]))
    print(json.dumps({"step_s": seconds[len(seconds) // 2], "tokens": lengths[-2]}))


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it: elsewhere it is emulated, and no one would train in it."""
    flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(flags)


def main() -> None:
    if sys.argv[1:2] == ["--trl"]:
        model, data, updates, dtype, folder = sys.argv[2:]
        run_trl(model, data, int(updates), dtype, folder)
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/train.json")
    args = parser.parse_args()
    dtypes = [args.dtype] if args.dtype else ["float32", *(["bfloat16"] if multiplies_bfloat16() else [])]
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        parameters = write_model(place / "model", args.hidden, args.layers)
        data = place / "problems.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in problems(2000)))
        for turn, dtype in product(range(args.repeats), dtypes):
            for lag in (0, 1):
                out = place / f"penstock-{dtype}-{lag}-{turn}"
                run = penstock(place / "model", data, lag, args.updates, dtype, out)
                found.setdefault((dtype, f"lag {lag}"), []).append(run)
            other = trl(place / "model", data, max(6, args.updates // 2), dtype, place / "trl")
            found.setdefault((dtype, "trl"), []).extend([other] if other is not None else [])
            limit = limit_s(args.hidden, args.layers, PROMPTS * SAMPLES, PROMPT_TOKENS, run["tokens"], dtype, CORES)
            found.setdefault((dtype, "products alone"), []).append({"step_s": limit, "tokens": run["tokens"]})
    rows: list[dict[str, Any]] = []
    for (dtype, system), runs in found.items():
        if not runs:
            print(f"{dtype} {system}: not installed (pip install 'penstock[bench]'), left out")
            continue
        rate = spread([PROMPTS * SAMPLES / run["step_s"] for run in runs])
        tokens = runs[-1]["tokens"]
        rows.append({"dtype": dtype, "system": system, "completions_per_s": rate, "response_tokens": tokens})
    base = {row["dtype"]: row["completions_per_s"]["median"] for row in rows if row["system"] == "trl"}
    for row in rows:
        if row["dtype"] in base:
            row["over_trl"] = row["completions_per_s"]["median"] / base[row["dtype"]]
        ratio = f", {row['over_trl']:.2f} times TRL" if "over_trl" in row else ""
        print(f"{row['dtype']} {row['system']}: {row['completions_per_s']['median']:.1f} completions/s{ratio}")
    shape = {"parameters": parameters, "hidden": args.hidden, "layers": args.layers}
    setup = {**shape, "prompts": PROMPTS, "samples": SAMPLES, "max_tokens": TOKENS}
    publish("train", {"setup": setup, "rows": rows}, args.keep)


if __name__ == "__main__":
    main()
