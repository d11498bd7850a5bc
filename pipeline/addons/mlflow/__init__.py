"""The link to MLflow. Only this package imports mlflow, inside functions: it takes seconds."""

READY = "ready"
"""The sender's answer to rank 0 once it has reached the server."""
TRAINING_DONE = b"over\n"
"""Rank 0's last word to the sender.

Not just the end of the pipe: a loader worker, forked from rank 0, may still hold the pipe open.
"""
