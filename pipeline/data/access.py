"""Access to files: tells an outage of a storage from other errors."""

import errno
from pathlib import Path
from typing import NamedTuple

from pipeline.errors import TemporaryError

_OUTAGE_ERRORS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH,
                  errno.ENETDOWN, errno.ENETUNREACH, errno.ENOTCONN, errno.ESHUTDOWN, errno.ECONNRESET,
                  errno.ECONNREFUSED, errno.ECONNABORTED, errno.EREMOTEIO, errno.ENODEV)  # fmt: skip
"""Errors of a storage that is out of reach, in a read or a write."""


class BadImage(NamedTuple):
    """An image that cannot be decoded, for people."""

    id: int
    name: str
    reason: str


def is_bucket(place: object) -> bool:
    """Return True for s3://…, False for a path of this machine."""
    return str(place).startswith("s3://")


def storage_outage(what: str | Path, error: OSError) -> TemporaryError | None:
    """Return the error of `what`, which is no image, if its storage is out of reach, else None."""
    if error.errno not in _OUTAGE_ERRORS:
        return None
    return TemporaryError(
        f"{what} is out of reach ({error.strerror})", "give the same command again once its storage is back"
    )
