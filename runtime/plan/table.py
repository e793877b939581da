"""A plan as a small HTML table, for notebooks. Pure."""

from collections.abc import Sequence
from html import escape


def html_table(caption: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Cells are texts, escaped here."""
    cells = ["".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"
