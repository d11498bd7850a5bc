"""The commands of a run and its data: launch, predict, export, verify, report, pack and data."""
