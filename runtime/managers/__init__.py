"""Cluster managers that start a run's agents: each file knows one of them."""
