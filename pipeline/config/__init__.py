"""A run's configuration: its keys (`schema`), how it is read (`load`), how it is explained (`help`)."""
