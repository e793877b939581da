"""The comparison with published rows: which rows count, and how errors are computed."""

from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from penstock.runtime.cluster.gpus import GPUS
from penstock.runtime.plan.model_shape import SHAPES, Parallel
from penstock.runtime.plan.train_cost import Trainer


def script(name: str) -> Any:
    return import_module(name)


def row(**more: Any) -> Any:
    """A row of NeMo-RL with the given fields replaced."""
    layout, mode = "gen[TP,PP]=[4,1] train=[4,1,1,4]", "GRPO On BF16"
    own = script("published").Row(
        0, "NeMo-RL", "v1", "Qwen3-32B", "H100", 32, layout, "w", 4096, 3251.0, mode, 0, 100.0, 571.0, ()
    )
    return replace(own, **more)


def test_the_rows_that_count_are_those_of_the_rule() -> None:
    published = script("published")
    if not published.TABLE.exists():
        pytest.skip("the published rows are not part of the project")
    rows, left = published.read()
    systems = [row.system for row in rows]
    assert {name: systems.count(name) for name in systems} == {"NeMo-RL": 40, "torchtitan": 32, "prime-rl": 39}
    assert sum(left.values()) == 25
    assert all(row.seconds > 0 and row.shape and row.gpu for row in rows)


def test_layouts_are_read_and_gpus_shared_out_by_the_rule() -> None:
    published = script("published")
    assert published.nemo_layouts(row()) == ((Parallel(fsdp=2, tp=4, pp=4), 1, 1), Parallel(tp=4), 8)
    (mesh, _, _), _, replicas = published.nemo_layouts(row(staleness=1))
    assert (mesh.ranks, replicas) == (16, 4)
    # Context-parallel ranks shard the weights, too.
    assert published.mesh_of("FSDP4 CP2 TP8 PP8") == (Parallel(fsdp=8, tp=8, pp=8), 2)


def test_what_other_systems_have_and_plans_do_not_is_costed() -> None:
    predicted, shape = script("predicted"), SHAPES["llama-8b"]
    h100, batch = GPUS["H100"], np.full(64, 4096)
    plain = predicted.Recipe(shape, h100, Parallel(fsdp=8, tp=2))
    assert plain.update(batch).parts == pytest.approx(Trainer(shape, h100, plain.mesh).update(batch).parts)
    # All stages cost the same here (the one with the head has fewer layers): the bubble is one stage's work.
    staged = replace(plain, mesh=Parallel(fsdp=8, tp=2, pp=2))
    assert staged.filling == 1
    chunked, hidden = replace(staged, chunks=2).update(batch), replace(plain, async_tp=True).update(batch)
    assert chunked.parts["bubble"] == pytest.approx(staged.update(batch).parts["bubble"] / 2)
    assert hidden.parts["tp"] == pytest.approx(plain.update(batch).parts["tp"] / 2)


def test_a_pair_is_of_one_release_and_a_tie_is_wrong() -> None:
    pairs, slow, other = script("planner").pairs, row(seconds=200.0), row(source="v2")
    assert pairs([row(), slow, other], [1.0, 2.0, 9.0]) == (1, 1)
    assert pairs([row(), slow], [2.0, 1.0]) == (0, 1)
    assert pairs([row(), slow], [1.0, 1.0]) == (0, 1)
    assert pairs([row(), row(seconds=105.0)], [1.0, 2.0], 0.14) == (0, 0)


def test_calibration_finds_scalars_that_were_there() -> None:
    calibration, prediction = script("calibration"), script("predicted").Prediction
    truth = calibration.NONE | {"generating": 2.0, "computing": 1.5}
    sides = ((9.0, 1.0), (1.0, 9.0), (5.0, 5.0), (2.0, 3.0), (7.0, 2.0))
    made = [prediction(({"generating": a}, {"computing": b})) for a, b in sides]
    scalars = calibration.fit([(p, p.seconds(truth)) for p in made] * 8)
    assert scalars["generating"] == pytest.approx(2.0, rel=0.05)
    assert scalars["computing"] == pytest.approx(1.5, rel=0.05)
    assert min(scalars.values()) >= 0


def test_a_row_is_predicted_without_its_own_set_up() -> None:
    plain = script("predicted").Prediction(({"computing": 10.0},))
    rows = [(plain, 10.0)] * 6 + [(plain, 40.0)] * 2
    found, _ = script("calibration").leave_one_out(rows, ["a", "b", "c", "d", "e", "f", "odd", "odd"])
    assert found[6] == found[7] == pytest.approx(10.0, rel=0.02)


def test_the_bound_and_the_schedule_agree_as_the_theory_page_says() -> None:
    periods = script("theory").periods
    for lag, seconds in enumerate((16, 8, 16 / 3, 4, 4)):
        assert periods(lag, 8.0, 4.0) == pytest.approx((seconds, seconds))
