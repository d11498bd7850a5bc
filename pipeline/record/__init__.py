"""What a run records: checkpoints, journal and trace, receipt, figures, terminal output, and its copy in MLflow."""
