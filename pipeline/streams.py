"""Lines on standard error, for processes without a terminal of their own."""

import os
import sys

QUIET = "PIPELINE_QUIET"
"""The environment variable that --quiet sets, so that it reaches every process of a run."""


def log(line: str) -> None:
    """Print a line to standard error, unless --quiet is given."""
    if not os.environ.get(QUIET):
        print(line, file=sys.stderr, flush=True)
