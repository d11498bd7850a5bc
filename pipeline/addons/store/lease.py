"""A lease: the right of one process to write to a mirror, held by conditional writes.

It does across machines what `deploy.takeover` does on a disk. The lease is an object. A start makes
it with a write that the store refuses if it exists (If-None-Match), and renews it every `RENEW_S`,
and before each other write, with one that the store refuses if anybody else has changed it
(If-Match). A lease that was not renewed for `LEASE_S`, by the store's own clock, may be taken over.
So two starts never hold one mirror at the same time, and a holder that was frozen learns before its
next write that it lost it. A process that finds the lease held waits: if it is renewed meanwhile,
the holder is alive.
"""

import json
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from pipeline.addons.datasets.names import printable_name
from pipeline.addons.store.bucket import ConflictError, MissingError, Store, StoredObject
from pipeline.errors import RequestError, RunError, TemporaryError
from pipeline.files import parse_json
from pipeline.streams import log

RENEW_S = 10
LEASE_S = 45
"""Seconds without a renewal after which a lease may be taken over."""
NAME = "lease.json"
_MAX_BYTES = 4096
_POLL_S = 1.0
_RELEASE_S = 5.0


class Lease:
    def __init__(self, store: Store, owner: str) -> None:
        """owner: identifies the run's folder, so that a restarted process recognises its own."""
        self._store, self._place = store, f"checkpoint.mirror={store}"
        holder = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')}"
        self._contents = {"holder": holder, "owner": owner, "process": secrets.token_hex(8)}
        self._etag = ""
        self._lock = threading.Lock()
        self.dropped = threading.Event()
        self.is_from_another_folder = False
        """True if a run in another folder held the lease before this process did."""

    def take(self) -> None:
        """Take the lease, and renew it in a thread from now on.

        Waits up to `LEASE_S` for a holder that may be dead. Raises TemporaryError, which names the
        holder, if it is alive.
        """
        seen, seen_at = "", 0.0
        while True:
            found, theirs = self._read()
            # only one process at a time holds a run's folder, so its lease needs no wait
            is_own = theirs.get("owner") == self._contents["owner"]
            is_free = found is None or is_own or theirs.get("is_released")
            idle_s = found.age_s if found else 0.0
            if found and found.etag == seen:  # not every store says what time it is
                idle_s = max(idle_s, time.monotonic() - seen_at)
            if found is None or is_free or idle_s > LEASE_S:
                with suppress(ConflictError, MissingError):  # another process was faster: look again
                    self._write(found.etag if found else "")
                    break
            elif seen and seen != found.etag:
                problem = f"{self._place} is held by {_name_of(theirs)}, which renews its lease"
                raise TemporaryError(problem, "wait for it, stop it, or give another checkpoint.mirror")
            elif not seen:
                seen, seen_at = found.etag, time.monotonic()
                wait = f"waiting up to {LEASE_S} s to see if it renews its lease"
                log(f"{self._place} is held by {_name_of(theirs)}: {wait}")
            time.sleep(_POLL_S)
        self.is_from_another_folder = found is not None and not is_own
        if found and not is_free:
            log(f"took over {self._place} from {_name_of(theirs)}, last renewed {idle_s:.0f} s ago")
        threading.Thread(target=self._renew_regularly, name="lease", daemon=True).start()

    def confirm(self) -> None:
        """Renew the lease. Called before each write.

        Ends this process with exit code 75 if another one has taken it over. Raises OutageError if
        the store is out of reach, TemporaryError if the lease was dropped.
        """
        with self._lock:
            if self.dropped.is_set():
                raise TemporaryError(f"{self._place} is no longer held by this process")
            try:
                self._write(self._etag)
            except (ConflictError, MissingError):
                found, theirs = self._read()
                if found is None or theirs.get("process") != self._contents["process"]:
                    line = f"{self._place} was taken over by {_name_of(theirs)}: this process exits"
                    print(f"pipeline: {line}", file=sys.stderr, flush=True)
                    os._exit(TemporaryError.code)
                self._etag = found.etag  # the answer to an earlier renewal was lost

    def drop(self, *, is_released: bool) -> None:
        """Stop renewing. is_released: nothing is being written, so the next start need not wait.

        Returns within seconds, also if the store does not answer.
        """
        self.dropped.set()
        if is_released and self._etag:
            release = threading.Thread(target=self._release, name="release", daemon=True)
            release.start()
            release.join(_RELEASE_S)

    def _release(self) -> None:
        with self._lock, suppress(RunError, ConflictError):
            self._write(self._etag, is_released=True)

    def _renew_regularly(self) -> None:
        while not self.dropped.wait(RENEW_S):
            with suppress(RunError):  # the store is away: the next write finds out
                self.confirm()

    def _read(self) -> tuple[StoredObject | None, dict[str, Any]]:
        """Return the lease that the store has now, or None, and its contents."""
        with suppress(MissingError):
            data, found = self._store.read_described(NAME, _MAX_BYTES)
            with suppress(ValueError):
                contents = parse_json(data)
                return found, contents if isinstance(contents, dict) else {}
            return found, {}
        return None, {}

    def _write(self, etag: str, *, is_released: bool = False) -> None:
        contents = {**self._contents, "is_released": is_released}
        contents["renewed"] = time.time()  # so that each has another etag
        data = json.dumps(contents).encode()
        self._etag = self._store.write(NAME, data, if_absent=not etag, if_match=etag)


def _name_of(contents: dict[str, Any]) -> str:
    return printable_name(str(contents.get("holder", "another process")))


def check_mirror(store: Store) -> str:
    """Check that objects of `store` can be written, read, deleted, and written on a condition.

    Some servers that speak S3 ignore the condition: two trainings would damage one mirror. Raises
    RequestError.
    """
    name = f".probe-{secrets.token_hex(16)}"
    remedy = "use a store that honours If-None-Match and If-Match, or leave checkpoint.mirror out"
    etag = store.write(name, b"first")
    try:
        with suppress(ConflictError):
            store.write(name, b"other", if_absent=True)
            raise RequestError(f"{store} ignores If-None-Match and overwrites an object", remedy)
        with suppress(ConflictError):
            store.write(name, b"other", if_match='"00000000000000000000000000000000"')
            raise RequestError(f"{store} ignores If-Match and overwrites an object", remedy)
        store.write(name, b"second", if_match=etag)
    except ConflictError:
        raise RequestError(f"{store} refuses a write with If-Match and the object's etag", remedy) from None
    finally:
        store.delete(name)
    return f"{store} can be written, and honours conditional writes"
