"""A rule for code: the Python that a model wrote is run against tests, in the sandbox of `environments/sandbox.py`.

Outputs are compared outside the sandbox: the code never sees what it must print. Tests in Python run in the process
of the code that they test. Code that exits early or changes a builtin passes none of them. Code that prints a verdict
blindly is detected, since it also passes tests that no code can pass. Code can still cheat by reading the tests in its
callers' frames, by attacking its own interpreter, by changing a library, or by returning an object that equals all
others: no test in Python is safe from that.
"""

import ast
import builtins
import json
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from secrets import token_hex
from textwrap import dedent
from typing import Any

from penstock.graph import requires
from penstock.graph.requires import Call
from penstock.nodes.environments.sandbox import Answer, Limits, SandboxError, isolated, run_python, wrapper_of
from penstock.nodes.option_checks import count, positive
from penstock.nodes.score import answers_that

_TESTING, _FUNCTION = ast.Assert | ast.Raise | ast.Call, ast.FunctionDef | ast.AsyncFunctionDef
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_FAILS = "raise AssertionError"
# Builtins that find functions by their names.
_LOOKING = {"globals", "locals", "vars"}
# What tells the failures of a class of unittest.
_TELLING = {"wasSuccessful", "failures", "errors"}
MAX_OUTPUT = 64_000
# Where a line begins, after the marks of lists and quotes.
_BEGINS = r"^[ \t>*+\-\d.)]*"
# A block of Markdown, and its language. Its fence begins a line; a block of Python may also open within a line of
# prose. Text between fences in one line is no block (```python```), nor is an underline in a traceback (~~~^^^). The
# last block may have no end, as in a text that was cut off.
_BLOCK = re.compile(
    r"(?<!`)(?P<span>```+)(?!`)[^`\r\n]+(?P=span)(?!`)"
    rf"|(?:(?P<begins>{_BEGINS})(?=```|~~~)|(?<!`)(?=```))(?P<fence>```+|~~~+)"
    r"(?P<kind>(?(begins)[^`~^\r\n]*|[ \t]*(?:python3?|py)?[ \t]*))\r?\n(?P<code>.*?)(?:(?P=fence)|\Z)",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)
_FENCE = re.compile(_BEGINS + r"(?:```+|~~~+)(?P<kind>[^\r\n]*)", re.MULTILINE)
_PYTHON = re.compile(r"\s*\{?\.?py(?:thon)?[\d.]*(?![\w.+-])", re.IGNORECASE)

# Runs code as a module, which a dataclass finds by the name of its class's module. Then runs its tests there, if there
# are some, with the builtins restored in between. What it needs itself are defaults of parameters, which are bound
# before the code can change a name.
_PROGRAM = """
def program(name, code, tests="", passed="", run=exec, show=print, sys=__import__("sys")):
    library = vars(sys.modules["builtins"])
    names, module = dict(library), type(sys)(name)
    sys.modules[name], scope = module, vars(module)
    run(code, scope)
    if tests:
        library.clear()
        library.update(names)
        scope["__builtins__"] = library
        run(tests, scope)
        show(passed)
"""


@dataclass(frozen=True)
class Tests:
    """The task of some code: map the input of each of `pairs`, (standard input, output), to the output, or pass the
    `statements`."""

    pairs: Sequence[tuple[str, str]] = ()
    statements: str = ""


