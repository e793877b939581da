"""The report of a run: what its folder says, read once, held against the simulator, and drawn as one HTML page."""
