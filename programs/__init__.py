"""The algorithms: one file each, on one page."""
