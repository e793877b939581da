"""The display of a run: a live dashboard in a terminal, plain lines elsewhere. Both get the controller's lines.

A line is a dict with a `kind`: "stage", "status", "base", "row", "accuracy", "note", "error", "external", "summary".
`runtime.control.recorder` makes most of them; unknown kinds are ignored.

- `figure`, `percent`, `many`, `seconds`, `clock` and `sparkline` format numbers.
- `Progress` accumulates the lines.
- `open_display` opens a `LiveDisplay` or a `PlainDisplay`; `dashboard` is the picture of the live one.
"""

import errno
import sys
import termios
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from math import floor, log10
from threading import Lock
from time import monotonic
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.runtime.control.signals import output_closed
from penstock.runtime.record.errors import visible
from penstock.runtime.record.metrics import Row, columns
from penstock.runtime.schedule.idle_causes import CAUSES

SPARKS = "▁▂▃▄▅▆▇█"


def figure(value: float | None, digits: int = 3) -> str:
    """About `digits` significant digits, without an exponent if possible."""
    if value is None:
        return "-"
    if value != 0 and not 1e-4 <= abs(value) < 1e5:
        return f"{value:.{digits - 1}e}"
    text = f"{value:.{digits}g}"
    return f"{value:.0f}" if "e+" in text else text


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def many(value: float | None) -> str:
    """A rate or count with k and M."""
    if value is None:
        return "-"
    for factor, unit in ((1e6, " M"), (1e3, " k")):
        if value >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def seconds(value: float) -> str:
    """1.234 s, 12.3 ms."""
    return f"{figure(value, 4)} s" if value >= 1 else f"{figure(value * 1e3)} ms"


def about(value: float, digits: int = 2) -> str:
    """12 s, 1200 s, 340 ms: seconds with `digits` significant digits."""
    if not value:
        return "0 ms"
    unit, scaled = ("s", value) if value >= 1 else ("ms", value * 1e3)
    decimals = digits - 1 - floor(log10(abs(scaled)))
    return f"{round(scaled, decimals):.{max(0, decimals)}f} {unit}"


def more(share: float) -> str:
    """3.1 % more, 110 % more: the difference of two predictions by one model, which is more precise than each."""
    return f"{figure(100 * share, 2)} % more"


def clock(seconds: float) -> str:
    """45.2 s, 2:03 min, 1:02:03 h."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as bars, averaged into at most `width` columns, scaled from the minimum to the maximum."""
    if not values:
        return ""
    # Not more columns than values: each bar stands for at least one.
    num = min(width, len(values))
    edges = [round(i * len(values) / num) for i in range(num + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((mean - low) * scale)] for mean in means)


Line = dict[str, Any]

STAGES = {
    "": "starting processes",
    "queue": "waiting for another run, which builds a base model",
    "base": "building the base model",
    "before": "measuring accuracy before",
    "train": "training",
    "measure": "measuring",
    "save": "saving a checkpoint",
    "after": "measuring accuracy after",
    "done": "done",
    "stopped": "stopped",
    "failed": "failed",
}
# How many rows rates are averaged over.
RECENT = 10


@dataclass
class PoolLine:
    """The state of a pool: what its replicas are doing; over the last rows, the share of time in which they were busy,
    and idle by cause; and the version of their weights."""

    doing: tuple[str, ...] = ()
    busy: float | None = None
    idle: dict[str, float] = field(default_factory=dict)
    version: int | None = None


