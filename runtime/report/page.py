"""The report as one HTML file: all values that the template shows. Pure, except that it reads the templates.

`page` is a run's report. `schedule_html` is a page with one schedule: lanes that zoom and pan, with nothing to load.
`render` fills any template of this folder.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from penstock import __version__
from penstock.graph.ir import Graph
from penstock.graph.svg import Measured, svg
from penstock.runtime.cluster.placement import served, slots_overrun
from penstock.runtime.record.timeline import Bar, boundaries, lanes, pool_of, span
from penstock.runtime.record.trackers import secret_values, without_secrets
from penstock.runtime.report.charts import accuracies, chart_groups, number, numbers, percent
from penstock.runtime.report.follow import NS, Followed, RankId, Work
from penstock.runtime.report.schedule_data import Chart, Row, Strip, encode
from penstock.runtime.report.summary import Report, rank_name
from penstock.runtime.report.what_if import SAME, WhatIfTable, bounded
from penstock.runtime.schedule.idle_causes import CAUSES, Cause

TEMPLATES = Path(__file__).parent / "templates"
# The secrets of the environment, looked up once per page for its thousands of strings.
_secrets = ContextVar[Sequence[str]]("_secrets", default=())


def render(template: str, **values: Any) -> str:
    """Fill a template, with its style and script inlined, and remove secrets: trackers store the page, and its reader
    may be another person than the run's user."""
    _secrets.set(secret_values())
    style, script = (TEMPLATES / name for name in ("style.css", "page.js"))
    page = _environment().get_template(template).render(style=style.read_text(), script=script.read_text(), **values)
    # A path on the page may not be UTF-8.
    return page.encode(errors="backslashreplace").decode()


@cache
def _environment() -> Environment:
    """Cached with its compiled templates: to compile a template takes longer than to fill it."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: without_secrets(value, _secrets.get()) if type(value) is str else value,
    )
    made.filters |= {"seconds": seconds, "percent": percent, "number": number}
    return made


def schedule_html(bars: Sequence[Bar], title: str) -> str:
    """One self-contained HTML file that shows a schedule, real or simulated: a lane per replica, each bar's node,
    index, duration and version on hover and on keyboard focus, zoom by buttons, wheel and keys, light and dark.

    `bars` come from the simulator or a run's trace. Times are seconds on any one clock. Syncs may have their own lanes
    ("policy>generator/0"), which are drawn in the lane of their replica.
    """
    begin, end = span(bars)

    def ns(time: float) -> int:
        return round((time - begin) * NS)

    rows: dict[str, Row] = {}
    for lane in lanes(bars):
        channel, _, name = lane.name.rpartition(">")
        row = rows.setdefault(name, Row(name, pool_of(name), Strip([])))
        for bar in (bar for track in lane.tracks for bar in track):
            # A sync on its own lane ("policy>generator/0") is named after its channel.
            shown = pool_of(bar.lane) if channel else bar.name
            row.real.work.append(
                Work(name, shown, bar.index, ns(bar.start), ns(bar.end), bar.kind, bar.version, cause=(bar.detail, 0))
            )
    pools = list(dict.fromkeys(row.pool for row in rows.values()))
    # Lanes of a pool are adjacent; pools are in the order in which they first worked.
    ordered = sorted(rows.values(), key=lambda row: pools.index(row.pool))
    for row in ordered:
        row.real.swaps = sorted((w.end, w.index) for w in row.real.work if w.kind == "swap")
    ends = [(update, ns(time)) for update, time in boundaries(bars)]
    data, merged = encode(Chart(ordered, ends, end=ns(end)))
    return render("schedule.html.j2", title=title, data=data, merged=merged)


STATES = {"busy": Cause("busy", "busy"), **CAUSES}


def page(report: Report, template: str = "report.html.j2") -> str:
    """The report's page, complete."""
    chart = make_chart(report)
    data, merged = encode(chart) if chart.rows else ("", 0)
    return render(
        template,
        report=report,
        facts=report.facts,
        summary=report.facts.summary or {},
        accuracies=accuracies(report.facts),
        rewards=numbers([row.get("reward_mean") for row in report.facts.rows]),
        graph=_graph(report),
        data=data,
        merged=merged,
        predicted_updates=sum(prediction.updates for prediction in report.predictions),
        states=STATES,
        ranks={lane: rank_name(lane, report.facts.whole_ns) for lane in report.facts.whole_ns},
        what_if=_what_if(report, report.table) if report.table and report.table.cases else None,
        groups=chart_groups(report),
        samples=_samples(report),
        version=__version__,
    )