def read_tests(answer: str, max_output: int = MAX_OUTPUT) -> Tests:
    """The tests of a reference answer (see `code_tests`). Raises ValueError for an answer that tests nothing, and for
    tests that no code can pass: they need a package, or more output than `max_output` bytes."""
    needed = 'Python that asserts, or JSON such as {"inputs": ["1 2"], "outputs": ["3"]}'
    try:
        found = json.loads(answer)
    except ValueError:
        try:
            tree = ast.parse(answer)
        except (SyntaxError, ValueError) as error:
            raise ValueError(f"given tests that are no Python ({error}), needed {needed}") from None
        for part in ast.walk(tree):
            if isinstance(part, ast.Assert) and isinstance(part.test, ast.Tuple) and part.test.elts:
                given = f"an assert that is always true, of a tuple, {ast.unparse(part)!r:.200}"
                raise ValueError(f"given {given}, needed {needed}") from None
        # Those within functions or a `try` may never be needed.
        modules = [part.module or "" for part in tree.body if isinstance(part, ast.ImportFrom)]
        modules += [name.name for part in tree.body if isinstance(part, ast.Import) for name in part.names]
        if packages := {name.partition(".")[0] or "." for name in modules} - sys.stdlib_module_names:
            given = f"tests that import {', '.join(sorted(packages))}"
            raise ValueError(f"given {given}, needed Python's own modules: the sandbox has no packages") from None
        if uncalled := _uncalled(tree):
            kind, call = "function that nothing calls", f"{uncalled.name}(…)"
            if isinstance(uncalled, ast.ClassDef):
                runner = "unittest.defaultTestLoader.loadTestsFromTestCase"
                kind, call = "class that nothing calls", f"{call}.test(…)"
                if uncalled.bases:
                    kind, call = "class whose failures nothing raises", f"{runner}({uncalled.name}).debug()"
            given = f"tests in a {kind}, as {call} behind it would"
            raise ValueError(f"given {given}, needed {needed}") from None
        if not any(isinstance(part, _TESTING) for part in _run_at_once(tree.body)):
            given = f"tests without an assert or a call that is run, {answer!r:.200}"
            raise ValueError(f"given {given}, needed {needed}") from None
        return Tests(statements=answer)
    fields: dict[str, Any] = found if isinstance(found, dict) else {}
    if name := fields.get("fn_name"):  # of APPS and TACO, whose inputs are arguments then
        given = f"inputs and outputs of a function, fn_name {name!r}"
        raise ValueError(f"given {given}, needed {needed}, of a program: nothing is called by name")
    inputs, outputs = fields.get("inputs", ()), fields.get("outputs", ())
    for each in (inputs, outputs):
        if not (isinstance(each, list) and each and all(isinstance(text, str) for text in each)):
            raise ValueError(f"given the tests {answer!r:.200}, needed {needed}")
    if len(inputs) != len(outputs):
        raise ValueError(f"given {len(inputs)} inputs and {len(outputs)} outputs, needed {needed}: as many of each")
    if (size := 1 + max(len(output.encode()) for output in outputs)) > max_output:  # with the end of its last line
        raise ValueError(f"given an output of {size} bytes, needed at most {max_output}, or a larger max_output")
    return Tests(pairs=tuple(zip(inputs, outputs, strict=True)))


