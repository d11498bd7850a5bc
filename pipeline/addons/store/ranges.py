"""Reads of parts of objects in a bucket, many at once, without a thread.

Latency is the cost of a bucket, not bandwidth. So a process states the parts that it will take, in
order, and up to `MAX_READS` of them are kept in flight or ready. Little's law: at 300 ms, 256 reads
in flight return 800 images per second, about as many as one core decodes; with images of 110 kB
they take 28 MB. Large images are limited by `MAX_BYTES` instead.

Why no thread: it would take turns with the decoder for the interpreter's lock. The kernel receives
into the sockets while an image is decoded, and the next call collects it. One libcurl CurlMulti
does that with epoll: about a tenth of a millisecond of CPU time for a read. libcurl gets URLs that
boto3 has signed, and no credentials.

Every failed attempt is counted by kind (`READ_FAILURES`) and made again after a pause that doubles,
with jitter, while all other reads go on. No attempt lasts for good: one that gets no byte for some
seconds, or fewer than `_SLOWEST` allows, is abandoned with its connection.
"""

import os
import random
import re
import select
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pycurl
from botocore.httpsession import get_cert_path

from pipeline.addons.store.bucket import Store
from pipeline.data.access import READ_FAILURES, OutageError, UnreadableError
from pipeline.errors import RunError

MAX_READS = 256
"""Reads in flight, waiting for another attempt, or ready and not taken."""
MAX_BYTES = 64 << 20
"""Bytes of these reads, unless a single one has more."""
_CONNECT_S = 5
_FIRST_STALL_S, _STALL_S = 3, 10
"""Time without a byte after which an attempt is abandoned: it doubles with each attempt."""
_PATIENCE_S, _PATIENCE = 3, 3
"""Seconds that `take` waits for a read that fails, and attempts, before it reports an outage."""
_SLOW_S, _SLOWEST = 30, 20_000
"""Time, and bytes a second of all reads beyond it, after which an attempt is abandoned."""
_REFUSED_S = 1.0  # after which the source of the credentials is asked again
_POLL_S = 0.01
"""Time between two polls of the sockets while no read is waited for: a poll costs CPU time."""
_CHECK_S = 0.5  # between checks for stalled connections
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 4.0
_MAX_WRONG = 4
"""Attempts after which wrong bytes are the object's, not the network's."""
_SIGNED_S, _SIGN_AGAIN_S = 3600, 300
"""boto3 renews temporary credentials 10 minutes before they expire, so a younger URL is valid."""
_ERROR_BYTES = 4096  # of the text of an error
_EVENTS = {pycurl.POLL_IN: select.EPOLLIN, pycurl.POLL_OUT: select.EPOLLOUT,
           pycurl.POLL_INOUT: select.EPOLLIN | select.EPOLLOUT}  # fmt: skip


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


@dataclass
class _Read:
    """A read and its attempts so far."""

    range: Range
    body: list[bytes] = field(default_factory=list)
    """The answer of the attempt in flight so far, as it came."""
    received: int = 0
    """Pieces of it at the last check for stalled connections."""
    data: bytes | None = None
    handle: Any = None
    """The libcurl handle of the attempt in flight."""
    began: float = 0
    """When the attempt in flight began."""
    last_byte: float = 0
    """When it began, or a check found new bytes."""
    next_attempt: float = 0
    failed_attempts: int = 0
    wrong_attempts: int = 0
    failing_since: float = 0
    reason: str = ""
    """The error of the last attempt."""
    status: int = 0
    """HTTP status of the last attempt; 0: no answer."""


