import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from penstock.graph import GraphError, Policy, Program, load, program
from penstock.graph.errors import ELSEWHERE_CALLED
from penstock.graph.node import NodeDef
from penstock.nodes.score import math_answer
from penstock.programs.aipo import aipo
from penstock.runtime.cli.flags import VERBS, RunFlags, nearest_flag, unknown_flags
from penstock.runtime.cli.parse import parse
from penstock.runtime.cli.tracing import CommandError, built_in

from .conftest import Output


@program(defaults={"updates": 60})
def sample(  # type: ignore[no-untyped-def]
    policy: Policy,
    *,
    samples: int = 8,
    rho: float = 4.0,
    normalize: bool = True,
    choice: Literal["strict", "ready"] = "strict",
    weights: tuple[float, ...] = (1.0, 0.5),
    by: Any = math_answer,
    table: dict[str, int] = {"a": 1},  # noqa: B006
    folder: Path | None = None,
    files: tuple[Path, ...] = (Path("a"),),
    untyped=None,
) -> Policy:
    """An example.

    Args:
        samples: responses per prompt.
    """
    return policy


@program
def needy(policy: Policy, *, teacher: str) -> Policy:
    return policy


@program
def listing(policy: Policy, *, weights: list[float] = [1.0, 0.5], few: list[int] | None = [3]) -> Policy:  # noqa: B006
    return policy


def read(*words: str, of: Program[..., Any] = sample, verb: str = "run") -> tuple[dict[str, Any], Any]:
    return parse(of, verb, "sample", words)[:2]


def test_defaults_are_the_programs_own() -> None:
    options, flags = read()
    assert options == {
        "samples": 8, "rho": 4.0, "normalize": True, "choice": "strict", "weights": [1.0, 0.5],
        "by": {"path": "penstock.nodes.score:math_answer"}, "table": {"a": 1}, "folder": None, "files": ["a"],
        "untyped": None,
    }  # fmt: skip
    assert (flags.updates, flags.batch) == (60, 32)


@pytest.mark.filterwarnings("error")
@program
def clipped(
    policy: Policy, *, clip: float | None = 0.2, steps: int | None = 3, kind: Literal["a", "b"] | None = "a"
) -> Policy:
    return policy


def test_an_option_that_may_be_none_is_so_by_that_word(config: Callable[[str], str]) -> None:
    given = {"clip": None, "steps": None, "kind": None}
    assert read("--clip", "None", "--steps=None", "--kind", "None", of=clipped)[0] == given
    assert read("--config", config('clip = "None"'), of=clipped)[0] == {**given, "steps": 3, "kind": "a"}
    with pytest.raises(CommandError, match=r"^--clip: given 'none', needed a number$"):
        read("--clip", "none", of=clipped)


def test_an_option_may_be_a_list() -> None:
    assert read(of=listing)[0] == {"weights": [1.0, 0.5], "few": [3]}
    assert read("--weights", "2", "3", "--few", "None", of=listing)[0] == {"weights": [2.0, 3.0], "few": None}


