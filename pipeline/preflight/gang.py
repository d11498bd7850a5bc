"""Compare the nodes of a job, and the links between them, before they train.

`pipeline doctor RECIPE --gang` runs this once on each node. The nodes wait for each other at a
store on node 0; from then on the check takes at most 60 s. Each node measures its compute and its
disk. Then each pair of nodes measures its link, over gloo or NCCL like the training. All nodes see
all results, so all of them find the same slow node and end with the same exit code. A link that
carries nothing is a timeout with a name, not a hang.
"""

import json
import os
import re
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from pipeline import world
from pipeline.config.schema import Config
from pipeline.device import choose_device
from pipeline.errors import RequestError, TemporaryError
from pipeline.files import atomic_write
from pipeline.preflight.machine import disk_speed
from pipeline.record.folder import RunFolder

_PORT = 29501
"""Port of the store on node 0 in a Job: the one after that of torchrun's rendezvous."""
_JOIN_TIMEOUT_S = 1800.0
_LOG_EVERY_S = 30.0
_GROUP_END_S, _NODE_END_S, _LINKS_END_S, _ALL_REDUCE_END_S, _END_S = 12.0, 21.0, 47.0, 53.0, 55.0
"""When each part must have ended, in seconds after all nodes have met."""
_GRACE_S = 4.0
"""An operation that does not heed its timeout is ended this much later, 59 s at the latest."""

_LINK_BELOW = 0.5
"""Links of one kind differ by less (shared switches, a busy core); a wrong speed by 4 or more."""
_ROUND_TRIP_ABOVE, _ROUND_TRIP_ABOVE_MS = 3.0, 1.0
"""A longer path adds less than 1 ms within a data centre, so less than that never counts."""
_COMPUTE_BELOW = 0.7
"""Equal GPUs differ by about 5 %; each step of a synchronous training waits for the slowest."""
_DISK_BELOW, _DISK_BELOW_MIB_S = 0.25, 50.0
"""A shared disk is uneven, and saves overlap with training: only a really slow one counts."""

_MIB = 2**20
_LINK_S, _ROUND_S, _COMPUTE_S = 0.5, 6.0, 1.0
_PINGS = 20
_FIRST_BYTES, _LAST_BYTES = 64 * 2**10, 4 * _MIB
_ALL_REDUCE_BYTES, _ALL_REDUCES, _ALL_REDUCE_S = (4 * 2**10, _MIB, 16 * _MIB), 3, 1.5

_NETWORK = (
    "look at these nodes and the network between them (all ports must be open to each other, and to no other"
    " machine; GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME selects the interface), then try again on all nodes"
)
"""The remedy if nodes do not reach each other."""


