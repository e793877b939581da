"""A line chart as an SVG picture, with the range of repeats at each point. Pure; follows the reader's theme."""

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860.0, 420.0, 52.0, 150.0, 48.0, 52.0
COLORS = ("#0B62C4", "#C2410C", "#15803D", "#7E22CE", "#DB2777", "#0E7490")
DASHES = ("", "6 3", "2 3", "9 3 2 3", "", "6 3")
STYLE = """
text{font:11px ui-sans-serif,system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;fill:#3A4048}
.back{fill:#FFFFFF}.grid{stroke:#E2E6EA}.base{stroke:#6B7480;stroke-dasharray:2 3}.title{font-size:14px;font-weight:600}
@media (prefers-color-scheme:dark){.back{fill:#15181C}.grid{stroke:#2C3238}text{fill:#C9D1D9}.base{stroke:#8A939D}}
"""
Spread = Mapping[str, float]


def line_chart(
    lines: Mapping[str, Sequence[Spread]], places: Sequence[str], title: str, below: str, level: tuple[str, float]
) -> str:
    """Draw a line per name through the medians (0 to 1) at equally spaced `places`, with bars from the smallest to the
    largest value.

    Lines are shifted slightly, so that bars do not overlap. `level` is the name and the height of a line to compare
    with.
    """
    step = (WIDTH - LEFT - RIGHT) / len(places)
    parts = [f'<rect class="back" width="{WIDTH:.0f}" height="{HEIGHT:.0f}"/>', _text(LEFT, 24, title, "title")]
    parts += [_row(tenths / 10) for tenths in range(0, 11, 2)]
    parts += [_text(LEFT + (i + 0.5) * step, HEIGHT - BOTTOM + 18, p, anchor="middle") for i, p in enumerate(places)]
    parts.append(_text(LEFT + step * len(places) / 2, HEIGHT - 12, below, anchor="middle"))
    name, height = level
    right = WIDTH - RIGHT
    parts.append(f'<line class="base" x1="{LEFT}" x2="{right}" y1="{_y(height):.1f}" y2="{_y(height):.1f}"/>')
    parts.append(_text(right + 8, _y(height) + 4, f"{name} {height:.2f}"))
    for number, (label, spreads) in enumerate(lines.items()):
        shift = (number - (len(lines) - 1) / 2) * step * 0.09
        xs = [LEFT + (i + 0.5) * step + shift for i in range(len(places))]
        parts += _line(label, xs, spreads, number)
    head = f'width="{WIDTH:.0f}" height="{HEIGHT:.0f}" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {head}><style>{STYLE}</style>{"".join(parts)}</svg>\n'


def _line(label: str, xs: Sequence[float], spreads: Sequence[Spread], number: int) -> list[str]:
    color, dash = COLORS[number % len(COLORS)], DASHES[number % len(DASHES)]
    points = " ".join(f"{x:.1f},{_y(s['median']):.1f}" for x, s in zip(xs, spreads, strict=True))
    style = f'fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="{dash}"'
    found = [f'<polyline points="{points}" {style}/>']
    for x, s in zip(xs, spreads, strict=True):
        low, high = _y(s["min"]), _y(s["max"])
        bar = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{color}" stroke-opacity=".45"'
        found.append(f'{bar} stroke-width="3"/>')
        found.append(f'<circle cx="{x:.1f}" cy="{_y(s["median"]):.1f}" r="3.5" fill="{color}"/>')
    x, y = WIDTH - RIGHT + 8, TOP + 10 + 20 * number
    found.append(f'<line x1="{x}" x2="{x + 26}" y1="{y}" y2="{y}" {style}/>')
    return [*found, _text(x + 32, y + 4, label)]


def _row(height: float) -> str:
    y = _y(height)
    line = f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return line + _text(LEFT - 8, y + 4, f"{height:.1f}", anchor="end")


def _y(height: float) -> float:
    return TOP + (1 - height) * (HEIGHT - TOP - BOTTOM)


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}>{escape(text)}</text>'