@dataclass
class Progress:
    """What a run has reported so far. `hear` adds a line. `updates` is the number of updates of the stage."""

    program: str
    updates: int
    stage: str = ""
    update: int = 0
    row: Line = field(default_factory=dict)
    rows: deque[Line] = field(default_factory=lambda: deque(maxlen=RECENT))
    rewards: list[float] = field(default_factory=list)
    pools: dict[str, PoolLine] = field(default_factory=dict)
    accuracy: dict[str, float] = field(default_factory=dict)
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=3))
    errors: list[str] = field(default_factory=list)
    cause: str = ""
    lost: Line = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.planned = self.updates

    def hear(self, line: Line) -> None:
        # Escape control characters here, once, so that no later print can forget it.
        line = shown(line)
        match line["kind"]:
            case "stage":
                # The base model's updates are not the run's: count anew once it is built.
                if self.stage == "base":
                    self.update, self.updates, self.row = 0, self.planned, {}
                self.stage = line["stage"]
            case "status":
                self._status(line)
            case "base":
                self.update, self.updates, self.row = line["update"], line["updates"], {"loss": line["loss"]}
            case "row":
                self._row(line["row"])
            case "accuracy":
                self._accuracy({line["stage"]: line["accuracy"]})
            case "note":
                self.notes.append(str(line["text"]))
            case "external":
                self.notes.append(external_text(line))
            case "error":
                self.cause = self.cause or str(line.get("code") or "")
                self._error(str(line["text"]))
            case "summary":
                self.stage = line["status"]
                self.cause = self.cause or str(line.get("cause") or "")
                self._error(str(line.get("error") or ""))

    def _status(self, line: Line) -> None:
        self.stage = line.get("stage", self.stage)
        self.lost = line.get("lost", self.lost)
        self.update, self.updates = line.get("update", self.update), line.get("updates", self.updates)
        self._accuracy(line.get("accuracy") or {})
        for name, said in (line.get("pools") or {}).items():
            pool = self.pools.setdefault(name, PoolLine())
            doing = said.get("doing", ())
            pool.doing = (doing,) if isinstance(doing, str) else tuple(doing)
            pool.version = said.get("version", pool.version)
        row = line.get("row") or {}
        # A watcher that started late has no row yet.
        if row and not self.row:
            self._row(row)

    def _row(self, row: Line) -> None:
        self.row = row
        self.rows.append(row)
        self.update = row.get("version", row["update"] + 1)
        if row.get("reward_mean") is not None:
            self.rewards.append(float(row["reward_mean"]))
        for name, states in (row.get("pools") or {}).items():
            spent: Counter[str] = Counter()
            for recent in self.rows:
                spent.update({state: s or 0.0 for state, s in recent.get("pools", {}).get(name, {}).items()})
            if states:
                pool, seconds = self.pools.setdefault(name, PoolLine()), spent.total()
                pool.busy = spent["busy"] / seconds if seconds else None
                pool.idle = {state: s / seconds for state, s in spent.items() if state != "busy" and s > 0}

    def _error(self, text: str) -> None:
        # The controller reports an error at once, and again in its summary.
        if text and text not in self.errors:
            self.errors.append(text)

    def _accuracy(self, found: dict[str, float | None]) -> None:
        self.accuracy.update({when: value for when, value in found.items() if value is not None})

    @property
    def failures(self) -> str:
        """How many groups failed and firings were tried again, and the last error, in one line; "" for none."""
        failed, again = self.lost.get("failed", 0), self.lost.get("retried", 0)
        counts = [f"{failed} group{'s' * (failed != 1)} failed"] if failed else []
        counts += [f"{again} firing{'s' * (again != 1)} tried again"] if again else []
        raised = str(self.lost.get("raised", "")).strip().splitlines()
        where = raised[0].partition(",")[0].rstrip(":") if raised else ""
        return f"{', '.join(counts)}; the last: {where}: {raised[-1]}" if counts and raised else ", ".join(counts)

    @property
    def updates_per_s(self) -> float | None:
        seconds = sum(float(row.get("seconds") or 0.0) for row in self.rows)
        return len(self.rows) / seconds if seconds else None

    @property
    def tokens_per_s(self) -> float | None:
        """Response tokens trained on per second of wall time, for all policies."""
        seconds = sum(float(row.get("seconds") or 0.0) for row in self.rows)
        # The column `tokens` is of one node only.
        rates = [(row.get("train_tokens_per_s") or 0.0, row.get("update_s") or 0.0) for row in self.rows]
        tokens = sum(rate * update_s for rate, update_s in rates)
        return tokens / seconds if seconds and tokens else None


