"""What the pages say of each algorithm in `programs/`, read from its docstring and its traced graph.

An algorithm is a built-in program that cites a paper. The others make the models that algorithms start from, measure,
or show a schedule.
"""

import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock import programs
from penstock.graph import Graph, Program, load, trace
from penstock.graph.imports import resolve, short

ARXIV = re.compile(r"\b(\d{4}\.\d{4,5})\b")
CITED = re.compile(r"[A-Z][\w-]+(?: et al\.| and [A-Z][\w-]+)? (?:19|20)\d\d\b|[A-Z][\w ]+ Lab (?:19|20)\d\d\b")
MODELS = {
    "Critic": "a critic",
    "Reference": "a frozen reference",
    "Average": "a copy of the policy",
    "RewardModel": "a reward model",
    "Teacher": "a teacher",
}
"""What the carried values beside the learner are, by their types."""


@dataclass(frozen=True)
class Entry:
    """A built-in program: its file, what its docstrings say, its graph with default options."""

    name: str
    lines: int
    module_doc: str
    program: Program[..., Any]
    graph: Graph

    @property
    def papers(self) -> list[str]:
        """Links to arXiv for what the docstrings cite; authors and year where nothing cited is there."""
        words = f"{self.module_doc}\n{self.graph.doc}"
        links = [f"[{number}](https://arxiv.org/abs/{number})" for number in dict.fromkeys(ARXIV.findall(words))]
        return links or list(dict.fromkeys(CITED.findall(" ".join(words.split()))))

    @property
    def summary(self) -> str:
        """The first sentence of the file's docstring, without what it cites."""
        first = " ".join(self.module_doc.split("\n\n")[0].split())
        bare = re.sub(r" \((?:[^()]|\([^()]*\))*(?:\d{4}|arXiv)(?:[^()]|\([^()]*\))*\)", "", first)
        return re.split(r"(?<!\bDr)\.(?:$|\s(?=[A-Z`]))", bare)[0]

    @property
    def lag(self) -> str:
        return str(dict(self.graph.options).get("lag", "none"))

    def needs(self) -> list[str]:
        return list(dict.fromkeys([*self._models(), *self._data(), *self._nodes()])) or ["–"]

    def _models(self) -> Iterator[str]:
        """Models beside the one that learns; those that only an option brings into the graph, too."""
        yield from _models(self.graph)
        for name, value in self.graph.options:
            flag = f"`--{name.replace('_', '-')}`"
            if name in [each.name for each in self.program.flags if each.is_path]:
                yield f"its directory, {flag}"
            elif value == 0 or value is False:
                given = trace(self.program, {name: type(value)(1)})
                yield from (f"{kind}, with {flag}" for kind in _models(given) if kind not in _models(self.graph))

    def _data(self) -> Iterator[str]:
        for source in self.graph.sources:
            if short(source.type) != "Prompts":
                yield f"`{short(source.type)}`"

    def _nodes(self) -> Iterator[str]:
        for node in self.graph.nodes:
            if node.answers:
                yield f"the environment `{short(node.op)}`"
            elif node.construct == "keep":
                yield f"the filter `{short(node.option('when')['path'])}`"
            elif node.construct == "delay":
                yield f"a delay of `{node.inputs[0].ref}`"
            elif node.stateful:
                yield f"the state of `{short(node.op)}`"
            elif node.clock == "update" and node.fires and node.every > 1:
                yield f"`{short(node.op)}` at every {node.every}th update"
            elif short(node.op) == "policy_logprobs":
                yield "log π before the update"
            elif short(node.op) == "generate" and node.option("temperature") == 0:
                yield "a greedy response beside"


def _models(graph: Graph) -> list[str]:
    kinds = [short(argument.type) for argument in graph.carried]
    return [MODELS[kind] for kind in kinds if kind in MODELS]


def entries() -> list[Entry]:
    """All built-in programs, by name."""
    found = []
    for module in pkgutil.iter_modules(programs.__path__):
        program = load(module.name)
        assert isinstance(program, Program)
        doc = inspect.getdoc(sys.modules[program.fn.__module__]) or ""
        lines = len(Path(inspect.getsourcefile(program.fn) or "").read_text().splitlines())
        found.append(Entry(module.name, lines, doc, program, trace(program)))
    return found


def algorithms() -> list[Entry]:
    return [entry for entry in entries() if entry.papers]


def others() -> list[Entry]:
    return [entry for entry in entries() if not entry.papers]


def loss(graph: Graph) -> str:
    """The loss that a graph's update is given, and how it averages; "" for an update with one of its own."""
    for node in graph.nodes:
        options = dict(node.options)
        if "loss" in options:
            return f"`{resolve({'path': options['loss']['path']}).__name__}`, {options['average']}"
    return ""
