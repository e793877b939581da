"""mkdocs' hooks: what pages show of the project itself is written while the site is built (see make.py)."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import make
from mkdocs.structure.files import File, Files


def on_files(files: Files, *, config: Any) -> Files:
    """Add a picture of each algorithm's graph."""
    for one in make.algorithms():
        picture = File.generated(config, f"img/graphs/{one.name}.svg", content=make.picture(one.name))
        files.append(picture)
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill the lines `<!-- write WHAT -->` of a page."""
    return make.written(markdown)
