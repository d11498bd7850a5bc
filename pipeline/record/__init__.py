"""What a run leaves behind: checkpoints, the journal and what MLflow gets from it, the trace, the line on a terminal."""
