"""What is injected, and what must come out: the fault matrix.

`rows` says what is promised; tests marked `fault` inject it, each instant drawn from a seed;
`cluster` starts and hurts the same training as processes, in network namespaces and in containers;
`ledger` counts and writes `docs/faults.md`.
"""
