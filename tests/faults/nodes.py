"""The nodes of a job: torchrun agents in network namespaces, with the variables of a real node.

Each start of a node has a namespace with an address of its own, and the node's name resolves to the
newest one, as that of a pod does. What kubelets and the Job controller do is not here:
tests/on_cluster.py has a real cluster.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from harness import Job, environment, kill, state, variable

from pipeline.addons.deploy import node as settings
from pipeline.record.journal import final_status

BIN = Path(sys.executable).parent
PREFIX = f"nodes-{os.getpid()}"
SWITCH = f"{PREFIX}-switch"


def missing() -> str | None:
    """Return why this machine has no network namespaces, or None if it has."""
    if not shutil.which("ip"):
        return "needs ip (apt-get install iproute2)"
    trial = ["unshare", "--net", "--uts", "true"]
    return "needs root" if subprocess.run(trial, capture_output=True, check=False).returncode else None


class Node:
    """One start of a node: its namespace and the processes in it."""

    def __init__(self, index: int, number: int) -> None:
        self.host = settings.host_name(index)
        self.namespace, self.port = f"{PREFIX}-{number}", f"port{number}"
        self.address, mac = _address(number)
        _ip("netns", "add", self.namespace)
        _ip("link", "add", "eth0", "address", mac, "netns", self.namespace, "type", "veth",
            "peer", "name", self.port, "netns", SWITCH)  # fmt: skip
        _ip("-n", SWITCH, "link", "set", self.port, "master", "bridge", "up")
        # With fixed neighbours packets to a lost node disappear, as in an overlay network.
        # Otherwise the kernel would report "no route to host" when the node does not answer ARP.
        neighbours = [f"neigh add {address} lladdr {mac} nud permanent dev eth0"
                      for address, mac in map(_address, range(200))]  # fmt: skip
        own = [f"address add {self.address}/24 dev eth0", "link set eth0 up", "link set lo up"]
        commands = "\n".join([*own, *neighbours])
        subprocess.run(["ip", "-n", self.namespace, "-batch", "-"], input=commands, text=True, check=True)
        self.hosts = Path("/etc/netns", self.namespace, "hosts")  # `ip netns exec` mounts it at /etc/hosts
        self.hosts.parent.mkdir(parents=True, exist_ok=True)
        self.hosts.touch()

    def start(self, command: list[str], log: Path, env: dict[str, str]) -> None:
        name = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', self.host.partition(".")[0]]
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *name, *command], stdout=file, stderr=file, env=env,
                start_new_session=True,
            )  # fmt: skip

    def processes(self) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]

    def ranks(self) -> set[int]:
        """Return the processes of living ranks, with their loader workers."""
        return {pid for pid in self.processes() if variable(pid, "RANK") is not None}

    def set_network(self, state: str) -> None:
        """Set the node's port of the switch `up`, or `down`: packets are lost, without a reset."""
        _ip("-n", SWITCH, "link", "set", self.port, state)

    def kill(self) -> None:
        for pid in self.processes():
            kill(pid, signal.SIGKILL)
        self.process.wait(10)

    def freeze(self) -> None:
        """Make the node lose power: no packet leaves or arrives, and no process runs."""
        self.set_network("down")
        told: set[int] = set()
        # in an uninterruptible wait (D) nothing runs: it may be for a new child that was stopped
        while left := {pid for pid in self.processes() if pid not in told or state(pid) not in "DTZ"}:
            for pid in sorted(left):
                kill(pid, signal.SIGSTOP)
            told |= left


class Nodes:
    """The two nodes of a job; a context manager that removes them at its end."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.run = Job(folder / "run", ["digits", *words, "data.workers=1"])
        self._all: list[Node] = []
        self._current: dict[int, Node] = {}
        folder.mkdir(parents=True)

    def __enter__(self) -> "Nodes":
        _ip("netns", "add", SWITCH)  # a namespace, too, so that this machine's firewall does not apply
        _ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        _ip("-n", SWITCH, "link", "set", "bridge", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._all:
            node.kill()
            _ip("netns", "del", node.namespace)
            shutil.rmtree(node.hosts.parent)
        _ip("netns", "del", SWITCH)

    def __getitem__(self, index: int) -> Node:
        """Return the newest start of a node."""
        return self._current[index]

    def start(self, index: int, *command: str) -> Node:
        """Start a node, or its replacement. command: other words than those before the request."""
        folder = self.run.folder.parent
        node = self._current[index] = Node(index, len(self._all))
        self._all.append(node)
        self._write_names()
        program, *words = command or settings.COMMAND
        request = [*self.run.arguments, f"run.dir={self.run.folder}"]
        env = environment(**settings.environment(2, 1))
        env |= {"PIPELINE_FINISHED": str(folder / f"finished-{index}")}  # in a pod: its own /tmp
        node.start([str(BIN / program), *words, *request], folder / f"node-{index}.log", env)
        return node

    def start_all(self) -> "Nodes":
        for index in range(2):
            self.start(index)
        return self

    def ends(self, number: int = 0) -> list[int]:
        """Send a signal to each node's command; return the exit codes once all have ended."""
        for node in self._current.values():
            kill(node.process.pid, number)
        return [node.process.wait(120) for node in self._current.values()]

    def thaw_all(self) -> None:
        """Wake the nodes that were frozen, and replaced: they must end by themselves."""
        for node in self._all:
            if node not in self._current.values():
                node.set_network("up")
                for pid in node.processes():
                    kill(pid, signal.SIGCONT)
                self.wait_for(lambda node=node: not node.processes(), "end of the thawed node", 60)

    def _write_names(self) -> None:
        """Make the nodes' names resolve. Each node knows its own."""
        for node in self._all:
            others = [other for other in self._current.values() if other.host != node.host]
            lines = [f"{other.address} {other.host}" for other in others]
            own = f"{node.address} {node.host} {node.host.partition('.')[0]}"
            with open(node.hosts, "r+") as file:  # in place: it is mounted
                file.write("\n".join(["127.0.0.1 localhost", own, *lines, ""]))
                file.truncate()

    def wait_for(self, condition: Callable[[], object], what: str, timeout: float = 240) -> float:
        """Replace failed nodes until the condition is true; return the seconds it took."""
        start = time.monotonic()
        while not condition():
            for index, node in list(self._current.items()):
                if node.process.poll():
                    self.start(index)
            assert time.monotonic() - start < timeout, f"no {what} in {timeout} s:\n{self.log()}"
            time.sleep(0.05)
        return time.monotonic() - start

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: self.run.step() >= step, f"step {step}")

    def wait_for_finish(self) -> None:
        journal = self.run.folder / "journal.jsonl"
        self.wait_for(lambda: final_status(journal) == "FINISHED", "end of rank 0")

    def wait(self) -> None:
        """Wait until node 0 has succeeded: that completes the Job, even if another node is lost."""
        self.wait_for(lambda: self[0].process.poll() == 0, "end")

    def log(self) -> str:
        logs = sorted(self.run.folder.parent.glob("node-*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text()[-4000:]}" for log in logs)


def _address(number: int) -> tuple[str, str]:
    """Return the IP and the MAC address of the start with this number."""
    return f"10.231.7.{10 + number}", f"02:00:00:00:07:{10 + number:02x}"


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout
