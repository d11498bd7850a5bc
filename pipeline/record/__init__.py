"""The records of a run: checkpoints, journal, trace, receipt, figures, terminal output, MLflow."""
