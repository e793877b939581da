"""mkdocs' hook: a build of the site fails for a page whose regions are not as make.py writes them."""

import logging
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import make

LOG = logging.getLogger("mkdocs.hooks.regions")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Show the regions as they are now. With `--strict` an error that is logged ends the build."""
    current = make.filled(markdown)
    if current != markdown:
        LOG.error(f"docs/{page.file.src_uri}: stale; run `python docs/make.py`")
    return current
