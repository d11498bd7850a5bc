"""Run commands in forks of a process that has imported torch: a start takes milliseconds.

For tests that need no new interpreter. What a fork starts of the pipeline, such as ranks or
MLflow's sender, is a fork, too. A command is `pipeline`, `torch.distributed.run` or the path of a
script, and its arguments. Any other is a program, which is executed.
"""

import atexit
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import itertools
import json
import logging
import os
import runpy
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import pipeline

_COMMAND_BYTES = 8192
"""Bytes of the server's command line, over which a fork writes its own."""
_ENVIRONMENT = dict(os.environ)  # before a test changes it
_LIBRARIES = """
    PIL.JpegImagePlugin alembic.config alembic.command matplotlib.figure mlflow.pyfunc mlflow.pytorch networkx
    mlflow.store.tracking.sqlalchemy_workspace_store mlflow.tracing.processor.otel opentelemetry.sdk.metrics
    sqlalchemy.dialects.sqlite sympy.tensor.tensor timm torch._dynamo torch._export.non_strict_utils
    boto3 torch._inductor.ir torch.distributed.run torch.export._trace torch.export.pt2_archive._package
"""
"""Imported before the forks, with all of the pipeline."""


def is_program(command: list[str]) -> bool:
    return command[0] not in ("pipeline", "torch.distributed.run") and not command[0].endswith(".py")


class Process:
    """A started command, with the part of `subprocess.Popen` that tests need."""

    def __init__(self, pid: int, code: Path) -> None:
        """code: the file to which the server writes the exit code."""
        self.pid, self._code = pid, code
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal, or None while it runs."""
        if self.returncode is None and self._code.exists():
            self.returncode = int(self._code.read_text())
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
        room = {"ROOM": " " * 32768}  # over which a fork writes its environment
        room["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"  # forks are made a third faster
        self._server = subprocess.Popen(
            [sys.executable, __file__, " " * _COMMAND_BYTES], stdin=subprocess.PIPE, env=environment | room
        )
        self._lock = threading.Lock()
        self._folder = tempfile.TemporaryDirectory()
        self._numbers = itertools.count()

    def start(
        self,
        command: list[str],
        environment: dict[str, str],
        outputs: tuple[Path, Path],
        prelude: str = "",
        cwd: Path | None = None,
    ) -> Process:
        """Start a command.

        It leads a session of its own, and its command line shows the command. outputs: the files of
        standard output and standard error. prelude: Python statements that it executes first.
        """
        assert len(os.fsencode(" ".join(command))) < _COMMAND_BYTES
        files = Path(self._folder.name, str(next(self._numbers)))
        pid, code = files.with_suffix(".pid"), files.with_suffix(".code")
        request = {
            "command": command, "environment": environment, "prelude": prelude,
            "outputs": [str(path.absolute()) for path in outputs], "cwd": str(cwd or Path.cwd()),
            "pid": str(pid), "code": str(code),
        }  # fmt: skip
        with self._lock:
            self._server.stdin.write(json.dumps(request).encode() + b"\n")
            self._server.stdin.flush()
        while not pid.exists():
            assert self._server.poll() is None, "the server of the forks has ended"
            time.sleep(0.003)
        return Process(int(pid.read_text()), code)


_MAKING = threading.Lock()
_SERVERS: list[Forked] = []


def server() -> Forked:
    """Return this process's only server; it ends with this process."""
    with _MAKING:  # threads may ask for it at once
        if not _SERVERS:
            _SERVERS.append(Forked(_ENVIRONMENT))
        return _SERVERS[0]