class RangeReader:
    """Reads parts of the objects of a store, by number. Belongs to one thread of one process."""

    def __init__(self, place: str, locate: Callable[[int], Range]) -> None:
        """locate: returns where the part of a number is."""
        self._place = place
        self._store: Store | None = None
        self._refusal: RunError | None = None
        """The last error of the source of the credentials, at `_refused`."""
        self._refused = 0.0
        self._locate = locate
        self._reads: dict[int, _Read] = {}
        self._uses: Counter[int] = Counter()
        """Number of times that each expected part will be taken (repeated augmentation)."""
        self._expected: deque[int] = deque()
        """Expected parts whose read has not begun, in order."""
        self._waiting: list[_Read] = []
        """Reads whose next attempt has to wait."""
        self._bytes = 0  # of self._reads
        self._failures: Counter[str] = Counter()
        self._urls: dict[str, tuple[str, float]] = {}
        """Name of an object -> URL, and when it was signed."""
        self._jitter = random.Random()
        self._certificates = os.environ.get("AWS_CA_BUNDLE") or get_cert_path(True)
        self._by_handle: dict[Any, _Read] = {}
        self._idle: list[Any] = []  # libcurl handles
        self._poll = select.epoll()
        self._timer: float | None = None
        self._last_pump = self._last_check = time.monotonic()
        self._pumping_since = self._last_pump
        """Since when there was no pause in which nobody asked for what had arrived."""
        self._multi = pycurl.CurlMulti()
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._watch)
        self._multi.setopt(pycurl.M_TIMERFUNCTION, self._set_timer)
        self._multi.setopt(pycurl.M_MAXCONNECTS, MAX_READS)

    def expect(self, numbers: list[int]) -> None:
        """Begin to read what will be taken next, in this order. Other reads are dropped."""
        self._uses = Counter(numbers)
        for number in self._reads.keys() - self._uses.keys():
            self._drop(number)
        self._expected = deque(number for number in self._uses if number not in self._reads)
        self._pump(0)

    def take(self, number: int) -> bytes:
        """Return the bytes of a part, expected or not.

        Raises UnreadableError if the object has other bytes there, OutageError if the store does
        not return it for some seconds; the next call then waits again.
        """
        start = time.monotonic()
        if number not in self._reads:
            self._begin(number, self._locate(number))
        read = self._reads[number]
        if start > self._last_pump + _POLL_S:
            self._pump(0)
        while read.data is None:
            if read.wrong_attempts >= _MAX_WRONG:
                self._drop(number)
                part = read.range
                raise UnreadableError(f"{part.name} has changed at byte {part.offset:,} since it was packed")
            is_failing = read.failed_attempts >= _PATIENCE
            if is_failing and time.monotonic() - max(start, read.failing_since) > _PATIENCE_S:
                raise self._outage(read)
            self._pump(1)
        self._uses[number] -= 1
        if self._uses[number] <= 0:
            self._drop(number)
            self._begin_expected()
        return read.data

    def _outage(self, read: _Read) -> OutageError:
        parts = (
            f"the store is out of reach ({self._place}/{read.range.name}: {read.reason})",
            "give the same command again once it is back",
        )
        if read.status == 206 or not 200 <= read.status < 400:
            return OutageError(*parts)
        error = RangesIgnoredError(*parts)
        error.status = read.status
        return error

    def pop_failures(self) -> list[int]:
        """Return the number of failed attempts of each of READ_FAILURES since the last call."""
        counts = [self._failures[kind] for kind in READ_FAILURES]
        self._failures.clear()
        return counts

    def close(self) -> None:
        """End all reads and close all connections."""
        for number in list(self._reads):
            self._drop(number)
        self._multi.close()
        for handle in self._idle:
            handle.close()
        self._poll.close()

    def _begin_expected(self) -> None:
        """Begin expected reads as far as the limits allow."""
        while self._expected and len(self._reads) < MAX_READS:
            part = self._locate(self._expected[0])
            if self._reads and self._bytes + part.size > MAX_BYTES:
                return
            self._begin(self._expected.popleft(), part)

    def _begin(self, number: int, part: Range) -> None:
        if number not in self._reads:  # it may have been taken before its turn
            self._bytes += part.size
            self._reads[number] = _Read(part)
            self._attempt(self._reads[number])

    def _drop(self, number: int) -> None:
        read = self._reads.pop(number)
        self._bytes -= read.range.size
        if read.handle:
            self._release(read)
        elif read in self._waiting:
            self._waiting.remove(read)

    def _attempt(self, read: _Read) -> None:
        """Send a request for the read."""
        part = read.range
        read.body, read.received = [], 0
        read.began = read.last_byte = time.monotonic()
        try:
            url = self._url(part.name)
        except RunError as error:  # the source of the credentials may be away for a moment
            self._store, self._refusal, self._refused = None, error, time.monotonic()
            read.status = 0
            self._fail(read, "denied", str(error))
            return
        read.handle = handle = self._idle.pop() if self._idle else self._new_handle()
        handle.setopt(pycurl.URL, url)
        handle.setopt(pycurl.RANGE, f"{part.offset}-{part.offset + part.size - 1}")
        handle.setopt(pycurl.WRITEFUNCTION, read.body.append)
        handle.setopt(pycurl.MAXFILESIZE_LARGE, max(part.size, _ERROR_BYTES))
        self._by_handle[handle] = read
        self._multi.add_handle(handle)

    def _new_handle(self) -> Any:
        handle = pycurl.Curl()
        handle.setopt(pycurl.NOSIGNAL, 1)
        handle.setopt(pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_1_1)
        handle.setopt(pycurl.CONNECTTIMEOUT, _CONNECT_S)
        handle.setopt(pycurl.TCP_KEEPALIVE, 1)
        handle.setopt(pycurl.BUFFERSIZE, 256 << 10)
        handle.setopt(pycurl.CAINFO, self._certificates)
        return handle

    def _url(self, name: str) -> str:
        url, signed = self._urls.get(name, ("", 0.0))
        if not url or time.monotonic() > signed + _SIGN_AGAIN_S:
            if self._refusal and time.monotonic() < self._refused + _REFUSED_S:
                raise self._refusal
            self._store = self._store or Store(self._place)
            url = self._store.presign(name, _SIGNED_S)
            self._urls[name] = url, time.monotonic()
        return url

    def _release(self, read: _Read) -> None:
        """Take the read's handle back; a transfer that is not complete loses its connection."""
        self._multi.remove_handle(read.handle)
        del self._by_handle[read.handle]
        self._idle.append(read.handle)
        read.handle = None

    def _pump(self, wait: float) -> None:
        """Let libcurl receive and send what it can. Wait for that, `wait` seconds at most."""
        self._begin_expected()
        now = time.monotonic()
        if now > self._last_pump + _CHECK_S:
            self._pumping_since = now
        times = [read.next_attempt for read in self._waiting]
        if self._timer is not None:
            times.append(self._timer)
        for descriptor, events in self._poll.poll(max(0, min([now + wait, *times]) - now)):
            readable = events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR)
            mask = (pycurl.CSELECT_IN if readable else 0) | (pycurl.CSELECT_OUT if events & select.EPOLLOUT else 0)
            self._multi.socket_action(descriptor, mask)
        now = time.monotonic()
        if self._timer is not None and now >= self._timer:
            self._timer = None
            self._multi.socket_action(pycurl.SOCKET_TIMEOUT, 0)
        self._finish_attempts()
        self._last_pump = now
        if now > self._last_check + _CHECK_S:
            self._last_check = now
            self._abandon_stalled(now)
        due = [read for read in self._waiting if now >= read.next_attempt]
        if due:
            self._waiting = [read for read in self._waiting if read not in due]
            for read in due:
                self._attempt(read)

    def _abandon_stalled(self, now: float) -> None:
        """Abandon the attempts that get no byte, or too few, with their connections.

        libcurl's own limit is on the mean speed of the last seconds: it takes three times as long,
        and counts the time in which nobody asked.
        """
        reads = len(self._by_handle)  # they share the link
        for read in list(self._by_handle.values()):
            if len(read.body) > read.received:
                read.received, read.last_byte = len(read.body), now
            limit = min(_STALL_S, _FIRST_STALL_S << min(4, read.failed_attempts))
            is_silent = now > max(read.last_byte, self._pumping_since) + limit
            is_slow = now > max(read.began, self._pumping_since) + _SLOW_S + read.range.size * reads / _SLOWEST
            if is_silent or is_slow:
                self._release(read)
                read.status = 0
                self._fail(read, "stalled", "the connection has stalled")

    def _watch(self, event: int, descriptor: int, _multi: Any, _data: Any) -> None:
        """Watch a socket as libcurl asks."""
        if event == pycurl.POLL_REMOVE:
            with suppress(OSError, ValueError):  # closed meanwhile
                self._poll.unregister(descriptor)
            return
        try:
            self._poll.register(descriptor, _EVENTS[event])
        except FileExistsError:
            self._poll.modify(descriptor, _EVENTS[event])

    def _set_timer(self, milliseconds: int) -> None:
        self._timer = None if milliseconds < 0 else time.monotonic() + milliseconds / 1000

    def _finish_attempts(self) -> None:
        while True:
            queued, succeeded, failed = self._multi.info_read()
            for handle in succeeded:
                self._finish(handle, 0, "")
            for handle, code, message in failed:
                self._finish(handle, code, message)
            if not queued:
                return

    def _finish(self, handle: Any, code: int, message: str) -> None:
        """Keep the bytes of an attempt that has ended, or have another one made."""
        read = self._by_handle[handle]
        read.status = handle.getinfo(pycurl.RESPONSE_CODE)
        self._release(read)
        data = b"".join(read.body)
        read.body.clear()  # its handle still refers to it
        kind, reason = _failure(read, code, message, data)
        if not kind:
            read.data = data
        else:
            self._fail(read, kind, reason)

    def _fail(self, read: _Read, kind: str, reason: str) -> None:
        """Count a failed attempt and make another one after a pause."""
        self._failures[kind] += 1
        now = time.monotonic()
        read.failing_since = read.failing_since or now
        read.reason = reason
        read.wrong_attempts += kind == "wrong_bytes"
        if read.status == 403:
            self._urls.pop(read.range.name, None)
        pause = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(10, read.failed_attempts))
        read.failed_attempts += 1
        read.next_attempt = now + pause * self._jitter.uniform(0.5, 1.5)
        self._waiting.append(read)


