"""`pipeline rehearse`: run the multi-node job on this machine, with one container per node.

Promise: the rehearsal runs what the cluster runs: the same image, the same name and variables of
each node (`deploy.node`), and a preflight before each training. A node that fails is replaced, as
by the Job controller, until node 0 has succeeded or too many have failed. Everything created
(network, volume, containers) is removed at the end, also on Ctrl-C: all of it has one label.
"""

import argparse
import contextlib
import json
import queue
import signal
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from docker.errors import APIError, DockerException, ImageNotFound
from docker.models.containers import Container
from docker.types import DeviceRequest, IPAMConfig, IPAMPool

import docker
from docker import DockerClient
from pipeline.addons.deploy import node as node_settings
from pipeline.config.load import load
from pipeline.errors import CRASH, OK, PERMANENT, RequestError, from_exit_code, one_line
from pipeline.guards.signals import handle

LABEL = "ddp-pipeline.rehearsal"
_POLL_S = 0.5
_BACK_OFF_S = 1.0
_API_TIMEOUT_S = 60
_COMMAND = f'pipeline doctor "$@" && exec {" ".join(node_settings.COMMAND)} "$@"'


class Fault(NamedTuple):
    """A fault to inject into a node when the journal reaches a step."""

    node: int
    step: int
    seconds: float | None = None  # seconds without a network; None: the node is killed

    def __str__(self) -> str:
        if self.seconds is None:
            return f"kill node {self.node}"
        return f"disconnect node {self.node} for {self.seconds:g} s"


def rehearse(options: argparse.Namespace, faults: list[Fault]) -> str | int:
    """Run a rehearsal; return the done line, or exit code 1 if too many nodes failed.

    options: the arguments of the command. Raises the error of a preflight that fails permanently.
    """
    if options.gpus and options.nproc != 1:
        raise RequestError(f"--nproc {options.nproc} is for nodes without GPUs: leave --nproc or --gpus out")
    config = load(options.recipe, [f"run.dir=/runs/{Path(options.recipe).stem}", *options.overrides])
    node_settings.check_resume_is_auto(config)
    (min_nodes, nodes), processes = options.nodes, options.gpus or options.nproc
    allowed = node_settings.allowed_nodes(config, min_nodes or nodes, nodes, processes)
    for fault in faults:
        if fault.node >= nodes:
            raise RequestError(f"cannot {fault}: with --nodes {nodes} there is no such node")
    with contextlib.closing(_connect_to_docker()) as client:
        handle(signal.default_int_handler)  # SIGINT, too: shells ignore it in background jobs
        try:
            image = client.images.get(options.image)
        except ImageNotFound:
            remedy = "build it with 'docker compose build trainer', or name another with --image"
            raise RequestError(f"image {options.image!r} is not on this machine", remedy) from None
        environment = {
            **node_settings.environment(nodes, processes, allowed if min_nodes else ()),
            "PIPELINE_IMAGE": (image.attrs.get("RepoDigests") or [options.image])[0],
            "PIPELINE_IMAGE_ID": image.id,
            **dict(variable.split("=", 1) for variable in options.env),
        }
        cluster = Cluster(client, options, config.run.dir, environment)
        try:
            return cluster.run(sorted(faults, key=lambda fault: fault.step))
        except APIError as error:
            raise RequestError(f"Docker refused a request: {error.explanation}") from None
        finally:
            handle(signal.SIG_IGN)  # a second Ctrl-C must not interrupt the removal
            cluster.close()


