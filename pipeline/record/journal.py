"""The journal: what a run reports, first of all to a file of its own.

Promise: tracking never costs training anything. A report is one line appended to `journal.jsonl`; whoever shows it to
people (MLflow) reads it from there, in its own time. Each point is written once: after a restart the steps that are
trained again are not reported again, the first row stands. A line torn by a crash is cut off at the next start; rows that
a full disk refuses are kept, and written once there is room.

Rows: {"time": ms, "step": n, "metrics": {key: value}} and events {"time": ms, "event": name, …}.
"""

import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def read(path: Path, start: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """(row, offset after it) for each whole line from byte `start` on; a torn last line is left for the next time."""
    try:
        with open(path, "rb") as file:
            file.seek(start)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                start += len(line)
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict):
                    yield row, start
    except FileNotFoundError:
        return


def final_status(path: Path) -> str | None:
    """The run's status, if that it has ended is the journal's last word."""
    status = None
    for row, _ in read(path):
        if "event" in row:
            status = row.get("status") if row["event"] == "ended" else None
    return status


class _Lines:
    """The end of a file of lines. What a full disk does not take is kept, and written first once there is room."""

    def __init__(self, path: Path, end: int) -> None:
        """What stands after byte `end` is struck out: a torn line, or rows that a restart makes anew."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._file, end)
        self._pending = b""

    @property
    def is_behind(self) -> bool:
        return bool(self._pending)

    def append(self, row: dict[str, Any]) -> OSError | None:
        """The error if not all could be written now: a line may be torn until it can, and readers wait for its end."""
        self._pending += json.dumps(row).encode() + b"\n"
        try:
            while self._pending:
                self._pending = self._pending[os.write(self._file, self._pending) :]
        except OSError as error:
            return error
        return None


class Journal:
    def __init__(self, path: Path, log: Callable[[str], None]) -> None:
        self._log = log
        self._reported: dict[str, int] = {}
        end = 0
        self.run_id = ""
        for row, after in read(path):
            end = after
            for key in row.get("metrics", ()):
                self._reported[key] = max(self._reported.get(key, -1), row["step"])
            self.run_id = self.run_id or row.get("run", "")
        self._lines = _Lines(path, end)
        if not self.run_id:
            self.run_id = uuid.uuid4().hex
            self.event("created", run=self.run_id)

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """Write the points of `step` that no row holds yet."""
        new = {
            key: value for key, value in metrics.items() if self._reported.get(key, -1) < step and math.isfinite(value)
        }
        if new:
            self._reported.update(dict.fromkeys(new, step))
            self._append({"time": _now_ms(), "step": step, "metrics": new})

    def event(self, name: str, **fields: Any) -> None:
        self._append({"time": _now_ms(), "event": name, **fields})

    def _append(self, row: dict[str, Any]) -> None:
        was_behind = self._lines.is_behind
        error = self._lines.append(row)
        if error and not was_behind:
            self._log(f"journal could not be written: {error.strerror}; its rows are kept until it can")


class Trace:
    """trace.jsonl: after each update the sample ids of the global batch and a digest of its pixels and labels."""

    def __init__(self, path: Path, step: int) -> None:
        """Opens it to go on after `step`: rows of later updates, which a restart makes anew, are struck out."""
        kept = 0
        for row, after in read(path):
            if row.get("step", 0) > step:
                break
            kept = after
        self._lines = _Lines(path, kept)

    def update(self, step: int, epoch: int, ids: list[int], batch_sha256: str) -> None:
        # a full disk is the journal's to complain of: it lies in the same folder
        self._lines.append({"step": step, "epoch": epoch, "ids": ids, "batch_sha256": batch_sha256})


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
