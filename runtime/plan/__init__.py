"""What a plan of GPUs costs, and the best one: the cost model, the search, and the simulation of a plan."""
