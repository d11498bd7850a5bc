"""The model, its loss, its EMA and its stages. Nothing here depends on the number of processes."""
