"""The confidence in seconds of the cost model: the likely range of a run, and the number of significant digits. Pure.

The ranges come from `benchmarks/planner.py`: the middle 80 % of the published steps of three systems took 1.05 to 1.77
times the prediction; with a few numbers fitted to other set-ups of the same system, 0.86 to 1.46 times
(docs/measurements.md). They are errors of the whole model. When plans are compared with each other, much of the error
cancels.
"""

from dataclasses import dataclass
from math import floor, log10
from typing import Any

# The range of measured / predicted seconds, rounded outwards.
AS_IT_IS = (1.0, 1.8)
CALIBRATED = (0.8, 1.5)


@dataclass(frozen=True)
class Confidence:
    """`calibrated` says by which run, and by how many samples, the model was calibrated; "" if it was not."""

    calibrated: str = ""

    @property
    def digits(self) -> int:
        """The number of significant digits of seconds."""
        return 3 if self.calibrated else 2

    def about(self, seconds: float) -> float:
        """Seconds rounded to the significant digits."""
        return round(seconds, self.digits - 1 - floor(log10(abs(seconds)))) if seconds else 0.0

    def range_s(self, seconds: float) -> tuple[float, float]:
        """The likely range: least and most seconds."""
        low, high = CALIBRATED if self.calibrated else AS_IT_IS
        return self.about(seconds * low), self.about(seconds * high)

    def facts(self, seconds: float) -> dict[str, Any]:
        """A period and its range as JSON."""
        return {
            "period_s": self.about(seconds),
            "period_range_s": list(self.range_s(seconds)),
            "calibrated": self.calibrated or None,
        }

    @property
    def words(self) -> str:
        """The confidence in words."""
        return f"calibrated by {self.calibrated}" if self.calibrated else "not calibrated: --calibrate RUN"


# The confidence in the cost model with its defaults.
NOT_CALIBRATED = Confidence()
