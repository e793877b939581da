"""Chat templates: how a model was taught to see a conversation. Rendered in a sandbox, as transformers does."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["TemplateError", "render"]


def render(template: str, messages: Sequence[Mapping[str, str]], special: Mapping[str, str]) -> str:
    """The words of a conversation, up to where the model's next answer begins. Raises TemplateError for what the
    template cannot say."""
    try:
        return _compiled(template).render(messages=messages, add_generation_prompt=True, **special)
    except TemplateError:
        raise
    except Exception as error:  # a template is a program, which may raise what it likes
        raise TemplateError(f"{type(error).__name__}: {error}") from error


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_template_error
    return environment.from_string(template)


def _to_json(value: Any, indent: int | None = None) -> str:
    """As chat templates expect it: without HTML escapes."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_template_error(message: str) -> None:
    raise TemplateError(message)
