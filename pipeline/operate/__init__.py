"""A run from its command to the settled training: checks, early stops, what to resume from."""
