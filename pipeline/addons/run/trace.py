"""The trace of a run, `trace.jsonl`: which samples each update used, if `run.trace` asks for it."""

from pipeline.record.folder import RunFolder
from pipeline.record.journal import JsonLines, read
from pipeline.train.listener import Listener, Update


class ToTrace(Listener):
    """Writes the sample ids of each update, and a digest of its batch."""

    def __init__(self, folder: RunFolder, step: int) -> None:
        """Open the file and cut off the rows after `step`: these updates are made again."""
        self._folder = folder
        ends = [end for row, end in read(folder.trace) if row.get("step", 0) <= step]
        self._lines = JsonLines(folder.trace, ends[-1] if ends else 0)

    def stepped(self, update: Update) -> None:
        self._folder.check_ours()
        # an error is not logged: the journal is on the same disk and logs its own
        row = {"step": update.step, "epoch": update.epoch, "ids": update.sample_ids}
        self._lines.append({**row, "batch_sha256": update.batch_sha256})
