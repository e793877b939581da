"""`plan --out`, `run --plan` and `check --plan`, and unplanned runs on GPUs, on the command line.

There is no GPU here. A plan is a value over hosts and devices: with its devices rewritten as CPUs (`on_cpus`), it runs
here to its end. A host with an agent on another machine stands in for a host with GPUs.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from penstock.nodes.model import CausalLM, ModelConfig, ModelError, read_config, save_model
from penstock.nodes.tokenizer import byte_tokenizer
from penstock.runtime.cli import children
from penstock.runtime.cluster.cluster import SeenGpu
from penstock.runtime.control.run_config import RunConfig
from penstock.runtime.record.folder import RunFolder
from tests.gates.running import penstock, until

from .conftest import Patch, Processes, Refuse, Say

GPUS = """
[[hosts]]
name = "{name}"
cores = {cores}
devices = [{devices}]
gpu = "{kind}"
"""
FAR = 'agent = "external"\n'
BIND = 'bind = "127.0.0.1:0"\n'
# Cluster files without GPUs, and their hosts.
CPUS = {"cpu": "a", "cpus": "abc"}
WORK = ("--samples", "4", "--max-tokens", "6")
PLAN = ("--batch", "4", *WORK, "--slots", "8", "--lr", "1e-3", "--model", "m")


def cluster(num: int, kind: str = "H100", cores: int = 2, *, far: bool = False, hosts: str = "a") -> str:
    devices = ", ".join(f'"cuda:{index}"' for index in range(num))
    each = [GPUS.format(name=name, devices=devices, kind=kind, cores=cores) + FAR * far for name in hosts]
    return BIND * far + "".join(each)


def small_model(folder: Path, heads: int, groups: int) -> None:
    tokenizer = byte_tokenizer("0123456789+-=:<eos>")
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=heads, num_key_value_heads=groups, head_dim=8, max_position_embeddings=96,
        eos_token_ids=tokenizer.stops,
    )  # fmt: skip
    model = CausalLM(config)
    model.init_weights(1)
    save_model(model, model.state_dict(), folder)
    tokenizer.save(folder)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A folder with the small model `m`, problems for it, and cluster files."""
    monkeypatch.chdir(tmp_path)
    small_model(tmp_path / "m", heads=4, groups=2)
    far = cluster(4, far=True)
    files = {
        "gpus": cluster(4), "three": cluster(3), "a100": cluster(4, "A100"), "cores": cluster(4, cores=1),
        "far": far, "card": cluster(1, far=True), "kindless": far.replace('gpu = "H100"', ""),
        "hosts": cluster(2, cores=1, hosts="abc"),
    }  # fmt: skip
    files["small"] = cluster(4, far=True) + '[gpus.H100]\nlike = "A100"\nmemory_gib = 40\n'
    files |= {name: "".join(f'[[hosts]]\nname = "{host}"\ncores = 1\n' for host in own) for name, own in CPUS.items()}
    for name, text in files.items():
        (tmp_path / f"{name}.toml").write_text(text)
    return tmp_path