def _samples(report: Report) -> list[dict[str, Any]]:
    """Groups with prompts and responses, and for each response the rewards that nodes gave it or later changed."""
    shown, nodes = [], {node.label: node.name for node in report.graph.nodes}
    for line in report.facts.samples:
        responses = Counter[str]()
        for said in line["texts"]:
            responses[said["node"]] += len(said["responses"])
        # A node's second output of rewards is named "label.output".
        whose = {name: name if name in nodes else name.rpartition(".")[0] for name in line["rewards"]}
        read = {name: _texts_of(report.graph, nodes.get(label, ""), responses) for name, label in whose.items()}
        begun = Counter[str]()
        for said in line["texts"]:
            node, begin = said["node"], begun[said["node"]]
            begun[node] = end = begin + len(said["responses"])
            # Rewards that a node gives to several nodes' responses are shown if their number matches this node's.
            scored = {
                name: values[begin:end]
                for name, values in line["rewards"].items()
                if node in read[name] and len(values) == responses[node]
            }
            rows = [
                {**response, "rewards": {name: values[row] for name, values in scored.items()}}
                for row, response in enumerate(said["responses"])
            ]
            shown.append({**line, **said, "rows": rows, "scorers": list(scored)})
    return shown


def _texts_of(graph: Graph, node: str, makers: Container[str]) -> set[str]:
    """The nearest `makers` of texts, by label, from which a node reads, directly or through others; the node itself if
    it is one. The search does not go past a maker: that reads other texts."""
    found, todo, seen = set[str](), [node], {node}
    while todo:
        if (name := todo.pop()) not in graph:  # an argument
            continue
        if (label := graph[name].label) in makers:
            found.add(label)
            continue
        new = {item.ref.node for item in graph[name].inputs} - seen
        seen |= new
        todo += new
    return found


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    size = abs(value)
    number, unit = (value, "s") if size >= 1 else (value * 1e3, "ms") if size >= 1e-3 else (value * 1e6, "µs")
    return f"{f'{number:#.3g}'.rstrip('.')} {unit}" if 0 < size < 1000 else f"{number:.0f} s"


def _graph(report: Report) -> str:
    notes = {n.node: f"{seconds(n.median_s)} · {percent(n.share)} of the time" for n in report.nodes if n.firings}
    shares, found = {n.node: n.share for n in report.nodes}, report.bound
    # The picture marks a pool by its label in the program; a resume may have placed its nodes in another pool.
    bounding = {n.node for n in report.nodes if found and n.pool == found.pool}
    labels = {node.pool for node in report.graph.nodes if node.name in bounding}
    return svg(report.graph, Measured(notes, shares, set(found.cycle) if found else set(), labels))


def make_chart(report: Report) -> Chart:
    """All lanes of the run, real and predicted."""
    facts = report.facts
    lanes = dict.fromkeys(lane for stage in facts.stages for lane in stage.accounts)
    order = {pool: place for place, pool in enumerate(dict.fromkeys(node.pool for node in report.nodes))}
    rooms = {replica.name: replica.capacity for replica in served(report.graph, facts.config.plan).replicas}
    real = _strips(stage.followed for stage in facts.stages)
    predicted = _strips(prediction.followed for prediction in report.predictions)
    rows = [
        Row(rank_name(lane, lanes), pool_of(lane[0]), real[lane],
            predicted[lane] if report.predictions else None, rooms.get(lane[0], 0))
        for lane in sorted(lanes, key=lambda known: order.get(pool_of(known[0]), len(order)))
    ]  # fmt: skip
    stages = [("starting", life.begin, life.begin + life.starting) for life in facts.lives]
    stages += [(stage.name, stage.begin, stage.end) for stage in facts.stages]
    ends = [end for stage in facts.training for end in stage.followed.ends.items()]
    # A prediction may last longer than the run.
    last = max((work.end for prediction in report.predictions for work in prediction.followed.work), default=0)
    return Chart(rows, ends, stages, [life.begin for life in facts.lives[1:]], max(facts.end, last))


def _strips(followed: Iterable[Followed]) -> defaultdict[RankId, Strip]:
    """The work and swaps of each rank."""
    found = defaultdict[RankId, Strip](lambda: Strip([]))
    for each in followed:
        for work in each.work:
            found[work.rank_id].work.append(work)
        for lane, swaps in each.swaps.items():
            found[lane].swaps += swaps
    return found


def _what_if(report: Report, table: WhatIfTable) -> dict[str, Any]:
    """The what-if table as the template's sliders read it."""
    cases = [
        {**asdict(case), "busy": {pool: round(share, 4) for pool, share in (case.busy or {}).items()}}
        for case in table.cases
    ]
    value = {"lag": table.lag, "replicas": table.replicas, "cases": cases, "measured_s": table.measured_s}
    bound, below = report.bound, False
    if bound is not None:
        # The bound is of the whole run, the table of its first updates.
        own = [case for case in table.cases if bounded(bound, table, case.replicas)]
        below = any(case.period_s and case.period_s < (1 - SAME) * bound.seconds for case in own)
    return {
        "table": table,
        "below": below,
        "overrun": slots_overrun(report.graph, report.stage.origin.plan, table.pool) if report.stage else 0.0,
        "lags": sorted({case.lag for case in table.cases}),
        "sizes": sorted({case.replicas for case in table.cases}),
        # It goes into a script element, so it must not contain "</script>".
        "json": json.dumps(value).replace("<", "\\u003c"),
    }
