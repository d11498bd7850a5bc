"""Run one training as processes or in network namespaces, and inject faults there.

Tests use the interface of `Cluster`. After a fault the training comes back as it does in that
environment: the user repeats the command, or the Job controller (simulated by `pods`) replaces the
node.
"""

import random
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from harness import SMALL, Job, assert_each_sample_once, children, command_line, kill, read_rows

from faults.pods import Pods, rendered

EVERY = 7
WORDS = (*SMALL, f"checkpoint.every={EVERY} steps", "track.uri=none")


class Cluster(ABC):
    """A training to start, disturb and wait for; `run` reads the files it writes."""

    run: Job
    kinds: ClassVar[dict[str, str]]
    """The faults that can be injected here -> their row of the fault matrix."""

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def kill(self, kind: str, draw: random.Random) -> None:
        """Send SIGKILL, and restart by hand where nothing else restarts the training."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for a successful end."""

    def run_undisturbed(self) -> None:
        """Train from the start to the end."""
        self.start()
        self.wait()

    @abstractmethod
    def close(self) -> None:
        """Remove all processes and namespaces."""

    @abstractmethod
    def log(self) -> str: ...

    def wait_for(self, condition: Callable[[], bool], what: str, timeout: float = 240) -> None:
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, f"no {what} in {timeout} s:\n{self.log()[-8000:]}"
            time.sleep(0.02)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: self.run.step() >= step, f"step {step}")

    def inject(self, kind: str, draw: random.Random) -> float:
        """Inject a fault and wait for the recovery; return the seconds until the next step."""
        before, starts, start = self.run.step(), len(self.run.starts()), time.monotonic()
        if kind == "cut":
            self.cut(5, draw)
        else:
            self.kill(kind, draw)
        if self.kinds[kind] in ("A5", "G1"):
            self.wait_for_step(self.run.step() + 2)
            assert len(self.run.starts()) == starts, f"{kind}: must not cause a restart"
        else:
            self.wait_for(lambda: len(self.run.starts()) > starts, f"start after the loss of {kind}")
            resumed = self.run.starts()[-1]["step"]
            # One interval, and the steps made while the last checkpoint was written, or between
            # reading the step and the kill.
            assert before - resumed <= 2 * EVERY, f"{kind}: from step {before} back to {resumed}"
            self.wait_for_step(resumed + 1)
        return time.monotonic() - start

    def cut(self, seconds: float, draw: random.Random) -> None:
        """Disconnect a node from the network for `seconds`."""
        raise NotImplementedError("one machine has no network to cut")


class Processes(Cluster):
    """`--nproc N` on this machine; `kill` repeats the command."""

    kinds: ClassVar = {
        "one rank": "A1",
        "all ranks": "A2",
        "launcher": "A3",
        "inside a save": "A4",
        "loader worker": "A5",
    }

    def __init__(self, folder: Path, digits: Path, world: int, *words: str) -> None:
        self.run = Job(
            folder, ["digits", f"data.root={digits}", *WORDS, "data.workers=2", *words], nproc=world
        )

    def start(self) -> None:
        self.run.start()

    def kill(self, kind: str, draw: random.Random) -> None:
        assert self.run.process
        delay = draw.uniform(0, 0.3)
        if kind == "inside a save":
            delay = self._wait_for_save(draw)
        time.sleep(delay)
        ranks = self.run.ranks()
        match kind:
            case "launcher":
                victims = [self.run.process.pid]
            case "one rank":
                victims = [draw.choice(ranks)]
            case "loader worker":
                workers = [pid for pid in children(draw.choice(ranks)) if " train " in command_line(pid)]
                victims = [draw.choice(workers)]
            case _:
                victims = ranks
        for pid in victims:
            kill(pid, signal.SIGKILL)
        if kind != "loader worker":
            self.run.wait_gone(5)  # no orphan may train or write
            self.run.start()

    def _wait_for_save(self, draw: random.Random) -> float:
        """Wait for a temporary file, or for its renaming; return the delay before the kill in s.

        After the renaming the run deletes older checkpoints, so that the kill may hit that, too.
        """
        if draw.random() < 0.5:
            self.run.wait_until(self.run.is_saving, "save", pause=0.0005)
            return draw.uniform(0, 0.05)
        before = set(self.run.checkpoints())
        self.run.wait_until(lambda: set(self.run.checkpoints()) - before, "saved file", pause=0.0002)
        return 0

    def wait(self) -> None:
        result = self.run.wait()
        assert result.code == 0, result.err

    def run_undisturbed(self) -> None:
        """Train with new interpreters: forks of one process have the same hashes, for example."""
        self.run.interpreter = True
        super().run_undisturbed()

    def close(self) -> None:
        self.run.clean()

    def log(self) -> str:
        return self.run.log()


class Namespaces(Cluster):
    """The pods of the rendered Job as processes; `Pods` simulates the Job controller."""

    kinds: ClassVar = {"one rank": "A1", "node 0": "G3", "another node": "G3", "cut": "G1"}

    def __init__(self, folder: Path, digits: Path, nodes: int, *words: str) -> None:
        self.pods = Pods(rendered(digits, *WORDS, *words, nodes=nodes), folder)
        self.pods.job["spec"]["backoffLimit"] *= 10  # a test loses more nodes than the Job tolerates
        self.run = self.pods.run

    def start(self) -> None:
        self.pods.__enter__()
        self._wait_for_end = self.pods.start_and_watch(1800)

    def kill(self, kind: str, draw: random.Random) -> None:
        time.sleep(draw.uniform(0, 0.3))
        match kind:
            case "one rank":
                self.pods.kill_rank(draw.randrange(self.pods.nodes))
            case "node 0":
                self.pods[0].kill()
            case _:
                self.pods[draw.randrange(1, self.pods.nodes)].kill()

    def cut(self, seconds: float, draw: random.Random) -> None:
        pod = draw.randrange(self.pods.nodes)
        self.pods[pod].set_network("down")
        time.sleep(seconds)
        self.pods[pod].set_network("up")

    def wait(self) -> None:
        assert self._wait_for_end() == 0, self.log()

    def close(self) -> None:
        self.pods.__exit__()

    def log(self) -> str:
        return self.pods.logs()


def done_line(run: Job) -> str:
    """Return the `done` line that the journal of a finished run keeps."""
    (line,) = {
        row["line"] for row in read_rows(run.folder / "journal.jsonl") if row.get("status") == "FINISHED"
    }
    return str(line)


def assert_same(run: Job, expected: Job) -> None:
    """Assert that a run has the weights, samples and figures of an undisturbed one."""
    assert done_line(run) == done_line(expected)
    assert_each_sample_once(run.trace(), 48)
    assert run.trace() == expected.trace()
    assert run.journal("train/", "val/") == expected.journal("train/", "val/")
