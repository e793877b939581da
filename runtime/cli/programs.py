"""The built-in programs and what each is for, read from their files without importing them."""

import ast
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from penstock import __path__ as roots
from penstock.runtime.cli.traced import CommandError


def built_in() -> dict[str, str]:
    """Name and first line of the documentation of each."""
    found = {}
    for path in sorted((Path(roots[0]) / "programs").glob("*.py")):
        for item in ast.parse(path.read_text()).body:
            if isinstance(item, ast.FunctionDef) and item.name == path.stem:
                found[item.name] = (ast.get_docstring(item) or "").partition("\n")[0]
    return found


def require_program(verb: str, argv: Sequence[str]) -> None:
    """Leave with help, or with an error, unless the words begin with a PROGRAM."""
    if argv and argv[0] in ("-h", "--help"):
        from penstock.runtime.cli.parse import verb_help  # imports what only help needs

        verb_help(verb, built_in())
    if argv and argv[0].startswith("-"):
        from penstock.runtime.cli.flags import VERBS, unknown_flags

        said = unknown_flags(argv[:1], [field.name for field in fields(VERBS[verb])], f"penstock {verb} PROGRAM")
        if said:
            raise CommandError(said, 2)
    if not argv or argv[0].startswith("-"):
        given = f"the flag {argv[0]!r} first" if argv else "nothing"
        raise CommandError(
            f"given {given}, needed a PROGRAM: {', '.join(built_in())}, package.module:function or file.py:function "
            f"(`penstock {verb} --help`)",
            2,
        )
