"""Reads of parts of objects in a bucket, many at once, in threads.

Latency is the cost of a bucket, not bandwidth. So a process states the parts that it will take, in
order, and up to `MAX_READS` of them are kept in flight or ready. Little's law: at 300 ms, 256 reads
in flight return 800 images per second, about as many as one core decodes; with images of 110 kB
they take 28 MB. Large images are limited by `MAX_BYTES` instead.

Each thread has a connection of its own. It reads with Python's http.client from URLs that boto3 has
signed: boto3 itself would take as much CPU time for a read as the decoding of the image. A failed
attempt is counted, and made again after a pause, while all other reads go on.
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
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from botocore.httpsession import get_cert_path
from urllib3.util import wait_for_read

from pipeline.addons.store.bucket import Store
from pipeline.data.interface import OutageError, UnreadableError
from pipeline.errors import RunError, one_line

MAX_READS = 256  # reads in flight, waiting for another attempt, or ready and not taken
MAX_BYTES = 64 << 20  # bytes of these reads, unless a single one has more
_ATTEMPTS = 4  # failed attempts after which a read is an outage. The loader begins it again.
_FIRST_PAUSE_S = 0.2  # before the second attempt, then doubled
_CONNECT_S = 5
_STALL_S = 3  # without a byte, after which an attempt is abandoned: doubled with each attempt
_SLOW_S, _SLOWEST = 30, 20_000
"""Time, and bytes a second of all reads beyond it, after which an attempt is abandoned."""
_SIGNED_S, _SIGN_AGAIN_S = 3600, 300
"""boto3 renews temporary credentials 10 minutes before they expire, so a younger URL is valid."""
_REFUSED_S = 1.0  # after which the source of the credentials is asked again
_ERROR_BYTES = 4096  # of the text of an error
_WRONG_BYTES = "wrong bytes"

_FAILURES = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
"""A counter of failed attempts in the kernel, one for this process and the workers it forks."""


def pop_failures() -> list[int]:
    """Return the number of failed attempts since the last call, as the only item."""
    with suppress(BlockingIOError):  # it is 0
        return [os.eventfd_read(_FAILURES)]
    return [0]


class Range(NamedTuple):
    """A part of an object, with the CRC-32 of its bytes."""

    name: str
    offset: int
    size: int
    crc: int


class _FailedRead(Exception):
    """A failed attempt, and the reason: it holds no URL, because that is signed."""


class RangeReader:
    """Reads parts of the objects of a store, by number. Belongs to one thread of one process."""

    def __init__(self, place: str, locate: Callable[[int], Range]) -> None:
        """locate: returns where the part of a number is."""
        self._place, self._locate = place, locate
        self._reads: dict[int, Future[bytes]] = {}
        self._bytes = 0  # of self._reads
        # number of times that each expected part will be taken (repeated augmentation)
        self._uses: Counter[int] = Counter()
        self._expected: deque[int] = deque()  # expected parts whose read has not begun, in order
        self._threads = ThreadPoolExecutor(MAX_READS, "read")
        self._local = threading.local()  # the connection of each thread
        self._tls = ssl.create_default_context(cafile=os.environ.get("AWS_CA_BUNDLE") or get_cert_path(True))
        self._lock = threading.Lock()
        self._store: Store | None = None
        # name of an object -> its URL, or why there is none, and until when that counts
        self._urls: dict[str, tuple[str | RunError, float]] = {}

    def expect(self, numbers: list[int]) -> None:
        """Begin to read what will be taken next, in this order. Other reads are dropped."""
        self._uses = Counter(numbers)
        for number in self._reads.keys() - self._uses.keys():
            self._drop(number)
        self._expected = deque(self._uses)
        self._begin_expected()

    def take(self, number: int) -> bytes:
        """Return the bytes of a part, expected or not.

        Raises UnreadableError if the object has other bytes there, OutageError if the store does
        not return it for some seconds; the next call then begins again.
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

    def _begin_expected(self) -> None:
        while self._expected and len(self._reads) < MAX_READS:
            number = self._expected[0]
            if number not in self._reads and self._uses[number]:  # it may have been taken before its turn
                part = self._locate(number)
                if self._reads and self._bytes + part.size > MAX_BYTES:
                    return
                self._begin(number, part)
            self._expected.popleft()

    def _begin(self, number: int, part: Range) -> None:
        self._bytes += part.size
        self._reads[number] = self._threads.submit(self._read, number, part)

    def _drop(self, number: int) -> None:
        self._reads.pop(number).cancel()
        self._bytes -= self._locate(number).size

    # in a thread

    def _read(self, number: int, part: Range) -> bytes:
        """Return the bytes of a part, after some attempts if it takes them."""
        reasons = []
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
                # after the pause: at once, `_begin` may not have noted this read yet
                if number not in self._reads or not threading.main_thread().is_alive():
                    break  # nobody waits for it any more
            try:
                return self._attempt(part, _STALL_S << attempt)
            except _FailedRead as failure:
                reasons.append(str(failure))
            os.eventfd_write(_FAILURES, 1)
        if reasons == [_WRONG_BYTES] * _ATTEMPTS:  # those of the object, not of the network
            raise UnreadableError(f"{part.name} has changed at byte {part.offset:,} since it was packed")
        problem = f"the store is out of reach ({self._place}/{part.name}: {reasons[-1]})"
        raise OutageError(problem, "give the same command again once it is back")

    def _attempt(self, part: Range, stall_s: float) -> bytes:
        """Return the bytes of a part. Raises _FailedRead."""
        url = self._url(part.name)
        connection = self._connection(url)
        deadline = time.monotonic() + _SLOW_S + part.size * len(self._reads) / _SLOWEST  # they share the link
        is_free = False
        try:
            connection.sock.settimeout(stall_s)
            path = url[url.index("/", len("https://")) :]
            end = part.offset + part.size - 1
            connection.request("GET", path, headers={"Range": f"bytes={part.offset}-{end}"})
            answer = connection.getresponse()
            data, size = bytearray(), part.size if answer.status == 206 else _ERROR_BYTES
            while len(data) < size and (piece := answer.read1(size - len(data))):
                data += piece
                if time.monotonic() > deadline:  # the timeout of the socket is for each piece
                    raise TimeoutError
            is_free = answer.length == 0
            answer.close()
        except TimeoutError:
            raise _FailedRead("the connection has stalled") from None
        except (HTTPException, OSError):
            raise _FailedRead("the connection was closed") from None
        finally:
            if not is_free:
                connection.close()
        if answer.status == 206 and len(data) < part.size:
            raise _FailedRead(f"{len(data):,} of {part.size:,} bytes")
        if answer.status == 416 or (answer.status == 206 and zlib.crc32(data) != part.crc):
            raise _FailedRead(_WRONG_BYTES)
        if answer.status != 206:
            code = re.search(rb"<Code>(\w{1,60})</Code>", data)
            reason = f"status {answer.status}, not 206{f': {code[1].decode()}' if code else ''}"
            with self._lock:
                self._urls.pop(part.name, None)  # sign another one: it may have expired
            raise _FailedRead(reason)
        return bytes(data)

    def _connection(self, url: str) -> HTTPConnection:
        """Return the connection of this thread, for https through the proxy of the environment."""
        connection: HTTPConnection | None = getattr(self._local, "connection", None)
        if connection and connection.sock and not wait_for_read(connection.sock, 0):
            return connection  # which the store has not closed meanwhile
        store = urlsplit(url)
        host = store.hostname or ""
        if store.scheme == "http":
            connection = HTTPConnection(host, store.port, timeout=_CONNECT_S)
        else:
            proxy = urlsplit("" if proxy_bypass(store.netloc) else getproxies().get("https", ""))
            first, port = proxy.hostname or host, proxy.port or store.port
            connection = HTTPSConnection(first, port, timeout=_CONNECT_S, context=self._tls)
            if proxy.hostname:
                connection.set_tunnel(host, store.port)
        try:
            connection.connect()
        except (HTTPException, OSError) as error:
            raise _FailedRead(one_line(error)) from None
        self._local.connection = connection
        return connection

    def _url(self, name: str) -> str:
        with self._lock:
            found, until = self._urls.get(name, ("", 0.0))
            now = time.monotonic()
            if now > until:
                try:
                    self._store = self._store or Store(self._place)
                    found, until = self._store.presign(name, _SIGNED_S), now + _SIGN_AGAIN_S
                except RunError as error:  # the source of the credentials may be away for a moment
                    self._store, found, until = None, error, now + _REFUSED_S
                self._urls[name] = found, until
        if isinstance(found, RunError):
            raise _FailedRead(str(found))
        return found
