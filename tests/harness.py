"""Start real runs for tests as a user starts them, watch the files they write, and kill them."""

import contextlib
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import forked
import pytest

from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.errors import RequestError
from pipeline.plan import DataSize, Plan
from pipeline.planning import make_plan
from pipeline.record.checkpoint_files import read_verified
from pipeline.supervision import process_stat
from pipeline.world import World

DONE = re.compile(
    r"^done step=(?P<step>\d+) epoch=(?P<epoch>\d+) "
    r"(?:top1=(?P<top1>[01]\.\d{4}) top5=(?P<top5>[01]\.\d{4})|map=(?P<map>[01]\.\d{4}))"
    r" images=(?P<images>\d+/\d+) weights=sha256:(?P<weights>[0-9a-f]{64})$"
)

ROOT = Path(__file__).parents[1]
make_database = forked.make_database
CPU = ("-f", "docker-compose.yml", "-f", "docker-compose.cpu.yml")
REVISION = "0123abc"
"""The revision of the container images that tests build."""
SHARING = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
"""Factor on time limits: the number of tests that run on this machine at the same time."""

_READ_AT_START = ("PYTHON", "OMP_", "MKL_", "ATEN_", "ONEDNN_", "LD_", "CUDA_", "TMPDIR")
"""Beginnings of the names of variables that Python and libraries read when they are loaded."""

DIGITS = DataSize(train_images=1437, val_images=360, num_classes=10)

# Small and fast, with all that makes bit-identical results hard: batch norm, momentum, an LR
# schedule, augmentation.
SMALL = (
    "model.arch=timm/test_efficientnet", "augment.size=16", "evaluate.resize=16", "batch.global=48",
    "run.device=cpu", "run.deterministic=true", "run.trace=true", "track.uri=none",
    "track.every=3 steps", "track.report=false",
)  # fmt: skip
SLOW = (*SMALL, "model.arch=shufflenet_v2_x0_5")
"""Another model, whose steps and saves are long enough to be hit by a fault."""


@dataclass
class Result:
    """Exit code, standard output, standard error and duration of a command."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def done(self) -> dict[str, str]:
        """Return the fields of the `done` line; fail if standard output does not end with one."""
        match = DONE.match(self.out.splitlines()[-1]) if self.out else None
        assert match, f"no done line (exit {self.code}): {self.out!r}\n{self.err[-3000:]}"
        return match.groupdict()

    @property
    def error(self) -> str:
        """Return the only error line; fail if there is a traceback."""
        assert "Traceback" not in self.err, self.err
        lines = [line for line in self.err.splitlines() if line.startswith("pipeline: ")]
        assert len(lines) == 1, self.err
        return lines[0].removeprefix("pipeline: ")

    def ended_with(self, code: int | None) -> "Result":
        """Return this result; fail if the exit code is another one. None: any will do."""
        assert code in (None, self.code), f"exit {self.code}, not {code}: {self.err[-20000:]}"
        return self


def environment(**extra: str) -> dict[str, str]:
    """Return this process's environment without MLflow's and our variables, plus `extra`."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW_", "PIPELINE_"))}
    return env | extra


