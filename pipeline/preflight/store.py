"""Checks that an object store honours reads of a part of an object, and conditional writes.

A training reads each image as a part of an object, and holds `checkpoint.mirror` by conditional
writes. Some servers that speak S3 ignore one or both: they answer with the whole object, or
overwrite what they must not. They are refused: the training would be slow, or two trainings would
damage one mirror. Each check returns a line for the user. It raises RequestError, or OutageError if
the store does not answer.
"""

import contextlib
import statistics
import time
import uuid
import zlib
from typing import Any

from pipeline.data.pack import SUMMARY
from pipeline.data.store import ConflictError, Store
from pipeline.errors import RequestError, RunError

_READS = 5
_PART_BYTES = 4096
_OTHER_ETAG = '"00000000000000000000000000000000"'
_REMEDY = "use a store that honours If-None-Match and If-Match, or leave checkpoint.mirror out"


def check_reads(store: Store) -> str:
    """Check that a part of an object can be read, as training reads images of the pack `store`."""
    from pipeline.data.ranges import Range, RangeReader, RangesIgnoredError

    data = store.read(SUMMARY)
    size = min(_PART_BYTES, len(data) // 2)
    reader, seconds = RangeReader(store.place), []
    try:
        for i in range(_READS):
            offset = i * (len(data) - size) // _READS
            part = Range(SUMMARY, offset, size, zlib.crc32(data[offset : offset + size]))
            start = time.perf_counter()
            reader.take(part)
            seconds.append(time.perf_counter() - start)
    except RangesIgnoredError:
        raise RequestError(
            f"{store} answers a read of {size:,} bytes of {SUMMARY} with the whole object: use a store that honours"
            " the header Range, or copy the pack to this machine and give its folder"
        ) from None
    finally:
        reader.close()
    return f"{store} returns a part of an object in {1000 * statistics.median(seconds):.1f} ms"


def check_mirror(store: Store) -> str:
    """Check that objects of `store` can be written, read, deleted, and written on a condition.

    Writes one small object with a name of its own and deletes it, also after an error.
    """
    name = f".probe-{uuid.uuid4().hex}"
    try:
        etag = store.write(name, b"first")
        if _is_written(store, name, if_absent=True):
            raise RequestError(f"{store} ignores If-None-Match and overwrites an object that exists: {_REMEDY}")
        if _is_written(store, name, if_match=_OTHER_ETAG):
            raise RequestError(f"{store} ignores If-Match and overwrites an object that has changed: {_REMEDY}")
        with contextlib.suppress(ConflictError):  # of a request that was done, but whose answer got lost
            store.write(name, b"second", if_match=etag)
        start = time.perf_counter()
        data = store.read(name)
        seconds = time.perf_counter() - start
        if data != b"second":
            raise RequestError(f"{store} refuses a write with If-Match and the object's own etag: {_REMEDY}")
        store.delete(name)
    except BaseException:
        with contextlib.suppress(RunError):
            store.delete(name)
        raise
    return f"{store} can be written, honours conditional writes, and returns an object in {1000 * seconds:.1f} ms"


def _is_written(store: Store, name: str, **condition: Any) -> bool:
    """Return True if the store writes although the condition is not met."""
    try:
        store.write(name, b"other", **condition)
    except ConflictError:
        return False
    return True