def _failure(read: _Read, code: int, message: str, data: bytes) -> tuple[str, str]:
    """Return the kind and the reason of a failed attempt, or ("", "").

    code, message: libcurl's error. The reason holds no URL, because it is signed.
    """
    status = read.status
    if status == 206 and not code:
        if len(data) != read.range.size:
            return "truncated", f"{len(data):,} of {read.range.size:,} bytes"
        return ("", "") if zlib.crc32(data) == read.range.crc else ("wrong_bytes", "wrong bytes")
    if status == 416:
        return "wrong_bytes", "the object is shorter"
    if status not in (0, 206):
        error = re.search(rb"<Code>(\w{1,60})</Code>", data)
        reason = f"{status} {error[1].decode()}" if error else f"status {status}"
        if 200 <= status < 300:
            return "ignored", f"status {status} and not 206: it ignores the range of a read"
        if status in (429, 503):
            return "slow_down", reason
        return {403: "denied", 404: "missing"}.get(status, "server_error"), reason
    if code in (pycurl.E_PARTIAL_FILE, pycurl.E_GOT_NOTHING, pycurl.E_RECV_ERROR):
        return "truncated", "the connection was closed"
    if code == pycurl.E_FILESIZE_EXCEEDED:
        return "truncated", "more bytes than asked"
    return "unreachable", re.sub(r"\s*\S*://\S*|\?\S*", "", message)[:150] or f"libcurl error {code}"
