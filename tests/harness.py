"""Real runs for tests: processes started as a user starts them, watched through what they write, killed by signals."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DONE = re.compile(
    r"^done step=(?P<step>\d+) epoch=(?P<epoch>\d+) top1=(?P<top1>[01]\.\d{4}) top5=(?P<top5>[01]\.\d{4})"
    r" images=(?P<images>\d+/\d+) weights=sha256:(?P<weights>[0-9a-f]{64})$"
)

SHARING = 2 if "PYTEST_XDIST_WORKER" in os.environ else 1
"""Tests that share the machine: so many times the promised seconds are allowed."""

# small and quick, but with all that makes exactness hard: batch norm, momentum, a schedule,
# augmentation
SMALL = (
    "model.arch=shufflenet_v2_x0_5", "batch.global=48", "run.device=cpu", "run.deterministic=true", "run.trace=true",
    "track.uri=none", "track.every=3 steps", "track.report=false",
)  # fmt: skip


@dataclass
class Result:
    code: int
    out: str
    err: str
    seconds: float

    @property
    def done(self) -> dict[str, str]:
        """The fields of the last line of standard output; fails if it is not a `done` line."""
        match = DONE.match(self.out.splitlines()[-1]) if self.out else None
        assert match, f"no done line (exit {self.code}): {self.out!r}\n{self.err[-3000:]}"
        return match.groupdict()

    @property
    def error(self) -> str:
        """The one line of an error; fails if there is a traceback."""
        assert "Traceback" not in self.err, self.err
        lines = [line for line in self.err.splitlines() if line.startswith("pipeline: ")]
        assert len(lines) == 1, self.err
        return lines[0].removeprefix("pipeline: ")


def environment(**extra: str) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW_", "PIPELINE_"))}
    return env | extra


def pipeline(*arguments: str, cwd: Path | None = None, timeout: float = 300, **env: str) -> Result:
    """Run a command to its end."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", *arguments],
        capture_output=True, text=True, timeout=timeout, cwd=cwd, env=environment(**env), check=False,
    )  # fmt: skip
    return Result(done.returncode, done.stdout, done.stderr, time.monotonic() - start)


def torchrun(nproc: int, *options: str) -> list[str]:
    agent = [sys.executable, "-m", "torch.distributed.run", *(options or ("--standalone",))]
    return [*agent, "--nproc-per-node", str(nproc), "-m", "pipeline"]


