"""Commands in processes forked from one that has torch imported: a start takes milliseconds instead of seconds."""

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from harness import Result, environment


class Forked:
    """Runs commands one after another, each in a fresh process."""

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


def _serve() -> None:
    import pipeline.operate.doctor
    import pipeline.operate.launch
    import pipeline.train.session  # noqa: F401 — what every command would import

    for line in sys.stdin:
        child = os.fork()
        if not child:
            _run(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(request: dict[str, object]) -> None:
    from pipeline.__main__ import main

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
