"""The control plane: processes, sockets, messages, deadlines."""
