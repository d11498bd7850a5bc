"""The fault matrix: which faults are injected, and what is promised for each.

`docs/faults.md` lists them. Tests marked `fault` inject them at instants drawn from a seed.
`cluster` runs the same training as processes and in network namespaces, and injects faults there.
`ledger` counts the results and writes them to the page.
"""