def test_keyword_arguments_are_flags() -> None:
    words = "--samples 4 --rho 2 --no-normalize --choice ready --weights 1 2 3 --by my:rule --updates 5 --plain"
    words += " --folder here --files b c"
    options, flags = read(*words.split(), "--table", '{"b": 2}', "--untyped", "text")
    assert options == {
        "samples": 4, "rho": 2.0, "normalize": False, "choice": "ready", "weights": [1.0, 2.0, 3.0],
        "by": {"path": "my:rule"}, "table": {"b": 2}, "folder": "here", "files": ["b", "c"], "untyped": "text",
    }  # fmt: skip
    assert (flags.updates, flags.plain) == (5, True)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--sampels", "4"], [("--sampels", "--samples")]),
        (["--updatse=4", "--helpp"], [("--updatse", "--updates"), ("--helpp", "--help")]),
        (["--no-normalise", "-batch", "3"], [("--no-normalise", "--normalize"), ("-batch", "--batch")]),
        (["--max_token", "3", "--rho", "-1"], [("--max-token", "--max-tokens")]),
    ],
)
@pytest.mark.parametrize("verb", ["run", "check", "simulate", "plan"])
def test_a_flag_that_is_none_is_told_with_the_nearest(words: list[str], told: list[tuple[str, str]], verb: str) -> None:
    known = {field.name for field in dataclasses.fields(VERBS[verb])} | {flag.name for flag in sample.flags} | {"help"}
    with pytest.raises(CommandError) as error:
        read(*words, verb=verb)
    lines = str(error.value).splitlines()
    expected = [(given, near) for given, near in told if near.lstrip("-").replace("-", "_") in known]
    first = [
        re.match(r"given (\S+), needed a flag of `penstock \w+ sample`; the nearest: (\S+?)(,|$)", x) for x in lines
    ]
    assert set(expected) <= {(match[1], match[2]) for match in first if match}
    assert {given for given, _ in told} == {line.split()[1].rstrip(",") for line in lines}


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("num_generations", "--samples"),
        ("group_size", "--samples"),
        ("run_dir", "--out"),
        ("output_dir", "--out"),
        ("epochs", "the nearest: --updates, the number of updates"),
        ("num-train-epochs", "the nearest: --updates, the number of updates"),
        ("gradient_accumulation_steps", "the nearest: --micro-tokens, the number of tokens in a micro-batch"),
        ("learning_rate", "--lr"),
        ("max-new-tokens", "--max-tokens"),
        ("lr_scheduler_type", "--lr-decay"),
        ("--max-completion-length", "--max-tokens"),
        ("per_device_train_batch_size", "--batch"),
        ("temperature", "option of generate,"),
        ("max_grad_norm", "option of aipo_update"),
        ("beta", "--"),  # this program has no such option
    ],
)
def test_the_words_of_other_libraries_are_answered_with_those_of_here(
    config: Callable[[str], str], word: str, told: str
) -> None:
    flag = f"--{word.lstrip('-')}"
    with pytest.raises(CommandError) as error:
        read(flag, "1", of=aipo)
    assert told in str(error.value).partition(";")[2]
    with pytest.raises(CommandError) as error:
        read("--config", config(f"{word.lstrip('-')} = 1"), of=aipo)
    assert told.replace("--", "") in str(error.value).partition(";")[2]


def test_words_in_groups_are_answered_as_flags_but_for_the_value_of_one() -> None:
    with pytest.raises(CommandError, match=r"^given data\.train-batch-size, .*; here it is --batch$"):
        read("--updates=3", "data.train_batch_size=64", of=aipo)
    assert read("--out", "lr.swept=1", of=aipo)[1].out == "lr.swept=1"
    assert read("--files", "math.right=1", "code.right=2")[0]["files"] == ["math.right=1", "code.right=2"]
    assert unknown_flags(["aipo.lr=3e-4"], ["dir"], "penstock report") == ""  # the folder of a sweep


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("critic.optim.lr", "; here it is --critic-lr"),
        ("actor.optim.lr", "; here it is --lr"),
        ("beta", "; it is an option of dpo_update,"),  # an exact name wins over what other libraries call so
        ("kl-coef", "; here it is --kl"),
    ],
)
def test_what_is_called_so_here_goes_before_what_others_call_so(name: str, told: str) -> None:
    said = nearest_flag(name, ["lr", "critic_lr", "kl"], lambda: {"beta": "dpo_update", "kl": "aipo_update"})
    assert said.startswith(told)


def test_a_plan_says_what_runs_have_otherwise_and_nothing_else(capsys: Output) -> None:
    made = program(defaults={"max_prompt": 2048, "max_tokens": 24, "generator_precision": "int8"})(sample.fn)
    read("--cluster", "c.toml", of=made, verb="plan")
    own, others = "--max-tokens 4096 --generator-precision none", "--max-tokens 24 --generator-precision int8"
    assert capsys.readouterr().err == f"note: planned for {own}; runs of sample have {others} by default\n"


def test_what_the_words_of_other_libraries_stand_for_is_there() -> None:
    known = {field.name for cls in VERBS.values() for field in dataclasses.fields(cls)}
    for found in map(load, built_in()):
        assert isinstance(found, Program)
        nodes = [value for value in found.fn.__globals__.values() if isinstance(value, NodeDef)]
        known |= {flag.name for flag in found.flags} | {option for node in nodes for option in node.interface.options}
    assert set(ELSEWHERE_CALLED.values()) <= known
    assert not ELSEWHERE_CALLED.keys() & {field.name for field in dataclasses.fields(RunFlags)}


