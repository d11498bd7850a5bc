"""The check of the nodes and links before training: what it names, and that it always ends."""

import contextlib
import ctypes
import fcntl
import itertools
import json
import multiprocessing
import os
import re
import select
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import SHARING, free_port

from pipeline.cli.main import main
from pipeline.deploy.node import environment
from pipeline.errors import RunError, TemporaryError
from pipeline.preflight import doctor, gang
from pipeline.preflight.gang import Node

SIZE = 3
PREFIX = f"gang-{os.getpid()}"
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x20000, 0x4000000, 0x40000000
JOB = {**environment(SIZE, 1), "JOB_UID": "a1"}

Check = Callable[[list[Node]], str]
Examine = Callable[..., tuple[dict[str, dict[str, Any]], str]]


# ---- three nodes in network namespaces


def ip(*words: str, check: bool = True) -> bool:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.returncode == 0


@dataclass
class Result:
    code: int | None
    log: str
    seconds: float


class Network:
    """Three nodes in network namespaces, on a bridge that has a namespace, too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names = [f"{PREFIX}-{node}" for node in range(SIZE)]
        self._switch = f"{PREFIX}-switch"
        hosts = [f"10.231.8.{10 + node} trainer-{node}.trainer trainer-{node}" for node in range(SIZE)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))

    def __enter__(self) -> "Network":
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self._switch, "link", "set", "bridge", "up")
        for node, name in enumerate(self._names):
            ip("netns", "add", name)
            peer = ("peer", "name", f"port{node}", "netns", self._switch)
            ip("link", "add", "eth0", "netns", name, "type", "veth", *peer)
            ip("-n", name, "link", "set", "lo", "up")
            self._join(node)
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self._names, self._switch):
            ip("netns", "del", name, check=False)

    def _join(self, node: int) -> None:
        """Connect the device eth0 of a node to the bridge."""
        ip("-n", self._switch, "link", "set", f"port{node}", "master", "bridge", "up")
        ip("-n", self._names[node], "address", "add", f"10.231.8.{10 + node}/24", "dev", "eth0")
        ip("-n", self._names[node], "link", "set", "eth0", "up")

    def throttle(self, node: int, rate: str) -> None:
        """Limit what reaches and what leaves a node."""
        for name, device in ((self._names[node], "eth0"), (self._switch, f"port{node}")):
            qdisc = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "200ms"]
            command = ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", device, *qdisc]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no rate limit can be set here: {done.stderr.strip()}")

    def delay(self, node: int, seconds: float) -> None:
        """Replace a node's cable by one that holds each packet for a while."""
        ip("-n", self._names[node], "link", "del", "eth0")
        ends = [_tap(f"{name}{os.getpid() % 100000}") for name in ("in", "out")]
        for (_, device), name, final in zip(
            ends, (self._names[node], self._switch), ("eth0", f"port{node}"), strict=True
        ):
            ip("link", "set", device, "netns", name)
            ip("-n", name, "link", "set", device, "name", final)
        self._join(node)
        threading.Thread(target=_relay, args=(ends[0][0], ends[1][0], seconds), daemon=True).start()

    def cut(self, node: int) -> None:
        ip("-n", self._switch, "link", "set", f"port{node}", "down")

    def check(self, *, cut: int | None = None) -> list[Result]:
        """Run the check on all nodes, as the pods of a Job do. cut: a node to cut off meanwhile."""
        start = time.monotonic()
        context = multiprocessing.get_context("fork")  # this process has imported torch
        processes = [context.Process(target=self._run, args=(node,)) for node in range(SIZE)]
        for process in processes:
            process.start()
        if cut is not None:
            while "measuring 3 links" not in self.log(0):
                assert time.monotonic() - start < 30, self.log(0)
                time.sleep(0.01)
            self.cut(cut)
        found = []
        for node, process in enumerate(processes):
            process.join(60 + 10 * SHARING)
            process.kill()
            found.append(Result(process.exitcode, self.log(node), time.monotonic() - start))
        return found

    def log(self, node: int) -> str:
        path = self.folder / f"{node}.log"
        return path.read_text() if path.exists() else ""

    def _run(self, node: int) -> None:
        """Become a process of the node, and run the check."""
        log = os.open(self.folder / f"{node}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self._names[node]}", "rb") as namespace:
            assert libc.setns(namespace.fileno(), CLONE_NEWNET) == 0
        assert libc.unshare(CLONE_NEWNS | CLONE_NEWUTS) == 0
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "--bind", str(self.folder / "hosts"), "/etc/hosts"], check=True)
        socket.sethostname(f"trainer-{node}")
        os.environ.update(JOB, JOB_COMPLETION_INDEX=str(node))
        os._exit(main(["doctor", "digits", f"run.dir={self.folder}/run", "run.device=cpu", "--gang"]))


