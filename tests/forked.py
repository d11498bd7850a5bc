"""Run commands in forks of a process that has imported torch: a start takes milliseconds.

For tests that need no new interpreter, and send no signals.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass
class Output:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


class Forked:
    """A process that has imported torch, and forks for each command. Threads may share it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self._server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, env=environment)
        self._lock = threading.Lock()

    def run(
        self, commands: list[list[str]], environments: list[dict[str, str]], cwd: Path, prelude: str, timeout: float
    ) -> list[Output]:
        """Run the commands at the same time and wait for all.

        prelude: Python statements that each process executes first. After `timeout` seconds the
        processes write their stacks and are killed: exit code -9.
        """
        assert self._server.stdin
        with tempfile.TemporaryDirectory() as folder:
            request = {"commands": commands, "environments": environments, "cwd": str(cwd), "prelude": prelude,
                       "timeout": timeout, "folder": folder}  # fmt: skip
            with self._lock:
                self._server.stdin.write(json.dumps(request).encode() + b"\n")
                self._server.stdin.flush()
            while not Path(folder, "codes").exists():
                assert self._server.poll() is None, "the server of the forks has ended"
                time.sleep(0.003)
            codes = json.loads(Path(folder, "codes").read_text())
            texts = [[Path(folder, f"{number}.{name}").read_text() for name in ("out", "err")]
                     for number in range(len(commands))]  # fmt: skip
        return [Output(code, out, err) for code, (out, err) in zip(codes, texts, strict=True)]


_MAKING = threading.Lock()
_ENVIRONMENT = dict(os.environ)  # before a test changes it


def server() -> Forked:
    """Return this process's only server; it ends with this process."""
    with _MAKING:
        return _make_server()


@cache
def _make_server() -> Forked:
    return Forked(_ENVIRONMENT)


class _Running:
    """The processes of a request."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._folder = Path(request["folder"])
        self._end = time.monotonic() + request["timeout"]
        self._living: dict[int, int] = {}
        self._codes = [0] * len(request["commands"])
        for number in range(len(self._codes)):
            child = os.fork()
            if not child:
                _run(request, number)
            self._living[child] = number

    def has_ended(self) -> bool:
        """Write the exit codes once all processes have ended; kill those that take too long."""
        for child in list(self._living):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                self._codes[self._living.pop(child)] = os.waitstatus_to_exitcode(status)
        if self._living and time.monotonic() > self._end:
            for number in (signal.SIGUSR1, signal.SIGKILL):
                for child in self._living:
                    os.killpg(child, number)
                time.sleep(1)
            for child, number in self._living.items():
                os.waitpid(child, 0)
                self._codes[number] = -signal.SIGKILL
            self._living = {}
        if self._living:
            return False
        (self._folder / ".codes").write_text(json.dumps(self._codes))
        (self._folder / ".codes").rename(self._folder / "codes")
        return True


def _serve() -> None:
    import pipeline.operate.launch
    import pipeline.preflight.doctor
    import pipeline.train.session  # noqa: F401 (import torch and ours once, before the forks)

    sys.path.remove(str(Path(__file__).parent))
    received, running = b"", []
    while True:
        if select.select([0], [], [], 0.002 if running else None)[0]:
            data = os.read(0, 1 << 20)
            if not data:
                return
            *lines, received = (received + data).split(b"\n")
            running += [_Running(json.loads(line)) for line in lines]
        running = [request for request in running if not request.has_ended()]


def _run(request: dict[str, Any], number: int) -> None:
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, name in ((1, "out"), (2, "err")):
            path = Path(request["folder"], f"{number}.{name}")
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        os.environ.clear()
        os.environ.update(request["environments"][number])
        os.chdir(request["cwd"])
        exec(request["prelude"], {})

        from pipeline.cli.main import main

        code = main(request["commands"][number])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
