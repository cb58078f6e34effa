"""The training loop and what it needs; it knows no task by name."""
