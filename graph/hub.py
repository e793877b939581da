"""Model directories by their name on the Hugging Face Hub, such as `Qwen/Qwen3-0.6B`, or `ORG/NAME@REVISION`."""

import os
import re
from functools import lru_cache
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Literal

_NAME = re.compile(r"(\w[\w.-]*/[\w.-]+)(?:@([\w./-]+))?")
# A model's directory in the Hub's cache.
_SNAPSHOT = re.compile(r".*/models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})/?")
# A model's weights, its shape and its tokenizer; no other formats of the same weights.
_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
# The same weights once more, as Mistral's own programs read them, and as Meta's do.
_COPIES = ["consolidated*", "original/*"]


class HubError(ValueError):
    """A Hub name that cannot be resolved: what was given, what is needed, and why."""


@lru_cache
def model_folder(given: str, *, weights: bool = True) -> str:
    """The directory of a model. A path that exists is returned as it is. For a Hub name, or a path in the Hub cache of
    another machine, return the directory in this machine's cache, downloaded first if needed; `weights=False` downloads
    no weights. Anything else is returned as it is.

    Raises HubError for a name that is neither in the cache nor on the Hub, or if the Hub cannot be reached.
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


def model_name(folder: Path) -> str:
    """What messages call the model of a directory: the directory's name, or in the Hub's cache that of its repository,
    `Qwen3-0.6B`."""
    snapshot = _SNAPSHOT.fullmatch(str(folder.absolute()))
    return snapshot[2] if snapshot else folder.absolute().name


def at_revision(name: str, revision: object) -> str:
    """The name of a model at a revision, as adapters name their base. A directory has no revisions: it stays as it is,
    and so does a name without one. Raises HubError for a revision that is no text."""
    if revision is None or Path(name).exists() or not _NAME.fullmatch(name):
        return name
    if not isinstance(revision, str) or not _NAME.fullmatch(said := f"{name.partition('@')[0]}@{revision}"):
        raise HubError(f"given the revision {revision!r} of {name}, needed a commit, a branch or a tag")
    return said


def unreachable(kind: Literal["model", "dataset"], name: str, revision: str | None) -> str:
    """Why the Hub does not answer about a name within HF_HUB_ETAG_TIMEOUT (5 s by default); "" if it answers anything.

    The Hub's client alone retries for half a minute, too long for a user who has mistyped a path.
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
        except Exception as error:  # errors of the client's HTTP library, which differs by version
            answers.put(f"{api.endpoint} cannot be reached: {error or type(error).__name__}")
        else:
            answers.put("")

    # In a thread, since resolving a host name has no timeout.
    Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=seconds)
    except Empty:
        return f"{api.endpoint} has not answered within {seconds:g} s (HF_HUB_ETAG_TIMEOUT)"
