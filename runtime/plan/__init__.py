"""Where everything runs: the machines, and the default placement."""
