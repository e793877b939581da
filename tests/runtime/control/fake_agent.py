"""The real agent with ranks of `fake_rank.py`, or of the program that its second argument names. FAKE_LEAVE_S: seconds
that the ranks have to leave. FAKE_LOG_BYTES: the maximum size of their logs.
"""

import os
import sys
from pathlib import Path

from penstock.runtime.control import agent
from penstock.runtime.control.early import EARLY, awaited
from penstock.runtime.control.process import RUN, die_with_parent
from penstock.runtime.control.security import Join

if __name__ == "__main__":
    die_with_parent()
    words = sys.argv[1:]
    worker, early = str(Path(__file__).with_name("fake_rank.py")), None
    if words[0] == EARLY:
        early = agent.ForkServer.begin((worker, *words), os.environ[RUN], None, asks=int(words[1]))
        print("said by an early agent", file=sys.stderr, flush=True)
    elif len(words) > 1:
        worker = words[1]
    join_file = Path(awaited() if early is not None else words[0])
    agent.LOG_BYTES = int(os.environ.get("FAKE_LOG_BYTES", agent.LOG_BYTES))
    agent.LEAVE_S = float(os.environ.get("FAKE_LEAVE_S", agent.LEAVE_S))
    fault = agent.Agent(Join.read(join_file), join_file, worker=(worker,), early=early).run()
    sys.exit(f"penstock agent: {fault}" if fault else 0)
