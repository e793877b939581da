"""Errors of files that users write: each key that is wrong, what was given, what is needed. Pure."""

from collections.abc import Iterable
from difflib import get_close_matches

from pydantic import BaseModel, ValidationError


def nearest(given: str, known: Iterable[str]) -> str:
    """A hint at the known name that was probably meant, or at all of them."""
    names = sorted(known)
    close = get_close_matches(given, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"


def explain(error: ValidationError, model: type[BaseModel], where: str) -> str:
    """A pydantic error as lines of `where: key: given …, needed …`, the nearest key for an unknown one."""
    faults = error.errors()
    inside = {str(fault["loc"][0]) for fault in faults if len(fault["loc"]) > 1}
    lines = []
    for fault in faults:
        path = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            known = _keys(model, fault["loc"][:-1])
            lines.append(f"{where}: unknown key {path!r}; {nearest(str(fault['loc'][-1]), known)}")
        elif fault["type"] == "missing":
            lines.append(f"{where}: {path}: missing")
        elif fault["type"] == "value_error":
            lines.append(": ".join(filter(None, (where, path, str(fault["ctx"]["error"])))))
        elif path not in inside:  # a list is not also too short because of the items that are wrong
            lines.append(f"{where}: {path}: given {fault['input']!r:.60}; {fault['msg'][0].lower()}{fault['msg'][1:]}")
    return "\n".join(lines)


def _keys(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """The keys of the model at `path`: a field's own model, or that of its items or of its values by name."""
    for part in path:
        if isinstance(part, int) or part not in model.model_fields:
            continue  # which item, or the user's own name for a value
        annotation = model.model_fields[part].annotation
        inner = [a for a in (annotation, *getattr(annotation, "__args__", ())) if isinstance(a, type)]
        models = [a for a in inner if issubclass(a, BaseModel)]
        if not models:
            return []
        model = models[0]
    return list(model.model_fields)
