"""`pipeline rehearse`: the multi-node job on this machine, one container a node, with nodes killed and cables pulled.

Promise: what runs is what the cluster runs: the same image, the same names and variables of each node (`operate.node`), a
preflight before each start, and a node that fails is replaced, as the Job controller does, until too many have failed.
Whatever was made (network, volume, containers) is removed at the end, also on Ctrl-C: all of it bears one label, and the
removal goes by that label and not by what this process remembers.
"""

import contextlib
import json
import queue
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pipeline import errors
from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.deploy import node as nodes
from pipeline.errors import CRASH, OK, RequestError, TemporaryError

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

LABEL = "ddp-pipeline.rehearsal"
_POLL_S = 0.5
_BACK_OFF_S = 1.0
_API_TIMEOUT_S = 60


@dataclass(frozen=True)
class Fault:
    """What happens to a node once a step is reported."""

    node: int
    step: int
    seconds: float | None = None
    """How long the node is without a network; None: it is killed."""

    def __str__(self) -> str:
        what = "SIGKILL to" if self.seconds is None else f"network cut for {self.seconds:g} s from"
        return f"{what} node {self.node}"


@dataclass(frozen=True, kw_only=True)
class Request:
    recipe: str
    overrides: list[str]
    num_nodes: int
    nproc: int = 1
    gpus: int = 0
    """GPUs a node; none: the nodes train on the CPU."""
    image: str = "ddp-pipeline"
    data: Path | None = None
    """Folder of this machine that the nodes see, read-only, as /data."""
    runs: str | None = None
    """Docker volume that is /runs in the nodes, and stays; None: one that is removed at the end."""
    faults: tuple[Fault, ...] = ()
    env: tuple[str, ...] = ()
    """NAME=VALUE of the nodes besides."""


def rehearse(request: Request) -> str | int:
    """The training's last line, or the exit code 1 if too many nodes failed. Raises the preflight's Verdict."""
    config = load(request.recipe, [f"run.dir=/runs/{Path(request.recipe).stem}", *request.overrides])
    nodes.check_resume(config)
    for fault in request.faults:
        if fault.node >= request.num_nodes:
            raise RequestError(
                f"node {fault.node} is not there: with --nodes {request.num_nodes} they are 0 to {request.num_nodes - 1}"
            )
    with _docker() as client, _signals_interrupt(), _cluster(client, request, config) as cluster:
        return cluster.run(list(request.faults))