@dataclass
class Node:
    """The measurements of one node."""

    name: str
    gflops: float = 0.0
    write_mib_s: float = 0.0
    read_mib_s: float = 0.0
    links: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Peer (its rank as text, a key of JSON) -> MiB/s in each direction, round trip in ms."""

    # Of two links the better one counts: with three nodes, each has a link to the slow one.

    @property
    def bandwidth(self) -> float:
        return statistics.median_high(rate for rate, _ in self.links.values())

    @property
    def round_trip(self) -> float:
        return statistics.median_low(trip for _, trip in self.links.values())


def rounds(size: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the pairs that measure at the same time: each pair once (the circle method).

    A node is in at most one pair of a round. With an odd number each node rests in one round.
    """
    ring = list(range(size + size % 2))
    for _ in ring[1:]:
        pairs = [(min(pair), max(pair)) for pair in zip(ring[: len(ring) // 2], reversed(ring), strict=False)]
        yield [pair for pair in pairs if pair[1] < size]
        ring = [ring[0], ring[-1], *ring[1:-1]]


# ---- judgement


def check_links(nodes: list[Node]) -> str:
    """Return a line on the links. Raises TemporaryError if those of one node are slow."""
    if len(nodes) == 1:
        return "one node has no link"
    bandwidth = statistics.median(node.bandwidth for node in nodes)
    trip = statistics.median(node.round_trip for node in nodes)
    limit = max(_ROUND_TRIP_ABOVE * trip, trip + _ROUND_TRIP_ABOVE_MS)
    slow = []
    for node in nodes:
        if node.bandwidth < _LINK_BELOW * bandwidth:
            slow.append(_slow(node, "its links reach", node.bandwidth, bandwidth, "MiB/s"))
        if node.round_trip > limit:
            slow.append(
                f"node {node.name} is slow, a message to it and back takes {_number(node.round_trip)} ms, the median"
                f" is {_number(trip)} ms"
            )
    _raise_if(slow)
    line = f"median {_number(bandwidth)} MiB/s in each direction, {_number(trip)} ms there and back"
    return line if len(nodes) > 2 else f"{line}; two nodes have one link, and nothing to compare it with"


def check_compute(nodes: list[Node]) -> str:
    """Return a line on the compute. Raises TemporaryError if a node is slow."""
    median = statistics.median(node.gflops for node in nodes)
    slow = [node for node in nodes if node.gflops < _COMPUTE_BELOW * median]
    _raise_if([_slow(node, "it computes", node.gflops, median, "GFLOP/s") for node in slow])
    return f"median {_number(median)} GFLOP/s in float32"


def check_disk(nodes: list[Node]) -> str:
    """Return a line on the disk of run.dir. Raises TemporaryError if it is slow on one node."""
    parts, slow = [], []
    for verb, rates in (
        ("writes", [node.write_mib_s for node in nodes]),
        ("reads", [node.read_mib_s for node in nodes]),
    ):
        median = statistics.median(rates)
        parts.append(f"{verb} {_number(median)} MiB/s")
        slow += [
            _slow(node, f"it {verb} run.dir's disk at", rate, median, "MiB/s")
            for node, rate in zip(nodes, rates, strict=True) if rate < min(_DISK_BELOW * median, _DISK_BELOW_MIB_S)
        ]  # fmt: skip
    _raise_if(slow)
    return f"the median node {' and '.join(parts)}"


def _slow(node: Node, what: str, rate: float, median: float, unit: str) -> str:
    numbers = f"{_number(rate)} {unit}, the median is {_number(median)} {unit} ({rate / median:.0%} of it)"
    return f"node {node.name} is slow, {what} {numbers}"


def _raise_if(slow: list[str]) -> None:
    if slow:
        remedy = "remove the cause or leave it out, then try again"
        if "JOB_COMPLETION_INDEX" in os.environ:
            remedy = "cordon it (kubectl cordon) or remove the cause, the Job tries again"
        raise TemporaryError("; ".join(slow), remedy)


def table(nodes: list[Node]) -> str:
    """Return one line per node."""
    width = max(len(node.name) for node in nodes)
    lines = [f"{'':{width}}  links MiB/s  there and back ms  GFLOP/s  write MiB/s  read MiB/s"]
    for node in nodes:
        link = [_number(node.bandwidth), _number(node.round_trip)] if node.links else ["-", "-"]
        disk = [_number(node.write_mib_s), _number(node.read_mib_s)]
        columns = zip((*link, _number(node.gflops), *disk), (11, 17, 7, 11, 10), strict=True)
        lines.append("  ".join([f"{node.name:{width}}", *(f"{text:>{size}}" for text, size in columns)]))
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# ---- measurement


class GangCheck:
    """The measurements of all nodes of a job, made together."""

    def __init__(self, config: Config, log: Callable[[str], None]) -> None:
        self.rank, self.size, self._host, self._port = _find_place()
        self._log = log
        self._folder = RunFolder(config.run_dir)
        self._job = os.environ.get("JOB_UID", "")
        self._passed = self._folder.path / "gang-check"
        """Holds the JOB_UID of the Job whose nodes have passed: a replaced pod finds no peers."""
        here = world.from_environment()
        self._device = choose_device(config, here)
        self._devices = [self._device]
        if self._device.type == "cuda" and here.local_size == 1:  # one process for the whole node
            self._devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        self.all_reduces: list[str] = []
        self._names: list[str] = []
        self._end = 0.0
        os.environ["RANK"] = str(self.rank)  # `cli.main.command` then exits without waiting for gloo's threads

    def passed_before(self) -> bool:
        """Return True if all nodes of this Job passed earlier: the others train, or wait to."""
        try:
            return bool(self._job) and self._passed.read_text(encoding="utf-8") == self._job
        except OSError:
            return False

    def meet(self) -> str:
        """Wait for all nodes. Raises TemporaryError if one does not come."""
        node, host = os.environ.get("NODE_NAME"), socket.gethostname()
        name = f"{host} ({node})" if node else host
        if self.size == 1:
            self._names, self._start = [name], time.monotonic()
            return "one node: there is nothing to compare it with"
        start, limit, place = time.monotonic(), _join_timeout(), f"{self._host}:{self._port}"
        self._log(f"node {self.rank} of {self.size}: waiting for all nodes at {place}")
        waiting = _Waiting(start, limit, self._log)
        while self.rank != 0 and not _answers(self._host, self._port):
            waiting.check([0])
        # A frozen node 0 keeps its connections open, and does not answer.
        timer = _abort_after(limit + _LOG_EVERY_S, "the wait for all nodes, at the store of node 0,")
        try:
            self._store = TCPStore(
                self._host, self._port, is_master=self.rank == 0, wait_for_workers=False,
                timeout=timedelta(seconds=_GROUP_END_S),
            )  # fmt: skip
            self._store.set(f"name/{self.rank}", name)
            while missing := [rank for rank in range(self.size) if not self._store.check([f"name/{rank}"])]:
                waiting.check(missing)
            self._names = [self._store.get(f"name/{rank}").decode() for rank in range(self.size)]
        except dist.DistError as error:
            problem = f"the store of node 0 at {place} is gone, or its port is in use ({error})"
            raise TemporaryError(problem, _NETWORK) from None
        finally:
            timer.cancel()
        self._start = time.monotonic()
        return f"{self.size} nodes met after {self._start - start:.0f} s"

    def measure(self) -> list[Node]:
        """Return the measurements of all nodes, on every node.

        Raises TemporaryError if a node or a link does not end a measurement in time.
        """
        own = Node(self._names[self.rank])
        if self.size > 1:
            with self._phase("the connection of all nodes to each other", _GROUP_END_S):
                is_gpu = self._device.type == "cuda"
                dist.init_process_group(
                    "nccl" if is_gpu else "gloo", store=PrefixStore("group", self._store), rank=self.rank,
                    world_size=self.size, timeout=timedelta(seconds=self._end - time.monotonic()),
                    device_id=self._device if is_gpu else None,  # one communicator for all pairs
                )  # fmt: skip
        with self._phase(f"compute or disk of {own.name}", _NODE_END_S):
            own.gflops = min(_gflops(device, _COMPUTE_S / len(self._devices)) for device in self._devices)
            own.write_mib_s, own.read_mib_s = disk_speed(self._folder)
        nodes = [Node(**values) for values in self._gather("node", asdict(own), _NODE_END_S)]
        if self.size > 1:
            self._measure_links(nodes)
            self._measure_all_reduces(nodes)
        return nodes

    def finish(self, is_passed: bool) -> str:
        """Save that the nodes passed, then leave together: node 0, with the store, last."""
        if is_passed and self._job and self.rank == 0:
            self._passed.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self._passed, self._job.encode())
        if self.size > 1:
            self._gather("end", None, _END_S)
            with self._phase("the end of the check", _END_S):
                self._store.set(f"left/{self.rank}", "")
                if self.rank == 0:
                    self._store.wait([f"left/{rank}" for rank in range(self.size)], timedelta(seconds=2))
        return f"all nodes have the result, {time.monotonic() - self._start:.0f} s after they met"

    def _measure_links(self, nodes: list[Node]) -> None:
        """Measure the link of each pair, and put the results of all nodes into `nodes`."""
        self._buffers = [torch.zeros(_LAST_BYTES, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self._control = torch.zeros(1, dtype=torch.int64, device=self._device)
        schedule = list(rounds(self.size))
        start, links = time.monotonic() - self._start, dict[int, tuple[float, float]]()
        seconds = min(_ROUND_S, (_LINKS_END_S - start) / len(schedule))
        self._log(f"measuring {self.size * (self.size - 1) // 2} links, {seconds:.1f} s each at most")
        for number, pairs in enumerate(schedule):
            for first, second in (pair for pair in pairs if self.rank in pair):
                # The ends of the rounds are fixed: a node that waits for one that a stalled link
                # holds up still has a whole round left when that one gives up.
                end = start + seconds * (number + 1)
                with self._phase(f"the link between {self._names[first]} and {self._names[second]}", end):
                    if self.rank == first:
                        links[second] = self._lead(second)
                    else:
                        self._follow(first)
        for first, row in enumerate(self._gather("links", links, _LINKS_END_S)):
            for second, link in row.items():
                nodes[first].links[second] = nodes[int(second)].links[str(first)] = tuple(link)

    def _lead(self, peer: int) -> tuple[float, float]:
        """Return MiB/s and round trip in ms of the link to `peer`, which runs `_follow`."""
        self._ping(peer)  # both are here now
        start = time.monotonic()
        budget = min(_LINK_S, (self._end - start) / 2)
        trips = [self._ping(peer)]
        while len(trips) < _PINGS and time.monotonic() - start < budget / 4:
            trips.append(self._ping(peer))
        size, rates = _FIRST_BYTES, list[float]()
        while not rates or time.monotonic() - start < budget:
            self._send(peer, size)
            seconds = self._exchange(peer, size)
            if size < _LAST_BYTES and 4 * seconds < budget / 4:  # too small for a good measurement
                size *= 4
            else:
                rates.append(size / _MIB / seconds)
        self._send(peer, 0)
        # A busy core slows some of the messages, a slow link all of them.
        return sorted(rates, reverse=True)[len(rates) // 4], 1000 * min(trips)

    def _follow(self, peer: int) -> None:
        """Answer `_lead`: a number of bytes means an exchange, -1 a ping, 0 the end."""
        while size := self._receive(peer):
            if size < 0:
                self._send(peer, -1)
            else:
                self._exchange(peer, size)

    def _ping(self, peer: int) -> float:
        start = time.perf_counter()
        self._send(peer, -1)
        self._receive(peer)
        return time.perf_counter() - start

    def _send(self, peer: int, value: int) -> None:
        self._control.fill_(value)
        self._wait([dist.isend(self._control, peer)])

    def _receive(self, peer: int) -> int:
        self._wait([dist.irecv(self._control, peer)])
        return int(self._control)

    def _exchange(self, peer: int, size: int) -> float:
        """Send and receive `size` bytes at the same time; return the seconds."""
        out, back = (buffer[:size] for buffer in self._buffers)
        start = time.perf_counter()
        self._wait(dist.batch_isend_irecv([dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, back, peer)]))
        return time.perf_counter() - start

    def _measure_all_reduces(self, nodes: list[Node]) -> None:
        """Time an all-reduce of each size, without those that the slowest link makes too long."""
        slowest = min(rate for node in nodes for rate, _ in node.links.values()) * _MIB
        for size in _ALL_REDUCE_BYTES:
            text = f"{size // 2**10} KiB" if size < _MIB else f"{size // _MIB} MiB"
            if (1 + _ALL_REDUCES) * 2 * size / slowest > _ALL_REDUCE_S:
                self.all_reduces.append(f"{text} not tried over the slowest link")
                continue
            tensor = torch.zeros(size // 4, device=self._device)
            seconds = []
            with self._phase(f"the all-reduce of {text}", _ALL_REDUCE_END_S):
                for _ in range(1 + _ALL_REDUCES):  # the first one warms up
                    start = time.perf_counter()
                    self._wait([dist.all_reduce(tensor, async_op=True)])
                    seconds.append(time.perf_counter() - start)
            median = statistics.median(seconds[1:])
            self.all_reduces.append(f"{text} {_number(1000 * median)} ms ({_number(size / _MIB / median)} MiB/s)")

    def _wait(self, works: list[Any]) -> None:
        """Wait for operations of the group. Raises an error when this part must have ended."""
        for work in works:
            if self._device.type == "cuda":  # NCCL's own timeout would end the process
                while not work.is_completed():
                    if time.monotonic() > self._end:
                        raise TimeoutError("timed out")
                work.wait()
            else:
                work.wait(timedelta(seconds=max(0.001, self._end - time.monotonic())))

    @contextmanager
    def _phase(self, what: str, end_s: float) -> Iterator[None]:
        """Give a part of the check its end. Raises TemporaryError if the part fails.

        A little later it ends this process, if the part does not heed its end.
        """
        self._end = self._start + end_s
        timer = _abort_after(self._end + _GRACE_S - time.monotonic(), what)
        try:
            yield
        except (RuntimeError, TimeoutError) as error:  # torch's errors of a group, a store and a device
            reason = re.sub(r"^\[\S+\] ", "", str(error)).partition(". ")[0]  # without its source file and advice
            raise self._earliest_failure(f"{what} failed ({reason})") from None
        finally:
            timer.cancel()

    def _gather(self, key: str, item: Any, end_s: float) -> list[Any]:
        """Return the items of all nodes, in rank order. Raises TemporaryError if one is missing."""
        if self.size == 1:
            return [item]
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        with self._phase(f"the exchange of results with node 0, {self._names[0]},", end_s):
            self._store.set(keys[self.rank], json.dumps(item))
            while not self._store.check(keys):
                if self._store.check(["failed"]):
                    raise self._earliest_failure("another node failed", is_own=False)
                if time.monotonic() > self._end:
                    names = [name for name, its in zip(self._names, keys, strict=True) if not self._store.check([its])]
                    raise self._earliest_failure(f"{', '.join(names)} did not end a part of the check in time")
                time.sleep(0.02)
            return [json.loads(text) for text in self._store.multi_get(keys)]

    def _earliest_failure(self, line: str, *, is_own: bool = True) -> TemporaryError:
        """Return the failure of the node that failed first, if node 0's store can be reached.

        A link that stalls makes its two nodes fail, and these then the nodes that wait for them.
        """
        failures = [(self._end - self._start if is_own else _END_S, line)]

        def exchange() -> None:
            with suppress(RuntimeError):
                self._store.set(f"failed/{self.rank}", json.dumps(failures[0]))
                self._store.set("failed", "")
                time.sleep(1)
                keys = [key for rank in range(self.size) if self._store.check([key := f"failed/{rank}"])]
                failures.extend(tuple(json.loads(text)) for text in self._store.multi_get(keys))

        thread = threading.Thread(target=exchange, daemon=True)
        thread.start()
        thread.join(2)
        if self.rank == 0:  # the others read the store
            time.sleep(1)
        return TemporaryError(min(failures)[1], _NETWORK)


class _Waiting:
    """Logs who is missing, and ends the wait after the limit."""

    def __init__(self, start: float, limit: float, log: Callable[[str], None]) -> None:
        self._start, self._limit, self._log = start, limit, log
        self._next = start + _LOG_EVERY_S

    def check(self, ranks: list[int]) -> None:
        """Sleep a moment. Raises TemporaryError, which names the missing nodes, after the limit."""
        names = ", ".join(_expected_name(rank) for rank in ranks[:8]) + (" …" if len(ranks) > 8 else "")
        waited = time.monotonic() - self._start
        if waited > self._limit:
            raise TemporaryError(f"{names} did not come within {self._limit:g} s", "start the check on all nodes")
        if time.monotonic() > self._next:
            self._next += _LOG_EVERY_S
            self._log(f"waiting for {names}, {waited:.0f} s of {self._limit:g} s")
        time.sleep(0.2)


def _find_place() -> tuple[int, int, str, int]:
    """Return this node's rank, the number of nodes, and host and port of node 0's store.

    They come from the variables of a Job's pod, or from those of `world`.
    """
    alone = 0, 1, "", _PORT
    if world.is_launched():
        here = world.from_environment()
        if here.size == 1:
            return alone
        host = os.environ.get("MASTER_ADDR", "")
        port = os.environ.get("MASTER_PORT", "")
        if here.init_method:
            host, _, port = here.init_method.removeprefix("tcp://").rpartition(":")
        return here.rank, here.size, host, int(port)
    nodes, rank = os.environ.get("PET_NNODES", "1"), os.environ.get("JOB_COMPLETION_INDEX", "0")
    if not (nodes.isdecimal() and rank.isdecimal() and int(rank) < int(nodes)):
        given = f"PET_NNODES={nodes!r} and JOB_COMPLETION_INDEX={rank!r}"
        raise RequestError(f"{given} in the environment: --gang needs a fixed number of nodes, and a smaller index")
    if nodes == "1":
        return alone
    host = os.environ.get("PET_RDZV_ENDPOINT", "").rpartition(":")[0]
    # Without JOB_UID, a pod that is replaced while the others train would wait for them.
    if not host or not {"JOB_COMPLETION_INDEX", "JOB_UID"} <= {*os.environ}:
        raise RequestError(
            f"PET_NNODES={nodes}, but this node does not know its index, node 0 or its Job",
            "set JOB_COMPLETION_INDEX, PET_RDZV_ENDPOINT and JOB_UID, or RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
        )
    return int(rank), int(nodes), host, _PORT


def _expected_name(rank: int) -> str:
    """Return the name of a node that has not come: in a Job, the host name of its pod."""
    host = os.environ.get("PET_RDZV_ENDPOINT", "").partition(".")[0]
    return f"{host.removesuffix('0')}{rank}" if host.endswith("-0") else f"rank {rank}"


def _join_timeout() -> float:
    """Return how long torchrun's rendezvous waits, from PET_RDZV_CONF."""
    settings = dict(part.split("=", 1) for part in os.environ.get("PET_RDZV_CONF", "").split(",") if "=" in part)
    return float(settings.get("join_timeout", _JOIN_TIMEOUT_S))


def _answers(host: str, port: int) -> bool:
    """Return True if node 0's store accepts connections."""
    try:
        socket.create_connection((host, port), 5).close()
    except OSError:
        return False
    return True


def _gflops(device: torch.device, seconds: float) -> float:
    """Return the speed of float32 matrix products on a device."""
    size = 4096 if device.type == "cuda" else 512
    matrix = torch.rand(size, size, device=device)
    product = matrix @ matrix
    count, start = 0, 0.0
    while not count or time.perf_counter() - start < seconds:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = start or time.perf_counter()  # after the first product, which loads the kernels
        torch.mm(matrix, matrix, out=product)
        count += 1
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return count * 2 * size**3 / 1e9 / (time.perf_counter() - start)


def _abort_after(seconds: float, what: str) -> threading.Timer:
    """Return a started timer that ends this process with 75, unless it is cancelled."""

    def abort() -> None:
        print(f"pipeline: {what} did not end in time: {_NETWORK}", file=sys.stderr, flush=True)
        os._exit(TemporaryError.code)

    timer = threading.Timer(seconds, abort)
    timer.daemon = True
    timer.start()
    return timer
