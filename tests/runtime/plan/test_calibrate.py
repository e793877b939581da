"""The cost model fitted to a recorded run: it recovers the parameters that made the run's durations, and refuses other
hardware by name."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.graph import load, trace
from penstock.runtime.cluster.cluster import read_cluster
from penstock.runtime.cluster.gpus import GPUS, HostTime
from penstock.runtime.plan.calibrate import CalibrationError, Decoded, Update, calibrate, fit_decoding, fit_updates
from penstock.runtime.plan.confidence import Confidence
from penstock.runtime.plan.decode_cost import Generator
from penstock.runtime.plan.model_shape import SHAPES, Parallel, read_shape
from penstock.runtime.plan.roles import roles_of
from penstock.runtime.plan.train_cost import Trainer, packed
from penstock.runtime.plan.workload import Lognormal
from penstock.runtime.schedule.simulator import Durations
from tests.runtime.report.runs import simulated_run

SHAPE, H100 = SHAPES["qwen3-4b"], GPUS["H100"]
GENERATOR = Generator(SHAPE, H100, Parallel(), 256)
TRAINER = Trainer(SHAPE, H100, Parallel(fsdp=8))
STEPS, CONTEXT = 900.0, 600.0
MICRO_TOKENS = 1024


def _decoded(engine: HostTime, rows: list[float]) -> list[Decoded]:
    slower = replace(GENERATOR, gpu=H100.model_copy(update={"engine": engine}))
    return [Decoded(STEPS * slower.step(n, n * CONTEXT).seconds, n) for n in rows]


def test_the_hosts_time_by_step_and_row_comes_back_where_rows_differ() -> None:
    for eager in (True, False):
        engine = H100.engine.model_copy(update={"eager": eager, "step_ms": 9.0, "row_us": 40.0})
        own = replace(
            GENERATOR, gpu=H100.model_copy(update={"engine": H100.engine.model_copy(update={"eager": eager})})
        )
        found = fit_decoding(_decoded(engine, [8.0, 40.0, 64.0, 200.0]), STEPS, CONTEXT, own)
        assert found.step_ms == pytest.approx(9.0, rel=1e-6)
        assert found.row_us == pytest.approx(40.0, rel=1e-6)


def test_rows_that_are_alike_keep_the_default_of_a_row() -> None:
    engine = H100.engine.model_copy(update={"step_ms": 9.0})
    found = fit_decoding(_decoded(engine, [60.0, 64.0, 70.0]), STEPS, CONTEXT, GENERATOR)
    assert [found.step_ms, found.row_us] == pytest.approx([9.0, H100.engine.row_us])


def test_a_machine_that_is_faster_than_the_model_has_no_negative_host() -> None:
    faster = [Decoded(each.seconds / 10, each.rows) for each in _decoded(H100.engine, [8.0, 64.0, 200.0])]
    found = fit_decoding(faster, STEPS, CONTEXT, GENERATOR)
    assert found.step_ms == found.row_us == 0


def test_updates_give_a_factor_and_where_tokens_differ_the_seconds_before_them() -> None:
    bare = replace(TRAINER, gpu=H100.model_copy(update={"engine": H100.engine.model_copy(update={"stage_s": 0.0})}))
    batches = [packed(np.full(64, length))[0] for length in (500, 1000, 2000)]
    found = [Update(2.5 + 1.3 * bare.steps([batch]).seconds, [batch]) for batch in batches]
    assert list(fit_updates(found, TRAINER)) == pytest.approx([1.3, 2.5])
    alike = [Update(H100.engine.stage_s + 1.3 * bare.steps([batches[0]]).seconds, [batches[0]])] * 4
    assert list(fit_updates(alike, TRAINER)) == pytest.approx([1.3, H100.engine.stage_s])


def test_a_run_on_other_hardware_is_refused_by_name(tmp_path: Path) -> None:
    folder = simulated_run(tmp_path / "r", updates=3).folder.path
    with pytest.raises(CalibrationError, match="given a run on CPUs, needed one on H100"):
        calibrate(folder, read_cluster("1x8xH100"), 128)
    with pytest.raises(CalibrationError, match="a folder that tells nothing"):
        calibrate(tmp_path, read_cluster("1x8xH100"), 128)


def test_a_calibrated_period_has_a_range_on_both_sides_and_three_digits() -> None:
    plain, calibrated = Confidence(), Confidence("run: 8 groups")
    assert (plain.about(12.345), calibrated.about(12.345)) == (12.0, 12.3)
    (low, high), (least, most) = plain.range_s(10.0), calibrated.range_s(10.0)
    assert low <= 10.0 < high
    assert least < 10.0 < most
    assert "run: 8 groups" in calibrated.words
    assert plain.about(0.0) == 0.0


def _on_a_gpu(folder: Path, cluster: str, model: Path) -> None:
    """Edit a simulated run's folder so that it says it ran on GPUs; no GPU wrote it."""
    config, placed = (json.loads((folder / name).read_text()) for name in ("config.json", "plan.json"))
    config["flags"] |= {"model": str(model), "dtype": "bfloat16", "max_tokens": 512, "recompute": "layer"}
    config["flags"] |= {"micro_tokens": MICRO_TOKENS}
    config["asked"]["cluster"] = read_cluster(cluster).model_dump(mode="json")
    text = json.dumps(placed)
    assert '"cpu"' in text
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "plan.json").write_text(text.replace('"cpu"', '"cuda:0"'))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row | {"response_length": 200.0, "finished": 1.0, "sync_s": 0.75} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(("name", "steps"), [("aipo", {}), ("ppo", {"epochs": 3, "minibatches": 2})])
def test_a_run_on_such_gpus_gives_a_model_with_its_seconds(tmp_path: Path, name: str, steps: dict[str, int]) -> None:
    """From the run's folder to the cluster that is planned for."""
    program, options = f"penstock.programs.{name}:{name}", {"lag": 1, **steps}
    roles = roles_of(graph := trace(load(name), options))
    nodes = {node.name: 0.001 for node in graph.nodes if node.fires} | {"generate": 12.0, roles.cycle[-1]: 4.0}
    seconds = Durations(nodes, publish=0.01, wire=0.1, swap=0.01)
    made = simulated_run(tmp_path / "r", updates=12, program=program, options=options, durations=seconds)
    model = {"model_type": "llama", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
             "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(model))
    _on_a_gpu(made.folder.path, "1x8xH100", tmp_path)
    found = calibrate(made.folder.path, read_cluster("1x8xH100"), 128)
    gpu = found.on(read_cluster("1x8xH100")).gpus["H100"]
    shape, engine = read_shape(str(tmp_path)), H100.engine
    lengths = Lognormal(200.0, 0.7, 512).take(256 * roles.samples).reshape(-1, roles.samples)
    decoded = float(lengths.max(axis=1).mean())
    assert gpu.engine.step_ms > engine.step_ms
    rows = 8 * roles.samples
    step = Generator(shape, gpu, Parallel(), 256).step(rows, rows * (128 + decoded / 2)).seconds
    # All rows that there are, or a few of them, on average.
    assert step * decoded == pytest.approx(12.0, rel=0.1)
    assert gpu.engine.swap_s > engine.swap_s
    trainer = Trainer(shape, gpu, Parallel(), micro_tokens=MICRO_TOKENS)
    update = trainer.update(np.full(rows, 328), roles.epochs, roles.minibatches).seconds
    assert update == pytest.approx(4.0, rel=0.1)
    assert str(made.folder.path) in Confidence(found.words).words
