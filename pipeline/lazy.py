"""Add-ons are imported when they are asked for: `addon("run.metrics").Metrics(...)`.

The core imports nothing of `pipeline/addons/`, and names what it asks for: what trains can be read
without them. Some are in every run (its metrics, its journal), the others a request asks for.
"""

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def addon(name: str) -> Any:
    """Return a module of `pipeline/addons/`."""
    return importlib.import_module(f"pipeline.addons.{name}")


@contextmanager
def freeze_imports() -> Iterator[None]:
    """Freeze the objects that the block imports, so that the garbage collector never scans them.

    Scanning takes a tenth of a start's time. During training a collection on one rank delays all
    ranks, and in a forked worker it copies every page that it touches.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