def on_cpus(path: Path, into: Path) -> None:
    """Write the plan to `into` with its GPUs rewritten as CPUs; its cluster file is `into` with the suffix .toml."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: without(item) for name, item in value.items()}
        if isinstance(value, list):
            return [without(item) for item in value]
        return "cpu" if isinstance(value, str) and value.startswith("cuda") else value

    made = without(json.loads(path.read_text())["run"])
    made["cluster"]["hosts"] = [{**host, "devices": [], "cores": 1} for host in made["cluster"]["hosts"]]
    made["words"]["cluster"] = ["--cluster", str(into.with_suffix(".toml"))]
    into.write_text(json.dumps({"run": made}))


@pytest.fixture
def planned(say: Say, home: Path) -> Path:
    say("plan", "aipo", "--cluster", "gpus.toml", *PLAN, "--mesh", "trainer=fsdp2", "--out", "plan.json")
    on_cpus(home / "plan.json", home / "cpu.json")
    return home / "plan.json"


def codes(text: str) -> list[str]:
    return re.findall(r"\[([a-z]+(?:-[a-z]+)+)\]", text)


@pytest.mark.parametrize(
    ("change", "given", "needed"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'", "'silu', or nothing"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'", "one of: default, linear"),
    ],
)
def test_a_model_that_a_run_refuses_is_planned_as_a_what_if_which_out_refuses(
    say: Say, refuse: Refuse, home: Path, change: dict[str, Any], given: str, needed: str
) -> None:
    # A plan needs no weights and no tokenizer.
    facts = json.loads((home / "m" / "config.json").read_text())
    (home / "other").mkdir()
    (home / "other" / "config.json").write_text(json.dumps({**facts, "rope_parameters": None, **change}))
    (home / "adapters").mkdir()
    adapters = {"base_model_name_or_path": str(home / "other"), "r": 2, "target_modules": ["q_proj"]}
    (home / "adapters" / "adapter_config.json").write_text(json.dumps(adapters))
    for model in ("other", "other/config.json", "adapters"):
        words = ("plan", "aipo", "--cluster", "gpus.toml", *PLAN[:-1], model)
        said = " ".join(say(*words).split())
        assert f"what if a run could have {given}: it needs {needed}" in said
        status, said = refuse(*words, "--out", "p.json")
        assert (status, codes(said)) == (2, ["model-kind"])
        assert f"given {given} needed {needed}" in said
    assert not (home / "p.json").exists()
    with pytest.raises(ModelError, match=f"given {given}, needed {needed}"):
        read_config("other")  # as a run does


@pytest.mark.slow
def test_a_run_of_a_plan_is_exactly_that_plan_to_its_end_and_goes_on(say: Say, refuse: Refuse, home: Path) -> None:
    """The plan has three hosts, each an agent on this machine; the trainer spans two of them."""
    say("plan", "aipo", "--cluster", "hosts.toml", *PLAN, "--mesh", "trainer=fsdp4", "--out", "plan.json")
    on_cpus(home / "plan.json", home / "cpus.json")
    say("check", "aipo", "--plan", "cpus.json")
    size = ("--updates", "2", "--eval-groups", "4")
    done = penstock("run", "aipo", "--plan", "cpus.json", *size, "--out", "run", "--plain", timeout=240)
    assert done.returncode == 0, done.stderr
    said = json.loads((home / "cpus.json").read_text())["run"]
    config = RunConfig.load(RunFolder.open("run"))
    assert config.plan.to_json() == said["plan"]
    trainer = config.plan.replica("trainer/0")
    assert (trainer.mesh, len(trainer.hosts)) == ((("fsdp", 4),), 2)
    options = config.to_json()["flags"]
    assert {name: options[name] for name in said["options"]} == said["options"] | {"mesh": ("trainer=fsdp4",)}
    assert dict(config.graph.options)["lr"] == 1e-3
    done = penstock("resume", "run", "--updates", "3", "--plain", timeout=240)
    assert done.returncode == 0, done.stderr
    assert RunConfig.load(RunFolder.open("run")).plan == config.plan
    # Agents that enrol take the places of its hosts in order. Too few agents are refused before any is asked for.
    words = ("aipo", "--plan", "cpus.json", "--updates", "1", "--eval-groups", "0", "--plain", "--on", "agents")
    status, told = refuse("run", *words, "--out", "on", "--agents", "2")
    assert (status, "given 2 agents, needed 3 for the hosts of --plan cpus.json" in told) == (2, True)
    assert not Path("on").exists()
    agent = [sys.executable, "-m", "penstock.runtime.cli.main", "agent", "--ticket", "on/ticket.json"]
    agents = [subprocess.Popen(agent) for _ in range(3)]
    done = penstock("run", *words, "--out", "on", timeout=240)
    assert (done.returncode, [each.wait(60) for each in agents]) == (0, [0, 0, 0]), done.stderr
    enrolled = RunConfig.load(RunFolder.open("on")).plan
    assert len(enrolled.replica("trainer/0").hosts) == 2
    assert [pool.replicas[0].mesh for pool in enrolled.pools] == [pool.replicas[0].mesh for pool in config.plan.pools]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("", []),
        ("--batch 4 --max-tokens 6", []),
        ("--batch 8", ["plan-flag"]),
        ("--max-tokens 7 --batch 8", ["plan-flag", "plan-flag"]),
        # An option of the program matters only if it changes what is planned.
        ("--lr 1e-2", []),
        ("--samples 2", ["plan-program"]),
        ("--lag 3 --samples 2", ["plan-program", "plan-program"]),
        ("--model new", ["plan-model"]),
        ("--cluster three.toml", []),
        ("--cluster a100.toml", ["plan-gpus"]),
        ("--cluster cores.toml", ["plan-cores"]),
        ("--cluster card.toml", ["plan-devices"]),
        # A kind that the file defines differs, whatever its name, if its memory does.
        ("--cluster small.toml", ["plan-gpus"]),
    ],
)
def test_check_says_whether_a_run_would_take_a_plan_and_how_flags_program_model_and_machines_differ(
    planned: Path, here: None, words: str, found: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: Patch
) -> None:
    from penstock.runtime.cli.main import main

    monkeypatch.setattr(children, "gpus", lambda: [SeenGpu("NVIDIA H100 80GB HBM3", 79.1, 9)] * 4)
    with pytest.raises(SystemExit) as leaving:
        main(["check", "aipo", "--plan", "plan.json", *words.split()])
    said = capsys.readouterr()
    assert codes(said.out + said.err) == found
    assert bool(leaving.value.code) == bool(found)


@pytest.mark.parametrize("verb", ["check", "run"])
def test_a_plan_for_a_named_model_asks_for_it_and_tries_no_other(
    verb: str, say: Say, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The small model that is built without --model has a context of 32 tokens, and this plan 4,096 for a response."""
    from penstock.runtime.cli.main import main

    say("plan", "aipo", "--cluster", "4xH100", "--model", "qwen3-0.6b", "--out", "named.json")
    with pytest.raises(SystemExit):
        main([verb, "aipo", "--plan", "named.json"])
    said = capsys.readouterr()
    found = codes(said.out + said.err)
    assert (found[0], "out-of-range" in found) == ("plan-model", False)


