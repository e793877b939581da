"""Where what is built once is kept: $PENSTOCK_CACHE, else `penstock` in the user's cache folder."""

import os
from pathlib import Path


def cache_folder() -> Path:
    given = os.environ.get("PENSTOCK_CACHE")
    if given:
        return Path(given).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
