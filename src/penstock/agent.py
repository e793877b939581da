"""`python -m penstock.agent --ticket FILE`: `penstock agent`, for what starts modules, such as torchrun."""

import sys

from penstock.runtime.cli.main import main

if __name__ == "__main__":
    main(["agent", *sys.argv[1:]])