def _uncalled(tree: ast.Module) -> _Definition | None:
    """The first function or class with an assert that does not come to the tests' end, as in HumanEval, pytest and
    unittest, whose runners call it; None if there is none, or if the code may look up its functions by name.

    The code never names it, and it is no helper beside an assert that is run and tests the code; or it is a class of
    unittest, whose failures are only collected unless the code also raises or reads them, or names one of its methods.
    """
    parts = list(ast.walk(tree))
    names = {part.id for part in parts if isinstance(part, ast.Name)}
    if names & _LOOKING:
        return None
    imported = {part.asname or part.name.partition(".")[0]: part.name for part in parts if isinstance(part, ast.alias)}
    run = list(_run_at_once(tree.body))
    own = {part.id for part in run if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    own |= {part.name for part in tree.body if isinstance(part, _Definition)} | {*imported, *dir(builtins)}
    of_code = any(isinstance(part, ast.Name) and part.id not in own for part in run)
    tested = of_code and any(isinstance(part, ast.Assert) for part in run)
    cases = {name for name, whole in imported.items() if whole.endswith("TestCase")}
    for one in tree.body:
        if isinstance(one, ast.ClassDef):
            bases = {getattr(base, "attr", getattr(base, "id", "")) for base in one.bases}
            if bases & cases or any(base.endswith("TestCase") for base in bases):
                cases.add(one.name)
        if not (isinstance(one, _Definition) and any(map(_asserts, ast.walk(one)))):
            continue
        if one.name not in names:
            if not (tested and isinstance(one, _FUNCTION) and _helps(one)):
                return one
        elif one.name in cases:
            told = _TELLING | {part.name for part in one.body if isinstance(part, _FUNCTION)}
            outside = (part for other in tree.body if other is not one for part in ast.walk(other))
            if not any(_tells(part, told, imported) for part in outside):
                return one
    return None


def _helps(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """True for a function that the tests of other prompts may call: it is none of pytest's or HumanEval's."""
    takes = {part.arg for part in ast.walk(function.args) if isinstance(part, ast.arg)}
    return not (function.name.startswith("test") or function.name == "check" or "candidate" in takes)


def _tells(part: ast.AST, told: Collection[str], imported: Collection[str]) -> bool:
    """True for what raises the failures of a class of unittest, and for attributes `told`, but not those of modules."""
    match part:
        case ast.Call(ast.Attribute(attr="debug"), args=[], keywords=[]):  # the debug of a logger has arguments
            return True
        case ast.Attribute(ast.Name(owner)):
            return owner not in imported and part.attr in told
    return isinstance(part, ast.Attribute) and part.attr in told


def _asserts(part: ast.AST) -> bool:
    """True for an assert, and for an assert method of unittest."""
    return isinstance(part, ast.Assert) or (isinstance(part, ast.Attribute) and part.attr.startswith("assert"))


def _run_at_once(body: Sequence[ast.AST]) -> Iterator[ast.AST]:
    """The parts of some code that run when it is executed: no body or decorators of functions, nothing for
    `__main__`."""
    for part in body:
        main = isinstance(part, ast.If) and any(getattr(n, "id", "") == "__name__" for n in ast.walk(part.test))
        if not (main or isinstance(part, _FUNCTION | ast.Lambda)):
            yield part
            inner = part.body if isinstance(part, ast.ClassDef) else list(ast.iter_child_nodes(part))
            yield from _run_at_once(inner)


def readable_tests(call: Call) -> None:
    """Requirement of `code_tests`: reference answers whose tests code can pass."""
    most = call.options.get("max_output", MAX_OUTPUT)
    answers_that(partial(read_tests, max_output=most) if isinstance(most, int) else read_tests)(call)


@requires(
    readable_tests,
    isolated,
    positive("seconds"),
    count(1, "cpu_seconds", "max_output"),
    count(32, "memory_mib"),
)
def code_tests(
    prompt: str,
    response: str,
    answer: str,
    *,
    seconds: float = 10.0,
    cpu_seconds: int = 5,
    memory_mib: int = 512,
    max_output: int = MAX_OUTPUT,
    sandbox: bool = True,
) -> float:
    """1.0 if the code of a response passes all tests of the reference answer, else 0.0.

    The code is the last block between ``` and ``` that is marked as Python, else the last without a mark, else the
    whole response. A block that the prompt has begun continues in the response. The tests are Python that runs after
    the code, `assert add(1, 2) == 3`; or JSON, `{"inputs": ["1 2"], "outputs": ["3"]}`: with each of the inputs as
    standard input, a run of the code must print the output and end with status 0. Spaces at the ends of lines and
    standard error do not count. Only tests in JSON are safe from code that cheats, such as by an object that equals all
    others.

    Each run has the limits of `Limits`; code that exceeds them has failed, as has code that imports an installed
    package: there are Python's own modules alone. `score` runs one row after the other,
    `remote_score(rollouts, by=code_tests, concurrency=4)` several at once. If bubblewrap does not work, the run is
    refused; sandbox=False runs code without it, with your rights (see `sandbox.py`).

    Raises SandboxError if the sandbox does not start, ValueError for tests that cannot be read or that pass without any
    code.
    """
    try:
        tests = read_tests(answer, max_output)
    except ValueError as error:
        raise ValueError(f"code_tests: {error}") from None
    code = _code_of(prompt, response)
    limits, command = Limits(seconds, cpu_seconds, memory_mib, max_output), wrapper_of(sandbox, "code_tests")
    if tests.statements:
        statements = tests.statements
        # Code that also passes tests that fail at their end has printed `passed`, which it found in its callers'
        # frames. The failure is at the end, since it may do so in a function that the tests call.
        if not _passes(code, statements, limits, command) or _passes(code, f"{statements}\n{_FAILS}", limits, command):
            return 0.0
        if _pass_alone(statements, limits, command):
            raise ValueError(f"code_tests: given tests that pass without any code, {statements!r:.200}, needed others")
        return 1.0
    for given, needed in tests.pairs:
        told = _run(f"{_PROGRAM}\nprogram('__main__', {code!r})", limits, command, given)
        if told.failed or _lines(told.output) != _lines(needed):
            return 0.0
    return 1.0


def _passes(code: str, statements: str, limits: Limits, command: Sequence[str]) -> bool:
    passed = token_hex()  # printed when the tests are through
    told = _run(f"{_PROGRAM}\nprogram('response', {code!r}, {statements!r}, {passed!r})", limits, command)
    # Not at its end: what the code has registered for the exit may print after it.
    return not told.failed and passed in told.output


@lru_cache(maxsize=4096)
def _pass_alone(statements: str, limits: Limits, command: Sequence[str]) -> bool:
    """True if the tests pass without any code: they may catch what they raise, or only define functions."""
    return _passes("", statements, limits, command)


def _code_of(prompt: str, response: str) -> str:
    """The code of a response (see `code_tests`)."""
    blocks, fence = _blocks(response), _FENCE.search(response)
    # A block that the prompt has begun, in a line of its own, continues in the response. The response's first fence
    # ends it, unless that fence names a language and so begins a block.
    ends = not blocks or fence is None or not fence["kind"].strip()
    if ends and response and (begun := _begun(prompt)):
        both = [block for block in _blocks(begun + response) if block["begins"] is not None]
        blocks = both if both and both[0].start() < len(begun) else blocks
    of_python = [match["code"] for match in blocks if _PYTHON.match(match["kind"])]
    found = of_python or [match["code"] for match in blocks if not match["kind"].strip()]
    if not found:
        return response
    code = found[-1].replace("\r\n", "\n")
    # A block within a list is indented as a whole.
    return dedent(code) if code.lstrip("\n")[:1].isspace() else code


def _begun(prompt: str) -> str:
    """The end of a prompt from the fence of a block that it has begun in a line of its own; "" without one."""
    for block in _BLOCK.finditer(f"{prompt}\n"):
        if block["begins"] is not None and block.end() == block.end("code"):  # no fence ends it
            return prompt[block.start() :]
    return ""


def _blocks(text: str) -> list[re.Match[str]]:
    return [match for match in _BLOCK.finditer(text) if (match["code"] or "").strip()]


def _run(code: str, limits: Limits, command: Sequence[str], stdin: str = "") -> Answer:
    """Run code. Raises SandboxError if its process does not start: that is not the code's fault."""
    begun = token_hex()
    limits = replace(limits, max_output=limits.max_output + len(f"{begun}\n"))  # beside the output of the code
    found = run_python(f"print({begun!r}, flush=True)\n{code}\n", limits, command, stdin, errors=False)
    if not found.output.startswith(begun):
        raise SandboxError(f"no start of its process: {found.output!r}", "a machine that can start it in time")
    return Answer(found.output.removeprefix(begun).removeprefix("\n"), found.failed, found.late)


def _lines(text: str) -> list[str]:
    # Not `splitlines`, for which a form feed ends a line, too.
    return [line.rstrip() for line in text.rstrip().split("\n")]