def run_together(
    commands: list[list[str]],
    environments: list[dict[str, str]],
    cwd: Path | None = None,
    timeout: float = 600,
    prelude: str = "",
) -> Result:
    """Run the commands of one process group at once; return their joined output and worst code."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        group, outputs = list[forked.Process](), list[tuple[Path, Path]]()
        for number, (command, env) in enumerate(zip(commands, environments, strict=True)):
            assert forked.is_program(command) or not _needs_interpreter(env), env
            outputs.append((Path(folder, f"{number}.out"), Path(folder, f"{number}.err")))
            group.append(forked.server().start(command, environment(**env), outputs[-1], prelude, cwd))
        try:
            codes = [process.wait(start + timeout - time.monotonic()) for process in group]
        except subprocess.TimeoutExpired:
            codes = []
            for signum in (signal.SIGUSR1, signal.SIGKILL):  # the first makes them write their stacks
                for process in group:
                    kill(process.pid, signum)
                time.sleep(1)
        out, err = ("".join(path.read_text() for path in paths) for paths in zip(*outputs, strict=True))
    assert codes, f"still running after {timeout} s: {err[-20000:]}"
    return Result(max(codes, key=abs), out, err, time.monotonic() - start)


def pipeline(
    *arguments: str, cwd: Path | None = None, timeout: float = 300, code: int | None = None, **env: str
) -> Result:
    """Run a command in a new interpreter, and wait for its end. code: that it must exit with."""
    command = [sys.executable, "-m", "pipeline", *arguments]
    return run_together([command], [env], cwd, timeout).ended_with(code)


def quick(
    *arguments: str,
    cwd: Path | None = None,
    timeout: float = 300,
    prelude: str = "",
    code: int | None = None,
    **env: str,
) -> Result:
    """Run a command in a fork, and wait for its end. code: that it must exit with."""
    return run_together([["pipeline", *arguments]], [env], cwd, timeout, prelude).ended_with(code)


def bench(name: str, *arguments: str, launcher: tuple[str, ...] = (), **env: str) -> Result:
    """Run a script of benchmarks/ in a fork. launcher: a module and its arguments before it."""
    script = ROOT / f"benchmarks/{name}.py"
    return run_together([[*launcher, str(script), *arguments]], [env], timeout=300)


def docker(*arguments: str, timeout: float = 600, check: bool = True, **env: str) -> str:
    """Run a docker command; return its standard output and standard error together."""
    done = subprocess.run(
        ["docker", *arguments], cwd=ROOT, env=os.environ | env, timeout=timeout, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert not check or done.returncode == 0, f"docker {' '.join(arguments)}: {done.stdout[-3000:]}"
    return done.stdout


def _needs_interpreter(env: dict[str, str]) -> bool:
    """Return True if a variable differs that a fork does not read again."""
    changed = environment(**env).items() ^ forked.server().environment.items()
    return any(name.startswith(_READ_AT_START) and name != "PYTHONPATH" for name, _ in changed)


def torchrun(nproc: int, *options: str) -> list[str]:
    """Return a torchrun command up to the pipeline's own arguments."""
    rendezvous = options or ("--rdzv-backend=pipeline", "--rdzv-endpoint=localhost")
    launcher = [sys.executable, "-m", "torch.distributed.run", *rendezvous]
    return [*launcher, "--nproc-per-node", str(nproc), "-m", "pipeline"]


