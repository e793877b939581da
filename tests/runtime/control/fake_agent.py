"""The real agent, whose ranks are `fake_rank.py`, or of the program that is named."""

import sys
from pathlib import Path

from penstock.runtime.control.agent import Agent
from penstock.runtime.control.keys import Join
from penstock.runtime.control.process import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    join_file = Path(sys.argv[1])
    worker = sys.argv[2] if len(sys.argv) > 2 else str(Path(__file__).with_name("fake_rank.py"))
    fault = Agent(Join.read(join_file), join_file, worker=(worker,)).run()
    sys.exit(f"penstock agent: {fault}" if fault else 0)
