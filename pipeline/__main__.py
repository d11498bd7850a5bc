"""Entry point of `python -m pipeline`."""

from pipeline.cli.main import command

if __name__ == "__main__":
    command()
