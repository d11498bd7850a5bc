"""Training: the state, one update (step), the exact validation, the loop, one process's session."""
