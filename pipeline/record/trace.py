"""The trace of a run, `trace.jsonl`: what each update was computed from."""

from pathlib import Path

from pipeline.record.journal import JsonLines, read


class Trace:
    """The writer of a row per update: sample ids, and a digest of the batch's pixels and labels."""

    def __init__(self, path: Path, step: int) -> None:
        """Open the file and cut off the rows after `step`: these updates are made again."""
        ends = [end for row, end in read(path) if row.get("step", 0) <= step]
        self._lines = JsonLines(path, ends[-1] if ends else 0)

    def append(self, step: int, epoch: int, ids: list[int], batch_sha256: str) -> None:
        # an error is not logged: the journal is on the same disk and logs its own
        self._lines.append({"step": step, "epoch": epoch, "ids": ids, "batch_sha256": batch_sha256})
