"""The real agent, whose ranks are `fake_rank.py`, or of the program that is named. FAKE_LEAVE_S: how long they may take
to leave.
"""

import os
import sys
from pathlib import Path

from penstock.runtime.control import agent
from penstock.runtime.control.process import die_with_parent
from penstock.runtime.control.security import Join

if __name__ == "__main__":
    die_with_parent()
    join_file = Path(sys.argv[1])
    worker = sys.argv[2] if len(sys.argv) > 2 else str(Path(__file__).with_name("fake_rank.py"))
    agent.LEAVE_S = float(os.environ.get("FAKE_LEAVE_S", agent.LEAVE_S))
    fault = agent.Agent(Join.read(join_file), join_file, worker=(worker,)).run()
    sys.exit(f"penstock agent: {fault}" if fault else 0)