class Cluster:
    """The nodes of one rehearsal: started, watched, hurt, replaced."""

    def __init__(self, client: "DockerClient", request: Request, config: Config, name: str, image: Any) -> None:
        self._client, self._request, self._config, self._name, self._image = client, request, config, name, image
        self._nodes: dict[int, Container] = {}
        self._addresses: dict[int, str] = {}
        self._ended: queue.Queue[tuple[int, int | Exception]] = queue.Queue()
        self._cut_off: dict[int, float] = {}  # node -> when its network comes back
        self._answer = ""
        self._network: Any = None
        self._making = threading.Lock()
        self._closed = False

    def run(self, faults: list[Fault]) -> str | int:
        """Start all nodes and see them through. Raises the Verdict of a preflight that no retry mends."""
        self._make_network()
        for node in range(self._request.num_nodes):
            self._start(node)
        faults = sorted(faults, key=lambda fault: fault.step)
        codes: dict[int, int] = {}
        replaced, at_most = 0, nodes.replacements(self._request.num_nodes)
        while len(codes) < self._request.num_nodes:
            self._heal()
            while faults and faults[0].step <= self._step():
                self._inflict(faults.pop(0))
            try:
                node, end = self._ended.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if isinstance(end, Exception) and getattr(end, "code", None) != TemporaryError.code:
                raise end
            code = end if isinstance(end, int) else TemporaryError.code
            if code == OK or OK in codes.values():  # where one node is through, the training is
                codes[node] = code
            elif replaced == at_most:
                _log(f"node {node} ended with {code}, and {at_most} nodes were replaced already: given up")
                return CRASH
            else:
                replaced += 1
                _log(f"node {node} ended with {code}; it is replaced ({replaced} of at most {at_most})")
                time.sleep(_BACK_OFF_S)
                self._start(node)
        _log(", ".join(f"node {node} ended with {code}" for node, code in sorted(codes.items())))
        for fault in faults:
            _log(f"the training ended before step {fault.step} was reported: no {fault}")
        return self._answer if all(code == OK for code in codes.values()) else CRASH

    def close(self) -> None:
        """From now on no container is made."""
        with self._making:
            self._closed = True

    def _words(self) -> list[str]:
        recipe = self._request.recipe
        inside = f"/recipe/{Path(recipe).name}" if _is_file(recipe) else recipe
        return [inside, *self._request.overrides, f"run.dir={self._config.run_dir}"]

    def _make_network(self) -> None:
        """A network whose addresses may be chosen, so that a node keeps its own when its cable is plugged in again."""
        from docker.types import IPAMConfig, IPAMPool

        settings: dict[str, Any] = {"labels": {LABEL: self._name}, "driver": "bridge"}
        free = self._client.networks.create(self._name, **settings)  # Docker finds a range that nobody uses
        free.reload()
        subnet = free.attrs["IPAM"]["Config"][0]["Subnet"]
        free.remove()
        self._network = self._client.networks.create(
            self._name, ipam=IPAMConfig(pool_configs=[IPAMPool(subnet=subnet)]), **settings
        )

    def _start(self, node: int) -> None:
        threading.Thread(target=self._live, args=(node,), daemon=True).start()

    def _live(self, node: int) -> None:
        """A node from its preflight to its end, as a pod lives; how it ended goes to the queue."""
        try:
            self._preflight(node)
            if node in self._nodes:
                self._nodes[node].remove(force=True)
            container = self._create(f"{self._name}-{node}", node, list(nodes.COMMAND))
            stream = container.attach(stream=True, demux=True, logs=True)  # before the start: nothing it says is missed
            container.start()
            container.reload()
            self._addresses[node] = container.attrs["NetworkSettings"]["Networks"][self._name]["IPAddress"]
            self._nodes[node] = container
            self._follow(node, stream)
            self._ended.put((node, container.wait()["StatusCode"]))
        except Exception as error:  # also when the containers are removed at the end: nobody listens then
            self._ended.put((node, error))

    def _preflight(self, node: int) -> None:
        """What a pod does in its init container; raises what it says."""
        container = self._create(f"{self._name}-{node}-preflight", node, ["pipeline", "doctor"])
        container.start()
        code = container.wait()["StatusCode"]
        lines = container.logs(stdout=False).decode(errors="replace").splitlines()
        container.remove(force=True)
        if code != OK:
            for line in lines[:-1]:
                _log(line, f"node {node} preflight | ")
            raise errors.from_exit_code(code)(
                lines[-1].removeprefix("pipeline: ") if lines else f"the preflight exited with {code}"
            )

    def _create(self, name: str, node: int, command: list[str]) -> "Container":
        """A container of a node, as locked up as a pod under Pod Security `restricted`."""
        from docker.types import DeviceRequest

        request = self._request
        volumes = {request.runs or self._name: {"bind": "/runs", "mode": "rw"}}
        if request.data:
            volumes[str(request.data.resolve())] = {"bind": "/data", "mode": "ro"}
        if _is_file(request.recipe):
            path = Path(request.recipe).resolve()
            volumes[str(path)] = {"bind": f"/recipe/{path.name}", "mode": "ro"}
        gpus = [str(node * request.gpus + i) for i in range(request.gpus)]
        host, _, domain = nodes.host(node).partition(".")
        with self._making:
            if self._closed:
                raise InterruptedError("the rehearsal is over")
            return self._client.containers.create(
                self._image,
                name=name,
                labels={LABEL: self._name},
                entrypoint=command,
                command=self._words(),
                environment=self._environment(),
                hostname=host,
                domainname=domain,
                network=self._name,
                networking_config={self._name: self._client.api.create_endpoint_config(aliases=[nodes.host(node)])},
                device_requests=[DeviceRequest(device_ids=gpus, capabilities=[["gpu"]])] if gpus else None,
                volumes=volumes,
                read_only=True,
                tmpfs={"/tmp": "size=8g"},
                mem_limit=f"{nodes.memory_gib(request.gpus, request.nproc)}g",
                pids_limit=32768,
                cap_drop=["ALL"],
                security_opt=["no-new-privileges:true"],
                shm_size="1g",
                init=True,
            )

    def _environment(self) -> dict[str, str]:
        digests = self._image.attrs.get("RepoDigests") or []
        given = dict(pair.split("=", 1) for pair in self._request.env)
        return {
            **nodes.environment(self._request.num_nodes, self._request.nproc),
            "PIPELINE_IMAGE": digests[0] if digests else self._request.image,
            "PIPELINE_IMAGE_ID": self._image.id,
            **given,
        }

    def _follow(self, node: int, stream: Iterator[tuple[bytes | None, bytes | None]]) -> None:
        """Say what a node says, line by line and under its name, until it ends."""
        rest = [b"", b""]
        for chunks in stream:
            for i, chunk in enumerate(chunks):
                *lines, rest[i] = (rest[i] + (chunk or b"")).split(b"\n")
                for line in lines:
                    text = line.decode(errors="replace").rstrip("\r")
                    if i == 0 and text.startswith("done "):
                        self._answer = text
                    _log(text, f"node {node} | ")

    def _step(self) -> int:
        """The last step that the journal reports; 0 while nobody can say."""
        for node, container in list(self._nodes.items()):
            if node in self._cut_off:
                continue
            with contextlib.suppress(Exception):  # it may be gone this instant
                _, text = container.exec_run(["tail", "-n", "1", f"{self._config.run_dir}/journal.jsonl"])
                return int(json.loads(text)["step"])
        return 0

    def _inflict(self, fault: Fault) -> None:
        from docker.errors import APIError

        _log(f"step {fault.step} is reported: {fault}")
        container = self._nodes[fault.node]
        try:
            if fault.seconds is None:
                container.kill()
            else:
                self._network.disconnect(container)
                self._cut_off[fault.node] = time.monotonic() + fault.seconds
        except APIError as error:
            _log(f"node {fault.node} is not there to be hurt just now: {error.explanation}")

    def _heal(self) -> None:
        from docker.errors import APIError

        for node, end in list(self._cut_off.items()):
            if time.monotonic() >= end:
                del self._cut_off[node]
                again = {"aliases": [nodes.host(node)], "ipv4_address": self._addresses[node]}
                with contextlib.suppress(APIError):  # it has ended meanwhile
                    self._network.connect(self._nodes[node], **again)
                    _log(f"node {node} has its network back")


