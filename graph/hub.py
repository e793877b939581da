"""Model directories by their name on the Hugging Face Hub, such as `Qwen/Qwen3-0.6B`, or `ORG/NAME@REVISION`."""

import os
import re
from functools import lru_cache
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Literal

_NAME = re.compile(r"(\w[\w.-]*/[\w.-]+)(?:@([\w./-]+))?")
# How the Hub's cache calls a directory.
_SNAPSHOT = re.compile(r".*/models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})/?")
# A model's weights, its shape and its tokenizer; no other formats of the same weights.
_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
# The same weights once more, as Mistral's own programs read them, and as Meta's do.
_COPIES = ["consolidated*", "original/*"]


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
    silent = unreachable("model", repo, revision)
    try:
        return snapshot_download(
            repo, revision=revision, local_files_only=bool(silent), allow_patterns=files, ignore_patterns=_COPIES
        )
    except (OSError, ValueError, HfHubHTTPError) as error:
        why = silent or str(error).strip().partition("\n")[0]
        needed = "a model's directory, or a name of the Hugging Face Hub that is in the cache or can be downloaded"
        raise HubError(f"given the model {given!r}, which is no directory here; needed {needed}: {why}") from error


def unreachable(kind: Literal["model", "dataset"], name: str, revision: str | None) -> str:
    """Why the Hub answers nothing about a name, within 5 s or HF_HUB_ETAG_TIMEOUT; "" if it answers, whatever it says.

    Its client tries again for half a minute to connect, which helps nobody who has mistyped a path.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    seconds = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 5)
    api = HfApi()
    answers: SimpleQueue[str] = SimpleQueue()

    def ask() -> None:
        try:
            api.repo_info(name, repo_type=kind, revision=revision, timeout=seconds)
        except (HfHubHTTPError, ValueError):
            answers.put("")
        except Exception as error:  # the errors of whichever library of HTTP the client is built on
            answers.put(f"{api.endpoint} cannot be reached: {error or type(error).__name__}")
        else:
            answers.put("")

    # In a thread, since the time that a host's name takes to be resolved has no limit.
    Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=seconds)
    except Empty:
        return f"{api.endpoint} has not answered within {seconds:g} s (HF_HUB_ETAG_TIMEOUT)"
