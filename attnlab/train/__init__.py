"""The training loop and its parts: devices, processes, checkpoints, metrics and cost counts, for any task."""
