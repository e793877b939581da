"""Faults of a program: their form, their codes, and where in the user's file they are.

A `Fault` says what is wrong, what was given, what is needed and where it was written. Its `code` is a stable word that
tests and tools match on; the texts may change. docs/check-errors.md lists all codes with cause and cure; a test checks
that none is missing. `check` returns faults, everything else raises them in a `GraphError`.
"""

import difflib
import inspect
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `where` is "file:line" of the call, "" for a graph without a source file."""

    code: str
    what: str
    given: str
    needed: str
    where: str = ""

    def __str__(self) -> str:
        # docs/check-errors.md lists cause and cure by the code.
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.what} [{self.code}]\n    given   {self.given}\n    needed  {self.needed}"


class GraphError(ValueError):
    """The user's program, path or graph cannot work; `faults` says why."""

    def __init__(self, *faults: Fault) -> None:
        super().__init__("\n".join(map(str, faults)))
        self.faults = faults


def fault(code: str, what: str, given: str, needed: str, where: str | None = None) -> GraphError:
    """A `GraphError` of one fault, at the user's line unless `where` is given."""
    return GraphError(Fault(code, what, given, needed, caller() if where is None else where))


_LIBRARY = (f"{__package__}.", "penstock.nodes.", "torch.", "numpy.")


def caller() -> str:
    """ "file:line" of the program that is being traced: the innermost frame outside this package, the nodes, and the
    libraries that refuse its values."""
    frame = sys._getframe(1)
    # Helpers in `penstock.nodes` call nodes, too, but the user needs the line in their own file.
    while frame.f_globals.get("__name__", "").startswith(_LIBRARY) and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def defined(function: object) -> str:
    """ "file:line" of a function's definition; "" if it was not written in Python."""
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, CodeType) else ""


# Names in TRL, verl, NeMo-RL, OpenRLHF, AReaL and prime-rl, by the flag or node option here that they mean.
ELSEWHERE_CALLED = {
    theirs: ours
    for ours, words in {
        "lr": "learning_rate actor_learning_rate",
        "critic_lr": "critic_learning_rate",
        "entropy": "entropy_coef entropy_coeff entropy_loss_coef ent_coef",
        "kl": "beta kl_coef kl_loss_coef init_kl_coef reference_policy_kl_penalty",
        "clip_norm": "max_grad_norm clip_grad",
        "clip": "epsilon eps_clip clip_ratio",
        "clip_low": "clip_ratio_low ratio_clip_min",
        "clip_high": "epsilon_high clip_ratio_high ratio_clip_max",
        "epochs": "num_iterations ppo_epochs",
        "by": "reward_func reward_funcs reward_fn reward_function",
        "samples": "num_generations num_generations_per_prompt n_samples_per_prompt rollouts_per_example n group_size",
        "lag": "max_head_offpolicyness max_async_level max_trajectory_age_steps staleness_threshold",
        "batch": "per_device_train_batch_size train_batch_size generation_batch_size rollout_batch_size batch_size "
        "num_prompts_per_step",
        "micro_tokens": "ppo_max_token_len_per_gpu gradient_accumulation_steps",
        "updates": "max_steps max_num_steps total_training_steps num_steps steps "
        "epochs num_epochs num_train_epochs total_epochs",
        "lr_warmup": "warmup_steps lr_warmup_steps num_warmup_steps",
        "lr_decay": "lr_scheduler_type lr_scheduler",
        "max_tokens": "max_completion_length max_new_tokens max_response_length generate_max_len",
        "max_prompt": "max_prompt_length prompt_max_len",
        "model": "model_name model_name_or_path model_path pretrain",
        "data": "dataset dataset_name prompt_data train_files",
        "data_split": "dataset_split dataset_train_split",
        "eval_data": "eval_dataset val_files",
        "eval_split": "dataset_test_split",
        "prompt_field": "input_key",
        "answer_field": "label_key",
        "system": "system_prompt",
        "chat_template_kwargs": "apply_chat_template_kwargs",
        "dtype": "bf16 fp16 torch_dtype",
        "lora": "use_peft lora_r lora_rank",
        "lora_targets": "lora_target_modules target_modules",
        "recompute": "gradient_checkpointing activation_checkpointing",
        "engine": "use_vllm",
        "generators": "vllm_num_engines",
        "mesh": "tensor_parallel_size tensor_model_parallel_size vllm_tensor_parallel_size",
        "out": "output_dir run_dir run_name save_dir save_path log_dir logging_dir checkpoint_dir ckpt_path "
        "default_local_dir experiment_name",
        "checkpoint_every": "save_steps save_freq save_period save_every",
        "keep": "save_total_limit keep_top_k max_ckpt_num",
        "keep_best": "metric_for_best_model load_best_model_at_end metric_name",
        "resume": "resume_from_checkpoint resume_from resume_mode",
        "save_samples": "log_completions",
        "track": "report_to use_wandb wandb logger",
        "track_project": "wandb_project project_name",
    }.items()
    for theirs in words.split()
}


# Those of them whose numbers are of something else, with what the number is here.
_COUNTED_HERE = {
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "total_epochs"), "the number of updates"),
    "gradient_accumulation_steps": "the number of tokens in a micro-batch",
}


def called_here(name: str, ours: str) -> str:
    """The end of a message that suggests `ours` for another library's name."""
    counted = _COUNTED_HERE.get(name.lstrip("-").replace("-", "_"))
    return f"; the nearest: {ours}, {counted}" if counted else f"; here it is {ours}"


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a message that suggests names, the most similar first; for another library's name, only the one that
    it means here."""
    known = sorted(set(names))
    bare = {other.lstrip("-").replace("-", "_"): other for other in known}
    if (ours := ELSEWHERE_CALLED.get(name.lstrip("-").replace("-", "_"))) in bare:
        return called_here(name, bare[ours])

    def likeness(other: str) -> float:
        # The sorted letters count, too: most typos swap two letters.
        pairs = ((name, other), (sorted(name), sorted(other)))
        return sum(difflib.SequenceMatcher(None, one, two).ratio() for one, two in pairs)

    if close := difflib.get_close_matches(name, known, n=3, cutoff=0.5):
        return f"; the nearest: {', '.join(sorted(close, key=likeness, reverse=True))}"
    return f"; there are: {', '.join(known[:12])}{', …' if len(known) > 12 else ''}" if known else ""