def free_ports(count: int) -> list[int]:
    """Return different TCP ports that nothing uses."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def free_port() -> int:
    return free_ports(1)[0]


@dataclass
class Job:
    """A training run that a test starts, watches, kills and starts again."""

    folder: Path
    arguments: list[str]
    nproc: int = 1
    by_torchrun: bool = False
    env: dict[str, str] = field(default_factory=dict)
    prelude: str = ""
    """Python statements that its first process executes first; forks of it keep what they did."""
    interpreter: bool = False
    """Start every process as a new interpreter, as for a user, and none as a fork."""
    process: forked.Process | None = None
    started: float = 0

    def train_words(self) -> list[str]:
        return ["train", *self.arguments, f"run.dir={self.folder}"]

    def command(self) -> list[str]:
        if self.by_torchrun:
            return [*torchrun(self.nproc)[2:], *self.train_words()]
        processes = ["--nproc", str(self.nproc)] if self.nproc > 1 else []
        return ["pipeline", *self.train_words(), *processes]

    def start(self) -> "Job":
        """Start the training; its output goes to FOLDER.out and FOLDER.err.

        It is a fork, and so is all that it starts of the pipeline, unless `interpreter` or a
        variable needs new interpreters.
        """
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.started = time.monotonic()
        self.starts_before = len(self.starts())
        for word in self.arguments:
            path = Path(word.removeprefix("track.uri=sqlite:///"))
            if word.startswith("track.uri=sqlite:") and not path.exists():
                make_database(path)  # the sender has only seconds
        command, outputs = self.command(), (self.folder.with_suffix(".out"), self.folder.with_suffix(".err"))
        if self.interpreter or _needs_interpreter(self.env):
            command = [sys.executable, "-m", *command]
        self.process = forked.server().start(command, environment(**self.env), outputs, self.prelude)
        return self

    def wait(self, timeout: float = 240, code: int | None = None) -> Result:
        """Return the result of the process; fail with the stacks in the log after `timeout` s.

        code: that it must exit with.
        """
        try:
            found = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._dump_stacks()
            self.clean()
            raise AssertionError(f"still running after {timeout} s: {self.log()[-20000:]}") from None
        return Result(found, self.output(), self.log(), time.monotonic() - self.started).ended_with(code)

    def _dump_stacks(self) -> None:
        """Make the ranks and their loader workers write their stacks to the log."""
        for pid in (pid for rank in self.ranks() for pid in (rank, *children(rank))):
            if " sync " not in command_line(pid):
                kill(pid, signal.SIGUSR1)
        time.sleep(1)

    def run(self, code: int | None = None) -> Result:
        return self.start().wait(code=code)

    def send(self, number: int) -> None:
        kill(self.process.pid, number)

    def stop(self, number: int = signal.SIGTERM, code: int | None = None) -> Result:
        """Send a signal, and return the result once all has ended."""
        self.send(number)
        return self.wait(code=code)

    def finished(self) -> "Job":
        """Train to the end, which must succeed; return the run."""
        self.run(code=0)
        return self

    def run_in_forks(self, code: int | None = None) -> Result:
        """Train to the end, each rank in a fork, without a launcher."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        group = ranks_of(self) if self.nproc > 1 else [self.env]
        commands = [["pipeline", *self.train_words()]] * len(group)
        result = run_together(commands, group, None, 240, self.prelude)
        self.folder.with_suffix(".out").write_text(result.out)
        self.folder.with_suffix(".err").write_text(result.err)
        return result.ended_with(code)

    def output(self) -> str:
        """Return the standard output of the last start, which is its `done` line."""
        return self.folder.with_suffix(".out").read_text()

    def log(self) -> str:
        path = self.folder.with_suffix(".err")
        return path.read_text() if path.exists() else ""

    def trace(self) -> list[dict[str, Any]]:
        """Return the rows of trace.jsonl: one for each training step."""
        return read_rows(self.folder / "trace.jsonl")

    def assert_each_sample_once(self) -> None:
        """Assert that the trace has each (epoch, sample id) once, and each step once, in order."""
        trace = self.trace()
        assert [row["step"] for row in trace] == list(range(1, len(trace) + 1))
        seen = [(row["epoch"], sample) for row in trace for sample in row["ids"]]
        assert len(seen) == len(set(seen)) == 48 * len(trace), "the batch of SMALL"

    def starts(self) -> list[dict[str, Any]]:
        """Return a journal row for each time that training started or resumed."""
        return [row for row in read_rows(self.folder / "journal.jsonl") if row.get("event") == "started"]

    def step(self) -> int:
        """Return the last step in the trace, 0 before the first."""
        with contextlib.suppress(FileNotFoundError), open(self.folder / "trace.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            *_, last, _ = b"", *file.read().split(b"\n")
            return int(json.loads(last)["step"]) if last else 0
        return 0

    def wait_for_step(self, step: int, timeout: float = 120) -> "Job":
        """Wait until this start, not an earlier one, has made the step; return the run."""
        self.wait_for_start(timeout)
        self.wait_until(lambda: self.step() >= step, f"step {step}", timeout)
        return self

    def wait_for_start(self, timeout: float = 120) -> None:
        """Wait until this start has loaded its state and begins to train."""
        self.wait_until(lambda: len(self.starts()) > self.starts_before, "start", timeout)

    def wait_until(self, condition: Any, what: str, timeout: float = 120, pause: float = 0.005) -> Any:
        """Return the condition's first true value; fail if the process ends or at the timeout."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if found := condition():
                return found
            code = self.process.poll()
            assert code is None, f"ended with {code} before {what}: {self.log()[-3000:]}"
            time.sleep(pause)
        self._dump_stacks()
        raise AssertionError(f"no {what} in {timeout} s: {self.log()[-20000:]}")

    def is_saving(self) -> bool:
        folder = self.folder / "checkpoints"
        return folder.is_dir() and any(name.startswith(".") for name in os.listdir(folder))

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks, in rank order."""
        if self.nproc == 1 and not self.by_torchrun:
            return [self.process.pid]
        found = [(variable(pid, "RANK"), pid) for pid in children(self.process.pid)]
        return [pid for _, pid in sorted((int(rank), pid) for rank, pid in found if rank is not None)]

    def workers(self, rank: int) -> list[int]:
        """Return the loader workers of a rank. rank: its process id."""
        return [pid for pid in children(rank) if " train " in command_line(pid)]

    def processes(self) -> list[int]:
        """Return all living processes of this run: launcher, ranks, loader workers, sender."""
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]
        return [pid for pid in pids if str(self.folder) in command_line(pid)]

    def wait_gone(self, seconds: float) -> None:
        """Fail if a process of this run is alive after `seconds` (and more, on a busy machine)."""
        try:
            wait_until(lambda: not self.processes(), "end of all processes", seconds * SHARING + 10)
        finally:
            self.clean()
        self.process.wait(5)

    def kill_at(self, step: int) -> None:
        """Kill all ranks at once when this start has made the step."""
        self.wait_for_step(step)
        for rank in self.ranks():
            kill(rank, signal.SIGKILL)
        self.wait_gone(5)

    def clean(self) -> None:
        for pid in self.processes():
            kill(pid, signal.SIGKILL)

    def journal(self, *prefixes: str) -> list[tuple[int, str, float]]:
        """Return (step, key, value) of each metric whose key has a prefix, in the order written."""
        rows = read_rows(self.folder / "journal.jsonl")
        metrics = [(row["step"], *item) for row in rows for item in row.get("metrics", {}).items()]
        return [metric for metric in metrics if metric[1].startswith(prefixes)]

    def checkpoints(self) -> list[Path]:
        return sorted((self.folder / "checkpoints").glob("step-*.pt"))

    def contents(self, step: int | None = None) -> dict[str, Any]:
        """Return the contents of the newest checkpoint, or of that of a step."""
        from pipeline.record.checkpoint_contents import decode  # imports torch

        found = [path for path in self.checkpoints() if step is None or f"-{step:08}." in path.name]
        return decode(read_verified(found[-1]), found[-1])


