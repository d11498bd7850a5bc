"""The fault matrix: which faults are injected, and what is promised for each.

`docs/faults.md` lists them. Tests marked `fault` inject them at instants drawn from a seed.
`nodes` runs the nodes of a job in network namespaces.
`ledger` counts the results and writes them to the page.
"""
