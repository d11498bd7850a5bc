"""The journal of a run, `journal.jsonl`: metrics and events, one JSON object per line.

Promise: tracking never slows training. Logging appends one line to a local file; the sender process
reads it from there and passes it on to MLflow. Each metric is written once. Of steps that are
trained again after a restart, only the figures that have changed are written again, and the last
row counts; of times and other measurements the first row counts. A line that a crash left
incomplete is cut off at the next start. Rows that do not fit on a full disk are kept in memory and
written once there is room.

Rows: {"time": ms, "step": n, "metrics": {key: value}}, and events {"time": ms, "event": name, …}.
"""

import json
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.files import parse_json

MEASURED = ("time/", "system/")
"""Beginnings of the metrics that do not follow from the weights."""


def read(path: Path, start: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield (row, offset after it) for each complete line from byte `start` on."""
    with suppress(FileNotFoundError, NotADirectoryError), open(path, "rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            start += len(line)
            with suppress(ValueError):
                row = parse_json(line)
                if isinstance(row, dict):
                    yield row, start


def run_id(path: Path) -> str | None:
    """Return the id of the run in a journal, or None if it has none."""
    return next((row["run"] for row, _ in read(path) if "run" in row), None)


def events(path: Path, name: str | None = None) -> list[dict[str, Any]]:
    """Return the events with that name, or all of them, in the order of the journal."""
    return [row for row, _ in read(path) if "event" in row and name in (None, row["event"])]


def last_event(path: Path, name: str | None = None) -> dict[str, Any]:
    """Return the last event with that name, or the last of all; {} if there is none."""
    return (events(path, name) or [{}])[-1]


def final_status(path: Path) -> str | None:
    """Return the status with which the run ended, or None if the last event is not its end."""
    return last_event(path).get("status")  # no other event has one


class JsonLines:
    """A JSON Lines file to append to.

    Lines that do not fit on a full disk are kept, and written once there is room.
    """

    def __init__(self, path: Path, end: int) -> None:
        """Open the file and cut it off at byte `end`: the rest is incomplete or out of date."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._file, end)
        self.pending = b""
        """Bytes that the disk has not taken yet."""

    def append(self, row: dict[str, Any]) -> OSError | None:
        """Write a row, or return the error if not everything could be written now.

        The last line may then be incomplete for a while; `read` leaves it out.
        """
        self.pending += json.dumps(row).encode() + b"\n"
        try:
            while self.pending:
                self.pending = self.pending[os.write(self._file, self.pending) :]
        except OSError as error:
            return error
        return None


class Journal:
    """The writer of a run's journal."""

    def __init__(self, path: Path, log: Callable[[str], None], resumed_at: int | None = None) -> None:
        """resumed_at: the step after which figures of earlier starts will be computed again.

        They are remembered, and written again only if they differ. -1: a fresh start, all; None:
        none. It is the step before that of the checkpoint if that has no evaluation yet.
        """
        self._log = log
        self._lock = threading.Lock()  # the thread that saves checkpoints writes rows, too
        self._last_steps: dict[str, int] = {}
        """The last logged step of each metric."""
        self._discarded: dict[tuple[str, int], float] = {}
        """The figures, by metric and step, that an earlier start logged after `resumed_at`."""
        end = 0
        self.run_id = ""
        for row, after in read(path):
            end = after
            self.run_id = self.run_id or row.get("run", "")
            for key, value in row.get("metrics", {}).items():
                if resumed_at is not None and row["step"] > resumed_at and not key.startswith(MEASURED):
                    self._discarded[key, row["step"]] = value
                else:
                    self._last_steps[key] = max(self._last_steps.get(key, -1), row["step"])
        self._lines = JsonLines(path, end)
        if not self.run_id:
            self.run_id = uuid.uuid4().hex
            self.log_event("created", run=self.run_id)

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Write the finite metrics of `step` that no row has yet."""
        new = {}
        for key, value in metrics.items():
            if self._last_steps.get(key, -1) < step and math.isfinite(value):
                self._last_steps[key] = step
                if self._discarded.pop((key, step), None) != value:
                    new[key] = value
        if new:
            self._append({"step": step, "metrics": new})

    def log_event(self, name: str, **fields: Any) -> None:
        self._append({"event": name, **fields})

    def _append(self, row: dict[str, Any]) -> None:
        with self._lock:
            is_known = bool(self._lines.pending)
            error = self._lines.append({"time": time.time_ns() // 1_000_000, **row})
        if error and not is_known:
            self._log(f"journal could not be written: {error.strerror}; its rows are kept until it can")
