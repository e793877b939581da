"""Five scalars for a system, fitted to its rows but for those of one set-up. Pure."""

from collections.abc import Mapping, Sequence

import numpy as np
from predicted import SCALARS, Prediction

NONE: dict[str, float] = {"computing": 1.0, "communicating": 1.0, "generating": 1.0, "rows": 0.0, "once": 0.0}
"""The scalars without calibration."""
PULL = {"computing": 1.0, "communicating": 1.0, "generating": 1.0, "rows": 2e-5, "once": 10.0}
"""How far from those a scalar may go for the price of one row's whole error: a weak pull, the same for all systems."""
ROUNDS = 40


def fit(rows: Sequence[tuple[Prediction, float]]) -> dict[str, float]:
    """The scalars, none below 0, that make the smallest sum of relative errors: by least squares weighted again in each
    round by the errors of the one before, with the sides that bound each row chosen again, too."""
    start = np.array([NONE[name] for name in SCALARS])
    pull = np.diag([0.5 / PULL[name] for name in SCALARS])
    values = start.copy()
    for _ in range(ROUNDS):
        scalars = dict(zip(SCALARS, values.tolist(), strict=True))
        terms = np.array([[p.active(scalars)[name] / seconds for name in SCALARS] for p, seconds in rows])
        weights = 1 / np.sqrt(np.maximum(np.abs(terms @ values - 1), 0.02))
        matrix = np.vstack([terms * weights[:, None], pull])
        wanted = np.concatenate([weights, pull @ start])
        values = (values + _least(matrix, wanted)) / 2  # half-way: sides that change do not make it swing
    return dict(zip(SCALARS, values.tolist(), strict=True))


def _least(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares without negative scalars: those that come out negative are held at 0, one after the other."""
    free = list(range(matrix.shape[1]))
    while True:
        found = np.zeros(matrix.shape[1])
        found[free] = np.linalg.lstsq(matrix[:, free], wanted, rcond=None)[0]
        if (found >= 0).all():
            return found
        free.remove(int(found.argmin()))


def leave_one_out(
    rows: Sequence[tuple[Prediction, float]], setups: Sequence[object]
) -> tuple[list[float], Mapping[str, float]]:
    """The prediction of each row by the scalars of all rows of other set-ups, and the scalars of all rows."""
    found = []
    for (prediction, _), setup in zip(rows, setups, strict=True):
        others = [row for row, other in zip(rows, setups, strict=True) if other != setup]
        found.append(prediction.seconds(fit(others)))
    return found, fit(rows)
