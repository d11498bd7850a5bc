"""A run's configuration: its keys (`schema`), reading it (`load`) and explaining it (`help`)."""
