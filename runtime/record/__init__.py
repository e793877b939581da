"""The run folder: its files, their readers and writers, and drawings of a run's schedule."""
