"""Five scalars for a system, fitted to its rows except those of one set-up. Pure."""

from collections.abc import Mapping, Sequence

import numpy as np
from predicted import SCALARS, Prediction

NONE: dict[str, float] = {"computing": 1.0, "communicating": 1.0, "generating": 1.0, "rows": 0.0, "once": 0.0}
"""The scalars without calibration."""
PULL = {"computing": 1.0, "communicating": 1.0, "generating": 1.0, "rows": 2e-5, "once": 10.0}
"""Scale of the penalty on each scalar's distance from `NONE`: a weak pull, the same for all systems."""
ROUNDS = 40


def fit(rows: Sequence[tuple[Prediction, float]]) -> dict[str, float]:
    """Fit scalars, none below 0, that minimise the sum of relative errors, by iteratively reweighted least squares:
    each round weights rows by the errors of the previous one, and again chooses the sum that bounds each row."""
    start = np.array([NONE[name] for name in SCALARS])
    pull = np.diag([0.5 / PULL[name] for name in SCALARS])
    values = start.copy()
    for _ in range(ROUNDS):
        scalars = dict(zip(SCALARS, values.tolist(), strict=True))
        terms = np.array([[p.active(scalars)[name] / seconds for name in SCALARS] for p, seconds in rows])
        weights = 1 / np.sqrt(np.maximum(np.abs(terms @ values - 1), 0.02))
        matrix = np.vstack([terms * weights[:, None], pull])
        wanted = np.concatenate([weights, pull @ start])
        values = (values + _least(matrix, wanted)) / 2  # half a step, against oscillation when bounds change
    return dict(zip(SCALARS, values.tolist(), strict=True))


def _least(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Solve least squares without negative scalars: the most negative one is fixed at 0 until none is negative."""
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
    """Return each row's prediction with scalars fitted to the rows of other set-ups, and the scalars of all rows."""
    found = []
    for (prediction, _), setup in zip(rows, setups, strict=True):
        others = [row for row, other in zip(rows, setups, strict=True) if other != setup]
        found.append(prediction.seconds(fit(others)))
    return found, fit(rows)