def free_port() -> int:
    """Nobody's at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def side_by_side(commands: list[list[str]], places: list[dict[str, str]]) -> Result:
    """Commands that form one group, each with its variables: what all of them said, once all have ended well."""
    start = time.monotonic()
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**place))
        for command, place in zip(commands, places, strict=True)
    ]
    try:
        answers = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    out, err = ("".join(texts) for texts in zip(*answers, strict=True))
    return Result(max(map(abs, codes)), out, err, time.monotonic() - start)


@dataclass
class Job:
    """A training in a folder, started, watched, hurt and started again."""

    folder: Path
    arguments: list[str]
    nproc: int = 1
    by_torchrun: bool = False
    env: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None
    started: float = 0

    def train_words(self) -> list[str]:
        return ["train", *self.arguments, f"run.dir={self.folder}"]

    def start(self) -> "Job":
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        if self.by_torchrun:
            command = [*torchrun(self.nproc), *self.train_words()]
        else:
            processes = ["--nproc", str(self.nproc)] if self.nproc > 1 else []
            command = [sys.executable, "-m", "pipeline", *self.train_words(), *processes]
        self.started = time.monotonic()
        self._starts = self._count_starts()
        self._out = open(self.folder.with_suffix(".out"), "w+")  # noqa: SIM115 — lives as long as the process
        self._err = open(self.folder.with_suffix(".err"), "w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            command, stdout=self._out, stderr=self._err, text=True, env=environment(**self.env), start_new_session=True
        )
        return self

    def wait(self, timeout: float = 240) -> Result:
        assert self.process
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._show_stacks()
            self.clean()
            raise AssertionError(f"still running after {timeout} s: {self.log()[-20000:]}") from None
        seconds = time.monotonic() - self.started
        self._out.seek(0)
        return Result(code, self._out.read(), self.log(), seconds)

    def _show_stacks(self) -> None:
        """Have the ranks and their workers say in the log where they hang."""
        for rank in self.ranks():
            for pid in (rank, *children(rank)):
                if " sync " not in command_line(pid):
                    kill(pid, signal.SIGUSR1)
        time.sleep(1)

    def run(self) -> Result:
        return self.start().wait()

    def log(self) -> str:
        return self.folder.with_suffix(".err").read_text()

    def step(self) -> int:
        """The last step that the trace says was made."""
        rows = read_rows(self.folder / "trace.jsonl")
        return rows[-1]["step"] if rows else 0

    def wait_for_step(self, step: int, timeout: float = 120) -> int:
        """Wait until this start, not one before it, has made the step."""
        self.wait_for_start(timeout)
        return self.wait_until(lambda: self.step() if self.step() >= step else 0, f"step {step}", timeout)

    def wait_for_start(self, timeout: float = 120) -> None:
        """Wait until this start has loaded its state and is about to train."""
        self.wait_until(lambda: self._count_starts() > self._starts, "start", timeout)

    def _count_starts(self) -> int:
        return sum(row.get("event") == "started" for row in read_rows(self.folder / "journal.jsonl"))

    def wait_until(self, condition: Any, what: str, timeout: float = 120, pause: float = 0.005) -> Any:
        assert self.process
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            found = condition()
            if found:
                return found
            assert self.process.poll() is None, f"ended with {self.process.poll()} before {what}: {self.log()[-3000:]}"
            time.sleep(pause)
        self._show_stacks()
        raise AssertionError(f"no {what} in {timeout} s: {self.log()[-20000:]}")

    def saving(self) -> bool:
        """Whether a checkpoint is being written right now."""
        folder = self.folder / "checkpoints"
        return folder.is_dir() and any(name.startswith(".") for name in os.listdir(folder))

    def ranks(self) -> list[int]:
        """Process ids of the ranks, in rank order."""
        assert self.process
        if self.nproc == 1 and not self.by_torchrun:
            return [self.process.pid]
        found = {}
        for pid in children(self.process.pid):
            rank = variable(pid, "RANK")
            if rank is not None:
                found[int(rank)] = pid
        return [found[rank] for rank in sorted(found)]

    def processes(self) -> list[int]:
        """Everything alive that belongs to this run: launcher, ranks, loader workers, sender."""
        return [pid for pid in all_processes() if str(self.folder) in command_line(pid)]

    def wait_gone(self, seconds: float) -> None:
        """Fails if anything of this run is alive after `seconds`; after twice as long where two tests share the machine."""
        end = time.monotonic() + seconds * SHARING
        while self.processes():
            if time.monotonic() > end:
                left = [(pid, command_line(pid)) for pid in self.processes()]
                self.clean()
                raise AssertionError(f"alive after {seconds} s: {left}")
            time.sleep(0.05)
        assert self.process
        self.process.wait(5)

    def clean(self) -> None:
        for pid in self.processes():
            kill(pid, signal.SIGKILL)

    def journal(self, *prefixes: str) -> list[tuple[int, str, float]]:
        """(step, key, value) of each point whose key begins so, in the order written."""
        return [
            (row["step"], key, value)
            for row in read_rows(self.folder / "journal.jsonl")
            for key, value in row.get("metrics", {}).items()
            if key.startswith(prefixes)
        ]

    def checkpoints(self) -> list[Path]:
        return sorted((self.folder / "checkpoints").glob("step-*.pt"))


def two_nodes(job: Job, hosts: tuple[str, ...] = ()) -> Result:
    """The job on two "nodes", whose names may be given: a torchrun agent each, with half of its processes."""
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1")
    agent = torchrun(job.nproc // 2, "--nnodes=2", *rendezvous)
    places = [on_host(host) for host in hosts] or [[], []]
    return side_by_side([[*place, *agent, *job.train_words()] for place in places], [job.env] * 2)


def on_host(name: str) -> list[str]:
    """What starts a command as if on a machine of that name; needs a system that gives its users namespaces."""
    return ["unshare", "--user", "--map-root-user", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', name]


def by_hand(job: Job) -> Result:
    """The job's processes started one by one, each told its place and where to meet."""
    place = {
        "WORLD_SIZE": str(job.nproc),
        "LOCAL_WORLD_SIZE": str(job.nproc),
        "INIT_METHOD": f"tcp://127.0.0.1:{free_port()}",
    }
    ranks = [{**job.env, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(job.nproc)]
    return side_by_side([[sys.executable, "-m", "pipeline", *job.train_words()]] * job.nproc, ranks)


def spawned(job: Job) -> Result:
    """The job's processes started by torch.multiprocessing.spawn, as a program of one's own would."""
    program = f"""\
import os, sys
import torch.multiprocessing
from pipeline.cli.main import main

def train(rank, words):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    sys.exit(main(words))

if __name__ == "__main__":
    os.environ.update(WORLD_SIZE="{job.nproc}", LOCAL_WORLD_SIZE="{job.nproc}", INIT_METHOD="tcp://127.0.0.1:{free_port()}")
    torch.multiprocessing.spawn(train, (sys.argv[1:],), {job.nproc})
"""
    path = job.folder.with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(program)
    return side_by_side([[sys.executable, str(path), *job.train_words()]], [job.env])


def assert_resumes(folder: Path, words: list[str], stop_at: int, nproc: int = 2) -> Job:
    """A run that was stopped at a step and gone on with ends as the one in one piece, which is returned."""
    whole = Job(folder / "whole", words, nproc=nproc)
    expected = whole.run().done
    parts = Job(folder / "parts", [*words, f"train.max_steps={stop_at}"], nproc=nproc)
    assert parts.run().done["step"] == str(stop_at)
    parts.arguments.pop()
    assert parts.run().done == expected
    assert read_rows(parts.folder / "trace.jsonl") == read_rows(whole.folder / "trace.jsonl")
    return whole


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a JSON-lines file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def assert_each_sample_once(trace: list[dict[str, Any]], global_batch: int) -> None:
    """Each (epoch, sample id) once, each step once and in order."""
    assert [row["step"] for row in trace] == list(range(1, len(trace) + 1))
    seen = [(row["epoch"], sample) for row in trace for sample in row["ids"]]
    assert len(seen) == len(set(seen)) == global_batch * len(trace)


def kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def all_processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]


def command_line(pid: int) -> str:
    """Empty for a process that is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def children(pid: int) -> list[int]:
    found = []
    for other in all_processes():
        try:
            fields = Path(f"/proc/{other}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(other)
    return found


def variable(pid: int, name: str) -> str | None:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((entry.decode().partition("=")[2] for entry in entries if entry.startswith(f"{name}=".encode())), None)
