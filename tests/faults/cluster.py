"""One training on several processes, hurt alike wherever it runs: as processes, in network namespaces, in containers.

A test sees the interface of `Cluster`. What is lost comes back as its place brings it back: a
person gives the same command again, the Job controller (played by `pods`) or `pipeline rehearse`
replaces a node.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import yaml
from engine import docker
from harness import SMALL, Job, children, command_line, environment, kill, read_rows, variable

from faults.pods import Pods
from pipeline.deploy.k8s import Request, render
from pipeline.deploy.rehearse import LABEL

EVERY = 7
WORDS = (*SMALL, f"checkpoint.every={EVERY} steps", "track.uri=none")


class Cluster(ABC):
    """A training that is started, hurt and waited for; `run` looks at what it writes."""

    run: Job
    kinds: ClassVar[dict[str, str]]
    """What can be done to it, and the row of the fault matrix that it is."""

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def kill(self, what: str, draw: random.Random) -> None:
        """SIGKILL, and whatever has to be done by hand in this place for the training to go on."""

    @abstractmethod
    def wait(self) -> str:
        """Its last line, once it has ended well."""

    @abstractmethod
    def close(self) -> None:
        """Leave nothing behind."""

    @abstractmethod
    def log(self) -> str: ...

    def starts(self) -> int:
        """How often a training was begun or gone on with."""
        return sum(row.get("event") == "started" for row in read_rows(self.run.folder / "journal.jsonl"))

    def wait_for(self, condition: object, what: str, timeout: float = 240) -> None:
        assert callable(condition)
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, f"no {what} in {timeout} s:\n{self.log()[-8000:]}"
            time.sleep(0.02)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: self.run.step() >= step, f"step {step}")

    def hurt(self, what: str, draw: random.Random) -> float:
        """Inflict it, see it gone on with; the seconds until a step was made after it."""
        before, starts, at = self.run.step(), self.starts(), time.monotonic()
        if what == "cut":
            self.cut(5, draw)
        else:
            self.kill(what, draw)
        if self.kinds[what] in ("A5", "G1"):
            self.wait_for_step(self.run.step() + 2)
            assert self.starts() == starts, f"{what}: nothing is started anew for it"
        else:
            self.wait_for(lambda: self.starts() > starts, f"start after the loss of {what}")
            gone_on = [
                row["step"] for row in read_rows(self.run.folder / "journal.jsonl") if row.get("event") == "started"
            ]
            # one interval, and the steps made while the last save was written, or while the blow
            # was being dealt
            assert before - gone_on[-1] <= 2 * EVERY, f"{what}: from step {before} back to {gone_on[-1]}"
            self.wait_for_step(gone_on[-1] + 1)
        return time.monotonic() - at

    def cut(self, seconds: float, draw: random.Random) -> None:
        """Take a node's network away for so long."""
        raise NotImplementedError("one machine has no network to cut")


class Processes(Cluster):
    """`--nproc N` on this machine. Whoever kills it gives the command again."""

    kinds: ClassVar = {
        "one rank": "A1",
        "all ranks": "A2",
        "launcher": "A3",
        "inside a save": "A4",
        "loader worker": "A5",
    }

    def __init__(self, folder: Path, digits: Path, world: int, *words: str) -> None:
        self.run = Job(folder, ["digits", f"data.root={digits}", *WORDS, "data.workers=2", *words], nproc=world)

    def start(self) -> None:
        self.run.start()

    def kill(self, what: str, draw: random.Random) -> None:
        assert self.run.process
        delay = draw.uniform(0, 0.3)
        if what == "inside a save":
            delay = self._wait_for_save(draw)
        time.sleep(delay)
        ranks = self.run.ranks()
        match what:
            case "launcher":
                victims = [self.run.process.pid]
            case "one rank":
                victims = [draw.choice(ranks)]
            case "loader worker":
                loading = [pid for pid in children(draw.choice(ranks)) if " train " in command_line(pid)]
                victims = [draw.choice(loading)]
            case _:
                victims = ranks
        for pid in victims:
            kill(pid, signal.SIGKILL)
        if what != "loader worker":
            self.run.wait_gone(5)  # neither an orphan that trains on nor one that writes
            self.run.start()

    def _wait_for_save(self, draw: random.Random) -> float:
        """Until a save is under way, or until a file just got its name and older ones are about to go; how long to wait."""
        if draw.random() < 0.5:
            self.run.wait_until(self.run.saving, "save", pause=0.0005)
            return draw.uniform(0, 0.05)
        there = set(self.run.checkpoints())
        self.run.wait_until(lambda: set(self.run.checkpoints()) - there, "saved file", pause=0.0002)
        return 0

    def wait(self) -> str:
        result = self.run.wait()
        assert result.code == 0, result.err
        return result.out.splitlines()[-1]

    def close(self) -> None:
        self.run.clean()

    def log(self) -> str:
        return self.run.log()