def test_an_argument_without_default_is_required() -> None:
    assert read("--teacher", "big", of=needy)[0] == {"teacher": "big"}


@pytest.mark.parametrize(
    ("words", "said", "of"), [("--samples 1 2", "2", sample), ("", "--teacher", needy)], ids=["two", "lacking"]
)
def test_a_usage_error_exits_with_2_and_names_the_flag(
    words: str, said: str, of: Program[..., Any], capsys: Output
) -> None:
    with pytest.raises(SystemExit, match="2"):
        read(*words.split(), of=of)
    assert said in capsys.readouterr().err


def test_help_explains_both_kinds_of_flags(capsys: Output) -> None:
    with pytest.raises(SystemExit, match="0"):
        read("--help")
    shown = capsys.readouterr().out
    for needed in ("An example.", "penstock run sample --lag", "responses per prompt.", "Updates of the policy", "60"):
        assert needed in shown


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_each_flag_in_the_box_of_its_subject(verb: str, capsys: Output) -> None:
    with pytest.raises(SystemExit, match="0"):
        read("--help", verb=verb)
    # The lines of a box are drawn with other characters where the encoding has none for them.
    _, *boxes = re.split(r"^\W+(\S+ )?options \W+$", capsys.readouterr().out, flags=re.MULTILINE)
    shown = [
        ((name or "").strip(), flag.replace("-", "_"))
        for name, box in zip(boxes[::2], boxes[1::2], strict=True)
        for flag in re.findall(r"^\W --([a-z]\S*)", box, re.MULTILINE)
    ]
    own = {"no_normalize" if flag.name == "normalize" else flag.name for flag in sample.flags}
    assert sorted(flag for _, flag in shown) == sorted({field.name for field in dataclasses.fields(VERBS[verb])} | own)
    assert own == {flag for name, flag in shown if name == "program"}
    if verb in ("run", "check"):
        assert {("training", "batch"), ("placement", "mesh"), ("placement", "cluster")} < set(shown)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--samples many", "^--samples: given 'many', needed a whole number$"),
        ("--choice random", "^--choice: given 'random', needed one of strict, ready$"),
        ("--choice", "^--choice: given no value, needed one of strict, ready$"),
        ("--weights 1 x -2 y", "^--weights: given 'x', needed a number\n--weights: given 'y', needed a number$"),
        ("--track wandb w", "^--track: given 'w', needed one of tensorboard, wandb, trackio, mlflow$"),
        ("--delta -1", "^--delta: given -1, needed at least 0$"),
        ("--slots 0 --drops 0", "^--slots: given 0, needed at least 1\n--drops: given 0, needed at least 1$"),
        ("--max-tokens -5", "^--max-tokens: given -5, needed at least 1$"),
        (f"--seed {2**63}", f"^--seed: given {2**63}, needed at most {2**63 - 1}$"),
        (f"--micro-tokens {10**20}", f"^--micro-tokens: given {10**20}, needed at most {2**53}$"),
        ("--lora-alpha nan", "^--lora-alpha: given nan, needed a finite number above 0$"),
        ("--lora-alpha 0", "^--lora-alpha: given 0.0, needed a finite number above 0$"),
        ("--mismatch-limit -1", "^--mismatch-limit: given -1.0, needed a finite number above 0$"),
        ("--deadline nan", "^--deadline: given nan, needed a finite number above 0$"),
        ("--startup-deadline 0", "^--startup-deadline: given 0.0, needed a finite number above 0$"),
    ],
)
def test_values_that_cannot_be_meant_are_refused_at_once(words: str, said: str) -> None:
    with pytest.raises(CommandError, match=said):
        read(*words.split())


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        (tmp_path / "c.toml").write_text(text)
        return str(tmp_path / "c.toml")

    return write


