"""How sure seconds of the cost model are: the range in which a run is likely to be, and the digits that are worth
saying. Pure.

The ranges are what `benchmarks/planner.py` found: of published steps of three systems the middle eighty of a hundred
took 1.05 to 1.77 times the prediction; with a few numbers fitted to other set-ups of the same system, 0.86 to 1.46
times (docs/measurements.md). They are of the whole model, not of one plan: plans of one model differ by less.
"""

from dataclasses import dataclass
from math import floor, log10
from typing import Any

# Shares of the prediction between which measured steps are, rounded outwards.
AS_IT_IS = (1.0, 1.8)
CALIBRATED = (0.8, 1.5)


@dataclass(frozen=True)
class Confidence:
    """`calibrated` says by which run and how many of its figures the model was calibrated; "" if by none."""

    calibrated: str = ""

    @property
    def digits(self) -> int:
        """That seconds are worth."""
        return 3 if self.calibrated else 2

    def about(self, seconds: float) -> float:
        """With as many digits as it is worth."""
        return round(seconds, self.digits - 1 - floor(log10(abs(seconds)))) if seconds else 0.0

    def range_s(self, seconds: float) -> tuple[float, float]:
        """The least and the most seconds that are likely."""
        low, high = CALIBRATED if self.calibrated else AS_IT_IS
        return self.about(seconds * low), self.about(seconds * high)

    def facts(self, seconds: float) -> dict[str, Any]:
        """Of a period, as JSON."""
        return {
            "period_s": self.about(seconds),
            "period_range_s": list(self.range_s(seconds)),
            "calibrated": self.calibrated or None,
        }

    @property
    def words(self) -> str:
        """How sure, for people."""
        return f"calibrated by {self.calibrated}" if self.calibrated else "not calibrated: --calibrate RUN"


# Of the cost model with its defaults.
NOT_CALIBRATED = Confidence()
