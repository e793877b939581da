import pytest
from pydantic import ValidationError

from penstock.runtime.plan.machine import Passes

GRID = ((16, 128, 1e9), (16, 512, 4e9), (256, 128, 4e9), (256, 512, 16e9))


def passes(**changes: object) -> Passes:
    return Passes.model_validate({"lanes": 1, "products": GRID, "launch_us": 1.0, "element_gb_s": 10.0, **changes})


def test_rates_of_measured_shapes_are_as_measured() -> None:
    for rows, width, rate in GRID:
        assert passes().flops(rows, width) == pytest.approx(rate)


def test_rates_between_measured_shapes_are_linear_in_the_logarithms() -> None:
    assert passes().flops(64, 128) == pytest.approx(2e9)
    assert passes().flops(64, 256) == pytest.approx(4e9)


def test_rates_beyond_measured_shapes_are_the_nearest() -> None:
    assert passes().flops(1, 64) == pytest.approx(1e9)
    assert passes().flops(4096, 4096) == pytest.approx(16e9)


@pytest.mark.parametrize("products", [(), GRID[:3], (*GRID[:3], (256, 512, 0.0))])
def test_rates_are_a_whole_grid_above_zero(products: object) -> None:
    with pytest.raises(ValidationError, match="products"):
        passes(products=products)


def test_an_optimizer_step_is_between_the_measured_ones() -> None:
    measured = passes(optimizer=((1_000, 1e-9), (4_000, 3e-9)))
    assert measured.optimizer_s(2_000) == pytest.approx(2_000 * 2e-9)
    assert measured.optimizer_s(8_000) == pytest.approx(8_000 * 3e-9)
