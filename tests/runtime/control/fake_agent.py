"""The real agent, whose ranks are `fake_rank.py`."""

import sys
from pathlib import Path

from penstock.runtime.control.agent import Agent
from penstock.runtime.control.keys import Join
from penstock.runtime.control.process import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    join_file = Path(sys.argv[1])
    fault = Agent(Join.read(join_file), join_file, worker=(str(Path(__file__).with_name("fake_rank.py")),)).run()
    sys.exit(f"penstock agent: {fault}" if fault else 0)
