"""Command lines that cannot work: each gives its exit status and what is needed; nothing is started or written."""

import re
import socket
import venv
from pathlib import Path

import pytest

from penstock.runtime.cli import children
from penstock.runtime.cli.main import VERBS, main
from penstock.runtime.cluster import interpreters
from penstock.runtime.cluster.cluster import SeenGpu
from penstock.runtime.control.security import Keys
from penstock.runtime.record import trackers
from tests.runtime.report.runs import simulated_run

from .conftest import Output, Patch, Refuse

LANGUAGE = Path(__file__).parents[2] / "programs_for_language.py"
WORK = "--model qwen3-4b --batch 8 --lengths 200,0.7 --max-tokens 1024"
H100 = f"--cluster 1x8xH100 {WORK}"
FP8_ON_CPU = r"--generator-precision \[no-precision\].*given +fp8 on a CPU.*needed +int8, or a GPU.*1 fault$"
INT8_OF_ADAPTERS = r"aipo\.py:\d+: generate: input 'behaviour' \[no-precision\].*given +int8 with adapters of rank 2"
INVARIANT_INT8 = r"aipo\.py:\d+: --invariant \[not-invariant\].*given +weights in int8 \(from broadcast\)"
INVARIANT_TP = r"--invariant \[not-invariant\].*given +generator=tp2"
NOT_COMPUTED = (
    ("--generator-precision fp8", FP8_ON_CPU),
    ("--generator-precision int8 --lora 2", INT8_OF_ADAPTERS),
    ("--invariant --generator-precision int8", INVARIANT_INT8),
    ("--invariant --mesh generator=tp2", INVARIANT_TP),
    *((f"--invariant --wire {wire}", rf"\[not-invariant\].*given +--wire {wire}") for wire in ("bfloat16", "int8")),
    ("--invariant --wire bfloat16 --dtype bfloat16 --lora 2", r"\[not-invariant\].*given +--wire bfloat16"),
)
NO_ADAPTERS = (
    ("--lora 4 --lora-targets qproj", "given +LoRA: the target 'qproj' needed +linear maps of a layer"),
    ("--lora-targets q_proj", "given +LoRA: targets q_proj without a rank needed +--lora RANK, too"),
    ("--lora 5000", r"given +LoRA: rank 5000 for matrices whose shorter sides are at most \d+ needed +at most"),
)
RANGE = "--on agents --lost-replica replace --generators 2..8"
JOB = "--on kubernetes --image i --claim c --agents 2"
OWN = '[[hosts]]\nname = "here"\ncores = 1\n\n'
FILE = '[[hosts]]\nname = "a"\ncores = 8\ndevices = ["cuda:0", "cuda:1"]\ngpu = "H100"\n'


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cpu.toml").write_text('[[hosts]]\nname = "local"\ncores = 2\n')
    (tmp_path / "none.toml").write_text(FILE.replace('"cuda:0", "cuda:1"', ""))
    (tmp_path / "words.toml").write_text('lag = 1\nbatch = "x"\n')
    (tmp_path / "typo.toml").write_text(FILE.replace("devices", "device"))
    rows = [f'{{"question": "{number}+1?", "answer": "#### {number + 1}"}}\n' for number in range(10)]
    (tmp_path / "d.jsonl").write_text("".join(rows))


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("simulat", 2, "penstock: there is no verb 'simulat'; did you mean 'simulate'?"),
        ("--helpp", 2, "did you mean '--help'?"),
        *((f"{verb} --helpp", 2, "given --helpp, needed a flag of .*; the nearest: --help") for verb in VERBS),
        *((verb, 2, "needed a PROGRAM: aipo, cispo, ") for verb in ("run", "show", "check", "plan", "simulate")),
        ("show aipoo", 2, "the nearest: aipo"),
        ("show toy --evaluation", 2, "toy has no evaluation"),
        ("doctor --out machine.toml", 2, "--out.*without --measure"),
        # run
        ("run toy --updatse 3", 2, "the nearest: --updates"),
        ("run toy --lag -1", 2, "given -1.*1 fault"),
        ("run toy --generators 8..2", 2, "--generators: given '8..2', needed a range from at least 1 .* such as 2..8"),
        ("run toy --generators=0..2", 2, "--generators: given '0..2', needed a range"),
        ("run toy --lost-replica replace --generators 2..", 2, "--generators: given '2..', needed a range"),
        ("run toy --generators 0", 2, "--generators: given 0, needed at least 1"),
        ("run toy --lag two --batch=x", 2, "--lag: given 'two', .* --batch: given 'x', needed a whole number"),
        ("run toy --lag --updates 3", 2, "--lag: given no value, needed a whole number"),
        ("run sft --model new --data d.jsonl --row fields", 2, "--row: given 'fields', needed MODULE:NAME or FILE"),
        ("run sft --model new --data d.jsonl --row f.py:fields", 2, "--row: given 'f.py:fields': there is no file"),
        ("run toy --grace 1e-4x", 2, "--grace: given '1e-4x', needed a number"),
        ("run toy --dtype fp8 --model", 2, "--dtype: given 'fp8', needed one of float32, .* --model: given no value"),
        ("run toy --config words.toml", 2, "--config words.toml: --batch: given 'x', needed a whole number"),
        ("simulate toy --generators 2..3", 2, "--generators: given '2..3', needed a whole number"),
        ("watch . --port x", 2, "--port: given 'x', needed a whole number"),
        ("run toy --cluster /nowhere.toml", 2, "given no file there"),
        ("run toy --cluster 0xH100", 2, "words such as 8xH100 are for `plan` and `simulate`"),
        *((f"run toy --device {name}", 2, f"--device: given {name!r}") for name in ("tpu", "cuda:x", "cpu:")),
        ("run toy --device cuda:99", 2, "device: given 'cuda:99' for pool trainer; host local has"),
        ("run toy --device cpu --transport nccl", 2, "--transport: given nccl: trainer/0 rank 0 is on the CPU"),
        ("run toy --device cpu --transport cuda_ipc", 2, "--transport: given cuda_ipc: trainer/0 rank 0 is on the CPU"),
        ("run aipo --data d.jsonl", 2, r"--model: given none for --data \S+d.jsonl; needed --model DIR"),
        ("run tool_use --no-sandbox", 2, "--model: given none for --data calculator, the default of tool_use; needed "),
        # run as a job
        ("run toy --on kubernetes", 2, "given no --image, --claim, --agents, needed: --image: a container image"),
        ("run toy --on kubernetes --image i --claim c", 2, "given no --agents, needed: --agents: how many Pods"),
        (f"run toy {JOB} --image", 2, "--image"),
        (f"run toy {JOB} --bind a:1", 2, "given --bind with --on kubernetes, needed none: the controller's Pod"),
        (f"run toy {JOB} --ticket-keys k", 2, "given --ticket-keys with --on kubernetes, needed none"),
        (f"run toy {JOB} --cluster cpu.toml", 2, "given --on and --cluster, needed one of them"),
        (f"run toy {JOB} --in-process", 2, "given --on and --in-process, needed one of them"),
        (f"run toy {JOB} --out here", 2, "--out: given 'here', needed a folder in /runs"),
        (f"run toy {JOB} --namespace Team", 2, "--namespace: given 'Team'"),
        (f"run toy {JOB} --memory-per-agent much", 2, "--memory-per-agent: given 'much', needed a quantity"),
        (f"run toy {JOB} --gpus-per-agent -1", 2, "--gpus-per-agent: given -1, needed at least 0"),
        (f"run toy {JOB} --agents 0", 2, "--agents: given 0, needed at least 1"),
        (f"run toy {JOB} --lag -1", 2, "given -1.*1 fault"),
        (f"run toy {JOB} -- --exclusive", 2, "given '--exclusive' behind a -- with --on kubernetes"),
        ("run toy -- --exclusive", 2, "given '--exclusive' behind a -- without --on"),
        ("run toy --dry-run", 2, "given --dry-run without --on, needed --on kubernetes"),
        ("run toy --on agents --agents 2 --image i", 2, "given --image with --on agents, needed --on kubernetes"),
        ("run toy --on slurm", 2, "given no allocation of Slurm .*needed `sbatch` or `salloc`"),
        ("run toy --on slurm --dry-run", 2, "given --dry-run with --on slurm, needed .*--on slurm --submit"),
        ("run toy --on agents --agents 2 --submit", 2, "given --submit with --on agents, needed --on slurm --submit"),
        ("run toy --on slurm --submit --nodes 2", 2, "sbatch stand behind a --"),
        ("run toy --on slurm -- --nodes 2", 2, "given '--nodes 2' behind a -- with --on slurm"),
        ("run toy --on slurm --submit --bind a:1", 2, "given --bind with --on slurm, needed none"),
        ("run toy --on slurm --submit -- 4", 2, "given '4' first behind the --, needed options of sbatch"),
        ("run toy --on slurm --submit -- --output=o", 2, "given --output=o behind the --, needed options without it"),
        ("run toy --on slurm --submit --seed 1 -- -a0-4", 2, "given --seed and --array, needed one of them"),
        ("run toy --on slurm --submit", 1, "given no sbatch in PATH"),
        ("run toy --on agents", 2, "given no --agents N, needed how many agents will come"),
        (f"run toy {RANGE} --agents 2", 2, r"given 2 agents, needed 3 for --generators 2..8: .*\(--agents 3\)"),
        ("run toy --on agents --agents 1 --place generator=3", 2, "given 1 agent, needed 4 for --place generator=3"),
        ("run toy --on agents --agents 2 --place trainer=1-0", 2, "given 'trainer=1-0', needed POOL=NUMBERS"),
        ("run toy --on agents --agents 2 --place generator=b", 2, "--place: given 'generator=b', needed POOL=NUMBERS"),
        ("resume . --on kubernetes --agents 2", 2, "holds no run"),
        ("run dapo --versions pinned --model new", 2, r"--versions pinned \[unmet-rule\] given the filter keep"),
        ("run curriculum --on-failure replace --model new", 2, r"--on-failure replace \[unmet-rule\] given choose"),
        *((f"run aipo {words}", 2, said) for words, said in NOT_COMPUTED),
        ("run aipo --invariant --dtype float16", 2, r"aipo.py:\d+: generate: .*not-invariant.*given +float16"),
        ("run aipo --mesh generator=tp8", 2, "mesh-cut.*given 4 attention heads"),
        ("run aipo --mesh trainer=fsdp2xep2", 2, "mesh-cut.*given a llama without experts"),
        ("resume nowhere", 2, "no such folder"),
        (f"resume {'long' * 100}", 2, "cannot be read: File name too long; needed the folder of a run"),
        ("resume . --lr 1e-5", 2, "given --lr, needed a flag of `penstock resume`, .* other options as they were;"),
        *((f"{verb} .", 2, "holds no run") for verb in ("resume", "report", "replay", "watch", "watch --once")),
        (f"run toy --generators {10**6}", 2, f"--generators {10**6}: given {10**6} ranks on a host .*needed at most"),
        # plan
        (f"plan toy --engine vllm {WORK}", 2, "given --engine, which `penstock run` has, needed a flag of"),
        ("plan aipo", 2, "--cluster: given nothing"),
        *((f"{verb} aipo --cluster 1x8xH100", 2, "--model: given nothing") for verb in ("plan", "simulate")),
        *((f"{verb} aipo --cluster 0x8xH100 {WORK}", 2, "needed at least 1 host") for verb in ("plan", "simulate")),
        *((f"{verb} aipo --cluster 1x8xH10 {WORK}", 2, "did you mean 'H100'") for verb in ("plan", "simulate")),
        *((f"{verb} aipo --cluster this {WORK}", 2, "needed first: penstock doctor") for verb in ("plan", "simulate")),
        *((f"{verb} aipo --cluster cpu.toml {WORK}", 2, "needed GPUs; .*--from RUN") for verb in ("plan", "simulate")),
        ("plan aipo --cluster 1x8xH100 --model lama-8b", 2, "did you mean 'llama-8b'"),
        (f"plan aipo {H100} --lengths long", 2, "needed MEAN,SIGMA"),
        (f"plan aipo {H100} --batch 0", 2, "--batch: given 0, needed at least 1"),
        (f"plan aipo {H100} --time-limit 0", 2, "--time-limit: given 0"),
        *((f"plan aipo {H100} --mesh {m}", 2, m) for m in ("trainer=fsdp16", "scorer=tp2", "trainer=tp3")),
        (f"plan aipo --cluster 1x8xA100 {WORK} --generator-precision fp8", 2, "plan: --generator-precision fp8 "),
        (f"plan aipo --cluster none.toml {WORK}", 2, "given 1 hosts without GPUs, needed one or more with devices"),
        (f"plan aipo --cluster typo.toml {WORK}", 2, "unknown key 'hosts.0.device'; did you mean 'devices'"),
        (f"plan aipo {H100} --prompt-tokens 9 --max-prompt 8", 2, "given 9, needed at most the 8 of --max-prompt"),
        (f"plan aipo {H100} --kept 0.5", 2, "--kept: given 0.5, needed none, since aipo has no filter"),
        *((f"{v} aipo {H100} --environment-s 0", 2, "given 0, needed none, since") for v in ("plan", "simulate")),
        *((f"plan dapo {H100} --kept {k}", 2, f"given {k}, needed a share above 0, 1 at most") for k in ("0", "1.5")),
        (f"plan guessing {H100} --environment-s nan", 2, "--environment-s: given nan, needed at least 0"),
        (f"plan aipo {H100} --lora-targets q_proj", 2, "LoRA: given targets q_proj without a rank, needed --lora RANK"),
        ("run toy --generator-precision int8", 2, "int8 and toy, of which no node computes in it"),
        (f"plan toy {H100} --generator-precision fp8", 2, "fp8 and toy, of which no node computes in it"),
        *((f"{verb} toy {H100} --lora 2", 2, "2 and toy, of which no value has ad") for verb in ("plan", "simulate")),
        (f"plan aipo {H100} --batch {10**9}", 2, "needed at most 1000000"),
        (f"plan dapo {H100} --kept 1e-6", 2, "needed at most 1000000"),
        # simulate with a plan
        ("simulate aipo --model llama-8b", 2, "--model: given without a plan; needed --cluster with it"),
        ("simulate aipo --plan p.json --max-tokens 99", 2, "--max-tokens: given beside --plan"),
        ("simulate aipo --plan p.json --batch 9", 2, "--batch: given beside --plan"),
        ("simulate aipo --plan none.json", 2, "--plan none.json: given"),
        (f"simulate aipo {H100} --generators 2", 2, "--generators: given with a plan"),
        (f"simulate aipo {H100} --duration generate=1", 2, "needed one of score, group_advantage before '='"),
        (f"simulate aipo {H100} --updates 0", 2, "--updates: given 0"),
        ("simulate aipo --cluster 1x8xH100 --model llama-405b", 2, "llama-405b does not fit on 8 GPUs"),
        (f"plan aipo {H100} --mesh trainer=ep2", 2, "mesh-cut.*given no experts over ep 2"),
        (f"plan aipo {H100} --mesh generator=ep2xtp2", 2, "mesh-axis.*needed one of the axes ep, tp"),
        (f"simulate aipo {H100} --mesh trainer=fsdp16", 2, "given 16 ranks, needed at most"),
        # simulate with given seconds
        ("simulate aipo", 2, "no duration of generate, score, .*; needed all, such as --duration g.*simulate --from"),
        ("simulate aipo --duration generat=1", 2, "needed one of generate, score"),
        *((f"simulate aipo --duration generate={s}", 2, "needed seconds and sigma") for s in ("fast", "-1", "1~")),
        ("simulate aipo --duration wire=0.5~1.5", 2, "needed seconds alone"),
        *((f"simulate toy --{f} none/file", 2, rf"needed .* \(--{f} FILE\)$") for f in ("svg", "html", "trace")),
        ("simulate {L}:filtered --drop score=0.3", 2, "given 'score=0.3', needed one of keep before '='"),
        *((f"simulate {{L}}:filtered --drop keep={s}", 2, "a share from 0 to 1, such as") for s in ("1.5", "half")),
        ("simulate {L}:filtered --drop keep=1", 2, "simulation: given 256 groups dropped for update 0"),
        ("simulate {L}:filtered --again reply=0.3", 2, "needed none, since the program has no nodes that answer"),
        ("simulate {L}:filtered --versions pinned", 2, "--versions pinned: given the filter keep"),
        # simulate from a run
        ("simulate --from .", 2, "holds no run"),
        *((f"simulate {words}", 2, "--from") for words in ("toy --from RUN", "--from", "--lag 1 --from=")),
    ],
)  # fmt: skip
def test_a_command_line_that_cannot_work_says_what_is_needed(
    words: str, status: int, said: str, refuse: Refuse, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    found = refuse(*words.replace("{L}", str(LANGUAGE)).split())
    assert (found[0], re.search(said, found[1]) is not None) == (status, True), found
    assert sorted(path for path in tmp_path.rglob("*") if "cache" not in path.parts) == before


@pytest.mark.parametrize(("words", "said"), [*NOT_COMPUTED, *NO_ADAPTERS])
def test_check_refuses_what_a_run_cannot_compute(
    words: str, said: str, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["check", "aipo", *words.split()])
    assert leaving.value.code == 1
    assert re.search(said, " ".join(capsys.readouterr().out.split()))


def test_what_has_no_policy_has_no_adapters(here: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["check", "reward_model", "--lora", "4"])
    assert leaving.value.code == 1
    assert "unmet-requirement" in capsys.readouterr().out


def test_adapters_of_a_programs_own_travel_in_float32_if_a_run_is_invariant(
    tmp_path: Path, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    source = (LANGUAGE.parents[1] / "programs" / "aipo.py").read_text()
    (tmp_path / "mine.py").write_text(re.sub(r"\bPolicy\b", "LoraPolicy", source))
    for wire, status, said in ((), 0, "no faults"), (("--wire", "bfloat16"), 1, "given   --wire bfloat16"):
        with pytest.raises(SystemExit) as leaving:
            main(["check", "mine.py:aipo", "--invariant", "--dtype", "bfloat16", *wire])
        assert leaving.value.code == status
        assert said in capsys.readouterr().out


@pytest.mark.parametrize(("gpu", "needed"), [("H100", "fp8, or none"), ("A100", "none")])
def test_check_names_the_precisions_that_can_be_given_for_a_kind_of_gpu(
    gpu: str, needed: str, tmp_path: Path, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gpus.toml").write_text(FILE.replace("H100", gpu))
    with pytest.raises(SystemExit) as leaving:
        main(["check", "aipo", "--generator-precision", "int8", "--cluster", "gpus.toml"])
    assert leaving.value.code == 1
    said = rf"\[no-precision\] given int8 on {gpu} needed {needed}: weights in the run's dtype"
    assert re.search(said, " ".join(capsys.readouterr().out.split()))


@pytest.mark.parametrize(("name", "major", "minor", "able"), [("GeForce RTX 4090", 8, 9, True), ("A10", 8, 6, False)])
def test_a_gpu_of_no_known_kind_has_fp8_if_its_compute_capability_does(
    name: str, major: int, minor: int, able: bool, here: None, monkeypatch: Patch, capsys: Output
) -> None:
    monkeypatch.setattr(children, "gpus", lambda: [SeenGpu(f"NVIDIA {name}", 23.6, major, minor)])
    with pytest.raises(SystemExit) as leaving:
        main(["check", "aipo", "--generator-precision", "fp8", "--device", "cuda"])
    said = capsys.readouterr()
    assert (leaving.value.code == 0, "[no-precision]" in said.out + said.err) == (able, not able), said


@pytest.mark.parametrize(("device", "status"), [("cuda", 2), ("cuda:1", 0)])
def test_a_run_in_one_process_has_one_gpu(
    device: str, status: int, here: None, monkeypatch: Patch, capsys: Output
) -> None:
    monkeypatch.setattr(children, "gpus", lambda: [SeenGpu("NVIDIA H100 80GB HBM3", 79.1, 9)] * 2)
    with pytest.raises(SystemExit) as leaving:
        main(["check", "aipo", "--in-process", "--device", device])
    said = " ".join(capsys.readouterr().err.split())
    assert (leaving.value.code, "ranks on cuda:0, cuda:1, needed one device for all: --device cuda:0" in said) == (
        status,
        status == 2,
    ), said


def test_check_says_what_is_given_and_needed_of_a_model_that_cannot_be_used(
    tmp_path: Path, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(SystemExit) as leaving:
        main(["check", "aipo", "--model", str(tmp_path)])
    assert leaving.value.code == 1
    said = r"given +\S+/config\.json: model_type 'gpt2' needed +one of: llama, mistral"
    assert re.search(said, " ".join(capsys.readouterr().out.split()))


@pytest.mark.parametrize(
    "words",
    [
        "--device tpu",
        "--device tpu --invariant",
        "--device cuda:99",
        "--device cpu --transport nccl",
        "--mesh scorer=tp2",
        "--mesh trainer=fsdp9999",
        "--cluster none.toml --device cuda",
        "--data d.jsonl",
        "--in-process --mesh trainer=fsdp2",
        "--resume auto",
        "--submit",
        "--on slurm --cluster none.toml",
        "--out .",
        "--out d.jsonl",
        "--out d.jsonl/new",
    ],
)
def test_check_refuses_what_a_run_does_in_the_same_words(words: str, refuse: Refuse) -> None:
    status, said = refuse("run", "aipo", *words.split())
    assert refuse("check", "aipo", *words.split()) == (status, said.replace("penstock run", "penstock check"))


def test_a_run_lists_all_faults_that_check_lists(
    refuse: Refuse, tmp_path: Path, monkeypatch: Patch, capsys: Output
) -> None:
    monkeypatch.setattr(interpreters, "find_spec", lambda name: None if name == "vllm" else "there")
    words = ["aipo", "--engine", "vllm", "--deterministic", "--model", "new", "--cluster", "c.toml"]
    (tmp_path / "c.toml").write_text(OWN)
    with pytest.raises(SystemExit):
        main(["check", *words])
    checked = " ".join(capsys.readouterr().out.split())
    assert refuse("run", *words) == (2, f"penstock run: {checked}")
    assert all(code in checked for code in ("engine-cannot", "no-engine")), checked


def test_check_leaves_no_folder(here: None, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as leaving:
        main(["check", "toy", "--out", "new/run"])
    assert (leaving.value.code, sorted(tmp_path.rglob("*"))) == (0, before)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo null", "status 0: 'null'"),
        ("echo '[[3, 11]]'", "status 0: '[[3, 11]]'"),
        ("echo no library >&2; exit 3", "status 3: 'no library'"),
        ("exec sleep 60", "nothing within 0.5 s"),
    ],
)
def test_what_a_command_says_that_is_no_interpreter_is_told(
    script: str, said: str, tmp_path: Path, here: None, capsys: pytest.CaptureFixture[str], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(interpreters, "PROBE_S", 0.5 if "sleep" in script else 30.0)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    (tmp_path / "own.toml").write_text(f'[[hosts]]\nname = "a"\ncores = 1\n[pools.generator]\npython = "{python}"\n')
    with pytest.raises(SystemExit) as leaving:
        main(["check", "toy", "--cluster", "own.toml"])
    assert leaving.value.code == 1
    found = " ".join(capsys.readouterr().out.split())
    assert "[no-interpreter]" in found
    assert f"which does not answer as an interpreter ({said})" in found


@pytest.mark.parametrize("verb", ["check", "run"])
def test_all_trackers_whose_clients_are_not_installed_are_told(
    verb: str, here: None, capsys: pytest.CaptureFixture[str], monkeypatch: Patch
) -> None:
    # As if none of the extras were installed.
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as leaving:
        main([verb, "toy", "--track", "wandb", "trackio"])
    assert leaving.value.code == (1 if verb == "check" else 2)
    found = " ".join("".join(capsys.readouterr()).split())
    for name in ("wandb", "trackio"):
        said = (
            rf"--track {name} \[missing-module\] given no package {name} in .* needed pip install 'penstock\[{name}\]'"
        )
        assert re.search(said, found)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("toy --lost-replica replace --generators 2..8", 0, "2 to 8 generators, and replicas may come and go"),
        ("toy --lost-replica replace --generators 3", 0, "; 3 generators, and"),
        ("toy --generators 2..8", 1, "generators-range.*given +--lost-replica stop"),
        ("toy --lost-replica replace --generators 8..2", 2, "given '8..2', needed a range"),
        ("toy --lost-replica replace --generators 2 --first-generators 8", 1, "generators-range"),
        ("grpo --accumulate 8 --lost-replica replace", 1, "cannot-be-lost"),
        ("dapo --versions pinned", 1, "--versions pinned .unmet-rule. given +the filter keep needed"),
        ("curriculum --on-failure replace", 1, "--on-failure replace .unmet-rule. given +choose, .* needed"),
        ("toy --order ready --versions pinned", 1, "--order ready .unmet-rule. given +--versions pinned needed"),
        ("toy --order ready --lag 2", 0, "no faults"),
        ("toy --plain --out here", 0, "no faults"),
        ("aipo --on agents --device cuda --mesh trainer=fsdp9999", 0, "no faults"),
        ("toy --mesh trainr=tp2", 2, "--mesh trainr=tp2: no such pool, needed one of: trainer, generator"),
    ],
)
def test_check_knows_which_rules_of_a_run_a_program_does_not_allow(
    words: str, status: int, said: str, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["check", *words.split()])
    found = " ".join("".join(capsys.readouterr()).split())
    assert (int(leaving.value.code or 0), re.search(said, found) is not None) == (status, True), found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = {"lag": 3, "every": 3}
    made = simulated_run(tmp_path_factory.mktemp("run") / "r", program=f"{LANGUAGE}:seldom", options=options, updates=3)
    return made.folder.path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--every 8", "--every: given an option of the program beside --from"),
        ("--batch 16", "--batch: given a flag of programs and plans beside --from"),
        ("--cluster 8x8xH100", "--cluster: given a flag of programs and plans beside --from"),
        ("--lag -1", "--lag: given -1, needed at least 0"),
        ("--lag 1", "--lag 1"),  # too small for the interval between publications
        ("--generators 0", "--generators: given 0, needed at least 1"),
        ("--updates 0", "--updates: given 0, needed at least 1"),
        ("--duration other=1", "needed one of fake_generate, fake_score, fake_update"),
        ("--lagg 1", "the nearest: --lag"),
    ],
)
def test_flags_that_a_run_cannot_vary_are_refused(words: str, said: str, refuse: Refuse, run: Path) -> None:
    found = refuse("simulate", "--from", run, *words.split())
    assert (found[0], said in found[1]) == (2, True), found