MakeJob = Callable[..., Job]
"""The fixture `job`: makes a run with the words and options that it is given."""


def two_nodes(job: Job, hosts: tuple[str, ...] = ()) -> Result:
    """Run the job with two torchrun agents, each with half of the processes.

    hosts: names, which need unprivileged user namespaces.
    """
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1")
    agent = [*torchrun(job.nproc // 2, "--nnodes=2", *rendezvous), *job.train_words()]
    if not hosts:
        return run_together([agent[2:]] * 2, [job.env] * 2)
    on_host = ["unshare", "--user", "--map-root-user", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"']
    return run_together([[*on_host, host, *agent] for host in hosts], [job.env] * 2)


def by_hand(job: Job) -> Result:
    """Run the job's processes without a launcher; variables tell each its rank and the address."""
    return run_together([[sys.executable, "-m", "pipeline", *job.train_words()]] * job.nproc, ranks_of(job))


def ranks_of(job: Job) -> list[dict[str, str]]:
    """Return the variables of each rank of a job without a launcher."""
    size, address = str(job.nproc), f"tcp://127.0.0.1:{free_port()}"
    group = {**job.env, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "INIT_METHOD": address}
    return [{**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(job.nproc)]


_SPAWNING = """\
import os, sys
import torch.multiprocessing
from pipeline.cli.main import main

def train(rank, words):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    sys.exit(main(words))

if __name__ == "__main__":
    torch.multiprocessing.spawn(train, (sys.argv[1:],), int(os.environ["WORLD_SIZE"]))
"""


def spawned(job: Job) -> Result:
    """Run the job's processes with torch.multiprocessing.spawn, as a user's own program can."""
    path = job.folder.with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_SPAWNING)
    return run_together([[sys.executable, str(path), *job.train_words()]], [ranks_of(job)[0]])


def assert_resumes(folder: Path, words: list[str], stop_at: int, nproc: int = 2, prelude: str = "") -> Job:
    """Assert that a run stopped at a step resumes to the same end; return the uninterrupted run."""
    uninterrupted = Job(folder / "uninterrupted", words, nproc=nproc, prelude=prelude)
    expected = uninterrupted.run_in_forks().done
    resumed = Job(folder / "resumed", [*words, f"train.max_steps={stop_at}"], nproc=nproc, prelude=prelude)
    assert resumed.run_in_forks().done["step"] == str(stop_at)
    resumed.arguments.pop()
    assert resumed.run_in_forks().done == expected
    assert resumed.trace() == uninterrupted.trace()
    return uninterrupted


def plan_of(
    *words: str, recipe: str = "digits", data: DataSize = DIGITS, size: int = 1, **world: Any
) -> tuple[Config, Plan]:
    """Return the configuration of a request, and its plan for that many processes."""
    config = load(recipe, list(words))
    return config, make_plan(config, World(**{"size": size, "local_size": size, **world}), data)


def save_checkpoint(run: Path, contents: dict[str, Any], step: int) -> Path:
    """Write a checkpoint into a run's folder, and return its path."""
    from pipeline.addons.run.journal import checkpoint_of_step
    from pipeline.record.checkpoint import CheckpointWriter  # imports torch
    from pipeline.record.folder import RunFolder

    folder = RunFolder(run)
    folder.checkpoints.mkdir(parents=True, exist_ok=True)
    writer = CheckpointWriter(folder, 1, print, lambda _: None)
    writer.save(contents, step, None)
    writer.wait()
    path = checkpoint_of_step(folder.checkpoints, step)
    assert path, "the checkpoint was not saved, see above"
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a JSON-lines file, which may not exist yet."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def contents_of(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return inode, time and bytes of each file but mlflow.lock, which its sender may refresh."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "mlflow.lock"]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def assert_same(run: Job, expected: Job) -> None:
    """Assert that a finished run has the weights, samples and figures of an undisturbed one."""
    ours, theirs = (
        {row["line"] for row in read_rows(job.folder / "journal.jsonl") if row.get("status") == "FINISHED"}
        for job in (run, expected)
    )
    assert len(ours) == 1
    assert ours == theirs
    run.assert_each_sample_once()
    assert run.trace() == expected.trace()
    assert run.journal("train/", "val/") == expected.journal("train/", "val/")


def wait_until(condition: Callable[[], Any], what: str, timeout: float = 120) -> Any:
    """Return the condition's first true value; fail after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < end, f"no {what} in {timeout} s"
        time.sleep(0.02)
    return found


def refused(call: Callable[[], object]) -> str:
    """Return the one line with which a call is refused."""
    with pytest.raises(RequestError) as refusal:
        call()
    (line,) = str(refusal.value).splitlines()
    return line


def in_ranks(function: Callable[..., object], size: int, *arguments: object) -> list[int | None]:
    """Call `function(rank, address, *arguments)` in forks of this process. Return exit codes."""
    address = f"tcp://127.0.0.1:{free_port()}"
    process = multiprocessing.get_context("fork").Process  # of torch, which this process has imported
    ranks = [process(target=function, args=(rank, address, *arguments)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return [rank.exitcode for rank in ranks]


def kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def before_each(function: str, *statements: str) -> str:
    """Return a prelude: the statements are executed before each call of a function.

    They see the call's arguments as `words`, and how many there have been as `calls`.
    """
    place, _, name = function.rpartition(".")
    body = "\n    ".join(statements)
    return f"""\
import os, signal, threading, time
from pkgutil import resolve_name

owner = resolve_name({place!r})
inner, calls = owner.{name}, 0

def call(*words, **options):
    global calls
    calls += 1
    {body}
    return inner(*words, **options)

owner.{name} = call
"""


def freeze(pids: list[int]) -> None:
    """Send SIGSTOP, and return once no thread of the processes runs any more."""
    for pid in pids:
        kill(pid, signal.SIGSTOP)
    threads = [int(path.name) for pid in pids for path in Path(f"/proc/{pid}/task").glob("*")]
    wait_until(lambda: all(state(thread) in "TZ" for thread in threads), "end of their system calls")


def state(pid: int) -> str:
    """Return the state of a process or thread; that of a zombie if it has ended."""
    try:
        return process_stat(pid)[0]
    except OSError:
        return "Z"


def command_line(pid: int) -> str:
    """Return a process's command line; "" if it has ended or is a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Return the addresses and ports at which processes listen, see proc_pid_net(5)."""
    found, links = set(), set()
    for pid in (pids := list(pids)):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                links.add(os.readlink(path))
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pids[0]}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in links:
                address, port = local.split(":")
                words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


def children(pid: int) -> list[int]:
    """Return the living children of a process."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            state, parent = process_stat(int(name))[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(name))
    return found


def variable(pid: int, name: str) -> str | None:
    """Return a variable of a process's environment; None if it has none or has ended."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    prefix = f"{name}=".encode()
    return next((entry.removeprefix(prefix).decode() for entry in entries if entry.startswith(prefix)), None)
