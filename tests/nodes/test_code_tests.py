"""Code that a model wrote earns its reward by tests in the sandbox; a fault of the sandbox is no reward of 0."""

import json
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from textwrap import indent
from typing import Any

import pytest

from penstock.graph import Context, Policy, Prompts, broadcast, program, trace
from penstock.graph.check import check
from penstock.nodes import code_tests as module
from penstock.nodes.advantage import group_advantage
from penstock.nodes.code_tests import code_tests, read_tests
from penstock.nodes.environments import sandbox
from penstock.nodes.environments.sandbox import Answer, SandboxError, isolation
from penstock.nodes.generate import generate
from penstock.nodes.learn.update import aipo_update
from penstock.nodes.score import score

ISOLATED = False
with suppress(SandboxError):
    ISOLATED = bool(isolation())
pytestmark = pytest.mark.filterwarnings("ignore:.*runs without a sandbox")
# Most promises hold without isolation, too.
graded = partial(code_tests, "add two numbers", sandbox=ISOLATED, seconds=60.0)

ASSERTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"
ADD = "def add(a, b):\n    return a + b\n"
CASE = "import unittest\nclass Test(unittest.TestCase):\n    def test(self):\n        self.assertEqual(add(1, 2), 3)\n"
LOADED = "unittest.defaultTestLoader.loadTestsFromTestCase(Test)"
NEAR = "assert abs(add(1, 2) - 3) < 1e-6"
PAIRS = json.dumps({"inputs": ["1 2\n", "-1 1\n"], "outputs": ["3\n", "0"]})
READS = "a, b = map(int, input().split())\nprint(a + b)\n"
IN_THREAD = "threading.stack_size(1 << 26)\nworker = threading.Thread(target=main)\nworker.start()\nworker.join()\n"
KINDS = "", "py", "py3", "Python3", "python title=x", "python3.11", "{.python}", "python {linenos=true}", " python "


POOL = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
meet = Barrier(32)
with ThreadPoolExecutor(32) as pool:
    list(pool.map(lambda _: meet.wait(), range(32)))
"""
PRINTS_WHEN_TESTED = """import sys
def add(a, b):
    frame = sys._getframe()
    while 'passed' not in frame.f_locals:
        frame = frame.f_back
    print(frame.f_locals['passed'])
    sys.exit()
