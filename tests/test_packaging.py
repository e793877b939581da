"""The promises of the packaging and the layers, checked on the files themselves."""

import ast
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import penstock
import penstock.graph

ROOT = Path(__file__).parent.parent
LAYERS = ("graph", "nodes", "runtime", "programs")
MAY_IMPORT = {
    "graph": {"graph"},
    "nodes": {"graph", "nodes", "host"},
    "runtime": {"graph", "runtime", "host"},
    "programs": {"graph", "nodes", "programs"},
}
WITH_TORCH = ("nodes/", "runtime/tensor/")
RANK_FILES = {
    f"runtime/control/{name}.py" for name in ("executor", "inprocess", "rank", "rank_state", "weight_channels")
}
"""What runs in a rank, or in the one process of --in-process."""
# The files that may import zmq; `doctor` only asks for its version and features.
WITH_SOCKETS = {
    *(
        f"runtime/control/{name}.py"
        for name in ("listener", "sockets", "security", "value_server", "desk", "applicant")
    ),
    "runtime/cli/doctor.py",
}
UNPICKLERS = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")


def files(*layers: str) -> list[Path]:
    return sorted(path for layer in layers or LAYERS for path in (ROOT / layer).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the modules that a file imports, and the lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or ""), node.lineno


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_package_is_links_to_the_four_folders() -> None:
    package = ROOT / "src" / "penstock"
    for layer in LAYERS:
        assert (package / layer).is_symlink()
        assert (package / layer).readlink() == Path("..") / ".." / layer
        assert (package / layer).resolve() == ROOT / layer
    assert (package / "py.typed").is_file()


def test_modules_are_loaded_from_the_folders_at_the_root() -> None:
    assert list(penstock.__path__) == [str(ROOT), str(ROOT / "src" / "penstock")]
    assert penstock.graph.__file__ == str(ROOT / "graph" / "__init__.py")


EXPORTS = {
    ("runtime/tensor/dcp.py", f"torch.distributed.checkpoint.{writer}")
    for writer in ("api", "filesystem", "hf_storage", "state_dict_saver")
}
"""Imports of a command that writes a format with pickle in it. Nothing here reads that format."""

RULES: dict[str, Callable[[str, str], bool]] = {
    "a layer imports only the layers below it": lambda file, module: (
        module.startswith("penstock.") and module.split(".")[1] not in MAY_IMPORT[file.partition("/")[0]]
    ),
    "imports are absolute, so that a class exists once": lambda file, module: (
        module.startswith(".") or module.split(".")[0] in LAYERS
    ),
    "only what runs in a rank imports torch": lambda file, module: (
        module.split(".")[0] == "torch" and not file.startswith(WITH_TORCH) and file not in RANK_FILES
    ),
    "nothing unpickles": lambda file, module: (
        module.split(".")[0] in UNPICKLERS or ("distributed.checkpoint" in module and (file, module) not in EXPORTS)
    ),
    "only the wire uses sockets": lambda file, module: module.split(".")[0] == "zmq" and file not in WITH_SOCKETS,
}
"""By rule, a function of a file and a module: True if the file must not import the module."""


def test_the_layers_take_no_name_from_the_public_surface() -> None:
    """It is above all of them: what they take there would hide which layer it is of."""
    taken = [
        (name(path), alias.name)
        for path in files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "penstock"
        for alias in node.names
    ]
    assert {given for _, given in taken} == {"__path__", "__version__"}


@pytest.mark.parametrize("rule", RULES)
def test_imports_keep_the_rules_of_the_layers(rule: str) -> None:
    found = [(name(path), module, line) for path in files() for module, line in imports(path)]
    assert [f"{file}:{line} {module}" for file, module, line in found if RULES[rule](file, module)] == []


def test_nothing_unpickles() -> None:
    """torch.load, torch.save and the object collectives pickle."""
    wrong = []
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                called = f"{node.value.id}.{node.attr}"
                if called in ("torch.load", "torch.save", "np.load", "numpy.load") or "object_list" in node.attr:
                    wrong.append(f"{name(path)}:{node.lineno} {called}")
    assert wrong == []


def test_every_dependency_has_a_range_and_a_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition("\ndependencies = [\n")[2].partition("\n]")[0]
    for line in section.splitlines():
        requirement, _, reason = line.partition("#")
        assert ">=" in requirement, line
        assert "<" in requirement, line
        assert len(reason.strip()) > 10, line


def test_the_repository_has_what_a_reader_looks_for() -> None:
    for needed in (
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "LICENSE",
        "docs/promises.md",
        ".ci/run",
        "Makefile",
    ):
        assert (ROOT / needed).is_file(), needed
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


@pytest.mark.slow
def test_the_wheel_carries_the_files_behind_the_links(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    for item in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / item, tmp_path / item)
    for folder in (*LAYERS, "src"):
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*command, "-w", "out", "-q"], cwd=tmp_path, check=True, timeout=400)
    (wheel,) = (tmp_path / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        carried = set(archive.namelist())
        entry = next(name for name in carried if name.endswith("entry_points.txt"))
        assert b"penstock = penstock.runtime.cli.main:main" in archive.read(entry)
    assert {f"penstock/{name(path)}" for path in files()} | {"penstock/py.typed", "penstock/__init__.pyi"} <= carried
    templates = [path for folder in ("graph", "runtime") for path in (ROOT / folder).rglob("templates/*")]
    templates += (ROOT / "nodes").rglob("*.[ch]")
    assert {f"penstock/{path.relative_to(ROOT)}" for path in templates} <= carried
