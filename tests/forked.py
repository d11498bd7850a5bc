"""Run commands in forks of a process that has imported torch: a start takes milliseconds."""

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Result, environment, read_rows

SMALL = (
    "model.arch=shufflenet_v2_x0_5", "augment.size=32", "batch.global=8", "train.epochs=2", "train.max_steps=1",
    "schedule.warmup=0", "checkpoint.every=1 steps", "data.workers=0", "run.device=cpu", "run.threads=1",
    "track.uri=none", "track.report=false", "data.source=folder", "data.root=images",
)  # fmt: skip


class Forked:
    """Runs commands one after another, each in a new process."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )

    def __call__(self, *words: str, cwd: Path, **env: str) -> Result:
        assert self._server.stdin
        assert self._server.stdout
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            request = {"words": words, "cwd": str(cwd), "env": environment(**env), "folder": folder}
            print(json.dumps(request), file=self._server.stdin, flush=True)
            code = int(self._server.stdout.readline())
            out, err = (Path(folder, name).read_text() for name in ("out", "err"))
        return Result(code, out, err, time.monotonic() - start)

    def close(self) -> None:
        assert self._server.stdin
        self._server.stdin.close()
        self._server.wait(30)


@dataclass
class Place:
    """A folder with `images` (4 classes, 16 training and 4 validation images) and `runs/done`."""

    path: Path
    forked: Forked
    holder: subprocess.Popen[bytes] | None = None
    """Another process that trains in this folder and holds its lock."""

    @classmethod
    def make(cls, path: Path, forked: Forked) -> "Place":
        place = cls(path, forked)
        place.run("data", "make", "synthetic", "images", "--images", "16", "--classes", "4", "--side", "32")
        assert place.train("run.dir=runs/done")[0] == 0
        return place

    def train(self, *words: str, **env: str) -> tuple[int, str]:
        """Run `train digits` with the small settings and `words`; return (exit code, stderr)."""
        result = self.forked("train", "digits", *SMALL, *words, cwd=self.path, **env)
        assert "Traceback" not in result.err, result.err
        return result.code, result.err

    def doctor(self, *words: str, **env: str) -> tuple[int, str]:
        result = self.forked("doctor", "digits", *SMALL, *words, cwd=self.path, **env)
        assert "Traceback" not in result.err, result.err
        return result.code, result.err

    def run(self, *words: str) -> str:
        """Run a command that must succeed; return its standard output."""
        result = self.forked(*words, cwd=self.path)
        assert result.code == 0, result.err
        return result.out

    def checkpoints(self, run: str = "done") -> list[Path]:
        return sorted((self.path / "runs" / run / "checkpoints").glob("step-*.pt"))

    def events(self, run: str, name: str) -> list[dict[str, Any]]:
        """Return the journal rows of a run that have this event."""
        return [row for row in read_rows(self.path / "runs" / run / "journal.jsonl") if row.get("event") == name]


def _serve() -> None:
    import pipeline.operate.launch
    import pipeline.preflight.doctor
    import pipeline.train.session  # noqa: F401 (import torch and ours once, before the forks)

    for line in sys.stdin:
        child = os.fork()
        if not child:
            _run(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(request: dict[str, object]) -> None:
    from pipeline.cli.main import main

    code = 1
    try:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(Path(str(request["folder"]), name), os.O_WRONLY | os.O_CREAT), number)
        os.environ.clear()
        os.environ.update(request["env"])  # type: ignore[arg-type]
        os.chdir(str(request["cwd"]))
        code = main(request["words"])  # type: ignore[arg-type]
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
