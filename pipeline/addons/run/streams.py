"""Standard output and standard error, of which no failure ends or changes what a process does.

Their reader may leave (`| head`, a pager), a terminal may die, a log's disk may be full. What then
cannot be written is lost, and the process continues. Only standard output carries a result: the
command line asks at the end whether it could be written.
"""

import errno
import io
import os
import select
import sys
from typing import Any

_READER_LEFT = (errno.EPIPE, errno.EIO)
_PATIENCE_MS = 5000


class _Stream(io.FileIO):
    """A file whose writes do not raise."""

    error: OSError | None = None  # the first failure, except that the reader left: it has read what it needed
    is_lossy = False  # text that no reader takes for seconds is lost, instead of holding up this process
    _is_stuck = False

    def write(self, data: Any, /) -> int:
        """Write some bytes, and return how many were written or are lost."""
        if self.is_lossy:
            poll = select.poll()
            poll.register(self, select.POLLOUT)
            self._is_stuck = not poll.poll(0 if self._is_stuck else _PATIENCE_MS)
            if self._is_stuck:
                return len(data)
        try:
            if (written := super().write(data)) is not None:
                return written
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        except OSError as error:
            if error.errno not in _READER_LEFT:
                self.error = self.error or error
            return len(data)


def tolerate_failures() -> None:
    """Replace the streams of this process, unless a program around it has replaced them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # closed (`2>&-`): the next file that is opened would get its number
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(number, True)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif stream is getattr(sys, f"__{name}__"):
            buffer = io.BufferedWriter(_Stream(stream.fileno(), "w", closefd=False))
            is_unbuffered = stream.line_buffering or stream.write_through
            # the encoding may be ASCII, a file's name any bytes
            text = io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", line_buffering=is_unbuffered)
            setattr(sys, name, text)


def lose_unread_log() -> None:
    """Lose what no reader of standard error takes: a pager or Ctrl-S must not hold training up."""
    if raw := _raw(sys.stderr):
        raw.is_lossy = True


def output_error() -> OSError | None:
    """Return why standard output could not be written completely, or None."""
    sys.stdout.flush()
    raw = _raw(sys.stdout)
    return raw.error if raw else None


def _raw(stream: object) -> _Stream | None:
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return raw if isinstance(raw, _Stream) else None