def test_a_plan_is_read_once(planned: Path, say: Say, home: Path) -> None:
    """A plan may come from a pipe, which can be read only once."""
    os.mkfifo(home / "pipe.json")
    writer = Thread(target=(home / "pipe.json").write_text, args=((home / "cpu.json").read_text(),), daemon=True)
    writer.start()
    assert "as pipe.json says" in say("check", "aipo", "--plan", "pipe.json")
    writer.join(30)


def test_a_run_refuses_what_check_does_and_leaves_no_folder(planned: Path, refuse: Refuse, home: Path) -> None:
    before = sorted(home.iterdir())
    for words, code in (
        ("--slots 4", "plan-flag"),
        ("--samples 2", "plan-program"),
        ("--cluster a100.toml", "plan-gpus"),
        ("", "no-device"),  # the file's host is this one, which has no GPU
    ):
        status, said = refuse("run", "aipo", "--plan", "plan.json", *words.split())
        assert (status > 0, codes(said)) == (True, [code])
    assert codes(refuse("run", "aipo", "--plan", "plan.json", "--model", "new")[1])[0] == "plan-model"
    assert codes(refuse("run", "aipo", "--plan", "cpu.toml")[1]) == ["plan-file"]
    assert codes(refuse("check", "ppo", "--plan", "cpu.json")[1] or "[plan-program]") == ["plan-program"]
    assert sorted(home.iterdir()) == before
    # A run cannot have responses this long with this model, and neither can a plan.
    assert refuse("plan", "aipo", "--cluster", "gpus.toml", "--model", "m")[0] == 2


