"""What one update has to do: the model, the prompts and samples, how long responses are. Pure but for what it reads."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from penstock.runtime.plan.lengths import IntArray, LengthError, Lengths, Lognormal, fitted, read_lengths
from penstock.runtime.plan.shape import Shape


@dataclass(frozen=True)
class Workload:
    """One update: `prompts` prompts of `prompt_tokens` each, `samples` responses to each of them.

    `epochs` is how often each response is trained on, `minibatches` the optimizer's steps in each epoch, and
    `micro_tokens` the most tokens in a micro-batch of a data-parallel rank (a longer sequence is one by itself).
    """

    shape: Shape
    prompts: int
    samples: int
    lengths: Lengths
    prompt_tokens: int = 128
    epochs: int = 1
    minibatches: int = 1
    micro_tokens: int = 8192

    def __post_init__(self) -> None:
        counts = ("prompts", "samples", "epochs", "minibatches", "micro_tokens")
        for name, least in (*((count, 1) for count in counts), ("prompt_tokens", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"workload: given {name} {getattr(self, name)}, needed {least} or more")
        if self.minibatches > self.responses:
            given = f"{self.minibatches} minibatches of {self.responses} responses"
            raise ValueError(f"workload: given {given}, needed at least one response in each")

    @property
    def responses(self) -> int:
        return self.prompts * self.samples

    @cached_property
    def response_tokens(self) -> IntArray:
        """[responses]: the length of each, those of a prompt beside each other."""
        return self.lengths.take(self.responses)

    @cached_property
    def sequence_tokens(self) -> IntArray:
        """[responses]: prompt and response, as the trainer sees them."""
        return self.response_tokens + self.prompt_tokens

    @property
    def context(self) -> int:
        """The longest sequence there can be."""
        return self.prompt_tokens + self.lengths.longest


def given_lengths(given: str, longest: int) -> Lengths:
    """`mean,sigma` of a lognormal, a file with a length per line, or the folder of a finished run.

    Raises LengthError, with what is needed.
    """
    path = Path(given)
    if path.is_dir():
        return of_run(path, longest)
    if path.is_file():
        return read_lengths(path, longest)
    try:
        mean, sigma = (float(part) for part in given.split(","))
    except ValueError:
        needed = (
            "MEAN,SIGMA of a lognormal in tokens such as 1000,0.7, a file with a length per line, or a run's folder"
        )
        raise LengthError(f"--lengths: given {given!r}, needed {needed}") from None
    return Lognormal(mean, sigma, longest)


def of_run(folder: Path, longest: int) -> Lognormal:
    """The lognormal that a run's `metrics.jsonl` speaks for: its mean `response_length`, and its share `finished` of
    responses that ended by themselves before `longest` tokens."""
    path = folder / "metrics.jsonl"
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise LengthError(f"{path}: no metrics of a run: {error}") from error
    found = [(row["response_length"], row.get("finished", 1.0)) for row in rows if "response_length" in row]
    if not found:
        raise LengthError(f"{path}: given {len(rows)} rows, needed one or more with response_length")
    mean, finished = (sum(column) / len(found) for column in zip(*found, strict=True))
    if not 1 <= mean <= longest:
        needed = f"responses of 1 to {longest} tokens, as asked for"
        raise LengthError(f"{path}: given a mean response_length of {mean:g}, needed {needed}")
    return fitted(mean, finished, longest)
