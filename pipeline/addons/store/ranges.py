"""Reads of parts of objects in a bucket, many at once, in threads.

Latency is the cost of a bucket, not bandwidth. So a process states the parts that it will take, in
order, and up to `MAX_READS` of them are kept in flight or ready. Little's law: at 300 ms, 256 reads
in flight return 800 images per second, about as many as one core decodes; with images of 110 kB
they take 28 MB. Large images are limited by `MAX_BYTES` instead.

Each thread has a connection of its own. It reads with Python's http.client from URLs that boto3 has
signed: boto3 itself would take as much CPU time for a read as the decoding of the image.

Every failed attempt is counted by kind (`READ_FAILURES`) and made again after a pause that doubles,
with jitter, while all other reads go on. No attempt lasts for good: one that gets no byte for some
seconds, or fewer than `_SLOWEST` allows, is abandoned with its connection.
"""

import os
import random
import re
import ssl
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from botocore.httpsession import get_cert_path

from pipeline.addons.store.bucket import Store
from pipeline.data.interface import OutageError, UnreadableError
from pipeline.errors import RunError, one_line

READ_FAILURES = ("denied", "missing", "slow_down", "server_error", "truncated", "wrong_bytes", "stalled",
                 "unreachable", "ignored")  # fmt: skip
"""The kinds of failed attempts to read an image, each of which is made again."""
MAX_READS = 256
"""Reads in flight, waiting for another attempt, or ready and not taken."""
MAX_BYTES = 64 << 20
"""Bytes of these reads, unless a single one has more."""
_CONNECT_S = 5
_FIRST_STALL_S, _STALL_S = 3, 10
"""Time without a byte after which an attempt is abandoned: it doubles with each attempt."""
_SLOW_S, _SLOWEST = 30, 20_000
"""Time, and bytes a second of all reads beyond it, after which an attempt is abandoned."""
_PATIENCE_S, _PATIENCE = 3, 3
"""Seconds since the first failure, and attempts, after which a read is an outage."""
_MAX_WRONG = 4
"""Attempts after which wrong bytes are the object's, not the network's."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 4.0
_SIGNED_S, _SIGN_AGAIN_S = 3600, 300
"""boto3 renews temporary credentials 10 minutes before they expire, so a younger URL is valid."""
_REFUSED_S = 1.0  # after which the source of the credentials is asked again
_ERROR_BYTES = 4096  # of the text of an error


_FAILURES = {kind: os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for kind in READ_FAILURES}
"""Counters of failed attempts in the kernel, one for this process and the workers it forks."""


def pop_failures() -> list[int]:
    """Return the number of failed attempts of each of READ_FAILURES since the last call."""
    counts = []
    for counter in _FAILURES.values():
        try:
            counts.append(os.eventfd_read(counter))
        except BlockingIOError:  # it is 0
            counts.append(0)
    return counts


def failure_metrics(counts: list[int]) -> dict[str, float]:
    """Return the number of failed attempts to read an image, and of each kind that occurred."""
    kinds = zip(READ_FAILURES, counts, strict=True)
    return {"data/failed_reads": float(sum(counts))} | {
        f"data/failed_reads_{kind}": float(count) for kind, count in kinds if count
    }


class RangesIgnoredError(OutageError):
    """A store that answers a read of a part with something else, such as the whole object."""

    status = 0
    """HTTP status of its answer."""


class Range(NamedTuple):
    """A part of an object, with the CRC-32 of its bytes."""

    name: str
    offset: int
    size: int
    crc: int


class _FailedRead(Exception):
    """A failed attempt. Its reason holds no URL, because that is signed."""

    def __init__(self, kind: str, reason: str, status: int = 0) -> None:
        self.kind, self.reason, self.status = kind, reason, status


class RangeReader:
    """Reads parts of the objects of a store, by number. Belongs to one thread of one process."""

    def __init__(self, place: str, locate: Callable[[int], Range]) -> None:
        """locate: returns where the part of a number is."""
        self._place, self._locate = place, locate
        self._reads: dict[int, Future[bytes]] = {}
        self._wanted: set[int] = set()
        """Their numbers, for the threads: a read that nobody wants any more is not repeated."""
        self._bytes = 0  # of self._reads
        self._uses: Counter[int] = Counter()
        """Number of times that each expected part will be taken (repeated augmentation)."""
        self._expected: deque[int] = deque()
        """Expected parts whose read has not begun, in order."""
        self._threads = ThreadPoolExecutor(MAX_READS, "read")
        self._local = threading.local()  # the connection of each thread
        self._tls = ssl.create_default_context(cafile=os.environ.get("AWS_CA_BUNDLE") or get_cert_path(True))
        self._lock = threading.Lock()
        self._store: Store | None = None
        self._urls: dict[str, tuple[str | RunError, float]] = {}
        """Name of an object -> its URL, or why there is none, and until when that counts."""

    def expect(self, numbers: list[int]) -> None:
        """Begin to read what will be taken next, in this order. Other reads are dropped."""
        self._uses = Counter(numbers)
        for number in self._reads.keys() - self._uses.keys():
            self._drop(number)
        self._expected = deque(number for number in self._uses if number not in self._reads)
        self._begin_expected()

    def take(self, number: int) -> bytes:
        """Return the bytes of a part, expected or not.

        Raises UnreadableError if the object has other bytes there, OutageError if the store does
        not return it for some seconds; the next call then waits again.
        """
        read = self._reads.get(number)
        if read and read.done() and isinstance(read.exception(), OutageError):
            self._drop(number)  # it failed a while ago: the store may be back
        if number not in self._reads:
            self._begin(number, self._locate(number))
        try:
            data = self._reads[number].result()
        except (OutageError, UnreadableError):
            self._drop(number)
            raise
        self._uses[number] -= 1
        if self._uses[number] <= 0:
            self._drop(number)
            self._begin_expected()
        return data

    def close(self) -> None:
        """End all reads and close all connections. A fork after it meets no thread."""
        self.expect([])
        self._threads.shutdown(cancel_futures=True)

    def _begin_expected(self) -> None:
        """Begin expected reads as far as the limits allow."""
        while self._expected and len(self._reads) < MAX_READS:
            part = self._locate(self._expected[0])
            if self._reads and self._bytes + part.size > MAX_BYTES:
                return
            number = self._expected.popleft()
            if number not in self._reads:  # it may have been taken before its turn
                self._begin(number, part)

    def _begin(self, number: int, part: Range) -> None:
        self._bytes += part.size
        self._wanted.add(number)
        self._reads[number] = self._threads.submit(self._read, number, part)

    def _drop(self, number: int) -> None:
        self._wanted.discard(number)
        self._reads.pop(number).cancel()
        self._bytes -= self._locate(number).size

    # in a thread

    def _read(self, number: int, part: Range) -> bytes:
        """Return the bytes of a part, after as many attempts as it takes."""
        kinds: list[str] = []
        give_up, pause = 0.0, _FIRST_PAUSE_S
        while True:
            try:
                return self._attempt(part, min(_STALL_S, _FIRST_STALL_S << min(4, len(kinds))))
            except _FailedRead as failure:
                kinds.append(failure.kind)
                give_up = give_up or time.monotonic() + _PATIENCE_S
                os.eventfd_write(_FAILURES[failure.kind], 1)
                if failure.status == 403:
                    with self._lock:
                        self._urls.pop(part.name, None)  # sign another one
                if kinds.count("wrong_bytes") >= _MAX_WRONG:
                    changed = f"{part.name} has changed at byte {part.offset:,} since it was packed"
                    raise UnreadableError(changed) from None
                is_outage = len(kinds) >= _PATIENCE and time.monotonic() > give_up
                if is_outage or number not in self._wanted or not threading.main_thread().is_alive():
                    raise self._outage(part, failure) from None
            time.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _outage(self, part: Range, failure: _FailedRead) -> OutageError:
        problem = f"the store is out of reach ({self._place}/{part.name}: {failure.reason})"
        remedy = "give the same command again once it is back"
        if failure.status == 206 or not 200 <= failure.status < 400:
            return OutageError(problem, remedy)
        error = RangesIgnoredError(problem, remedy)
        error.status = failure.status
        return error

    def _attempt(self, part: Range, stall_s: float) -> bytes:
        """Return the bytes of a part. Raises _FailedRead."""
        url = self._url(part.name)
        end = time.monotonic() + _SLOW_S + part.size * len(self._reads) / _SLOWEST  # they share the link
        is_complete = False
        try:
            answer = self._ask(url, part, stall_s)
            data, is_complete = _body(answer, max(part.size, _ERROR_BYTES), end)
        except TimeoutError:
            raise _FailedRead("stalled", "the connection has stalled") from None
        except (HTTPException, OSError):
            raise _FailedRead("truncated", "the connection was closed") from None
        finally:
            if not is_complete:
                self._disconnect()
        _check(answer.status, data, part)
        return data

    def _ask(self, url: str, part: Range, stall_s: float) -> HTTPResponse:
        """Return the answer to a request for a part, without its body."""
        connection: HTTPConnection | None = getattr(self._local, "connection", None)
        is_new = connection is None or connection.sock is None
        if connection is None or is_new:
            connection = self._connect(url)
        connection.sock.settimeout(stall_s)
        try:
            end = part.offset + part.size - 1
            connection.request(
                "GET", self._local.prefix + _path(url), headers={"Range": f"bytes={part.offset}-{end}"}
            )
            return connection.getresponse()
        except (BrokenPipeError, ConnectionResetError):
            if is_new:
                raise
            self._disconnect()  # the store has closed a connection that was not used for a while
            return self._ask(url, part, stall_s)

    def _connect(self, url: str) -> HTTPConnection:
        """Connect this thread to the store, through the proxy that the environment names."""
        store = urlsplit(url)
        proxy = "" if proxy_bypass(store.netloc) else getproxies().get(store.scheme, "")
        self._local.prefix = f"http://{store.netloc}" if proxy and store.scheme == "http" else ""
        address = urlsplit(proxy) if proxy else store
        connect: Any = (
            partial(HTTPSConnection, context=self._tls) if store.scheme == "https" else HTTPConnection
        )
        connection: HTTPConnection = connect(address.hostname, address.port, timeout=_CONNECT_S)
        if proxy and store.scheme == "https":
            connection.set_tunnel(store.hostname or "", store.port)
        try:
            connection.connect()
        except (HTTPException, OSError) as error:
            raise _FailedRead("unreachable", one_line(error)) from None
        self._local.connection = connection
        return connection

    def _disconnect(self) -> None:
        if hasattr(self._local, "connection"):
            self._local.connection.close()

    def _url(self, name: str) -> str:
        """Return the signed URL of an object."""
        with self._lock:
            found, until = self._urls.get(name, ("", 0.0))
            if time.monotonic() > until:
                try:
                    self._store = self._store or Store(self._place)
                    found = self._store.presign(name, _SIGNED_S)
                    until = time.monotonic() + _SIGN_AGAIN_S
                except RunError as error:  # the source of the credentials may be away for a moment
                    self._store, found = None, error
                    until = time.monotonic() + _REFUSED_S
                self._urls[name] = found, until
        if isinstance(found, RunError):
            raise _FailedRead("denied", str(found))
        return found


def _path(url: str) -> str:
    return url[url.index("/", len("https://")) :]


def _body(answer: HTTPResponse, limit: int, end: float) -> tuple[bytes, bool]:
    """Return a body, or a little more than `limit` of it, and True if the connection is free then.

    Raises TimeoutError at `end`: a timeout of the socket is for each piece.
    """
    if answer.status != 206 and answer.status < 400:
        return b"", False  # it may be the whole object
    data, length = bytearray(), answer.length
    size = limit + 1 if length is None else min(length, limit + 1)
    while len(data) < size and (piece := answer.read1(size - len(data))):
        data += piece
        if time.monotonic() > end:
            raise TimeoutError
    answer.close()
    return bytes(data), len(data) == length


def _check(status: int, data: bytes, part: Range) -> None:
    """Raise _FailedRead unless an answer has the bytes of a part."""
    if status == 206:
        if len(data) > part.size:
            raise _FailedRead("truncated", "more bytes than asked", status)
        if len(data) < part.size:
            raise _FailedRead("truncated", f"{len(data):,} of {part.size:,} bytes", status)
        if zlib.crc32(data) != part.crc:
            raise _FailedRead("wrong_bytes", "wrong bytes", status)
        return
    if status == 416:
        raise _FailedRead("wrong_bytes", "the object is shorter", status)
    if 200 <= status < 300:
        raise _FailedRead("ignored", f"status {status} and not 206: it ignores the range of a read", status)
    code = re.search(rb"<Code>(\w{1,60})</Code>", data)
    kinds = {403: "denied", 404: "missing", 429: "slow_down", 503: "slow_down"}
    reason = f"{status} {code[1].decode()}" if code else f"status {status}"
    raise _FailedRead(kinds.get(status, "server_error"), reason, status)
