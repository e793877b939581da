"""Options that a run leaves open are chosen by memory: recomputation, micro-batch size, chunks of logits."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.graph import load, trace
from penstock.graph.ir import Graph
from penstock.runtime.cluster.cluster import Cluster, ClusterError, read_cluster
from penstock.runtime.cluster.gpus import GPUS
from penstock.runtime.control.run_config import RunConfig, RunOptions
from penstock.runtime.plan.model_shape import SHAPES, Parallel
from penstock.runtime.plan.train_cost import Trainer
from penstock.runtime.plan.trainer_fit import MOST_TOKENS, TrainerRank, fit, fitted, require_hosts

H100 = GPUS["H100"]


@cache
def _graph(name: str) -> Graph:
    return trace(load(name), {"lag": 1})


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The directory of an 8B model, with only its sizes."""
    sizes = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(sizes | heads))
    return str(tmp_path)


def _fitted(model: str, cluster: str = "1x8xH100", program: str = "grpo", **options: Any) -> RunOptions:
    given = {"device": "cuda", "dtype": "bfloat16", "model": model, "slots": 8, "max_tokens": 1024, **options}
    machines = read_cluster(cluster)
    return fitted(RunConfig.make(_graph(program), None, machines, RunOptions(**given)), machines)


def test_the_fastest_step_that_fits_is_taken() -> None:
    """Compared with all choices, for memory from too little to plenty."""
    trainer, chosen = Trainer(SHAPES["llama-8b"], H100, Parallel(fsdp=8)), []
    for gb in range(10, 130, 5):
        place, longest = TrainerRank(trainer, gb * 1e9), 4096
        found = fit([place], longest)
        every = [
            replace(trainer, micro_tokens=longest << double, recompute=again)
            for double, again in product(range(3), (0.0, 1.0))
        ]
        fitting = [each for each in every if place.memory(each).bytes <= place.room]
        seconds = [each.update(np.full(8 * 4 * MOST_TOKENS // longest, longest)).seconds for each in fitting]
        assert (found is None) == (not fitting)
        if found is not None:
            assert found in fitting
            assert found.update(np.full(8 * 4 * MOST_TOKENS // longest, longest)).seconds == min(seconds)
            chosen.append(found.recompute)
    # Layers are recomputed only where memory is scarce.
    assert chosen == sorted(chosen, reverse=True)
    assert {*chosen} == {0.0, 1.0}


def test_a_run_decides_what_is_left_open_and_keeps_what_is_given(model: str) -> None:
    mesh = ("trainer=fsdp4",)
    open_ = _fitted(model, mesh=mesh)
    assert open_.recompute in ("none", "layer")
    assert open_.micro_tokens >= 1024
    assert open_.logit_elements == 1 << 28
    given = _fitted(model, mesh=mesh, recompute="layer", micro_tokens=5000, logit_elements=1 << 20)
    assert (given.recompute, given.micro_tokens, given.logit_elements) == ("layer", 5000, 1 << 20)
    assert _fitted(model, mesh=mesh, recompute="none").recompute == "none"
    assert _fitted(model, mesh=mesh, micro_tokens=5000).micro_tokens == 5000
    # A resume starts from the chosen options.
    assert RunOptions.from_json(json.loads(json.dumps(vars(open_)))) == replace(open_, mesh=mesh)


def test_no_sequence_is_longer_than_the_models_context(model: str) -> None:
    file, long = Path(model) / "config.json", 200_000
    with pytest.raises(ClusterError, match="no-fit"):
        _fitted(model, mesh=("trainer=fsdp4",), max_prompt=long)
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 3000}))
    assert _fitted(model, mesh=("trainer=fsdp4",), max_prompt=long).micro_tokens in (3000, 6000, 12000)


def test_what_lies_beside_the_trainer_leaves_less_room(model: str) -> None:
    """With five GPUs the generator has its own; with four it shares the trainer's first one."""
    alone, shared = (_fitted(model, f"1x{gpus}xH100", mesh=("trainer=fsdp4",), program="aipo") for gpus in (5, 4))
    assert (alone.recompute, shared.recompute) == ("none", "layer")


def test_moments_go_to_the_host_where_nothing_else_fits(model: str) -> None:
    mesh = ("trainer=fsdp2",)
    assert _fitted(model, "1x4xH100", mesh=("trainer=fsdp4",)).optimizer_state == "device"
    with pytest.raises(ClusterError, match="fsdp"):
        _fitted(model, "1x1xH100", optimizer_state="device", mesh=())
    narrow = read_cluster("1x4xH100").model_copy(
        update={"gpus": {"H100": H100.model_copy(update={"memory_gib": 64.0})}}
    )
    config = RunConfig.make(
        _graph("grpo"), None, narrow,
        RunOptions(device="cuda", dtype="bfloat16", model=model, slots=8, max_tokens=1024, mesh=mesh),
    )  # fmt: skip
    found = fitted(config, narrow)
    assert found.optimizer_state == "host"
    both = replace(config.flags, recompute=found.recompute, micro_tokens=found.micro_tokens)
    assert fitted(replace(config, flags=both), narrow).optimizer_state == "host"
    with pytest.raises(ClusterError, match="--optimizer-state host"):
        fitted(replace(config, flags=replace(config.flags, optimizer_state="device")), narrow)
    # The moments of both ranks are on one host.
    (host,) = narrow.hosts
    for gib, codes in ((60.0, ["host-memory"]), (80.0, [])):
        said = narrow.model_copy(update={"hosts": (host.model_copy(update={"memory_gib": gib}),)})
        with nullcontext() if not codes else pytest.raises(ClusterError, match=rf"\[{codes[0]}\]"):
            assert fitted(config, said) == found


def test_a_model_that_does_not_fit_is_refused_unless_both_are_given(model: str) -> None:
    with pytest.raises(ClusterError, match="fsdp"):
        _fitted(model)
    assert _fitted(model, recompute="layer", micro_tokens=512).micro_tokens == 512


def test_nothing_is_decided_of_a_cpu_and_of_gpus_that_nobody_has_described(model: str) -> None:
    for options in ({"device": "cpu", "model": model}, {"model": ""}):
        found = _fitted(**options)
        assert (found.recompute, found.micro_tokens, found.logit_elements) == ("none", 0, 0)
    machines = read_cluster("1x2xH100")
    unnamed = machines.model_copy(update={"hosts": (machines.hosts[0].model_copy(update={"gpu": ""}),)})
    config = RunConfig.make(_graph("aipo"), None, unnamed, RunOptions(device="cuda", model=model))
    assert fitted(config, unnamed).recompute == "none"


@pytest.mark.parametrize(
    ("gib", "options", "fits"),
    [
        (280.0, {}, False),
        (310.0, {}, True),
        (310.0, {"slots": 512}, False),
        (310.0, {"generators": 2}, False),
        (280.0, {"slots": 16}, True),
        (280.0, {"max_tokens": 64}, True),
        (280.0, {"dtype": "bfloat16"}, True),
        (280.0, {"lora": 8}, True),
        (290.0, {}, False),
        (290.0, {"wire": "bfloat16"}, True),
    ],
)
def test_weights_moments_and_the_cache_of_all_slots_fit_into_the_memory_of_a_host(
    model: str, gib: float, options: dict[str, Any], fits: bool
) -> None:
    (host,) = Cluster.local(0).hosts
    machines = Cluster(hosts=(host.model_copy(update={"memory_gib": gib}),))
    given: dict[str, Any] = {"device": "cpu", "model": model, "slots": 64, "max_tokens": 2048, **options}
    config = RunConfig.make(_graph("aipo"), None, machines, RunOptions(**given))
    with nullcontext() if fits else pytest.raises(ClusterError, match=r"\[no-fit\].*--slots"):
        require_hosts(config, machines)


def test_the_memory_of_a_host_is_its_own_or_that_of_this_machine(model: str) -> None:
    """Nothing is known of a remote host that does not state its memory."""
    (host,) = Cluster.local(0).hosts
    for agent, said in (("local", pytest.raises(ClusterError)), ("external", nullcontext())):
        machines = Cluster(hosts=(host.model_copy(update={"agent": agent}),))
        options = RunOptions(device="cpu", model=model, slots=1 << 20)
        with said:
            require_hosts(RunConfig.make(_graph("aipo"), None, machines, options), machines)


def test_a_slot_has_no_more_positions_than_the_model(model: str) -> None:
    path = Path(model, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 128}))
    (host,) = Cluster.local(0).hosts
    machines = Cluster(hosts=(host.model_copy(update={"memory_gib": 250.0}),))
    options = RunOptions(device="cpu", model=model, slots=64, max_tokens=64)
    require_hosts(RunConfig.make(_graph("aipo"), None, machines, options), machines)
