"""A folder with images and a finished run, for commands in forks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
from harness import quick, read_rows
from object_store import Bucket

SMALL = ("model.arch=shufflenet_v2_x0_5", "augment.size=32", "batch.global=8", "train.epochs=2",
         "train.max_steps=1", "schedule.warmup=0", "checkpoint.every=1 steps", "data.workers=0",
         "run.device=cpu", "run.threads=1", "track.uri=none", "track.report=false", "data.source=folder",
         "data.root=images")  # fmt: skip


@dataclass
class Place:
    """A folder with `images` (4 classes, 16 training and 4 validation images) and `runs/done`."""

    path: Path
    holder: forked.Process | None = None
    """Another training in this folder, which holds its lock."""
    bucket: Bucket | None = None
    """Holds the mirror of a run."""

    @classmethod
    def make(cls, path: Path) -> "Place":
        place = cls(path)
        place.make_images("images")
        place.train("run.dir=runs/done")
        return place

    def make_images(self, name: str) -> None:
        self.run("data", "make", "synthetic", name, "--images", "16", "--classes", "4", "--side", "32")

    def train(self, *words: str, code: int = 0, **env: str) -> str:
        """Run `train digits` with the small settings and `words`; return standard error.

        code: that it must exit with.
        """
        return self._digits("train", *words, code=code, **env)

    def doctor(self, *words: str, code: int = 0, **env: str) -> str:
        return self._digits("doctor", *words, code=code, **env)

    def _digits(self, command: str, *words: str, code: int, **env: str) -> str:
        result = quick(command, "digits", *SMALL, *words, cwd=self.path, code=code, **env)
        assert "Traceback" not in result.err, result.err
        return result.err

    def run(self, *words: str) -> str:
        """Run a command that must succeed; return its standard output."""
        return quick(*words, cwd=self.path, code=0).out

    def checkpoints(self, run: str = "done") -> list[Path]:
        return sorted((self.path / "runs" / run / "checkpoints").glob("step-*.pt"))

    def events(self, run: str, name: str) -> list[dict[str, Any]]:
        """Return the journal rows of a run that have this event."""
        rows = read_rows(self.path / "runs" / run / "journal.jsonl")
        return [row for row in rows if row.get("event") == name]
