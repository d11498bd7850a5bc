"""The folder of a run: its lock, checkpoints, journal and saved failure; and the terminal."""
