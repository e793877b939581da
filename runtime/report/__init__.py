"""The report of a run: its folder read once, compared with the simulator, and drawn as one HTML page."""