@contextlib.contextmanager
def _cluster(client: "DockerClient", request: Request, config: Config) -> Iterator[Cluster]:
    """A cluster's volume and name; whatever bears the name is removed at the end."""
    from docker.errors import APIError, ImageNotFound

    try:
        image = client.images.get(request.image)
    except ImageNotFound:
        raise RequestError(
            f"image {request.image!r} is not on this machine: build it with 'docker compose build trainer', or name"
            " another with --image"
        ) from None
    name = f"rehearsal-{uuid.uuid4().hex[:8]}"
    cluster = Cluster(client, request, config, name, image)
    try:
        if request.runs is None:
            client.volumes.create(name, labels={LABEL: name})
        _log(f"{name}: {request.num_nodes} nodes of {request.image} ({image.short_id})")
        yield cluster
    except APIError as error:
        raise RequestError(f"Docker refuses: {error.explanation}") from None
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave the half of it
        cluster.close()
        _remove_all(client, name)


def _remove_all(client: "DockerClient", name: str) -> None:
    """Remove the containers, networks and volumes of a rehearsal. Raises APIError if Docker cannot within a minute."""
    from docker.errors import APIError

    mine = {"label": f"{LABEL}={name}"}
    deadline = time.monotonic() + _API_TIMEOUT_S
    while containers := client.containers.list(all=True, filters=mine, ignore_removed=True):
        for container in containers:
            try:
                container.remove(force=True)
            except APIError:  # a preflight may be removing its own container: look again until it is gone
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_S)
    for network in client.networks.list(filters=mine):
        network.remove()
    for volume in client.volumes.list(filters=mine):
        volume.remove(force=True)


@contextlib.contextmanager
def _docker() -> Iterator["DockerClient"]:
    """The engine that DOCKER_HOST names, else this machine's. RequestError if none answers."""
    try:
        import docker
    except ImportError:
        raise RequestError("a rehearsal wants the Python package 'docker': pip install docker") from None
    try:
        client = docker.from_env(timeout=_API_TIMEOUT_S)
        client.ping()
    except docker.errors.DockerException as error:
        raise RequestError(
            f"no Docker engine answers ({_reason(error)}): start it, or say with DOCKER_HOST where it is"
        ) from None
    with contextlib.closing(client):
        yield client


def _reason(error: BaseException) -> str:
    """The innermost cause that speaks plainly: `Permission denied`, `No such file or directory`."""
    for word in ("Permission denied", "No such file or directory", "Connection refused"):
        if word in str(error):
            return word
    return str(error)


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM ends a rehearsal as Ctrl-C does, and Ctrl-C also where a shell has told its background jobs to ignore it."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, interrupt)
    yield


def _is_file(recipe: str) -> bool:
    return Path(recipe).suffix in (".yaml", ".yml")


_speaking = threading.Lock()


def _log(text: str, who: str = "rehearsal | ") -> None:
    with _speaking:
        print(f"{who}{text}", file=sys.stderr, flush=True)