def _tap(name: str) -> tuple[int, str]:
    """Return the descriptor and the name of a new network device."""
    end = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(end, 0x400454CA, struct.pack("16sH22x", name.encode(), 0x1002))  # TUNSETIFF, TAP without header
    return end, name


def _relay(one: int, other: int, seconds: float) -> None:
    """Pass the packets of each device on to the other after a while."""
    queue = deque[tuple[float, int, bytes]]()
    with contextlib.suppress(OSError), os.fdopen(one, "rb"), os.fdopen(other, "rb"):  # until the namespace is gone
        while True:
            pause = max(0, queue[0][0] - time.monotonic()) if queue else 1
            for end in select.select([one, other], [], [], pause)[0]:
                queue.append((time.monotonic() + seconds, other if end == one else one, os.read(end, 2048)))
            while queue and queue[0][0] <= time.monotonic():
                _, end, packet = queue.popleft()
                os.write(end, packet)


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    if not (shutil.which("ip") and shutil.which("tc") and ip("netns", "add", f"{PREFIX}-try", check=False)):
        pytest.skip("no network namespace can be made here, or ip or tc is not installed")
    ip("netns", "del", f"{PREFIX}-try")
    # The three nodes share the cores and the disk of this machine with other tests.
    monkeypatch.setattr(gang, "_COMPUTE_BELOW", 0.1)
    monkeypatch.setattr(gang, "_DISK_BELOW", 0.01)
    with Network(tmp_path) as made:
        yield made


def test_equal_nodes_pass_and_a_replaced_pod_is_not_checked_again(network: Network, tmp_path: Path) -> None:
    found = network.check()
    assert [result.code for result in found] == [0, 0, 0], found[0].log
    assert all(result.seconds < 60 for result in found)
    assert re.search(r"^trainer-2 +\d", found[0].log, re.MULTILINE), "the table is in the log of node 0"
    assert "trainer-2 " not in found[1].log
    assert (tmp_path / "run/gang-check").read_text() == "a1"
    for result in network.check():
        assert result.code == 0
        assert "have passed this check before" in result.log


def test_a_throttled_node_is_named_on_all_nodes(network: Network, tmp_path: Path) -> None:
    network.throttle(2, "40mbit")
    for result in network.check():
        assert result.code == 75, result.log
        assert re.search(r"BAD links +node trainer-2 is slow, its links reach [\d.]+ MiB/s, the median", result.log)
        assert "cordon it" in result.log
        assert not re.search("node trainer-[01] is slow, its links", result.log)
    assert not (tmp_path / "run").exists(), "not passed: the next start checks again"


@pytest.mark.skipif(not os.access("/dev/net/tun", os.W_OK), reason="no /dev/net/tun")
def test_a_delayed_node_is_named(network: Network) -> None:
    network.delay(1, 0.02)
    for result in network.check():
        assert result.code == 75, result.log
        assert re.search("node trainer-1 is slow, a message to it and back takes [4-9][0-9]", result.log), result.log


def test_a_link_that_stalls_in_the_check_is_named_on_all_nodes(network: Network) -> None:
    for result in network.check(cut=2):
        assert result.code == 75, result.log
        assert result.seconds < 60
        assert re.search("the link between trainer-[01] and trainer-2 failed", result.log), result.log


# ---- who meets


@pytest.fixture
def examine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Examine:
    """Return a function that runs the check in this process; it returns findings and error."""

    def run(**env: str) -> tuple[dict[str, dict[str, Any]], str]:
        for name in ("RANK", "WORLD_SIZE", "PET_NNODES", "JOB_COMPLETION_INDEX", "JOB_UID"):
            monkeypatch.setenv(name, "")  # the check sets RANK: monkeypatch restores it
            monkeypatch.delenv(name)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        error = ""
        try:
            words = [f"run.dir={tmp_path / 'run'}", "run.device=cpu"]
            assert doctor.examine_gang("digits", words, as_json=True) == 0
        except RunError as raised:
            error = f"{raised.code} {raised}"
        rows = json.loads(capsys.readouterr().out)["findings"]
        return {row["check"]: row for row in rows}, error

    return run


def test_one_node_has_nothing_to_compare_with(examine: Examine) -> None:
    found, error = examine()
    assert not error
    assert found["meet"]["line"] == "one node: there is nothing to compare it with"
    assert "GFLOP/s" in found["compute"]["line"]


def test_a_node_that_never_comes_ends_the_wait_with_its_name(examine: Examine) -> None:
    port, limit = str(free_port()), "join_timeout=0.5,read_timeout=300"
    found, error = examine(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, PET_RDZV_CONF=limit)
    assert error == "75 rank 1 did not come within 0.5 s: start the check on all nodes"
    assert not found["meet"]["ok"]
    job = {**JOB, "PET_RDZV_ENDPOINT": "trainer-0.invalid:29500", "PET_RDZV_CONF": limit}
    _, error = examine(**job, JOB_COMPLETION_INDEX="2")
    assert error == "75 trainer-0 did not come within 0.5 s: start the check on all nodes"