class Namespaces(Cluster):
    """The pods of the rendered Job, a process each, looked after as the Job controller does."""

    kinds: ClassVar = {"one rank": "A1", "node 0": "G3", "another node": "G3", "cut": "G1"}

    def __init__(self, folder: Path, digits: Path, nodes: int, *words: str) -> None:
        request = Request(nodes=nodes, gpus=0, overrides=(*WORDS, f"data.root={digits}", "data.workers=1", *words))
        self.pods = Pods([one for text in render(request).values() for one in yaml.safe_load_all(text)], folder)
        self.pods.job["spec"]["backoffLimit"] *= 10  # this many losses are no bad luck any more
        self.run = self.pods.run

    def start(self) -> None:
        self.pods.__enter__()
        self._end = self.pods.start_and_watch(1800)

    def kill(self, what: str, draw: random.Random) -> None:
        time.sleep(draw.uniform(0, 0.3))
        match what:
            case "one rank":
                self.pods.kill_rank(draw.randrange(self.pods.nodes))
            case "node 0":
                self.pods.kill_pod(0)
            case _:
                self.pods.kill_pod(draw.randrange(1, self.pods.nodes))

    def cut(self, seconds: float, draw: random.Random) -> None:
        pod = draw.randrange(self.pods.nodes)
        self.pods.partition(pod)
        time.sleep(seconds)
        self.pods.heal(pod)

    def wait(self) -> str:
        assert self._end() == 0, self.log()
        return _line(self.run)

    def close(self) -> None:
        self.pods.__exit__()

    def log(self) -> str:
        return self.pods.logs()


class Containers(Cluster):
    """`pipeline rehearse`: a container a node.

    What it writes is read where the engine keeps the volume.
    """

    kinds: ClassVar = {"one rank": "A1", "node 0": "G3", "another node": "G3", "cut": "G1"}

    def __init__(self, folder: Path, nodes: int, *words: str) -> None:
        self._volume, self._nodes, self._words = f"faults-{os.getpid()}-{folder.name}", nodes, words
        docker("volume", "create", self._volume)
        mount = Path(docker("volume", "inspect", "--format", "{{.Mountpoint}}", self._volume).strip())
        self.run = Job(mount / "digits", [])
        self._output = folder.with_suffix(".out")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "pipeline", "rehearse", "digits", "--nodes", str(self._nodes),
                   "--runs", self._volume, *WORDS, *self._words]  # fmt: skip
        self._output.parent.mkdir(parents=True, exist_ok=True)
        with open(self._output, "w") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, env=environment())

    def kill(self, what: str, draw: random.Random) -> None:
        time.sleep(draw.uniform(0, 0.3))
        if what == "one rank":
            node = self._container(draw.randrange(self._nodes))
            pids = [int(line.split()[0]) for line in docker("top", node, "-eo", "pid").splitlines()[1:]]
            kill(next(pid for pid in pids if variable(pid, "RANK") and "multiprocessing" not in command_line(pid)), 9)
        else:
            docker("kill", self._container(0 if what == "node 0" else draw.randrange(1, self._nodes)))

    def cut(self, seconds: float, draw: random.Random) -> None:
        node = self._container(draw.randrange(self._nodes))
        link = ["{{range $name, $_ := .NetworkSettings.Networks}}{{$name}} {{.IPAddress}} {{index .Aliases 0}}{{end}}"]
        network, address, alias = docker("inspect", "--format", *link, node).split()
        docker("network", "disconnect", network, node)
        time.sleep(seconds)
        docker("network", "connect", "--ip", address, "--alias", alias, network, node)

    def wait(self) -> str:
        assert self._process
        assert self._process.wait(600) == 0, self.log()
        return _line(self.run)

    def close(self) -> None:
        if self._process:
            self._process.terminate()
            self._process.wait(60)
            kept = self._output.with_suffix(".kept")  # what was written is looked at when the volume is gone
            shutil.copytree(self.run.folder, kept)
            self.run.folder = kept
        docker("volume", "rm", "--force", self._volume)

    def log(self) -> str:
        return self._output.read_text()

    def _container(self, node: int) -> str:
        names = docker("ps", "--filter", f"label={LABEL}", "--format", "{{.Names}}").split()
        return next(name for name in names if re.fullmatch(rf"rehearsal-\w+-{node}", name))


def _line(run: Job) -> str:
    (line,) = {row["line"] for row in read_rows(run.folder / "journal.jsonl") if row.get("status") == "FINISHED"}
    return str(line)
