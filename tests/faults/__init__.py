"""The fault matrix, which docs/faults.md lists: tests marked `fault` inject its faults."""
