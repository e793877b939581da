"""The machine: scheduler, control plane, tensor plane, run folder, command line."""
