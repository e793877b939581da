"""`python -m penstock.agent --ticket FILE`: `penstock agent`, for what starts modules, such as torchrun."""

import sys

from penstock.runtime.cli.main import main
from penstock.runtime.control.process import die_with_parent

if __name__ == "__main__":
    # What starts it may be killed, as an actor of Ray is.
    die_with_parent()
    sys.argv.insert(1, "agent")
    main()
