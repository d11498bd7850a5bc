"""A run from its command to its processes: checks of the request, restarts, launch, evaluation."""
