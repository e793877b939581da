"""Import paths, which name functions and classes in a graph, so that another process finds the same ones.

"package.module:name", or "/absolute/file.py:name" for a module that was loaded from a file. The name of a built-in
program, such as "aipo", is short for `penstock.programs.aipo:aipo`.
"""

import hashlib
import importlib
import importlib.util
import itertools
import math
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType, NoneType, UnionType
from typing import Any, TypeVar, get_args

from penstock.graph.errors import GraphError, fault, nearest
from penstock.graph.ir import Json

PROGRAMS = "penstock.programs"

# The annotations of an option that is a file or a folder, evaluated or not.
PATHS = (Path, Path | None, "Path", "Path | None")
# And of one that is several of them.
LISTS = (list[Path], Sequence[Path], tuple[Path, ...], "list[Path]", "Sequence[Path]", "tuple[Path, ...]")

T = TypeVar("T")

# The modules that were loaded from a file: their names, and the files' absolute paths.
_files: dict[str, str] = {}


def path_of(thing: Any) -> str:
    """The import path of a function, class, node or program."""
    module = thing.__module__
    if module == "__main__" and (file := getattr(sys.modules["__main__"], "__file__", None)):
        module = os.path.abspath(file)
    return f"{_files.get(module, module)}:{thing.__qualname__}"


def short(path: str) -> str:
    """The name in a path, without its module."""
    return path.rpartition(":")[2].rpartition("<locals>.")[2]


def load(path: str) -> Any:
    """What `path` names: "package.module:name", "file.py:name" or the name of a built-in program.

    Raises GraphError with the nearest names if there is none. Exceptions of a module during its import are not caught:
    their traceback names the line.
    """
    place, _, name = path.rpartition(":")
    if not place and not name.endswith(".py"):
        place = f"{PROGRAMS}.{name}"
        if not name.isidentifier() or importlib.util.find_spec(place) is None:
            built_in = [m.name for m in pkgutil.iter_modules(importlib.import_module(PROGRAMS).__path__)]
            needed = '"package.module:name", "file.py:name" or the name of a built-in program'
            raise _not_found(repr(path), needed + nearest(name, built_in))
    elif name.endswith(".py"):
        place, name = path, ""
    module = _from_file(path, place) if place.endswith(".py") else _import(path, place)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            needed = f"a name that is defined at the top of {module.__file__}" if name else 'a name after ":"'
            if "<locals>" in name or "<lambda>" in name:
                needed += " (other processes cannot import what is defined inside a function)"
            public = _public(module)
            own = [n for n, v in public.items() if getattr(v, "__module__", "") == module.__name__]
            raise _not_found(repr(path), needed + nearest(name, own or public))
        found = getattr(found, part)
    return found


def _public(module: ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if callable(value) and not name.startswith("_")}


def public_in(file: str, kind: type[T]) -> dict[str, T]:
    """The public callables of a kind in a file, those too that it imports, by their names. Raises as `load`."""
    return {name: value for name, value in _public(_from_file(file, file)).items() if isinstance(value, kind)}


def _not_found(given: str, needed: str, code: str = "nothing-to-load") -> GraphError:
    return fault(code, "nothing to load", given, needed, "")


def imported(path: str) -> Any:
    """What `load` finds, if this process has imported its module; None if not."""
    place, _, name = path.rpartition(":")
    found: Any = sys.modules.get(place)
    if place.endswith(".py"):
        found = _main(place) or sys.modules.get(_module_name(place))
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _main(real: str) -> ModuleType | None:
    """`__main__`, if this is its file: a second copy of the module would have other classes."""
    main = sys.modules.get("__main__")
    return main if main is not None and os.path.abspath(getattr(main, "__file__", None) or "") == real else None


def _module_name(real: str) -> str:
    """The same in every process, since keys and digests may hold it."""
    return f"penstock_file_{hashlib.blake2b(os.fsencode(real), digest_size=6).hexdigest()}"


def _import(path: str, module: str) -> ModuleType:
    _reachable(os.getcwd())
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        # If it is another module that is missing, the module that imports it is at fault.
        if not missing or not f"{module}.".startswith(f"{missing}."):
            raise
    needed = "a module that can be imported here (is it installed, or in the current folder?)"
    raise _not_found(f"{path!r}: there is no module {missing!r}", needed, "missing-module")


def _from_file(path: str, file: str) -> ModuleType:
    """The module of a file, loaded once however its path is written."""
    real = os.path.abspath(file)
    if not os.path.isfile(real):
        siblings = [p.name for p in Path(real).parent.glob("*.py")]
        needed = f"an existing file{nearest(Path(real).name, siblings)}"
        raise _not_found(f"{path!r}: there is no file {real}", needed)
    # A second module of the same file would have other classes of the same names.
    name = _module_name(real)
    known = _main(real) or sys.modules.get(name)
    if known is not None:
        return known
    spec = importlib.util.spec_from_file_location(name, real)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Registered before it runs, as `import` does: dataclasses look their module up.
    sys.modules[name], _files[name] = module, real
    _reachable(os.path.dirname(real))
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        at = traceback.extract_tb(error.__traceback__)[-1]
        if isinstance(error, ImportError) and at.filename == real and "no known parent package" in str(error):
            packages = itertools.takewhile(lambda folder: (folder / "__init__.py").exists(), Path(real).parents)
            names = [folder.name for folder in packages] or [Path(real).parent.name]
            within = ".".join([*reversed(names), Path(real).stem])
            given = f"a file whose imports are relative to its package ({at.line})"
            needed = f"its name in the package, {within}:{path.rpartition(':')[2]}, from the folder of {names[-1]}"
            raise fault("relative-import", repr(path), given, needed, f"{real}:{at.lineno}") from None
        raise
    return module


