"""A game of turns that costs nothing: guess a whole number, and be told whether it is higher or lower."""

import re
from itertools import compress

import torch

from penstock.graph.context import Context
from penstock.graph.protocols import Source
from penstock.graph.requires import reads_no_data
from penstock.graph.types import Mean, Metrics, Prompts, Replies, Rollouts
from penstock.nodes.environments.environment import environment

LOW, HIGH = 0, 9
_NUMBER = re.compile(r"[0-9]+")


class Secrets(Prompts):
    """Prompts are a range to guess in ("0-9:"), answers a number in it.

    The program's options `low` and `high` are its bounds, by default 0 and 9.
    """

    maker = "penstock.nodes.environments.guessing_game:open_secrets"


class _Secrets:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.low, self.high = (int(context.options.get(name, bound)) for name, bound in (("low", LOW), ("high", HIGH)))
        if not 0 <= self.low < self.high:
            raise ValueError(f"secrets: given the range {self.low} to {self.high}, needed 0 <= low < high")

    def read(self, ordinal: int) -> Prompts:
        """A secret drawn by key; for the evaluation the numbers in turn."""
        # All numbers equally often, so that two evaluations differ only by their policies.
        number = ordinal if self.context.split == "evaluate" else self.context.key("secret", ordinal)
        secret = self.low + number % (self.high - self.low + 1)
        return Secrets((ordinal,), (f"{self.low}-{self.high}:",), (str(secret),))


@reads_no_data
def open_secrets(context: Context) -> Source:
    """The source of `Secrets`. Raises ValueError unless 0 <= low < high."""
    return _Secrets(context)


@environment
def guessing_game(
    rollouts: Rollouts, *, higher: str = "higher", lower: str = "lower", unclear: str = "a number?"
) -> tuple[Replies, Metrics]:
    """Replies whether each row's secret (its `answers`) is `higher` or `lower` than the guess, the first number in the
    newest turn; `unclear` if that has none.

    A row is done, with reward 1, when the guess is right; until then its reward is 0. Raises ValueError for a secret
    that is no whole number. Metric: `unclear`, the share of turns without a number.
    """
    texts, right = [], []
    for row, (said, answer) in enumerate(zip(rollouts.texts, rollouts.answers, strict=True)):
        if not _NUMBER.fullmatch(answer):
            place = f"guessing_game, group {rollouts.ordinals[row]}"
            raise ValueError(f"{place}: given the secret {answer!r}, needed a whole number (see Secrets)")
        found = _NUMBER.search(said)
        guess = None if found is None else int(found[0])
        right.append(guess == int(answer))
        texts.append(unclear if guess is None else higher if guess < int(answer) else lower)
    done_N = torch.tensor(right)
    replies = Replies(tuple(texts), ("user",) * len(texts), done_N, done_N.float())
    return replies, {"unclear": Mean.of([text == unclear for text in compress(texts, rollouts.in_newest_turn())])}