def test_a_model_that_cannot_be_cut_as_the_planned_one_is_told_to_be_another_one(
    say: Say, refuse: Refuse, home: Path
) -> None:
    say("plan", "aipo", "--cluster", "gpus.toml", *PLAN, "--mesh", "generator=tp2", "--out", "plan.json")
    small_model(home / "odd", heads=3, groups=3)
    assert codes(refuse("run", "aipo", "--plan", "plan.json", "--model", "odd")[1])[0] == "plan-model"


def test_the_flags_that_a_plan_does_not_decide_are_the_users(planned: Path, processes: Processes) -> None:
    from penstock.runtime.cli import starting

    words = "--plan cpu.json --updates 3 --seed 5 --data arithmetic:3 --wire bfloat16 --lr 1e-2 --out run"
    assert starting.run(["aipo", *words.split()]) == 0
    (config,) = processes.configs
    flags = config.flags
    assert (flags.updates, flags.seed, flags.data, flags.wire) == (3, 5, "arithmetic:3", "bfloat16")
    assert (flags.batch, flags.slots, dict(config.graph.options)["lr"]) == (4, 8, 1e-2)


Started = Callable[..., tuple[RunConfig, list[str]]]


@pytest.fixture
def started(processes: Processes, capsys: pytest.CaptureFixture[str]) -> Started:
    """Start a run; return its config and the lines printed before training."""

    def start(words: str) -> tuple[RunConfig, list[str]]:
        from penstock.runtime.cli import starting

        capsys.readouterr()
        number = len(processes.configs)
        assert starting.run(["aipo", "--out", f"run{number}", "--model", "m", *words.split()]) == 0
        return processes.configs[-1], capsys.readouterr().out.partition("training …")[0].splitlines()

    return start


def test_a_first_run_on_gpus_needs_no_flags_and_says_in_five_lines_what_it_chose(started: Started) -> None:
    """The cluster file names GPUs on another host, since this machine has none."""
    config, said = started("--cluster far.toml")
    assert len(said) == 5
    flags, plan = config.flags, config.plan
    assert (flags.device, flags.dtype, flags.recompute) == ("cuda", "bfloat16", "none")
    assert flags.micro_tokens > 0
    devices = {pool.name: {device for _, device in pool.places} for pool in plan.pools}
    assert "cuda:0" in devices["trainer"]
    assert devices["scorer"] == {"cpu"}
    assert not devices["trainer"] & devices["generator"]
    assert config.graph["broadcast"].lag == 1


