"""The real agent, whose ranks are `fake_rank.py`, or of the program that is named. FAKE_LEAVE_S: how long they may take
to leave.
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
    worker = sys.argv[2] if len(sys.argv) > 2 else str(Path(__file__).with_name("fake_rank.py"))
    early = None
    if sys.argv[1] == EARLY:
        early = agent.Forks.begin((worker,), os.environ[RUN], None)
        print("said by an early agent", file=sys.stderr, flush=True)
    join_file = Path(awaited() if early is not None else sys.argv[1])
    agent.LEAVE_S = float(os.environ.get("FAKE_LEAVE_S", agent.LEAVE_S))
    fault = agent.Agent(Join.read(join_file), join_file, worker=(worker,), early=early).run()
    sys.exit(f"penstock agent: {fault}" if fault else 0)