def test_a_config_file_gives_flags_and_the_command_line_wins(config: Callable[[str], str], capsys: Output) -> None:
    file = config("samples = 2\nmax-tokens = 7\nnormalize = false\nplain = true\nweights = [3, 4]\nbatch = 5")
    options, flags = read("--batch", "6", "--config", file)
    assert (options["samples"], options["normalize"], options["weights"]) == (2, False, [3.0, 4.0])
    assert (flags.max_tokens, flags.plain, flags.batch) == (7, True, 6)
    assert read(f"--config={file}")[1].batch == 5
    with pytest.raises(SystemExit):
        read("--config", config("batch = [1, 2]"))
    assert "The config file stands for: --batch 1 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("updats = 3", r"c.toml: unknown key 'updats'; the nearest: updates"),
        ("confg = 'x.toml'", r"c.toml: unknown key 'confg'; (?!.*config)"),
        ("config = 'x.toml'", r"c.toml: given config = 'x.toml', needed .*: a config file names no other one$"),
        ("[run]\nupdates = 3", r"c.toml: 'run' is a table, needed a value \(flags are not grouped\)"),
        ("samples = {a = 1}", r"'samples' is a table"),
        ("samples = 2.5", r"c.toml: --samples: given '2.5', needed a whole number$"),
        ("updates = true", r"c.toml: --updates: given 'true', needed a whole number$"),
        ("samples = false", r"c.toml: --samples: given 'false', needed a whole number$"),
        ('weights = [1, "many"]', r"c.toml: --weights: given 'many', needed a number$"),
        ("samples = = 3", r"not TOML.*line 1"),
    ],
)
def test_a_config_file_that_cannot_work_is_an_error(config: Callable[[str], str], text: str, said: str) -> None:
    with pytest.raises(CommandError, match=said):
        read("--config", config(text))
    with pytest.raises(CommandError, match="cannot be read: No such file"):
        read("--config", "/nowhere/c.toml")


def test_an_option_may_not_take_a_flags_name() -> None:
    @program
    def clashing(policy: Policy, *, updates: int = 3, batch: int = 1, other: int = 0) -> Policy:
        return policy

    with pytest.raises(GraphError) as error:
        read(of=clashing)
    assert [(fault.what, fault.where) for fault in error.value.faults] == [
        ("clashing: option 'updates'", clashing.where),
        ("clashing: option 'batch'", clashing.where),
    ]
    assert read(of=clashing, verb="show")[0] == {"updates": 3, "batch": 1, "other": 0}
    assert read("--batch", "8", of=clashing, verb="check")[1].batch == 8  # sets the flag; `check` reports the option


def test_defaults_for_a_flag_that_is_none_are_an_error() -> None:
    @program(defaults={"updats": 3})
    def wrong(policy: Policy) -> Policy:
        return policy

    with pytest.raises(CommandError, match="there is no flag 'updats'; the nearest: updates"):
        read(of=wrong)


@pytest.mark.parametrize("verb", ["simulate", "plan"])
def test_the_model_and_lengths_of_a_program_are_not_planned_for_and_that_is_told(verb: str, capsys: Output) -> None:
    @program(defaults={"model": "new", "batch": 4, "max_tokens": 1})
    def fresh(policy: Policy) -> Policy:
        return policy

    assert (read(of=fresh)[1].model, read(of=fresh, verb=verb)[1].model) == ("new", "")
    assert (read(of=fresh)[1].max_tokens, read(of=fresh, verb=verb)[1].max_tokens) == (1, 4096)
    assert capsys.readouterr().err == ""
    read("--cluster", "8xH100", of=fresh, verb=verb)
    assert re.findall(r"--\S+ \d+", capsys.readouterr().err) == ["--max-tokens 4096", "--max-tokens 1"]
    read("--cluster", "8xH100", "--max-tokens", "7", of=fresh, verb=verb)
    assert capsys.readouterr().err == ""


def test_a_range_of_generators_is_two_flags(config: Callable[[str], str]) -> None:
    for words in (["--generators", "2..8"], ["--generators=2..8"], ["--config", config('generators = "2..8"')]):
        flags = parse(sample, "run", "sample", [*words, "--lost-replica", "replace"]).flags
        assert (flags.first_generators, flags.generators) == (2, 8)