class Cluster:
    """The nodes of one rehearsal, each in a container with a thread that runs it."""

    def __init__(
        self, client: DockerClient, options: argparse.Namespace, run_dir: str, environment: dict[str, str]
    ) -> None:
        self._client, self._options, self._run_dir = client, options, run_dir
        self._environment = environment  # the variables of each node
        self._name = f"rehearsal-{uuid.uuid4().hex[:8]}"
        self._nodes: dict[int, Container] = {}
        self._addresses: dict[int, str] = {}
        # (node, its exit code, or the error that ended its thread)
        self._exits: queue.Queue[tuple[int, int | Exception]] = queue.Queue()
        self._done_line = ""
        self._last_lines: dict[int, str] = {}  # each node's last line of standard error
        self._network: Any = None
        self._create_lock = threading.Lock()
        self._closed = False

    def run(self, faults: list[Fault]) -> str | int:
        """Run all nodes with the faults, replacing those that fail; return as `rehearse` does."""
        min_nodes, nodes = self._options.nodes
        if self._options.runs is None:
            self._client.volumes.create(self._name, labels={LABEL: self._name})
        self._create_network()
        _log(f"{self._name}: {nodes} nodes with image {self._options.image}")
        for node in range(nodes):
            self._start_node(node)
        replaced, limit = 0, node_settings.max_replacements(nodes, min_nodes)
        while True:
            while faults and faults[0].step <= self._last_reported_step():
                self._inject(faults.pop(0))
            try:
                node, code = self._exits.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if isinstance(code, Exception):
                raise code
            if code in PERMANENT:  # of the preflight: torchrun exits with 1
                line = self._last_lines.get(node, f"node {node} exited with {code}")
                raise from_exit_code(code)(line.removeprefix("pipeline: "))
            if code == OK and node == 0:  # rank 0 leaves last: the training is done
                for fault in faults:
                    _log(f"the training ended before step {fault.step}: did not {fault}")
                return self._done_line or CRASH
            if code != OK and replaced == limit:
                _log(f"node {node} exited with {code}, and {limit} nodes were replaced already: giving up")
                return CRASH
            if code != OK:
                replaced += 1
                _log(f"node {node} exited with {code} and is replaced ({replaced} of at most {limit})")
                time.sleep(_BACK_OFF_S)
                self._start_node(node)

    def close(self) -> None:
        """Remove all that was created. Raises APIError if something stays for a minute."""
        with self._create_lock:
            self._closed = True  # the threads of the nodes create no more containers
        labelled = {"label": f"{LABEL}={self._name}"}
        deadline = time.monotonic() + _API_TIMEOUT_S
        while containers := self._client.containers.list(all=True, filters=labelled, ignore_removed=True):
            for container in containers:
                with contextlib.suppress(APIError):  # a thread may be removing it
                    container.remove(force=True)
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        for network in self._client.networks.list(filters=labelled):
            network.remove()
        for volume in self._client.volumes.list(filters=labelled):
            volume.remove(force=True)

    def _create_network(self) -> None:
        # Docker lets a container ask for an address only in a network with an explicit subnet, and
        # a node must get its own again when it is reconnected. A temporary network finds a subnet.
        settings: dict[str, Any] = {"labels": {LABEL: self._name}, "driver": "bridge"}
        temporary = self._client.networks.create(self._name, **settings)
        temporary.reload()
        subnet = temporary.attrs["IPAM"]["Config"][0]["Subnet"]
        temporary.remove()
        ipam = IPAMConfig(pool_configs=[IPAMPool(subnet=subnet)])
        self._network = self._client.networks.create(self._name, ipam=ipam, **settings)

    def _start_node(self, node: int) -> None:
        threading.Thread(target=self._run_node, args=(node,), daemon=True).start()

    def _run_node(self, node: int) -> None:
        """Run a node to its end, and put its exit into the queue."""
        try:
            if node in self._nodes:
                self._nodes[node].remove(force=True)
            container = self._create_container(node)
            # before the start, to miss no output
            stream = container.attach(stream=True, logs=True, demux=True)
            container.start()
            container.reload()
            self._addresses[node] = container.attrs["NetworkSettings"]["Networks"][self._name]["IPAddress"]
            self._nodes[node] = container
            incomplete = [b"", b""]  # of standard output and standard error, whose chunks alternate
            for chunks in stream:
                for i, chunk in enumerate(chunks):
                    *lines, incomplete[i] = (incomplete[i] + (chunk or b"")).split(b"\n")
                    for line in lines:
                        text = line.decode(errors="replace").rstrip("\r")
                        if i == 1:
                            self._last_lines[node] = text
                        elif text.startswith("done step="):
                            self._done_line = text
                        _log(text, f"node {node} | ")
            self._exits.put((node, container.wait()["StatusCode"]))
        except Exception as error:  # also when the containers are removed at the end; nothing reads it then
            self._exits.put((node, error))

    def _create_container(self, node: int) -> Container:
        """Create a container of a node, as restricted as a pod under Pod Security `restricted`."""
        options, recipe = self._options, self._options.recipe
        volumes = {options.runs or self._name: {"bind": "/runs", "mode": "rw"}}
        if options.data:
            volumes[str(options.data.resolve())] = {"bind": "/data", "mode": "ro"}
        if Path(recipe).suffix in (".yaml", ".yml"):
            recipe = f"/recipe/{Path(recipe).name}"
            volumes[str(Path(options.recipe).resolve())] = {"bind": recipe, "mode": "ro"}
        arguments = [recipe, *options.overrides, f"run.dir={self._run_dir}"]
        gpus = [str(node * options.gpus + i) for i in range(options.gpus)]
        host_name = node_settings.host_name(node)
        host, _, domain = host_name.partition(".")
        with self._create_lock:
            if self._closed:
                raise InterruptedError("the rehearsal is over")
            return self._client.containers.create(
                self._environment["PIPELINE_IMAGE_ID"], name=f"{self._name}-{node}",
                labels={LABEL: self._name}, environment=self._environment,
                entrypoint=["sh", "-c", _COMMAND, "node"], command=arguments,
                hostname=host, domainname=domain, network=self._name,
                networking_config={self._name: self._client.api.create_endpoint_config(aliases=[host_name])},
                device_requests=[DeviceRequest(device_ids=gpus, capabilities=[["gpu"]])] if gpus else None,
                volumes=volumes, read_only=True,
                # it gets the mode of the image's folder, whose owner is the image's user
                tmpfs={"/tmp": "size=8g", "/cache": "size=8g,exec,mode=1777"},
                shm_size="1g",
                mem_limit=f"{node_settings.memory_gib(options.gpus, options.nproc)}g", pids_limit=32768,
                cap_drop=["ALL"], security_opt=["no-new-privileges:true"], init=True,
            )  # fmt: skip

    def _last_reported_step(self) -> int:
        for container in list(self._nodes.values()):
            with contextlib.suppress(Exception):  # the node may end at any moment
                _, text = container.exec_run(["tail", "-n", "1", f"{self._run_dir}/journal.jsonl"])
                return int(json.loads(text)["step"])
        return 0

    def _inject(self, fault: Fault) -> None:
        _log(f"step {fault.step}: {fault}")
        try:
            if fault.seconds is None:
                self._nodes[fault.node].kill()
            else:
                self._network.disconnect(self._nodes[fault.node])
                timer = threading.Timer(fault.seconds, self._reconnect, [fault.node])
                timer.daemon = True
                timer.start()
        except APIError as error:  # the node may have ended
            _log(f"cannot {fault}: {error.explanation}")

    def _reconnect(self, node: int) -> None:
        settings = {"aliases": [node_settings.host_name(node)], "ipv4_address": self._addresses[node]}
        with contextlib.suppress(APIError):  # the node may have ended
            self._network.connect(self._nodes[node], **settings)
            _log(f"node {node} is connected again")


def _connect_to_docker() -> DockerClient:
    """Connect to the engine of DOCKER_HOST or of this machine. Raises RequestError if none."""
    try:
        client = docker.from_env(timeout=_API_TIMEOUT_S)
        client.ping()
        return client
    except DockerException as error:
        problem = f"no Docker engine answers ({one_line(error)})"
        raise RequestError(problem, "start it, or set DOCKER_HOST to its address") from None


def _log(text: str, prefix: str = "rehearsal | ") -> None:
    print(f"{prefix}{text}\n", end="", file=sys.stderr, flush=True)  # other threads print, too
