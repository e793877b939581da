"""Plans for GPUs: the cost model, the search for the best plan, and the simulation of a plan."""
