"""Models over several ranks: what each rank holds, which micro-batches it works on, and how gradients are summed."""
