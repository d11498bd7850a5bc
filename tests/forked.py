"""Run commands in forks of a process that has imported torch: a start takes milliseconds.

For tests that need no new interpreter.
"""

import atexit
import ctypes
import gc
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

_COMMAND_BYTES = 8192
"""Bytes of the server's command line, over which a fork writes its own."""


@dataclass
class Output:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


class Process:
    """A started command, with the part of `subprocess.Popen` that tests need."""

    def __init__(self, folder: "tempfile.TemporaryDirectory[str]", pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._folder = folder

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal, or None while it runs."""
        codes = Path(self._folder.name, "codes")
        if self.returncode is None and codes.exists():
            (self.returncode,) = json.loads(codes.read_text())
            self._folder.cleanup()
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.003)
        return code


class Forked:
    """A process that has imported torch, and forks for each command. Threads may share it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        command = [sys.executable, __file__, " " * _COMMAND_BYTES]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        self._lock = threading.Lock()

    def run(
        self, commands: list[list[str]], environments: list[dict[str, str]], cwd: Path, prelude: str, timeout: float
    ) -> list[Output]:
        """Run the commands at the same time and wait for all.

        prelude: Python statements that each process executes first. After `timeout` seconds the
        processes write their stacks and are killed: exit code -9.
        """
        with tempfile.TemporaryDirectory() as folder:
            outputs = [[f"{folder}/{number}.{name}" for name in ("out", "err")] for number in range(len(commands))]
            self._request(
                commands=[["pipeline", *command] for command in commands], environments=environments, cwd=str(cwd),
                prelude=prelude, outputs=outputs, timeout=timeout, folder=folder,
            )  # fmt: skip
            codes = json.loads(self._wait_for(Path(folder, "codes")))
            texts = [[Path(path).read_text() for path in paths] for paths in outputs]
        return [Output(code, out, err) for code, (out, err) in zip(codes, texts, strict=True)]

    def start(self, command: list[str], environment: dict[str, str], prelude: str, out: Path, err: Path) -> Process:
        """Start a command, its module first; its output goes to the files `out` and `err`.

        It leads a session of its own, and its command line shows the command.
        """
        assert len(" ".join(command).encode()) < _COMMAND_BYTES, command
        folder = tempfile.TemporaryDirectory()
        self._request(
            commands=[command], environments=[environment], cwd=os.getcwd(), prelude=prelude,
            outputs=[[str(out), str(err)]], timeout=None, folder=folder.name,
        )  # fmt: skip
        return Process(folder, int(self._wait_for(Path(folder.name, "pid"))))

    def _request(self, **request: Any) -> None:
        assert self._server.stdin
        with self._lock:
            self._server.stdin.write(json.dumps(request).encode() + b"\n")
            self._server.stdin.flush()

    def _wait_for(self, path: Path) -> str:
        while not path.exists():
            assert self._server.poll() is None, "the server of the forks has ended"
            time.sleep(0.003)
        return path.read_text()


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
        self._end = time.monotonic() + request["timeout"] if request["timeout"] else math.inf
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
        with suppress(FileNotFoundError):  # the test has forgotten this process
            _write(self._folder / "codes", json.dumps(self._codes))
        return True


def _write(path: Path, text: str) -> None:
    """Write a file that is there completely or not at all."""
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


def _serve() -> None:
    import torch.distributed.run  # noqa: F401 (import torch and ours once, before the forks)

    import pipeline.operate.launch
    import pipeline.preflight.doctor
    import pipeline.train.session  # noqa: F401

    gc.freeze()  # a fork that collects garbage would copy all pages
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


def _run(request: dict[str, Any], number: int) -> NoReturn:
    """Run a command in this fork, and exit."""
    code = 1
    try:
        os.setsid()
        if request["timeout"] is None:
            _show(request["commands"][number])
            _write(Path(request["folder"], "pid"), str(os.getpid()))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor, path in zip((1, 2), request["outputs"][number], strict=True):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC), descriptor)
        os.environ.clear()
        os.environ.update(request["environments"][number])
        os.chdir(request["cwd"])
        command = request["commands"][number]
        exec(request["prelude"], {})

        if command[0] == "torch.distributed.run":
            from torch.distributed.run import main
        else:
            from pipeline.cli.main import main

        code = main(command[1:]) or 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    try:
        threading._shutdown()  # as the interpreter does, which also frees all modules: that takes a second
        atexit._run_exitfuncs()
        sys.stdout.flush()
    finally:
        os._exit(code)


def _show(command: list[str]) -> None:
    """Make /proc/PID/cmdline show the command: by it, tests find the processes of a run."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    words = "\0".join([sys.executable, "-m", *command]).encode()
    ctypes.memmove(start, words.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    _serve()