def reach(path: str) -> None:
    """Make modules beside the file of a program's path importable, as they were when it was traced."""
    place = path.rpartition(":")[0]
    if place.endswith(".py"):
        _reachable(os.path.dirname(os.path.abspath(place)))


def _reachable(folder: str) -> None:
    # Last in the path, so that a user's files shadow no installed module.
    if folder not in sys.path:
        sys.path.append(folder)


def encode(value: Any, what: str) -> Json:
    """An option as JSON. Raises GraphError for what JSON cannot hold; `what` names the option in the error.

    A node, function or class is `{"path": …}`, a `functools.partial` of one with its keyword arguments
    `{"path": …, "options": {…}}`.
    """
    # NaN is refused: no option means it, and two graphs with it would not be equal.
    if value is None or type(value) in (bool, int, str) or (type(value) is float and not math.isnan(value)):
        return value
    # JSON does not know NumPy's numbers, which are no `int` or `float`.
    if isinstance(value, Integral) or (isinstance(value, Real) and not math.isnan(value)):
        return int(value) if isinstance(value, Integral) else float(value)
    # Absolute, so that a run can be resumed from any folder.
    if isinstance(value, Path):
        return str(value.absolute())
    # JSON has no tuples; a node that needs one is given a list.
    if isinstance(value, list | tuple):
        return [encode(item, what) for item in value]
    if isinstance(value, dict) and all(type(key) is str for key in value) and not names_function(value):
        return {key: encode(item, what) for key, item in value.items()}
    if isinstance(value, partial):
        if value.args:
            needed = "a functools.partial with keyword arguments only"
            raise fault("partial-by-place", what, f"{value!r}, with arguments by place", needed)
        annotations = getattr(value.func, "__annotations__", {})
        for name, bound in value.keywords.items():
            require_no_function(bound, annotations.get(name), f"{what}: option {name!r}")
        function = encode(value.func, what)  # may be a partial itself, if that one has attributes
        return {**function, "options": {**function.get("options", {}), **encode(value.keywords, what)}}
    if isinstance(value, FunctionType | BuiltinFunctionType | type) or hasattr(value, "__wrapped__"):
        path = path_of(value)
        if "<" not in path:
            return {"path": path}
        needed = "a function that other processes can import: NAME, or functools.partial(NAME, number=…), of a "
        needed += "`def NAME(…)` at the top of a module"
        if isinstance(value, type):
            needed = "a class that other processes can import, at the top of a module"
        raise fault("local-function", what, path, needed)
    if isinstance(value, float):
        raise fault("not-constant", what, repr(value), "a finite number")
    needed = "a constant (number, text, True, False, None, or lists and dicts of them), a function or a node"
    raise fault("not-constant", what, f"{value!r} ({type(value).__name__})", needed)


def require_no_function(value: Any, annotation: Any, what: str) -> None:
    """Raises GraphError for a function in place of a number, a truth value or a text, as the annotation says."""
    allowed = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    plain = {int: "a number", float: "a number", bool: "True or False", str: "a text"}
    if callable(value) and allowed[0] in plain and set(allowed) <= {*plain, NoneType}:
        given = path_of(value) if hasattr(value, "__qualname__") else repr(value)
        raise fault("wrong-option-type", what, given, plain[allowed[0]])


def names_function(option: Json) -> bool:
    """Is an encoded option a function?"""
    return isinstance(option, dict) and set(option) in ({"path"}, {"path", "options"})


def resolve(option: Json) -> Any:
    """The inverse of `encode`, except that tuples stay lists, and paths stay texts outside of functions."""
    if isinstance(option, list):
        return [resolve(item) for item in option]
    if isinstance(option, dict):
        if names_function(option):
            function = load(option["path"])
            return partial(function, **arguments(function, option["options"])) if "options" in option else function
        return {key: resolve(item) for key, item in option.items()}
    return option


def arguments(function: Callable[..., Any], options: Mapping[str, Json]) -> dict[str, Any]:
    """Encoded options as a function takes them: with a `Path` for a text where that is its annotation."""
    annotations = getattr(function, "__annotations__", {})
    return {name: located(resolve(option), annotations.get(name)) for name, option in options.items()}


def located(value: Any, annotation: Any) -> Any:
    """An option's value, with an absolute `Path` in place of each text that is a file or folder by its annotation."""
    if annotation in PATHS and isinstance(value, str | Path):
        return Path(value).absolute()
    if annotation in LISTS and isinstance(value, list | tuple):
        return [located(item, Path) for item in value]
    return value