def make_database(path: Path) -> None:
    """Make MLflow's tables in an SQLite file that has none: that takes seconds, once."""
    made = Path(tempfile.gettempdir(), "mlflow.db")  # see conftest.py: one folder for all workers
    with open(made.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            words = ["-m", "mlflow", "db", "upgrade", f"sqlite:///{made}"]
            subprocess.run([sys.executable, *words], check=True, capture_output=True)
    with closing(sqlite3.connect(made)) as source, closing(sqlite3.connect(path)) as target:
        if not target.execute("SELECT * FROM sqlite_master").fetchone():
            source.backup(target)


def _serve() -> None:
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # it would start threads
    from mlflow.store.db import utils
    from mlflow.utils import requirements_utils

    root = Path(pipeline.__file__).parents[1]
    found = (".".join(path.relative_to(root).with_suffix("").parts) for path in root.glob("pipeline/**/*.py"))
    for name in (*_LIBRARIES.split(), *found):
        if "__" not in name and "store.r" not in name:  # forks close the descriptor of `store.ranges`
            importlib.import_module(name)
    requirements_utils._init_packages_to_modules_map()  # it looks at every file of every package
    make_tables = utils._initialize_tables
    utils._initialize_tables = lambda engine: (
        make_database(engine.url.database) if engine.dialect.name == "sqlite" else make_tables(engine)
    )
    subprocess._fork_exec = _start  # type: ignore[attr-defined]
    gc.freeze()  # a fork that collects garbage would copy all pages
    sys.path.remove(str(Path(__file__).parent))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks of this process
    for line in os.fdopen(os.dup(0)):
        if not os.fork():
            _attend(json.loads(line))


def _attend(request: dict[str, Any]) -> NoReturn:
    """Fork for the command of a request, and write its exit code when it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if not child:
        _run(request)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, status = os.waitpid(child, 0)
    with suppress(FileNotFoundError):  # the tests have ended
        _write(Path(request["code"]), str(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _write(path: Path, text: str) -> None:
    """Write a file that is there completely or not at all."""
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


def _run(request: dict[str, Any]) -> NoReturn:
    """Run the command of a request in this fork, and exit."""
    try:
        os.setsid()
        _become(request["command"], request["environment"])
        _write(Path(request["pid"]), str(os.getpid()))
        for descriptor, path in enumerate([os.devnull, *request["outputs"]]):
            writing = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC
            os.dup2(os.open(path, writing if descriptor else os.O_RDONLY), descriptor)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.chdir(request["cwd"])
        exec(request["prelude"], {})
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    _execute(request["command"])


_execute_program = subprocess._fork_exec  # type: ignore[attr-defined]
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def _start(words: list[str], *others: Any) -> int:
    """Start a process for `subprocess.Popen`: a fork if it is one of the pipeline, or a script."""
    command = [*itertools.dropwhile(lambda word: word in ("-u", "-m"), words[1:])] or [""]
    if words[0] != sys.executable or is_program(command):
        return _execute_program(words, *others)
    cwd, variables, preexec = others[3], others[4], others[20]
    entries = [os.fsdecode(entry).partition("=") for entry in variables or ()]
    environment = {name: value for name, _, value in entries} if variables else dict(os.environ)
    # this process's handlers are not the command's
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    pid = os.fork()
    if not pid:
        try:
            _become(command, environment)
            for number, stream in enumerate((others[5], others[8], others[10])):
                if stream >= 0:
                    os.dup2(stream, number)
            if cwd is not None:
                os.chdir(cwd)
            if others[14]:
                os.setsid()
            if preexec:
                preexec()
            _leave_parent()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        _execute(command)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid


def _leave_parent() -> None:
    """Give up what a new interpreter has not: connections, and handlers of signals."""
    for number in _HANDLED:
        if signal.getsignal(number) != signal.SIG_IGN:  # a new interpreter, too, keeps that
            signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.disable()
    atexit._clear()
    logging.getLogger("torch.distributed.elastic").setLevel(logging.NOTSET)
    np.random.seed()  # as in a new interpreter, nothing may depend on numpy's global generator
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


def _execute(command: list[str]) -> NoReturn:
    """Run a command, and exit."""
    if is_program(command):
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)
    code = 1
    try:
        for folder in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
            if folder and folder not in sys.path:
                sys.path.insert(0, folder)
        if command[0].endswith(".py"):
            sys.argv = command
            sys.path.insert(0, str(Path(command[0]).parent))
            runpy.run_path(command[0], run_name="__main__")
            main = lambda _: 0  # noqa: E731 (it has ended without sys.exit)
        elif command[0] == "torch.distributed.run":
            from torch.distributed.run import main
        else:
            from pipeline.cli.main import main

        code = main(command[1:]) or 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    if command[0] == "pipeline" and "RANK" in os.environ:  # as pipeline.cli.main.command does
        sys.stdout.flush()
        os._exit(code)
    try:
        threading._shutdown()  # as the interpreter does, which also frees all modules: that takes a second
        atexit._run_exitfuncs()
        sys.stdout.flush()
    finally:
        os._exit(code)


def _become(command: list[str], environment: dict[str, str]) -> None:
    """Take the environment. Make /proc/PID/cmdline and environ show it and the command.

    By them, tests find the processes of a run.
    """
    os.environ.clear()  # the C library's variables point to the bytes that are written over
    os.environ.update(environment)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    words = command if is_program(command) else [sys.executable, "-m", *command]
    variables = [f"{name}={value}" for name, value in environment.items()]
    # arg_start, arg_end, env_start and env_end of proc(5)
    for (start, end), strings in zip(((45, 46), (47, 48)), (words, variables), strict=True):
        room = int(fields[end]) - int(fields[start])
        text = os.fsencode("\0".join(strings))
        assert len(text) <= room, strings
        ctypes.memmove(int(fields[start]), text.ljust(room, b"\0"), room)


if __name__ == "__main__":
    _serve()