def test_on_one_card_trainer_and_generator_take_turns_unless_a_lag_is_given(started: Started) -> None:
    config, _ = started("--cluster card.toml")
    assert {device for pool in config.plan.pools for _, device in pool.places} == {"cuda:0", "cpu"}
    assert (config.graph["broadcast"].lag, dict(config.graph.options)["lag"]) == (0, 0)
    config, _ = started("--cluster card.toml --lag 2")
    assert config.graph["broadcast"].lag == 2
    assert config.offload == "off"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_planned_run_starts_at_its_agents_whose_ranks_name_a_gpu_that_is_not_there(home: Path) -> None:
    words = ["aipo", "--cluster", "card.toml", "--model", "m", "--eval-groups", "0", "--updates", "1", "--out", "run"]
    command = [sys.executable, "-m", "penstock.runtime.cli.main", "run", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        try:
            join = home / "run" / "keys" / "a.json"
            until(join.exists, "the agent was asked for")
            assert penstock("agent", str(join), timeout=120).returncode == 0
            said, failed = run.communicate(timeout=120)
        finally:
            run.kill()
    assert (run.returncode, codes(failed)) == (1, ["no-device"])
    assert "host a" in failed
    assert said.splitlines()[0].startswith("planned aipo")


def test_flags_that_are_given_are_kept_and_the_rest_is_planned_around_them(started: Started) -> None:
    config, said = started(
        "--cluster far.toml --mesh trainer=fsdp2 --generators 2 --slots 200 --micro-tokens 3000 --recompute none "
        "--dtype float16 --batch 4"
    )
    flags, plan = config.flags, config.plan
    assert (flags.mesh, flags.generators, flags.slots) == (("trainer=fsdp2",), 2, 200)
    # Slots for 200 evaluation groups of one response each, and two groups ahead, although an update has only four.
    assert plan.replica("generator/0").capacity == 200 + 2
    assert (flags.micro_tokens, flags.recompute, flags.dtype) == (3000, "none", "float16")
    assert [len(replica.ranks) for replica in plan.replicas] == [2, 1, 1, 1]
    assert all(f"--{name}" in said[-1] for name in ("mesh", "generators", "slots", "micro-tokens", "recompute"))


@pytest.mark.parametrize(
    ("words", "lines", "device"),
    [
        ("--cluster cpu.toml", 0, "cpu"),
        ("--cluster far.toml --device cpu", 0, "cpu"),
        ("--cluster far.toml --plan none", 0, "cuda"),
        # A run that no plan covers uses its flags, and one line says so.
        ("--cluster far.toml --dtype float32", 1, "cuda"),
        ("--cluster kindless.toml", 1, "cuda"),
    ],
)
def test_where_nothing_is_planned_a_run_is_as_its_flags_say(
    started: Started, words: str, lines: int, device: str
) -> None:
    config, said = started(words)
    assert (len(said), config.flags.device, config.flags.slots) == (lines, device, 256)


def test_the_gpus_of_this_machine_are_those_that_its_torch_sees(started: Started, monkeypatch: Patch) -> None:
    monkeypatch.setattr(children, "gpus", lambda: [SeenGpu("NVIDIA L40S", 44.4, 8)] * 2)
    config, said = started("")
    assert len(said) == 5
    assert {device for pool in config.plan.pools for _, device in pool.places} == {"cuda:0", "cuda:1", "cpu"}
    # With `--device cuda:1` the run has only this one.
    config, said = started("--device cuda:1")
    assert {device for pool in config.plan.pools for _, device in pool.places} == {"cuda:1", "cpu"}
    assert config.flags.device == "cuda:1"


def test_bad_input_is_refused_by_its_code(refuse: Refuse, home: Path) -> None:
    """Refusals on the command line, before anything is started or written."""
    apart = '[[hosts]]\nname = "a"\ncores = 2\n[[hosts]]\nname = "b"\ncores = 2\naddress = "10.0.0.2"\n'
    (home / "apart.toml").write_text(apart + '[pools]\ntrainer = ["a", "b"]\n')
    small = cluster(1, "TINY", far=True) + '[gpus.TINY]\nlike = "H100"\nmemory_gib = 2.5\n'
    (home / "tiny.toml").write_text(small)
    (home / "thin.toml").write_text('[[hosts]]\nname = "a"\ncores = 2\nmemory_gib = 0.001\n')
    for words, code in (
        ("run aipo --cluster tiny.toml --model m", "no-fit"),
        *((f"{verb} aipo --cluster thin.toml --model m", "no-fit") for verb in ("run", "check")),
        ("run aipo --cluster apart.toml --mesh trainer=fsdp2", "no-network"),
        ("run aipo --cluster apart.toml --mesh trainer=tp2", "mesh-hosts"),
        ("run aipo --mesh generator=fsdp2", "mesh-axis"),
        ("plan aipo --cluster 1x4xA100 --model llama-8b --generator-precision fp8", "no-precision"),
        ("plan aipo --cluster 1x1xH100 --model llama-8b", "no-fit"),
        ("plan aipo --cluster 4x8xH200 --model glm-4.5-air --out p.json", "model-kind"),
    ):
        status, said = refuse(*words.split())
        assert status > 0
        assert code in codes(said), said
    assert not (home / "p.json").exists()
