"""Reward by samples seen, of `aipo` at lag 0 and of TRL's GRPOTrainer: is the difference larger than that of seeds?

    python benchmarks/reward.py [--processes 2] [--keep]

Both begin with the demo's base model and see the same problems in the same order, 16 prompts of 8 samples per update,
which is one AdamW step. Rule, token average, learning rate, decay rates, clipping and number format are the same;
rewards are not divided by their standard deviation, there is no KL term, and the learning rate is constant. On samples
of the policy itself the two losses have the same gradient. TRL is in the extra `bench`. Finished runs are kept in
--scratch.

The verdict compares the mean reward of the last updates, and of all, by an exact permutation test: the share of the
ways to divide the runs into two groups whose means differ at least as much. "within noise" means above 5 %.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from chart import line_chart
from here import Job, run_here, serve, shared_base, spread_out
from report import ROOT, Keep, publish, spread

from penstock.graph import Program, load
from penstock.host import cache_folder
from penstock.runtime.control.run_config import RunOptions

OURS, THEIRS = "aipo, lag 0", "TRL"
SEEDS = (0, 1, 2, 3, 4)
UPDATES, BATCH, SAMPLES, MAX_TOKENS, RATE = 40, 16, 8, 16, 2e-4
BETAS, CLIP = (0.9, 0.95), 1.0
"""Those of all updates in this library (`UpdateOptions`)."""
LAST = 8
"""The number of last updates whose rewards are averaged."""
NOISE = 0.05
PICTURE = ROOT / "docs" / "img" / "reward.svg"


def work(job: Job, base: str) -> Job:
    """Run once; return the job with the mean reward of each update."""
    return {**job, "rewards": (ours if job["system"] == OURS else theirs)(base, job["seed"])}


def ours(base: str, seed: int) -> list[float]:
    program = load("aipo")
    assert isinstance(program, Program)
    flags = RunOptions(
        updates=UPDATES, batch=BATCH, seed=seed, model=base, max_tokens=MAX_TOKENS, slots=BATCH * SAMPLES, eval_groups=1
    )
    found = run_here(program, {"lag": 0, "lr": RATE, "samples": SAMPLES}, flags)
    if found["status"] != "done":
        raise RuntimeError(f"aipo with seed {seed} {found['status']}: {found['error']}")
    return [round(row["reward_mean"], 4) for row in found["rows"]]


def theirs(base: str, seed: int) -> list[float]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from penstock.graph.context import Context
    from penstock.nodes.data import open_prompts
    from penstock.nodes.score import math_answer

    torch.set_num_threads(1)
    source = open_prompts(Context(node="prompts", seed=seed, batch=BATCH))
    read = [source.read(ordinal) for ordinal in range(UPDATES * BATCH)]
    rows = [{"prompt": prompts.texts[0], "answer": prompts.answers[0]} for prompts in read]
    rewards: list[float] = []

    class Told(TrainerCallback):
        def on_log(self, *args: Any, **kwargs: Any) -> None:
            logs = kwargs["logs"]
            rewards.extend([round(logs["reward"], 4)] if "reward" in logs else [])

    def reward(prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        return [math_answer(*one) for one in zip(prompts, completions, answer, strict=True)]

    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            per_device_train_batch_size=BATCH * SAMPLES,
            num_generations=SAMPLES,
            max_completion_length=MAX_TOKENS,
            temperature=1.0,
            max_steps=UPDATES,
            seed=seed,
            shuffle_dataset=False,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            weight_decay=0.0,
            max_grad_norm=CLIP,
            beta=0.0,
            scale_rewards="none",
            loss_type="dapo",
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(base, padding_side="left"),
        )
        trainer.add_callback(Told())
        with redirect_stdout(sys.stderr):  # standard output has only results
            trainer.train()
    assert len(rewards) == UPDATES, rewards
    return rewards


def chance(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the share of all divisions of the values into two groups of these sizes whose means differ at least as
    much."""
    values = [*first, *second]

    def apart(chosen: Sequence[int]) -> float:
        others = [value for index, value in enumerate(values) if index not in chosen]
        return abs(fmean(values[index] for index in chosen) - fmean(others))

    seen = apart(range(len(first))) - 1e-9
    ways = list(combinations(range(len(values)), len(first)))
    return sum(apart(way) >= seen for way in ways) / len(ways)


