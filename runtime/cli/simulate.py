"""`penstock simulate`: a program's schedule on a virtual clock, with given durations, a plan's or a finished run's."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from penstock.runtime.cli.flags import DrawingFlags, SimulateFlags
from penstock.runtime.cli.simulate_recorded import Recorded, from_run, read_recorded_flags, recorded
from penstock.runtime.cli.simulating import Given, PlannedSchedule, drawing, facts, given, pictured, planned
from penstock.runtime.cli.tracing import CommandError, require_program, trace_program
from penstock.runtime.record.errors import visible
from penstock.runtime.record.folder import write_atomic
from penstock.runtime.record.trace_formats import chrome_trace, gantt_svg
from penstock.runtime.schedule.simulator import Simulation


def main(argv: Sequence[str]) -> int:
    flags: DrawingFlags
    shown: Given | PlannedSchedule | Recorded
    try:
        if from_run(argv):
            flags = read_recorded_flags(argv)
            shown = recorded(flags)
        else:
            shown, flags = _of_program(argv)
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise CommandError(str(error), 2) from None
    _write(shown.result, shown.title, flags)
    width = flags.width or shutil.get_terminal_size((100, 24)).columns
    if flags.json:
        print(json.dumps({**shown.facts(), **facts(shown.result)}))
    else:
        lines = [visible(line) for line in shown.lines(width)]
        print("\n".join([*lines, "", *drawing(shown.result, width)]))
    return 0


def _of_program(argv: Sequence[str]) -> tuple[Given | PlannedSchedule, SimulateFlags]:
    """The schedule of a PROGRAM, and the flags. Raises CommandError, and what planning and simulating raise."""
    require_program("simulate", argv)
    traced = trace_program("simulate", argv)
    flags: SimulateFlags = traced.flags
    graph = traced.sound()
    if flags.updates < 1:
        raise CommandError(f"--updates: given {flags.updates}, needed at least 1", 2)
    return planned(graph, flags) or given(graph, flags), flags


def _write(result: Simulation, title: str, flags: DrawingFlags) -> None:
    """The files that were asked for."""
    if flags.svg:
        write_atomic(Path(flags.svg), gantt_svg(pictured(result), title).encode(), "--svg FILE")
    if flags.html:
        from penstock.runtime.report.page import schedule_html  # imports templates, which others do without

        write_atomic(Path(flags.html), schedule_html(pictured(result), title).encode(), "--html FILE")
    if flags.trace:
        write_atomic(Path(flags.trace), json.dumps(chrome_trace(result.bars, title)).encode(), "--trace FILE")
