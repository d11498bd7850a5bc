"""A lease: the right of one process to write to a mirror, held by conditional writes.

It does across machines what `deploy.takeover` does on a disk. The lease is an object. A start makes
it with a write that the store refuses if it exists (If-None-Match), and renews it every `RENEW_S`
with a write that the store refuses if anybody else has changed it (If-Match). A lease that was not
renewed for `LEASE_S`, by the store's own clock, may be taken over. So two starts never hold one
mirror at the same time, and a holder that was frozen learns before its next write that it lost it.

A process that finds the lease held waits: if it is renewed meanwhile, the holder is alive.
"""

import json
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from pipeline.addons.store.bucket import ConflictError, MissingError, Store, StoredObject
from pipeline.errors import RunError, TemporaryError
from pipeline.files import parse_json
from pipeline.streams import log

RENEW_S = 10
LEASE_S = 45
"""Seconds without a renewal after which a lease may be taken over."""
NAME = "lease.json"
_MAX_BYTES = 4096
_POLL_S = 1.0
_FRESH_S = 2.0
"""Seconds for which a renewal proves that the lease is ours."""
_RELEASE_S = 5.0


@dataclass(frozen=True)
class _Contents:
    holder: str
    """The process, for messages."""
    owner: str = ""
    """The run folder on whose behalf it writes: only one process at a time holds that folder."""
    process: str = ""
    is_released: bool = False
    renewed: float = 0.0
    """Wall clock of the holder; it makes the contents, and so the etag, of each renewal differ."""

    @classmethod
    def parse(cls, data: bytes) -> "_Contents":
        with suppress(ValueError, TypeError, AttributeError):  # contents of another kind
            contents = cls(**parse_json(data))
            if contents.holder.isprintable():
                return contents
        return cls("another process")


class Lease:
    """The lease of a mirror."""

    def __init__(self, store: Store, owner: str) -> None:
        """owner: identifies the run's folder, so that a restarted process recognises its own."""
        self._store = store
        self._place = f"checkpoint.mirror={store}"
        holder = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}"
        self._contents = _Contents(holder, owner, secrets.token_hex(8))
        self._etag = ""
        self._renewed = 0.0  # by `_now`
        self._lock = threading.Lock()
        self._dropped = threading.Event()
        self.is_from_another_folder = False
        """True if a run in another folder held the lease before this process did."""

    def take(self) -> None:
        """Take the lease, and renew it in a thread from now on.

        Waits up to `LEASE_S` for a holder that may be dead. Raises TemporaryError, which names the
        holder, if it is alive.
        """
        seen, seen_at = "", 0.0
        while not self._etag:
            found, contents = self._read()
            is_own = contents.owner == self._contents.owner
            idle_s = 0.0
            if found:  # a store may leave out its clock
                idle_s = max(found.age_s, _now() - seen_at if found.etag == seen else 0)
            if found is None:
                self._write(if_absent=True)
            elif contents.process == self._contents.process:  # an answer of the store was lost
                self._etag = found.etag
            elif is_own or contents.is_released or idle_s > LEASE_S:
                self.is_from_another_folder = not is_own
                self._write(if_match=found.etag)
                if self._etag and not (is_own or contents.is_released):
                    log(f"took over {self._place} from {contents.holder}, last renewed {idle_s:.0f} s ago")
            elif seen and seen != found.etag:
                raise TemporaryError(
                    f"{self._place} is held by {contents.holder}, which renews its lease",
                    "wait for it, stop it, or give another checkpoint.mirror",
                )
            elif not seen:
                wait = f"waiting up to {max(1, LEASE_S - idle_s):.0f} s to see if it renews its lease"
                log(f"{self._place} is held by {contents.holder}: {wait}")
                seen, seen_at = found.etag, _now()
            if not self._etag:
                time.sleep(_POLL_S)
        threading.Thread(target=self._renew_regularly, name="lease", daemon=True).start()

    def confirm(self) -> None:
        """Return if the lease is ours now. Called before each write.

        Ends this process with exit code 75 if another one has taken it over. Raises OutageError if
        the store is out of reach, TemporaryError if the lease was dropped.
        """
        if self._dropped.is_set() or not self._etag:
            raise TemporaryError(f"{self._place} is no longer held by this process")
        if _now() - self._renewed > _FRESH_S:
            self._renew()

    def drop(self, *, is_released: bool) -> None:
        """Stop renewing. is_released: the next start need not wait, since nothing is being written.

        Returns within seconds, also if the store does not answer.
        """
        self._dropped.set()
        if is_released and self._etag:
            release = threading.Thread(target=self._release, name="lease-release", daemon=True)
            release.start()
            release.join(_RELEASE_S)

    def _release(self) -> None:
        with self._lock, suppress(RunError, ConflictError):
            self._store.write(NAME, self._encode(is_released=True), if_match=self._etag)

    def _renew(self) -> None:
        with self._lock:
            if self._dropped.is_set():
                return
            now = _now()
            try:
                self._etag = self._store.write(NAME, self._encode(), if_match=self._etag)
            except (ConflictError, MissingError):
                found, contents = self._read()
                if found is None or contents.process != self._contents.process:
                    by = contents.holder if found else "nobody: the lease was deleted"
                    line = f"{self._place} was taken over by {by}: this process writes nothing more and exits"
                    print(f"pipeline: {line}", file=sys.stderr, flush=True)
                    os._exit(TemporaryError.code)
                self._etag = found.etag
            self._renewed = now

    def _read(self) -> tuple[StoredObject | None, _Contents]:
        """Return what the store has now: the object, or None, and its contents."""
        try:
            data, found = self._store.read_described(NAME, _MAX_BYTES)
        except MissingError:
            return None, _Contents("")
        return found, _Contents.parse(data)

    def _write(self, *, if_absent: bool = False, if_match: str | None = None) -> None:
        with suppress(ConflictError, MissingError):  # another process was faster: the caller looks again
            self._etag = self._store.write(NAME, self._encode(), if_absent=if_absent, if_match=if_match)
            self._renewed = _now()

    def _encode(self, *, is_released: bool = False) -> bytes:
        contents = replace(self._contents, is_released=is_released, renewed=time.time())
        return json.dumps(asdict(contents)).encode()

    def _renew_regularly(self) -> None:
        while not self._dropped.wait(RENEW_S):
            with suppress(RunError):  # the store is away: `confirm` finds out before the next write
                self._renew()


def _now() -> float:
    """Return the seconds since the boot, those of a suspended machine included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
