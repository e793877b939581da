"""A curriculum: of several candidates for a group, take the prompt of the kind whose rewards vary most.

If all responses are right, or all wrong, a group-mean baseline leaves no gradient: p · (1 − p), the variance of a
reward that is 1 with probability p, measures how much there is to learn (see DAPO, arXiv 2503.14476, section 3.2, which
drops such groups after sampling). The variances are a carried value, read through `delay`: the choices for an update
depend on exactly the updates before it, except the last `lag`.
"""

from collections.abc import Callable
from dataclasses import field, replace
from itertools import zip_longest
from math import inf
from typing import ClassVar

from penstock.graph import node
from penstock.graph.context import Context
from penstock.graph.protocols import Source
from penstock.graph.types import Metrics, Prompts, Rewards
from penstock.nodes.carried import carried
from penstock.nodes.data import Made, open_prompts

# A prompt's text → its kind, which it has in common with other prompts.
Kind = Callable[[str], str]

# The share of a kind's variance that an update keeps.
MEMORY = 0.7


class Candidates(Prompts):
    """Several prompts for each group, one of which is to be chosen."""

    maker: ClassVar[str] = "penstock.nodes.curriculum:open_candidates"
    pool: ClassVar[str] = "curriculum"


@carried
class Varied:
    """For each kind of prompt, the recent variance of the rewards within a group; read through `delay`."""

    maker: ClassVar[str] = "penstock.nodes.curriculum:make_varied"
    pool: ClassVar[str] = "curriculum"

    variances: dict[str, float] = field(default_factory=dict)


def open_candidates(context: Context) -> Source:
    """The run's prompts, as many for a group as the program's option `candidates` says."""
    count = int(context.options.get("candidates", 4))
    if count < 1:
        raise ValueError(f"candidates: given {count}, needed at least 1 prompt to choose from")
    prompts = open_prompts(replace(context, split="train"))

    def read(ordinal: int) -> Candidates:
        found = Prompts.concat([prompts.read(ordinal * count + index) for index in range(count)])
        return Candidates((ordinal,) * count, found.texts, found.answers)

    return Made(read)


def make_varied(context: Context) -> Varied:
    return Varied()


def carries(text: str) -> str:
    """The kind of an arithmetic problem "a+b=": its sign, and how many digits have to be carried or borrowed.

    Raises ValueError for any other text.
    """
    sign = "+" if "+" in text else "-"
    a, _, b = text.rstrip("=").partition(sign)
    if not (a.isdecimal() and b.isdecimal()):
        needed = 'a problem such as "12+345="; for other prompts, pass `by` a function of their own kinds'
        raise ValueError(f"carries: given {text!r}, needed {needed}")
    carry = count = 0
    for x, y in zip_longest(reversed(a), reversed(b), fillvalue="0"):
        carry = int(int(x) + int(y) + carry > 9 if sign == "+" else int(x) - int(y) - carry < 0)
        count += carry
    return f"{sign}{count}"


@node(pool="curriculum")
def choose(candidates: Candidates, varied: Varied, *, by: Kind = carries) -> tuple[Prompts, Metrics]:
    """The candidate of the kind whose rewards have varied most, the first of equals; unseen kinds come first.

    Metrics: `expected_variance`, the known variance of that kind, and `unseen`, 1 if none is known.
    """
    known = [varied.variances.get(by(text)) for text in candidates.texts]
    # Try kinds without a known variance first.
    variances = [inf if variance is None else variance for variance in known]
    row = max(range(len(variances)), key=variances.__getitem__)
    chosen = Prompts((candidates.ordinals[row],), (candidates.texts[row],), (candidates.answers[row],))
    found = known[row]
    return chosen, {"unseen": 1.0} if found is None else {"unseen": 0.0, "expected_variance": found}


@node(pool="curriculum", clock="update")
def remember(varied: Varied, prompts: Prompts, rewards: Rewards, *, by: Kind = carries) -> tuple[Varied, Metrics]:
    """Update the variances with the rewards of an update's groups. Metric: `kinds`, the number of known kinds."""
    groups, rows = len(prompts.texts), len(rewards.values_N)
    if rows % groups:
        raise ValueError(f"remember: given {rows} rewards of {groups} groups, needed equally many of each group")
    variance_G = rewards.values_N.float().view(groups, -1).var(1, unbiased=False).tolist()
    for text, variance in zip(prompts.texts, variance_G, strict=True):
        kind = by(text)
        # The first variance counts in full: with a start at 0 a new kind would not be chosen for a long time.
        known = varied.variances.get(kind, variance)
        varied.variances[kind] = MEMORY * known + (1 - MEMORY) * variance
    return varied, {"kinds": float(len(varied.variances))}
