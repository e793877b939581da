"""Learning rates that change during a run: functions of the update's number and of the run's length.

    policy_update(policy, rollouts, advantage, loss=ppo, lr=partial(cosine, peak=1e-5, warmup=20))

One of your own is such a function at the top of your own file. An update calls it with the number of updates before it
(0, 1, …) and the updates of the whole run (`--updates`), so that a resumed run goes on where it was. Its own options
are bound with functools.partial.
"""

import math
from collections.abc import Callable

from penstock.graph import requires
from penstock.nodes.option_checks import count, not_negative

Schedule = Callable[[int, int], float]
"""(the update's number from 0, the run's updates) → its learning rate."""


@requires(not_negative("peak", "final"), count(0, "warmup"))
def cosine(update: int, updates: int, *, peak: float, warmup: int = 0, final: float = 0.0) -> float:
    """A line up over `warmup` updates to `peak`, times half a cosine from 1 down to the share `final` at the run's end.

    The cosine of Loshchilov and Hutter 2016 (arXiv 1608.03983), equation 5, without restarts.
    """
    fall = 0.5 * (1 + math.cos(math.pi * min(1.0, update / max(1, updates))))
    return peak * (_rise(update, warmup) * (final + (1 - final) * fall))


@requires(not_negative("peak", "final"), count(0, "warmup"))
def linear(update: int, updates: int, *, peak: float, warmup: int = 0, final: float = 0.0) -> float:
    """A line up over `warmup` updates to `peak`, times a line from 1 down to the share `final` at the run's end.

    `final=1.0` stays at the peak: a warm-up alone.
    """
    fall = 1 - min(1.0, update / max(1, updates))
    return peak * (_rise(update, warmup) * (final + (1 - final) * fall))


def _rise(update: int, warmup: int) -> float:
    """The share of the peak that update 0, 1, … has on the way up; 1 from update `warmup` on."""
    return min(1.0, (update + 1) / (warmup + 1))
