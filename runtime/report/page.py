"""The report as one HTML file: all that the template shows, in words and numbers. Pure but for the templates.

`page` is a run's report. `schedule_html` is a schedule as a page of its own: lanes that zoom and pan, with nothing to
load. `render` fills any template of this folder.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from penstock import __version__
from penstock.graph.svg import Measured, svg_in_page
from penstock.runtime.cluster.placement import served
from penstock.runtime.record.timeline import Bar, boundaries, lanes, pool_of, span
from penstock.runtime.report.charts import accuracies, chart_groups, numbers, percent
from penstock.runtime.report.follow import NS, Followed, RankId, Work
from penstock.runtime.report.run_history import Account
from penstock.runtime.report.schedule_data import Chart, Row, Strip, encode
from penstock.runtime.report.summary import (
    NodeTime,
    Report,
    lags,
    node_times,
    occupancy,
    rank_accounts,
    rank_name,
    sync_parts,
    whole_accounts,
)
from penstock.runtime.report.what_if import Table
from penstock.runtime.schedule.idle_causes import CAUSES, Cause

TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **values: Any) -> str:
    """A template of the page with its style and script in it, complete."""
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"seconds": seconds, "percent": percent}
    style, script = (TEMPLATES / name for name in ("style.css", "page.js"))
    page = environment.get_template(template).render(style=style.read_text(), script=script.read_text(), **values)
    # A path in it may be no UTF-8.
    return page.encode(errors="backslashreplace").decode()


def schedule_html(bars: Sequence[Bar], title: str) -> str:
    """One self-contained HTML file that shows a schedule, real or simulated: a lane per replica, each bar's node,
    index, duration and version on hover and on keyboard focus, zoom by buttons, wheel and keys, light and dark.

    `bars` are what the simulator or a run's record has: times are seconds on any one clock, syncs may have lanes of
    their own ("policy>generator/0"), which are drawn in the lane of their replica.
    """
    begin, end = span(bars)

    def ns(time: float) -> int:
        return round((time - begin) * NS)

    rows: dict[str, Row] = {}
    for lane in lanes(bars):
        channel, _, name = lane.name.rpartition(">")
        row = rows.setdefault(name, Row(name, pool_of(name), Strip([])))
        for bar in (bar for track in lane.tracks for bar in track):
            # A sync on a lane of its own ("policy>generator/0") has the name of its channel.
            shown = pool_of(bar.lane) if channel else bar.name
            row.real.work.append(
                Work(name, shown, bar.index, ns(bar.start), ns(bar.end), bar.kind, bar.version, cause=(bar.detail, 0))
            )
    pools = list(dict.fromkeys(row.pool for row in rows.values()))
    ordered = sorted(rows.values(), key=lambda row: pools.index(row.pool))
    for row in ordered:
        row.real.swaps = sorted((w.end, w.index) for w in row.real.work if w.kind == "swap")
    ends = [(update, ns(time)) for update, time in boundaries(bars)]
    data, merged = encode(Chart(ordered, ends, end=ns(end)))
    return render("schedule.html.j2", title=title, data=data, merged=merged)


STATES = {"busy": Cause("busy", "busy"), **CAUSES}


def page(report: Report, template: str = "report.html.j2") -> str:
    """The complete file."""
    facts = report.facts
    nodes = node_times(report)
    chart = make_chart(report)
    data, merged = encode(chart) if chart.rows else ("", 0)
    charts = chart_groups(report)
    training, whole = rank_accounts(facts.training), whole_accounts(facts)
    table = _what_if(report.table) if report.table and report.table.cases else None
    contents = [("graph", "Graph"), *([("schedule", "Schedule"), ("idle", "Busy and idle")] if data else [])]
    contents += [("what-if", "What if")] if table else []
    return render(
        template,
        program=facts.config.graph.name,
        command=f"penstock run {' '.join(facts.asked.get('command', ()))}",
        verdict=report.verdict,
        facts=_head(report),
        notes=facts.notes,
        warnings=[str(text) for text in (facts.summary or {}).get("warnings") or ()],
        error=(facts.summary or {}).get("error", ""),
        failures=facts.failures,
        contents=contents + [(group.anchor, group.title) for group in charts],
        graph=_graph(report, nodes),
        bound=report.bound,
        prediction=report.prediction,
        nodes=nodes,
        data=data,
        merged=merged,
        predicted=any(row.predicted for row in chart.rows),
        updates=_done(report),
        predicted_updates=sum(p.updates for p in report.predictions if p),
        syncs=sync_parts(facts.training),
        key=[(state, known.title) for state, known in STATES.items() if any(state in a for a in whole.values())],
        idle=_idle("While training", training, whole.keys()),
        occupancy=occupancy(report),
        whole=_idle("The whole run", whole, whole.keys()),
        what_if=table,
        groups=charts,
        footer=f"Written by penstock {__version__} from {facts.folder}. One file: it loads nothing and sends nothing.",
    )


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    size = abs(value)
    number, unit = (value, "s") if size >= 1 else (value * 1e3, "ms") if size >= 1e-3 else (value * 1e6, "µs")
    return f"{f'{number:#.3g}'.rstrip('.')} {unit}" if 0 < size < 1000 else f"{number:.0f} s"


def _head(report: Report) -> list[dict[str, str]]:
    facts, prediction = report.facts, report.prediction
    summary = facts.summary or {}
    found = [
        ("status", summary.get("status") or "unknown", ""),
        ("updates", f"{_done(report)}", f"of {facts.config.flags.updates}"),
    ]
    if prediction and prediction.measured_s:
        found.append(
            ("time per update", seconds(prediction.measured_s), f"predicted {seconds(prediction.predicted_s)}")
        )
    if report.bound and prediction and prediction.measured_s:
        share = report.bound.seconds / prediction.measured_s
        found.append(("lower bound", seconds(report.bound.seconds), f"{percent(share)} of it"))
    if measured := accuracies(facts):
        first, (version, last) = measured[0][1], measured[-1]
        more = f"from {100 * first:.1f} %" if len(measured) > 1 else "" if version else "before training"
        found.append(("accuracy", f"{100 * last:.1f} %", more))
    if rewards := numbers([row.get("reward_mean") for row in facts.rows]):
        found.append(("reward", f"{rewards[-1]:.3g}", f"from {rewards[0]:.3g}"))
    if found_lags := lags(report):
        mean = sum(lag * count for lag, count in found_lags.items()) / found_lags.total()
        found.append(("mean lag", f"{mean:.2f}", f"at most {report.stage.tables.max_lag if report.stage else 0}"))
    fates = summary.get("fates") or {}
    lost = [f"{fates[fate]} {fate}" for fate in ("dropped", "failed") if fates.get(fate)]
    if summary:
        found.append(("prompt groups", f"{summary.get('groups', 0):,}", ", ".join(lost)))
    found.append(("wall time", seconds(facts.end / NS), f"in {len(facts.lives)} parts" if len(facts.lives) > 1 else ""))
    return [{"name": name, "value": value, "more": more} for name, value, more in found]


def _done(report: Report) -> int:
    return len({update for stage in report.facts.training for update in stage.followed.ends})


def _graph(report: Report, nodes: Iterable[NodeTime]) -> str:
    known = {n.node: n for n in nodes}
    notes = {n.node: f"{seconds(n.median_s)} · {percent(n.share)} of the time" for n in known.values() if n.firings}
    shares = {n.node: n.share for n in known.values()}
    found = report.bound
    fire = [node for node in report.graph.nodes if node.fires and node.name in known]
    labels = {node.pool for node in fire if found and known[node.name].pool == found.pool}
    return svg_in_page(report.graph, Measured(notes, shares, set(found.cycle) if found else set(), labels))


def make_chart(report: Report) -> Chart:
    """All lanes of the run, with what was predicted under what was."""
    facts = report.facts
    lanes = dict.fromkeys(lane for stage in facts.stages for lane in stage.accounts)
    order = {pool: place for place, pool in enumerate(dict.fromkeys(n.pool for n in node_times(report)))}
    rooms = {replica.name: replica.capacity for replica in served(report.graph, facts.config.plan).replicas}
    rows: dict[RankId, Row] = {}
    for lane in sorted(lanes, key=lambda known: order.get(pool_of(known[0]), len(order))):
        room = rooms.get(lane[0], 0)
        rows[lane] = Row(rank_name(lane, lanes), pool_of(lane[0]), Strip([]), room=room)
    for stage in facts.stages:
        _add({lane: row.real for lane, row in rows.items()}, stage.followed)
    predictions = [prediction for prediction in report.predictions if prediction]
    if predictions:
        for row in rows.values():
            row.predicted = Strip([])
        for prediction in predictions:
            _add({lane: row.predicted for lane, row in rows.items() if row.predicted}, prediction.followed)
    stages = [("starting", life.begin, life.begin + life.starting) for life in facts.lives]
    stages += [(stage.name, stage.begin, stage.end) for stage in facts.stages]
    ends = [end for stage in facts.training for end in stage.followed.ends.items()]
    last = [w.end for p in predictions for w in p.followed.work]
    return Chart(list(rows.values()), ends, stages, [life.begin for life in facts.lives[1:]], max([facts.end, *last]))


def _add(strips: Mapping[RankId, Strip], followed: Followed) -> None:
    for work in followed.work:
        if work.rank_id in strips:
            strips[work.rank_id].work.append(work)
    for lane, swaps in followed.swaps.items():
        if lane in strips:
            strips[lane].swaps += swaps


def _idle(caption: str, accounts: Mapping[RankId, Account], known: Collection[RankId]) -> dict[str, Any]:
    """A table of ranks: the states that any of them was in, and each one's nanoseconds by state."""
    states = [(state, STATES[state]) for state in STATES if any(account.get(state) for account in accounts.values())]
    rows = [(rank_name(lane, known), account) for lane, account in accounts.items()]
    return {"caption": caption, "states": states, "rows": rows}


def _what_if(table: Table) -> dict[str, Any]:
    """What the sliders and the table of the template show."""
    lags_ = sorted({case.lag for case in table.cases})
    sizes = sorted({case.replicas for case in table.cases})
    cases = [
        {**asdict(case), "busy": {pool: round(share, 4) for pool, share in (case.busy or {}).items()}}
        for case in table.cases
    ]
    value = {"lag": table.lag, "replicas": table.replicas, "cases": cases}
    return {
        "table": table,
        "lags": lags_,
        "sizes": sizes,
        "lag_at": lags_.index(table.lag) if table.lag in lags_ else 0,
        "size_at": sizes.index(table.replicas) if table.replicas in sizes else 0,
        # No "</script>" may stand in it: it goes into a script element.
        "json": json.dumps(value).replace("<", "\\u003c"),
    }
