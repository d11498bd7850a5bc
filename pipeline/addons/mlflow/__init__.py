"""The link to MLflow. Only this package imports mlflow, inside functions: it takes seconds."""