"""
DATACLASS = "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n"
LAST = (
    "import atexit\natexit.register(print, 'bye')\n",
    "class Prints:\n    def __del__(self, show=print):\n        show('bye')\nkept = Prints()\n",
    "import threading\nthreading.Timer(0.1, print, ('bye',)).start()\n",
)
ENDS_OF_LINES = (("a\nb", 1.0), ("a \r\nb\n\n", 1.0), ("a\x0cb", 0.0), ("a\u2028b", 0.0), ("a\rb", 0.0))
HIDES = (
    "atexit.register(os._exit, 0)",
    "sys.excepthook = lambda *given: os._exit(0)",
    "import threading\nthreading.Timer(0.1, os._exit, (0,)).start()",
    "class AssertionError(BaseException): pass\n__builtins__['AssertionError'] = AssertionError",
)
ENDS = (
    "sys.exit(0)",
    "os._exit(0)",
    "raise KeyboardInterrupt",
    "sys.setrecursionlimit(10**9) or add(a, b)",
    "[print('x' * 1000) for _ in range(10**6)]",
)
# Texts before a block, with fences that open no block.
MENTIONS = (
    "The answer goes in a ```python``` block.",
    "```python``` begins it.",
    "It stands between ```python and ``` fences.",
    "<think>I wrap it in ```python ... ```.</think>",
    "The result is ```3```",
    "It fails:\n    x / y\n    ~~^~~~",
    "It fails:\n    x(1)[0]\n    ~~~~^^^",
    "Use ~~~",
    "Use ```text or so",
    "> Quoted:\n> ```text\n> 3\n> ```",
)


def fenced(code: str) -> str:
    return f"First:\n```python\nprint(1)\n```\nBetter:\n```python\n{code}```\nThat is it."


@pytest.mark.parametrize(
    ("response", "tests", "reward"),
    [
        (fenced(ADD), ASSERTS, 1.0),
        (ADD, ASSERTS, 1.0),
        (fenced("from __future__ import annotations\n" + ADD), ASSERTS, 1.0),
        (fenced("if __name__ == '__main__':\n    print(input())\n" + ADD), ASSERTS, 1.0),
        # What looks for the module of the code.
        (fenced(DATACLASS + ADD.replace("a + b", "P(a).x + b")), ASSERTS, 1.0),
        (fenced(DATACLASS + "import pickle\npickle.dumps(P(1))\n" + READS), PAIRS, 1.0),
        (fenced("import sys\n" + ADD + "add = vars(sys.modules[__name__])['add']\n"), ASSERTS, 1.0),
        # What prints when the tests are through.
        *((fenced(ADD + last), ASSERTS, 1.0) for last in LAST),
        # A form feed ends no line.
        *((f"print({one!r})", '{"inputs": [""], "outputs": ["a\\nb"]}', reward) for one, reward in ENDS_OF_LINES),
        (fenced(ADD.replace("+", "-")), ASSERTS, 0.0),
        (fenced("def add(a, b):\n    return 3\n"), ASSERTS, 0.0),
        ("I cannot.", ASSERTS, 0.0),
        ("", ASSERTS, 0.0),
        # Code that ends before its tests.
        (fenced("import sys\nsys.exit(0)\n"), ASSERTS, 0.0),
        (fenced("import os\nos._exit(0)\n"), ASSERTS, 0.0),
        (fenced("print('passed')\nraise SystemExit\n"), ASSERTS, 0.0),
        (fenced(ADD + "'''\n"), ASSERTS, 0.0),
        # Code that changes what its tests run with.
        (fenced("import builtins\nbuiltins.exec = lambda *given: None\n"), ASSERTS, 0.0),
        (fenced("import sys\nsys._getframe(1).f_globals['exec'] = lambda *given: None\n"), ASSERTS, 0.0),
        (fenced("import builtins\nbuiltins.abs = lambda x: 0\ndef add(a, b):\n    return 4\n"), NEAR, 0.0),
        (fenced("__builtins__ = {'abs': lambda x: 0}\nadd = int\n"), NEAR, 0.0),
        (fenced("import builtins\nbuiltins.abs = lambda x: 0\n" + ADD), NEAR, 1.0),
        (fenced(READS), PAIRS, 1.0),
        (
            fenced("import sys\na, b = map(int, sys.stdin.buffer.read().split())\nprint(a + b, end=' \\n\\n')\n"),
            PAIRS,
            1.0,
        ),
        (fenced("import sys\n" + READS + "sys.exit()\n"), PAIRS, 1.0),
        # Programs that read the input, or end, in other ways.
        (fenced(READS.replace("input()", "open(0).read()")), PAIRS, 1.0),
        (fenced("import os\n" + READS.replace("input()", "os.read(0, 100)")), PAIRS, 1.0),
        (fenced("import fileinput\n" + READS.replace("input()", "fileinput.input().readline()")), PAIRS, 1.0),
        (fenced(READS + "exit()\n"), PAIRS, 1.0),
        (fenced(READS + "quit(0)\n"), PAIRS, 1.0),
        (f"1. This:\n   ```python\n{indent(ADD, '   ')}   ```", ASSERTS, 1.0),
        (fenced(ADD).replace("\n", "\r\n"), ASSERTS, 1.0),
        (f"- This:\n  ```python\n{indent(ADD, '  ')}\n  x = 1\n  ```".replace("\n", "\r\n"), ASSERTS, 1.0),
        (fenced(f"{ADD}assert len('''\n  \n''') == 4\n"), ASSERTS, 1.0),
        (fenced(READS.replace("input()", "open('/dev/stdin').read()")), PAIRS, 1.0),
        (fenced("import sys\nsys.stdin = open('/dev/stdin')\n" + READS), PAIRS, 1.0),
        (fenced(f"import threading\ndef main():\n{indent(READS, '  ')}{IN_THREAD}"), PAIRS, 1.0),
        # Standard error is not output.
        (fenced("import sys\nprint('debug', file=sys.stderr)\n" + READS), PAIRS, 1.0),
        (fenced("import re\nre.compile('\\d')\n" + READS), PAIRS, 1.0),
        (fenced("import os, sys\nsys.stderr = open(os.devnull, 'w')\n" + READS), PAIRS, 1.0),
        # As for an online judge, an exit status other than 0 is an error.
        (fenced("import sys\n" + READS + "sys.exit(0)\n"), PAIRS, 1.0),
        (fenced("import sys\n" + READS + "sys.exit(7)\n"), PAIRS, 0.0),
        (fenced("import sys\n" + READS + "sys.exit('failed')\n"), PAIRS, 0.0),
        # The ways to write a block.
        *((fenced(ADD).replace("```python\n", f"```{kind}\n"), ASSERTS, 1.0) for kind in KINDS),
        (fenced(ADD).replace("```", "~~~"), ASSERTS, 1.0),
        (fenced(ADD).replace("```", "````"), ASSERTS, 1.0),
        (f"{fenced(ADD)}\nIt prints\n```\n3\n```\nand\n```text\n0\n```\n", ASSERTS, 1.0),
        (f"```\n{ADD}```\nIt prints\n```text\n3\n```\nor\n```text\n4\n```\n", ASSERTS, 1.0),
        (f"```cpp\nint x;\n```\nor\n```\n{ADD}```\n", ASSERTS, 1.0),
        (f"First:\n```python\n{ADD}", ASSERTS, 1.0),
        (f"Here: ```Python\n{ADD}```", ASSERTS, 1.0),
        (f"Here: ```\n{ADD}```", ASSERTS, 1.0),
        (f"1. ```py3\n{ADD}```", ASSERTS, 1.0),
        *((f"{mention}\n\n```python\n{ADD}```\nThat is it.", ASSERTS, 1.0) for mention in MENTIONS),
        (fenced(ADD + POOL), ASSERTS, 1.0),
        # Code that reads its caller's variables.
        (fenced("import os, sys\nos._exit('raise A' in sys._getframe(1).f_locals['tests'])\n"), ASSERTS, 0.0),
        (fenced("import sys\nprint(sys._getframe(1).f_locals['passed'])\nsys.exit()\n"), ASSERTS, 0.0),
        (
            fenced("import sys\nhas = sys._getframe(1).f_locals\nhas['show'](has['passed'])\nexit()\n"),
            ASSERTS,
            0.0,
        ),
        (fenced(PRINTS_WHEN_TESTED), ASSERTS, 0.0),
        # Code that ends its tests, or hides how they end.
        *((fenced(f"import atexit, os, sys\n{line}\n{ADD.replace('+', '-')}"), ASSERTS, 0.0) for line in HIDES),
        *((fenced(f"import os, sys\ndef add(a, b):\n    {line}\n"), ASSERTS, 0.0) for line in ENDS),
        (fenced(READS.replace("+", "-")), PAIRS, 0.0),
        (fenced("print(3)\n"), PAIRS, 0.0),
        (fenced(READS + "print('done')\n"), PAIRS, 0.0),
        (fenced(READS + "raise ValueError\n"), PAIRS, 0.0),
        (fenced("print('x' * 10**6)\n"), PAIRS, 0.0),
        (fenced("x = 'x' * 10**10\n" + READS), PAIRS, 0.0),
    ],
)
def test_code_is_right_if_it_passes_all_tests(response: str, tests: str, reward: float) -> None:
    assert graded(response, tests) == reward


@pytest.mark.parametrize(
    "response",
    [
        "    return a + b\n```",
        "    return a + b\n```\n",
        "    return a + b",
        "    return a + b\n```\nThis adds both.",
        "    return a - b\n```\nNo:\n```python\ndef add(a, b):\n    return a + b\n```\nThat adds both.",
        "    pass\n```python\ndef add(a, b):\n    return a + b\n```\nThat adds both.",
    ],
)
def test_a_block_that_the_prompt_has_begun_goes_on_in_the_response(response: str) -> None:
    prompt = "Complete:\n```python\ndef add(a, b):\n"
    assert code_tests(prompt, response, ASSERTS, sandbox=ISOLATED, seconds=60.0) == 1.0
    assert code_tests("Write in a ```python block.\n", ADD, ASSERTS, sandbox=ISOLATED, seconds=60.0) == 1.0


def test_a_prompt_that_has_begun_no_block_changes_nothing() -> None:
    """Even if it ends with the mark of a quote or list, after which the first fence of a response would stand."""
    response = f"```\nint x;\n```\nor, shorter: ```python\n{ADD}```"
    for prompt in ("Add.\n", "Add.\n> ", "```\nint x;\n```\n- "):
        assert code_tests(prompt, response, ASSERTS, sandbox=ISOLATED, seconds=60.0) == 1.0


def test_code_without_an_end_has_failed() -> None:
    assert code_tests("", "while True: pass", ASSERTS, cpu_seconds=1, seconds=30.0, sandbox=ISOLATED) == 0.0


@pytest.mark.parametrize(
    "tests",
    [
        "",
        "1 + 1",
        "x = 3",
        "def f(:",
        "def test_add():\n    assert add(1, 2) == 3",
        "import random\nrandom.seed(0)\ndef check(f):\n    for _ in range(2):\n        assert f(1, 2) == 3",
        CASE,
        "import random\nrandom.seed(0)\n" + CASE,
        CASE + "unittest.main()",
        CASE + f"add(1, 2)\nunittest.TextTestRunner().run({LOADED})",
        CASE + f"assert callable(add)\nunittest.TextTestRunner().run({LOADED})",
        CASE + f"unittest.TextTestRunner().run({LOADED})",
        CASE + ASSERTS,
        ASSERTS + "\ndef test_more():\n    assert add(0, 0) == 0",
        # HumanEval's form, beside asserts that do not test the code, or that do.
        "def check(candidate):\n    assert candidate(1, 2) == 3\nTOLD = {}\nassert TOLD == {}",
        "def verify(f):\n    assert f(1, 2) == 3\nimport sys\nassert sys.version_info >= (3, 8)",
        "def check(f):\n    assert f(1, 2) == 3\nassert callable(add)",
        "def verify(candidate):\n    assert candidate(1, 2) == 3\nassert callable(add)",
        CASE + f"import logging\nlogging.debug('so')\nunittest.TextTestRunner().run({LOADED})",
        CASE + f"import logging\nlogging.getLogger('').debug('so')\nunittest.TextTestRunner().run({LOADED})",
        CASE + f"import re as told\nunittest.TextTestRunner().run({LOADED})\ntold.errors",
        CASE.replace("import unittest", "import unittest\nfrom unittest import TestCase as Base").replace(
            "unittest.TestCase", "Base"
        )
        + f"unittest.TextTestRunner().run({LOADED})",
        "import unittest\nclass Base(unittest.TestCase):\n    pass\n"
        + CASE.replace("unittest.TestCase", "Base")
        + f"unittest.TextTestRunner().run({LOADED})",
        "assert (add(1, 2) == 3, 'of positive numbers')",
        ASSERTS + "\ndef check():\n    assert (add(0, 0) == 0, 'of nothing')\ncheck()",
        "print()\nclass Test:\n    def test(self):\n        assert add(1, 2) == 3",
        "if __name__ == '__main__':\n    assert add(1, 2) == 3",
        "check = lambda: add(1, 2) or 1 / 0",
        '{"input": ["1"], "output": ["2"]}',
        '{"inputs": ["1"], "outputs": []}',
        '{"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}',
        "[1]",
        "3",
    ],
)
def test_tests_that_test_nothing_are_refused(tests: str) -> None:
    with pytest.raises(ValueError, match=r"given .*needed Python that asserts, or JSON"):
        read_tests(tests)
    with pytest.raises(ValueError, match="code_tests: given"):
        graded(ADD, tests)


@pytest.mark.parametrize(
    ("tests", "given"),
    [
        ("import numpy as np, math\nassert add(1, 2) == np.int64(3)", "tests that import numpy, needed Python's own"),
        ("from solution.parts import add\nassert add(1, 2) == 3", "tests that import solution, needed Python's own"),
        (json.dumps({"inputs": [""], "outputs": ["x" * 64_000]}), "an output of 64001 bytes, needed at most 64000"),
    ],
)
def test_tests_that_no_code_can_pass_are_refused(tests: str, given: str) -> None:
    """Right code would get a reward of zero."""
    with pytest.raises(ValueError, match=f"code_tests: given {given}"):
        graded(ADD, tests)


@pytest.mark.parametrize(("size", "options"), [(63_999, {}), (64_000, {"max_output": 64_001})])
def test_an_output_of_as_many_bytes_as_are_allowed_is_right(size: int, options: dict[str, Any]) -> None:
    tests = json.dumps({"inputs": [""], "outputs": ["x" * size]})
    assert graded(f"print('x' * {size})", tests, **options) == 1.0


def test_a_function_of_tests_is_called() -> None:
    check = "def check(add):\n    def same(a, b):\n        assert a == b\n    same(add(1, 2), 3)\n"
    found = "for name, test in dict(globals()).items():\n    if name == 'check':\n        test(add)"
    for call in ("check(add)", "for test in (check,):\n    test(add)", found):
        assert (graded(ADD, check + call), graded(ADD.replace("+", "-"), check + call)) == (1.0, 0.0)


def test_a_helper_that_nothing_calls_may_stand_beside_tests() -> None:
    tests = f"def same(a, b):\n    assert a == b\n{ASSERTS}"
    assert (graded(ADD, tests), graded(ADD.replace("+", "-"), tests)) == (1.0, 0.0)


@pytest.mark.parametrize("base", ["list", "dict", "Exception", "typing.Generic[typing.TypeVar('T')]"])
def test_a_class_with_another_base_than_that_of_unittest_may_assert_in_tests(base: str) -> None:
    tests = f"import typing\nclass Part({base}):\n    def __call__(self):\n        assert self\n        return 1\n"
    tests += "assert add(Part()(), 2) == 3"
    assert read_tests(tests).statements == tests


@pytest.mark.parametrize(
    "call",
    [
        "Test('test').test()",
        f"{LOADED}.debug()",
        f"assert unittest.TextTestRunner().run({LOADED}).wasSuccessful()",
        f"found = unittest.TestResult()\n{LOADED}.run(found)\nassert not found.failures + found.errors",
    ],
)
def test_a_class_of_tests_is_run(call: str) -> None:
    assert (graded(ADD, CASE + call), graded(ADD.replace("+", "-"), CASE + call)) == (1.0, 0.0)


@pytest.mark.parametrize(
    "tests",
    [
        "assert True",
        "try:\n    assert add(1, 2) == 3\nexcept Exception:\n    pass",
        "async def test():\n    assert add(1, 2) == 3\ntest()",
    ],
)
def test_tests_that_pass_without_code_are_refused_where_code_passes(tests: str) -> None:
    with pytest.raises(ValueError, match="given tests that pass without any code"):
        graded(ADD.replace("+", "-"), tests)
    assert graded("raise ValueError", tests) == 0.0


def test_a_sandbox_that_does_not_start_is_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "run_python", lambda *given, **more: Answer("bwrap: no room", failed=True))
    with pytest.raises(SandboxError, match="given no start of its process: 'bwrap: no room'"):
        graded(ADD, ASSERTS)


@program
def coded(policy: Policy, prompts: Prompts, *, sandboxed: bool = True) -> Policy:
    rollouts = generate(prompts, broadcast(policy), samples=2)
    return aipo_update(policy, rollouts, group_advantage(score(rollouts, by=partial(code_tests, sandbox=sandboxed))))


@pytest.fixture
def no_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    sandbox._find_isolation.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    yield
    sandbox._find_isolation.cache_clear()


@pytest.mark.usefixtures("no_bubblewrap")
def test_a_run_is_refused_where_nothing_isolates_code() -> None:
    contexts = {name: Context(node=name) for name in ("score", "generate", "policy", "prompts")}
    with pytest.raises(SandboxError, match="no bubblewrap"):
        code_tests("", ADD, ASSERTS)
    found = [fault for fault in check(trace(coded), contexts=contexts) if fault.code == "no-sandbox"]
    assert [fault.what for fault in found] == ["score: by code_tests: option 'sandbox'"]
    free = trace(coded, {"sandboxed": False})
    assert not [fault for fault in check(free, contexts=contexts) if fault.code == "no-sandbox"]
