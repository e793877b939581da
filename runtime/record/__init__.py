"""The run folder, and what is drawn of it."""