def test_a_join_file_that_is_none_is_said(refuse: Refuse, tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    path.write_text('{"program": "toy"}')
    status, said = refuse("agent", "b.json")
    assert (status, bool(re.fullmatch(r"penstock agent: b\.json: not a key .*; needed the join file .*", said))) == (
        2,
        True,
    )
    path.unlink()
    Keys.make("r", "tcp://127.0.0.1:0", ["b"]).join("b", "tcp://127.0.0.1:1", tmp_path).write(path)
    path.chmod(0o644)
    status, said = refuse("agent", "b.json")
    assert (status, "chmod 600 b.json" in said) == (2, True)


def test_a_port_in_use_leaves_no_folder(refuse: Refuse, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        (tmp_path / "c.toml").write_text(f'bind = "{bind}"\n[[hosts]]\nname = "a"\ncores = 1\n')
        found = refuse("run", "toy", "--cluster", "c.toml", "--out", "here")
    said = "the port is in use; stop what listens there, or name another (port 0: any free one)"
    assert found == (2, f"penstock run: cannot listen on tcp://{bind}: {said}")
    assert not (tmp_path / "here").exists()


def test_an_interpreter_that_cannot_be_used_is_refused_before_there_is_a_run(
    tmp_path: Path, here: None, capsys: pytest.CaptureFixture[str]
) -> None:
    bare, silent, run = tmp_path / "bare", tmp_path / "silent", tmp_path / "run"
    venv.create(bare, with_pip=False)
    silent.write_text("#!/bin/sh\necho no interpreter\n")
    silent.chmod(0o755)
    cases: tuple[tuple[Path, str, tuple[str, ...]], ...] = (
        (bare / "bin/python", "check", ()),
        (silent, "run", ("--out", str(run))),
        (tmp_path / "nowhere", "check", ()),
    )
    for python, verb, more in cases:
        (tmp_path / "own.toml").write_text(f'{OWN}[pools.generator]\npython = "{python}"\n')
        with pytest.raises(SystemExit) as leaving:
            main([verb, "toy", "--cluster", "own.toml", *more])
        assert leaving.value.code == (1 if verb == "check" else 2)
        said = "".join(capsys.readouterr())
        assert "pools.generator.python [no-interpreter]" in said
        assert str(python) in said
    assert not run.exists()


def test_the_path_of_an_interpreter_is_whole(tmp_path: Path, refuse: Refuse) -> None:
    (tmp_path / "own.toml").write_text(f'{OWN}[pools.generator]\npython = "python3"\n')
    status, said = refuse("run", "toy", "--cluster", "own.toml", "--out", tmp_path / "run")
    assert status != 0
    assert "pools.generator" in said
    assert "'python3'" in said
