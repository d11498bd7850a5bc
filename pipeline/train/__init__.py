"""The training itself: what survives (state), one update (step), the exact validation (evaluate), and the loop."""
