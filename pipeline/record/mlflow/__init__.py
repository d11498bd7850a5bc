"""Everything that talks to MLflow. Only this package imports mlflow, and only inside functions (an import takes seconds)."""