def tables(runs: Sequence[Job]) -> dict[str, Any]:
    """Return `rows`, each system's mean rewards ± the standard deviation between seeds; the `verdict` on the two; and
    `curve`, the reward by samples seen, as means over four updates."""
    of = {system: [run["rewards"] for run in runs if run["system"] == system] for system in (OURS, THEIRS)}
    last = {system: [fmean(rewards[-LAST:]) for rewards in found] for system, found in of.items()}
    whole = {system: [fmean(rewards) for rewards in found] for system, found in of.items()}
    rows = [
        {
            "system": system,
            "seeds": len(of[system]),
            f"reward, last {LAST} updates": _mean(last[system]),
            "reward, all updates": _mean(whole[system]),
        }
        for system in of
    ]
    verdict = []
    for what, figures in ((f"last {LAST} updates", last), ("all updates", whole)):
        found = chance(figures[OURS], figures[THEIRS])
        difference = fmean(figures[OURS]) - fmean(figures[THEIRS])
        said = "within noise" if found > NOISE else "apart"
        verdict.append({"reward of": what, "difference": round(difference, 4), "chance": round(found, 3), "is": said})
    curve = []
    for end in range(4, UPDATES + 1, 4):
        means = {system: [fmean(rewards[end - 4 : end]) for rewards in found] for system, found in of.items()}
        curve.append({"samples": end * BATCH * SAMPLES, **{system: spread(found) for system, found in means.items()}})
    return {"rows": rows, "verdict": verdict, "curve": curve}


def _mean(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f} ± {stdev(values):.3f}"


def picture(curve: Sequence[Mapping[str, Any]], before: float) -> str:
    lines = {system: [row[system] for row in curve] for system in (OURS, THEIRS)}
    title = f"Reward by samples seen: median of {len(SEEDS)} seeds, with smallest and largest"
    return line_chart(lines, [str(row["samples"]) for row in curve], title, "samples seen", ("first", before))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=["table", "serve"], default="table")
    parser.add_argument("--scratch", type=Path, default=cache_folder() / "reward", help="another for another set-up")
    parser.add_argument("--processes", type=int, default=2, help="runs at once, one thread each")
    parser.add_argument("--keep", action=Keep, help="write benchmarks/results/reward.json and the picture")
    args = parser.parse_args()
    # Checked before any run of ours, since theirs come later and would end the benchmark.
    if lacking := [name for name in ("trl", "transformers", "datasets", "accelerate") if find_spec(name) is None]:
        parser.error(f"given an interpreter without {', '.join(lacking)}, needed them: pip install 'penstock[bench]'")
    if args.what == "serve":
        os.environ.update(HF_HUB_OFFLINE="1", WANDB_DISABLED="true", CUDA_VISIBLE_DEVICES="")
        serve(partial(work, base=str(shared_base(args.scratch))))
        return
    shared_base(args.scratch)
    worker = [__file__, "serve", "--scratch", str(args.scratch)]
    jobs = [{"system": system, "seed": seed} for seed in SEEDS for system in (OURS, THEIRS)]
    runs = spread_out(jobs, worker, args.processes, args.scratch / "runs.jsonl")
    found = tables(runs)
    setup = {
        "updates": UPDATES,
        "prompts": BATCH,
        "samples": SAMPLES,
        "max_tokens": MAX_TOKENS,
        "learning rate": RATE,
        "seeds": len(SEEDS),
    }
    if args.keep:
        PICTURE.write_text(picture(found["curve"], fmean(run["rewards"][0] for run in runs)))
    publish("reward", {"setup": setup, **found}, args.keep)


if __name__ == "__main__":
    main()
