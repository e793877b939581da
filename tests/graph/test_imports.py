"""Import paths: they name a function so that another process finds the same one."""

import json
import os
import subprocess
import sys
from enum import IntEnum
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.graph import GraphError, NodeDef, Policy, Program, load, node, program, trace
from penstock.graph.imports import arguments, encode, imported, resolve, short
from penstock.graph.types import Rewards, Rollouts

PROGRAMS = Path(__file__).with_name("programs_for_tests.py")

MINE = """
from dataclasses import dataclass
from penstock.graph import Policy, Prompts, Rewards, Rollouts, Weights, broadcast, node, program
from beside_mine import rule

@dataclass
class Plan:
    steps: tuple

class Nested:
    @staticmethod
    def inside(x): return x

@node(pool="generator")
def plan(prompts: Prompts, behaviour: Weights, *, by=rule) -> Plan: ...

@node(pool="trainer", clock="update")
def learn(policy: Policy, plan: Plan) -> Policy: ...

@program
def mine(policy, prompts):
    return learn(policy, plan(prompts, broadcast(policy, lag=1)))

not_here = lambda: 1
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "beside_mine.py").write_text("def rule(x): return x\n")
    return tmp_path / "mine.py"


@node
def judge(rollouts: Rollouts) -> Rewards: ...


def refused(path: str, code: str, *words: str) -> None:
    with pytest.raises(GraphError) as raised:
        load(path)
    assert [fault.code for fault in raised.value.faults] == [code]
    for word in words:
        assert word in str(raised.value)


# Loading --------------------------------------------------------------------------------------------------


def test_a_module_and_name() -> None:
    assert load("penstock.graph.types:Rewards") is Rewards
    assert load("penstock.graph.types:Batchable.concat").__name__ == "concat"


def test_a_file_and_name_with_what_stands_beside_it(mine: Path) -> None:
    found = load(f"{mine}:mine")
    assert isinstance(found, Program)
    assert found.path == f"{mine}:mine"
    assert load(f"{mine}:Nested.inside")(3) == 3


def test_a_file_is_loaded_once_whatever_its_path_is_given_as(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(f"{mine}:plan")
    monkeypatch.chdir(mine.parent)
    assert load("mine.py:plan") is first
    assert load("./mine.py:plan") is first
    assert isinstance(first, NodeDef)


def test_the_graph_of_a_file_names_its_nodes_types_and_functions_by_path(mine: Path) -> None:
    graph = trace(load(f"{mine}:mine"))
    assert graph.op == f"{mine}:mine"
    assert [n.op for n in graph.nodes] == ["broadcast", f"{mine}:plan", f"{mine}:learn"]
    assert graph["plan"].outputs[0].type == f"{mine}:Plan"
    assert graph["plan"].option("by") == {"path": "beside_mine:rule"}
    assert load(graph["learn"].op) is load(f"{mine}:learn")


def test_another_process_traces_an_equal_graph(mine: Path) -> None:
    code = (
        "import json,sys; from penstock.graph import load,trace; print(json.dumps(trace(load(sys.argv[1])).to_json()))"
    )
    command = [sys.executable, "-c", code, f"{mine}:mine"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == trace(load(f"{mine}:mine")).to_json()


def test_a_script_names_its_own_nodes_by_file(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "from penstock.graph import load, node, Rewards\n"
        "@node\n"
        "def judge(rewards: Rewards) -> Rewards: ...\n"
        "if __name__ == '__main__':\n"
        "    print(judge.path, load(judge.path) is judge)\n"
    )
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == f"{tmp_path}/script.py:judge True\n"


def test_modules_of_the_current_folder_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lonely_module.py").write_text("def rule(x): return x\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load("lonely_module:rule")(2) == 2


def test_built_in_programs_have_short_names(monkeypatch: pytest.MonkeyPatch) -> None:
    import penstock.programs as programs

    folder = PROGRAMS.parent
    monkeypatch.setattr(programs, "__path__", [str(folder)])
    refused("programs_for_test", "nothing-to-load", "'programs_for_test'", "the nearest: programs_for_tests")


# What cannot be loaded ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "code", "words"),
    [
        ("{mine}:lern", "nothing-to-load", ["given   '{mine}:lern'", "at the top of {mine}", "the nearest: learn"]),
        ("penstock.graph.types:Reward", "nothing-to-load", ["the nearest: Rewards"]),
        ("{mine}:xyz", "nothing-to-load", []),
        ("{mine}", "nothing-to-load", ["mine"]),
        ("{mine}:mine.<locals>.inner", "nothing-to-load", ["other processes cannot import"]),
        ("penstock.grph:node", "missing-module", ["there is no module 'penstock.grph'"]),
        ("no_such_package.inside:node", "missing-module", ["there is no module 'no_such_package'"]),
        ("{folder}/mien.py:mine", "nothing-to-load", ["there is no file", "the nearest: mine.py"]),
        ("aippo.inner", "nothing-to-load", []),
    ],
)
def test_what_cannot_be_found_comes_with_the_nearest_names(mine: Path, path: str, code: str, words: list[str]) -> None:
    refused(path.format(mine=mine, folder=mine.parent), code, *(w.format(mine=mine) for w in words))


def test_a_module_that_cannot_be_imported_says_so_itself(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_dependency\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        load(f"{tmp_path}/broken.py:anything")
    (tmp_path / "wrong.py").write_text("def f(:\n")
    with pytest.raises(SyntaxError):
        load(f"{tmp_path}/wrong.py:f")
    (tmp_path / "wrong.py").write_text("def f(): return 1\n")
    assert load(f"{tmp_path}/wrong.py:f")() == 1


@pytest.mark.parametrize("marked", [True, False])
def test_a_file_of_a_package_comes_with_its_name_in_it(tmp_path: Path, marked: bool) -> None:
    folder = tmp_path / "mine" / "algorithms"
    folder.mkdir(parents=True)
    for place in (folder, folder.parent) if marked else ():
        (place / "__init__.py").touch()
    (folder / "first.py").write_text("import math\nfrom .rules import rule\n")
    needed = "mine.algorithms.first:rule, from the folder of mine" if marked else "algorithms.first:rule, from"
    refused(f"{folder}/first.py:rule", "relative-import", f"{folder}/first.py:2", "from .rules import rule", needed)
    # What another module lacks is its own fault.
    (folder / "second.py").write_text(f"import sys; sys.path.append({str(folder)!r}); import first\n")
    with pytest.raises(ImportError, match="no known parent package"):
        load(f"{folder}/second.py:rule")


# Options --------------------------------------------------------------------------------------------------


class Kind(IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    ("option", "encoded"),
    [
        *((same, same) for same in (None, True, 3, -2.5, float("inf"), "text", [1, [2]], {"a": {"b": None}})),
        ((1, (2,)), [1, [2]]),
        ([np.float64(0.5), np.int64(3), np.float32(0.25), Kind.ONE], [0.5, 3, 0.25, 1]),
    ],
)
def test_an_option_is_encoded_as_json(option: Any, encoded: Any) -> None:
    assert json.dumps(encode(option, "x")) == json.dumps(encoded)
    assert resolve(encode(option, "x")) == encoded


@pytest.mark.parametrize("thing", [judge, Rewards, os.path.join, len])
def test_functions_classes_and_nodes_are_encoded_as_paths(thing: Any) -> None:
    assert resolve(encode([{"by": thing}], "x")) == [{"by": thing}]


@pytest.mark.parametrize(
    "option", [float("nan"), np.float64("nan"), {1: 2}, b"x", object(), {"path": "a:b"}, {1}, 1j, lambda: 1]
)
def test_other_objects_are_refused(option: Any) -> None:
    with pytest.raises(GraphError, match="score: option 'by'"):
        encode(option, "score: option 'by'")


def test_short_names() -> None:
    assert short("penstock.graph.types:Rewards") == "Rewards"
    assert short("/home/me/my.py:judge") == "judge"
    assert short("m:test.<locals>.Inner") == "Inner"


def test_options_that_are_paths_are_absolute_in_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    @program
    def shelved(policy: Policy, *, shelf: Path | None = None, home=Path("h"), shelves: list[Path] = []) -> Any:  # type: ignore[no-untyped-def]  # noqa: B006
        seen.append((shelf, shelves))
        return policy

    def options(**given: Any) -> dict[str, Any]:
        return dict(trace(shelved, given).options)

    monkeypatch.chdir(tmp_path)
    here = f"{tmp_path}/"
    assert options(shelf="s", shelves=["s", "/t"]) == {
        "shelf": f"{here}s",
        "home": f"{here}h",
        "shelves": [f"{here}s", "/t"],
    }
    assert options() == {"shelf": None, "home": f"{here}h", "shelves": []}
    assert seen == [(tmp_path / "s", [tmp_path / "s", Path("/t")]), (None, [])]
    assert encode(partial(read_all, files=(Path("f"),)), "x")["options"] == {"files": [f"{here}f"]}


def test_what_stands_beside_a_program_is_reached_by_those_who_do_not_load_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("raise SystemExit\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "nodes.py").write_text("def part(): ...\n")
    done = f"from penstock.graph.imports import load, reach\nreach({f'{tmp_path}/program.py:mine'!r})\n"
    code = done + "print(load('parts.nodes:part').__name__)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=True, timeout=60)
    assert said.stdout == "part\n"


def read(text: str, *, file: Path, other: "Path | None" = None, name: str = "n") -> str:
    return f"{text} {file.name} {other and other.name} {name}"


def read_all(text: str, *, files: tuple[Path, ...]) -> str:
    return " ".join([text, *(file.name for file in files)])


def test_a_function_gets_several_paths_where_it_asks_for_them() -> None:
    given = encode(partial(read_all, files=(Path("/a/b"), Path("/c"))), "x")
    assert resolve(given)("t") == "t b c"


def test_a_function_with_options_bound_in_two_steps_keeps_those_of_both() -> None:
    """functools.partial itself merges two partials into one, unless the first has attributes."""
    first = update_wrapper(partial(read, name="n", file=Path("/a")), read)
    assert encode(partial(first, file=Path("/b")), "x")["options"] == {"name": "n", "file": "/b"}


def test_a_function_gets_a_path_where_it_asks_for_one_and_a_text_where_not() -> None:
    given = encode(partial(read, file=Path("/a/b"), other=Path("c"), name="d"), "x")
    assert resolve(given)("t") == "t b c d"
    assert arguments(read, {"file": "/a", "other": None, "name": "/n"}) == {
        "file": Path("/a"),
        "other": None,
        "name": "/n",
    }


def test_what_is_imported_is_found_and_nothing_else_is_imported(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("class A:\n    def f(self): ...\n")
    assert imported(f"{tmp_path}/late.py:A.f") is None
    assert load(f"{tmp_path}/late.py:A.f") is imported(f"{tmp_path}/late.py:A.f") is not None
    assert imported(f"{tmp_path}/late.py:B") is None
    assert imported("json:dumps") is json.dumps
    assert imported("no_such_package.module:f") is None