def shown(value: Any) -> Any:
    """A line with all of its text safe for a terminal: the text of an error comes from nodes or other programs."""
    if isinstance(value, dict):
        return {shown(name): shown(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [shown(item) for item in value]
    return visible(value) if isinstance(value, str) else value


def external_text(line: Line) -> str:
    return f"waiting for `penstock agent {line['join']}` on host {line['host']}"


# The least time between two plain lines about updates.
PLAIN_SECONDS = 1.0
# The least time between two plain lines about failures.
FAILURE_SECONDS = 10.0
# How many lines at the end of the last traceback the dashboard shows.
TRACEBACK = 8
POOL_COLORS = ("blue", "dark_orange", "green", "magenta", "cyan", "red")
Wanted = tuple[str, str, Callable[[float | None], str]]
# The metrics of a row that the dashboard shows: name, key, and format.
FIGURES: tuple[Wanted, ...] = (
    ("loss", "loss", figure),
    ("lag", "lag_mean", figure),
    ("epoch", "epoch", figure),
    ("ratio", "ratio_mean", lambda value: "-" if value is None else f"{value:.4f}"),
    ("clipped", "ratio_clipped", percent),
    ("mismatch", "mismatch", figure),
    ("sync", "sync_s", lambda value: "-" if value is None else f"{1e3 * value:.3g} ms"),
)
ACCURACY: Wanted = ("accuracy", "accuracy", percent)
PLAIN: tuple[Wanted, ...] = (("reward", "reward_mean", figure), ACCURACY, *FIGURES[:3])


class Display(AbstractContextManager["Display"]):
    """Shows a run while it is entered. `progress` has the lines so far, accumulated."""

    progress: Progress

    @abstractmethod
    def tell(self, line: Line) -> None:
        """Show a line of the controller. Raises OSError if the pipe or the terminal is closed."""

    def __exit__(self, *raised: object) -> None:
        return None


def open_display(program: str, updates: int, folder: str, *, plain: bool, seconds: float = 0.0) -> Display:
    """Open the display of a run that has been going on for `seconds`."""
    progress = Progress(program, updates)
    if plain or not sys.stdout.isatty():
        return PlainDisplay(progress, write_line)
    return LiveDisplay(progress, folder, Console(), seconds)


def write_line(text: str) -> None:
    print(visible(text), flush=True)


class PlainDisplay(Display):
    """Prints a line per stage, and at most one a second about updates. Errors are left to the end."""

    def __init__(
        self, progress: Progress, write: Callable[[str], object], now: Callable[[], float] = monotonic
    ) -> None:
        self.progress, self.write, self.now = progress, write, now
        self._stage: str | None = None
        self._said = -PLAIN_SECONDS
        self._failures: tuple[str, float] = "", -FAILURE_SECONDS
        # Trackers call `tell` from their own threads.
        self._lock = Lock()

    def tell(self, line: Line) -> None:
        with self._lock:
            self._tell(line)

    def _tell(self, line: Line) -> None:
        self.progress.hear(line)
        if self.progress.stage != self._stage and line["kind"] != "summary":
            self._stage, self._said = self.progress.stage, -PLAIN_SECONDS
            self.write(f"{STAGES.get(self._stage, self._stage)} …")
        match line["kind"]:
            case "status":
                self._failed()
            case "row" | "base":
                self._row()
            case "accuracy" if line["accuracy"] is not None:
                self.write(f"accuracy {line['stage']} training: {percent(line['accuracy'])}")
            case "note":
                self.write(f"note: {line['text']}")
            case "external":
                self.write(external_text(line))

    def _failed(self) -> None:
        """Print the failures if there are new ones; the first time with the whole traceback."""
        (before, at), said = self._failures, self.progress.failures
        # A node that always fails would fill the log with the same line.
        if said == before or (now := self.now()) - at < FAILURE_SECONDS:
            return
        self._failures = said, now
        self.write(f"failures: {said}" if before else f"failures: {said}\n{self.progress.lost['raised'].rstrip()}")

    def _row(self) -> None:
        seen, now = self.progress, self.now()
        # The last update is always shown: else a short run would end without one.
        if now - self._said < PLAIN_SECONDS and seen.update < seen.updates:
            return
        self._said = now
        parts = [f"update {seen.update}/{seen.updates}"]
        parts += [f"{name} {value}" for name, value in _figures(seen.row, PLAIN)]
        if seen.rows:
            parts.append(f"{figure(seen.updates_per_s)} updates/s")
            # A program that generates nothing has no token rate.
            parts += [f"{many(seen.tokens_per_s)} tokens/s"] if seen.tokens_per_s is not None else []
        self.write("  ".join(parts))


class LiveDisplay(Display):
    """A dashboard that redraws itself a few times a second."""

    def __init__(self, progress: Progress, folder: str, console: Console, seconds: float = 0.0) -> None:
        self.progress, self.folder, self.console = progress, folder, console
        self.began = monotonic() - seconds
        # rich redraws in its own thread, while `tell` changes `progress`.
        self._lock = Lock()
        self.live = Live(console=console, get_renderable=self._render, refresh_per_second=8, transient=False)

    def __enter__(self) -> Self:
        self._restore = quiet_controls()
        self.live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        # The run has ended in any case, and its summary follows.
        with suppress(OSError):  # the terminal is gone
            self.live.stop()
        self._restore()

    def tell(self, line: Line) -> None:
        with self._lock:
            self.progress.hear(line)
        # If the terminal is gone, rich draws nothing, and does not raise.
        if output_closed(self.console.file.fileno()):
            raise OSError(errno.EIO, "the terminal is gone")

    def _render(self) -> RenderableType:
        with self._lock:
            return dashboard(self.progress, self.folder, self.console.width, monotonic() - self.began)


def quiet_controls() -> Callable[[], None]:
    """Keep the terminal from writing ^C into the picture. Returns a function that undoes it."""
    if not sys.stdin.isatty():
        return lambda: None
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    changed = list(before)
    changed[3] &= ~termios.ECHOCTL
    termios.tcsetattr(fd, termios.TCSADRAIN, changed)

    def restore() -> None:
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(fd, termios.TCSADRAIN, before)

    return restore


def dashboard(seen: Progress, folder: str, width: int, seconds: float) -> RenderableType:
    """The whole picture, `width` columns wide, `seconds` after it was first drawn."""
    inner = width - 4
    blank = Text("")
    bar = ProgressBar(total=max(seen.updates, 1), completed=seen.update, complete_style="green", finished_style="green")
    stage = Text(STAGES.get(seen.stage, seen.stage), style="bold cyan")
    head = _grid(2, {}, {"ratio": 1, "no_wrap": False}, {"justify": "right"})
    head.add_row(stage, bar, f"{seen.update}/{seen.updates}  {clock(seconds)}")
    body: list[RenderableType] = [head, blank]
    if seen.rewards or seen.accuracy:
        body.append(_learning(seen, inner))
    body.append(_numbers(seen, inner))
    if seen.pools:
        body += [blank, _pools(seen)]
    body += [Text(f"· {note}", style="yellow") for note in seen.notes]
    if seen.failures:
        body.append(Text(f"· {seen.failures}", style="red"))
        body += [Text(f"  {line}", style="dim") for line in str(seen.lost.get("raised", "")).splitlines()[-TRACEBACK:]]
    title = Text.assemble(" ", (visible(seen.program), "bold"), " ")
    place = Text(f" {visible(folder)} ")
    return Panel(Group(*body), title=title, title_align="left", subtitle=place, subtitle_align="right", width=width)


def _grid(padding: int, *columns: Mapping[str, Any]) -> Table:
    """A table without lines, with full width. `columns` are the options of each column; columns do not wrap."""
    table = Table.grid(padding=(0, padding), expand=True)
    for options in columns:
        table.add_column(**{"no_wrap": True, **options})
    return table


def _learning(seen: Progress, width: int) -> Table:
    """The reward with its sparkline, and the accuracy."""
    said = _shown(seen.row, "reward_mean", figure)
    name, reward = ("reward", said) if said != figure(None) else ("", "")
    spark = Text(sparkline(seen.rewards, max(width - 40, 12)), style="green")
    before, after = seen.accuracy.get("before"), seen.accuracy.get("after")
    accuracy = Text("")
    if after is not None:
        accuracy = Text.assemble(("accuracy ", "dim"), percent(before), " → ", (percent(after), "bold green"))
    elif before is not None:
        accuracy = Text.assemble(("accuracy before ", "dim"), percent(before))
    elif "accuracy" in seen.row:
        accuracy = Text.assemble(("accuracy ", "dim"), (_shown(seen.row, "accuracy", percent), "bold green"))
    table = _grid(1, {}, {"width": 6}, {"ratio": 1}, {"justify": "right"})
    table.add_row(Text(name, style="dim"), Text(reward, style="bold"), spark, accuracy)
    return table


def _numbers(seen: Progress, width: int) -> Text:
    """Rates, and as many metrics of the last row as fit."""
    items = [("updates/s", figure(seen.updates_per_s))]
    items += [("tokens/s", many(seen.tokens_per_s))] if seen.tokens_per_s is not None else []
    items += _figures(seen.row, FIGURES)
    line = Text(no_wrap=True, overflow="crop")
    for name, value in items:
        if len(line) + len(name) + len(value) + 1 > width:
            break
        line.append(f"{name} ", style="dim").append(f"{value}   ", style="bold")
    return line


def _shown(row: Row, key: str, show: Callable[[float | None], str]) -> str:
    """A metric of a row as text; the reported value if it is infinite or NaN."""
    wrong = row.get("not_finite") or {}
    return str(wrong[key]) if key in wrong else show(row.get(key))


def _figures(row: Row, wanted: Sequence[Wanted]) -> list[tuple[str, str]]:
    """The wanted metrics of a row, each with its name: "loss", or "solver.loss" for a named node."""
    return [
        (f"{column.removesuffix(key)}{name}", _shown(row, column, show))
        for name, key, show in wanted
        for column in columns([row], key)
    ]


def _pools(seen: Progress) -> Table:
    """A line for each pool: the share of time in which it was busy, its firings or why it is idle, and its weights; and
    a second line with the causes of its idle time."""
    table = _grid(2, {}, {"width": 16}, {"ratio": 1, "overflow": "ellipsis"}, {"justify": "right"})
    # Colors repeat if there are more pools than colors.
    for color, (name, pool) in zip(POOL_COLORS * 9, seen.pools.items(), strict=False):
        gauge = Text("")
        if pool.busy is not None:
            full = round(pool.busy * 10)
            gauge = Text.assemble(("█" * full, color), ("░" * (10 - full), "dim"), f" {100 * pool.busy:3.0f} %")
        # A firing has its index in brackets; anything else is a cause of idle time, or other text.
        doing = Text(", ".join(what for what in pool.doing if "[" in what))
        if not doing and pool.doing:
            said = pool.doing[0]
            doing = Text(CAUSES[said].display if said in CAUSES else said, style="dim")
        version = Text("" if pool.version is None else f"weights v{pool.version}", style="dim")
        table.add_row(Text(name, style=f"bold {color}"), gauge, doing, version)
        if pool.idle:
            titles = {cause: known.column or cause for cause, known in CAUSES.items()}
            causes = ", ".join(f"{titles.get(cause, cause)} {percent(share)}" for cause, share in pool.idle.items())
            table.add_row("", Text("idle", style="dim", justify="right"), Text(causes, style="dim"), "")
    return table
