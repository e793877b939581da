"""`python -m penstock.runtime.cli.inprocess_child RUN_FOLDER`: a whole run in this process, which has the terminal.

Plain lines on standard output; a debugger stops where the user wants it to. Exit status as of `penstock run`.
"""

import signal
import sys

from penstock.runtime.cli.display import PlainDisplay, Progress
from penstock.runtime.control.inprocess import run_in_process
from penstock.runtime.control.launcher import DONE, FAILED, INTERRUPTED
from penstock.runtime.control.process import told
from penstock.runtime.control.run_config import RunConfig
from penstock.runtime.control.signals import interrupt, on_stop, while_heard
from penstock.runtime.record.errors import RecordError, visible
from penstock.runtime.record.folder import RunFolder


def main() -> None:
    folder = RunFolder.open(sys.argv[1])
    config = RunConfig.load(folder)
    progress = Progress(config.graph.name, config.flags.updates)
    display = PlainDisplay(progress, lambda text: print(visible(text), flush=True))
    tell = while_heard(display.tell, lambda: signal.raise_signal(signal.SIGTERM))
    try:
        with on_stop(interrupt):
            status = run_in_process(folder, tell)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except RecordError as fault:
        print(visible(f"penstock: {fault}"), file=sys.stderr)
        sys.exit(FAILED)
    except Exception as raised:
        print(visible(f"penstock: {told(raised)}"), end="", file=sys.stderr)
        sys.exit(FAILED)
    for error in progress.errors:
        print(visible(f"penstock: {error}"), file=sys.stderr)
    sys.exit({"done": DONE, "stopped": INTERRUPTED}.get(status, FAILED))


if __name__ == "__main__":
    main()
