"""Model directories by their name on the Hugging Face Hub, such as `Qwen/Qwen3-0.6B`, or `ORG/NAME@REVISION`."""

import re
from functools import lru_cache
from pathlib import Path

_NAME = re.compile(r"(\w[\w.-]*/[\w.-]+)(?:@([\w./-]+))?")
# How the Hub's cache calls a directory.
_SNAPSHOT = re.compile(r".*/models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})/?")
# A model's weights, its shape and its tokenizer; no other formats of the same weights.
_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")


class HubError(ValueError):
    """A name of the Hub that cannot be had: what was given, what is needed, and why."""


@lru_cache
def model_folder(given: str, *, weights: bool = True) -> str:
    """The directory of a model: `given`, unless it is no directory here and a name of the Hub, or a directory of the
    Hub's cache on another machine. Then it is the one in the cache here, downloaded first if need be, without its
    weights if these are not asked for.

    Raises HubError for a name that is neither here nor there, or that cannot be reached.
    """
    if Path(given).exists():
        return given
    if snapshot := _SNAPSHOT.fullmatch(given):
        repo, revision = f"{snapshot[1]}/{snapshot[2]}", snapshot[3]
    elif name := _NAME.fullmatch(given):
        repo, revision = name[1], name[2]
    else:
        return given
    # It takes most of a second to import.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    files = [pattern for pattern in _FILES if weights or pattern != "*.safetensors"]
    try:
        return snapshot_download(repo, revision=revision, allow_patterns=files)
    except (OSError, ValueError, HfHubHTTPError) as error:
        why = str(error).strip().partition("\n")[0]
        needed = "a model's directory, or a name of the Hugging Face Hub that is in the cache or can be downloaded"
        raise HubError(f"given the model {given!r}, which is no directory here; needed {needed}: {why}") from error