def test_the_log_says_every_30_s_who_is_missing() -> None:
    lines: list[str] = []
    now = time.monotonic()
    for waited in (29, 31, 62):
        gang._Waiting(now - waited, 1800, lines.append).check([1, 2])
    assert lines == ["waiting for rank 1, rank 2, 31 s of 1800 s", "waiting for rank 1, rank 2, 62 s of 1800 s"]


@pytest.mark.parametrize(
    "env",
    [
        {"PET_NNODES": "1:2"},
        {"PET_NNODES": "2"},
        {"PET_NNODES": "2", "JOB_COMPLETION_INDEX": "2"},
        {"PET_NNODES": "2", "JOB_COMPLETION_INDEX": "1", "PET_RDZV_ENDPOINT": "trainer-0.trainer:29500"},
    ],
)
def test_an_incomplete_environment_is_refused(examine: Examine, env: dict[str, str]) -> None:
    _, error = examine(**{"PET_RDZV_ENDPOINT": ""} | env)
    assert error.startswith("2 PET_NNODES=")


# ---- schedule and judgement


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 63, 64])
def test_each_pair_of_nodes_measures_once(size: int) -> None:
    schedule = list(gang.rounds(size))
    assert len(schedule) == size - 1 + size % 2
    assert sorted(pair for pairs in schedule for pair in pairs) == list(itertools.combinations(range(size), 2))
    for pairs in schedule:
        nodes = [node for pair in pairs for node in pair]
        assert len(nodes) == len({*nodes}), "a node is in one pair at a time"


def job(size: int, **slow: tuple[int, float]) -> list[Node]:
    """Return equal nodes, except for `slow`: a value and the node that has it."""
    nodes = [Node(f"trainer-{rank}", 1000, 200, 400) for rank in range(size)]
    for first, second in itertools.combinations(range(size), 2):
        link = []
        for name, usual in (("bandwidth", 800.0), ("round_trip", 0.2)):
            node, value = slow.get(name, (-1, 0))
            link.append(value if node in (first, second) else usual)
        nodes[first].links[str(second)] = nodes[second].links[str(first)] = (link[0], link[1])
    for name, (node, value) in slow.items():
        if name in ("gflops", "write_mib_s", "read_mib_s"):
            setattr(nodes[node], name, value)
    return nodes


@pytest.mark.parametrize("size", [3, 4, 8, 64])
@pytest.mark.parametrize(
    ("check", "slow", "says"),
    [
        (gang.check_links, {"bandwidth": (2, 390)}, "its links reach 390 MiB/s, the median is 800 MiB/s (49% of it)"),
        (gang.check_links, {"bandwidth": (2, 410)}, ""),
        (gang.check_links, {"round_trip": (1, 1.3)}, "a message to it and back takes 1.3 ms, the median is 0.2 ms"),
        (gang.check_links, {"round_trip": (1, 1.1)}, ""),  # more than 3 times, but not by 1 ms
        (gang.check_compute, {"gflops": (0, 690)}, "it computes 690 GFLOP/s, the median is 1,000 GFLOP/s (69% of it)"),
        (gang.check_compute, {"gflops": (0, 710)}, ""),
        (gang.check_disk, {"write_mib_s": (1, 49)}, "it writes run.dir's disk at 49 MiB/s, the median is 200 MiB/s"),
        (gang.check_disk, {"write_mib_s": (1, 51)}, ""),
        (gang.check_disk, {"read_mib_s": (1, 5)}, "it reads run.dir's disk at 5 MiB/s, the median is 400 MiB/s"),
        (gang.check_disk, {"read_mib_s": (1, 60)}, ""),  # less than a quarter, but fast enough
    ],
)  # fmt: skip
def test_only_a_slow_node_is_named(size: int, check: Check, slow: dict[str, tuple[int, float]], says: str) -> None:
    if not says:
        assert "median" in check(job(size, **slow))
        return
    ((node, _),) = slow.values()
    with pytest.raises(TemporaryError) as raised:
        check(job(size, **slow))
    assert f"node trainer-{node} is slow, {says}" in str(raised.value)
    assert re.findall(r"trainer-\d+", str(raised.value)) == [f"trainer-{node}"]


def test_the_link_of_two_nodes_is_only_reported() -> None:
    assert "nothing to compare" in gang.check_links(job(2, bandwidth=(0, 0.001), round_trip=(0, 500)))
    with pytest.raises(TemporaryError, match="trainer-1 is slow"):
        gang.check_compute(job(2, gflops=(1, 500)))
