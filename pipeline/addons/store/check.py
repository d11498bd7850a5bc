"""Checks of the object stores that hold the data and the mirror of a run.

A training holds `checkpoint.mirror` by conditional writes. Some servers that speak S3 ignore the
condition and overwrite the object: they are refused, because two trainings would damage one mirror.
A store that ignores the range of a read is refused when the data is opened (`store.remote`). Each
check returns a line for the user. It raises RequestError, or OutageError if the store does not
answer.
"""

import contextlib
import statistics
import time
import uuid
from typing import Any

import numpy as np

from pipeline.addons.store.bucket import ConflictError, Store
from pipeline.data.interface import Images, UnreadableError
from pipeline.errors import RequestError, RunError

_READS = 5
_OTHER_ETAG = '"00000000000000000000000000000000"'
_REMEDY = "use a store that honours If-None-Match and If-Match, or leave checkpoint.mirror out"


def check_reads(images: Images) -> str:
    """Check that the store returns images, read as training reads them, and measure the time.

    images: of a pack in a bucket. That the store honours ranges was checked when it was opened.
    """
    from pipeline.addons.store.remote import StoreImages

    assert isinstance(images, StoreImages)
    present = np.flatnonzero(images.split.sizes > 0)
    seconds = []
    for i in present[:: -(-len(present) // _READS)].tolist():
        start = time.perf_counter()
        with contextlib.suppress(UnreadableError):  # the check of the images names it
            images.read(i)
        seconds.append(time.perf_counter() - start)
    images.close()
    return f"{images.root} returns one image in {1000 * statistics.median(seconds):.1f} ms"


def check_mirror(store: Store) -> str:
    """Check that objects of `store` can be written, read, deleted, and written on a condition.

    Writes one small object with a name of its own and deletes it, also after an error.
    """
    name = f".probe-{uuid.uuid4().hex}"
    try:
        etag = store.write(name, b"first")
        if _is_written(store, name, if_absent=True):
            raise RequestError(f"{store} ignores If-None-Match and overwrites an object that exists", _REMEDY)
        if _is_written(store, name, if_match=_OTHER_ETAG):
            raise RequestError(f"{store} ignores If-Match and overwrites an object that has changed", _REMEDY)
        with contextlib.suppress(ConflictError):  # of a request that was done, but whose answer got lost
            store.write(name, b"second", if_match=etag)
        start = time.perf_counter()
        data = store.read(name)
        took_ms = 1000 * (time.perf_counter() - start)
        if data != b"second":
            raise RequestError(f"{store} refuses a write with If-Match and the object's own etag", _REMEDY)
        store.delete(name)
    except BaseException:
        with contextlib.suppress(RunError):
            store.delete(name)
        raise
    return f"{store} can be written, honours conditional writes, and returns an object in {took_ms:.1f} ms"


def _is_written(store: Store, name: str, **condition: Any) -> bool:
    """Return True if the store writes although the condition is not met."""
    try:
        store.write(name, b"other", **condition)
    except ConflictError:
        return False
    return True
