"""Run the pods of a rendered Job as processes, and act as the kubelets and the Job controller.

A pod has a network namespace. Each of its containers is process 1 of its own process namespace, so
that the kernel treats signals as in a container. The manifests define the commands, their
environment, the pods' names, their volumes, and when the Job is complete or has failed.
`Pods._container` lists the differences from a cluster.
"""

import contextlib
import ctypes
import itertools
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import yaml
from harness import Job, children, command_line, kill, variable
from manifests import Document, one, pod_of, settings

from pipeline.addons.deploy.k8s import render
from pipeline.addons.deploy.options import RenderOptions
from pipeline.supervision import process_stat

BIN = Path(sys.executable).parent
PREFIX = f"pods-{os.getpid()}"
SWITCH = f"{PREFIX}-switch"
_ADDRESSES = 240
"""Pods of one Job that are alive at the same time have different numbers modulo this."""


def missing() -> str | None:
    """Return why this machine cannot run pods as processes, or None if it can."""
    absent = [name for name in ("ip", "unshare", "tini") if not shutil.which(name)]
    if absent:
        return f"not installed: {', '.join(absent)}"
    trial = subprocess.run(
        ["ip", "netns", "add", f"{PREFIX}-try"], capture_output=True, text=True, check=False
    )
    if trial.returncode:
        return f"no network namespace can be made here: {trial.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", f"{PREFIX}-try"], check=True)
    return None


class Pod:
    """One start of a pod: its network namespace, with an address of its own, and its containers."""

    def __init__(self, index: int, number: int, name: str) -> None:
        self.index, self.name = index, name
        self.namespace, self.port = f"{PREFIX}-{number}", f"port{number}"
        self.address, self.mac = _address(number)
        self.has_ended = threading.Event()
        """The pod's phase is Succeeded or Failed: its name no longer resolves."""
        self.is_deleted = False
        """Marked for deletion: the kubelet ends the container, and starts no other."""
        self.is_disrupted = False
        """Has the condition DisruptionTarget."""
        self.is_frozen = False
        self.container, self.code = "", None
        """The last container that ran, and its exit code. A lost node reports none."""
        self.is_replaced = True
        """The Job controller starts another pod when this one has failed."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, container: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes] | None:
        with self._lock:
            self._process = None if self.is_deleted else container()
            return self._process

    def mark_deleted(self) -> None:
        with self._lock:
            self.is_deleted = True

    def terminate(self) -> None:
        """Send SIGTERM to process 1 of the running container, as the kubelet does."""
        while self._process and self._process.poll() is None:
            for pid in children(self._process.pid):
                if command_line(pid).partition(" ")[0] not in (
                    "unshare",
                    "sh",
                    "",
                ):  # it has not replaced itself yet
                    kill(pid, signal.SIGTERM)
                    return
            time.sleep(0.01)

    def kill(self) -> None:
        """Kill all processes of the pod at once."""
        for pid in self.processes():
            kill(pid, signal.SIGKILL)

    def stop_processes(self) -> None:
        """Send SIGSTOP to all processes, process 1 first, until none runs.

        One in an uninterruptible wait runs nothing, and stops at its end. A process that has just
        forked waits so for its child, which may be stopped already.
        """
        told: set[int] = set()
        while running := [pid for pid in self.processes() if _runs(pid, is_told=pid in told)]:
            for pid in sorted(running):
                kill(pid, signal.SIGSTOP)
            told.update(running)

    def continue_processes(self) -> None:
        for pid in self.processes():
            kill(pid, signal.SIGCONT)

    def set_network(self, state: str) -> None:
        """Set the pod's port of the switch `up`, or `down`: packets are lost, without a reset."""
        _ip("-n", SWITCH, "link", "set", self.port, state, check=not self.has_ended.is_set())

    def processes(self) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self.namespace, check=False).split()]

    def trainers(self) -> list[int]:
        """Return the living ranks and loader workers."""
        return [pid for pid in self.processes() if "pipeline train" in command_line(pid).replace(" -u", "")
                and variable(pid, "RANK") is not None]  # fmt: skip

    def rank(self, rank: int) -> int | None:
        """Return the process of a rank, not its loader workers; None if it does not run here."""
        found = [pid for pid in self.trainers() if variable(pid, "RANK") == str(rank)]
        return next((pid for pid in found if int(_stat(pid)[1]) not in found), None)

    def create_namespace(self) -> None:
        _ip("netns", "add", self.namespace)
        _ip("link", "add", "eth0", "address", self.mac, "netns", self.namespace, "type", "veth",
            "peer", "name", self.port, "netns", SWITCH)  # fmt: skip
        _ip("-n", SWITCH, "link", "set", self.port, "master", "bridge", "up")
        # With fixed neighbours packets to a lost pod disappear, as in an overlay network. Otherwise
        # the kernel would report "no route to host" when the pod does not answer ARP.
        neighbours = [f"neigh add {address} lladdr {mac} nud permanent dev eth0"
                      for address, mac in map(_address, range(_ADDRESSES))]  # fmt: skip
        commands = [
            f"address add {self.address}/24 dev eth0",
            "link set eth0 up",
            "link set lo up",
            *neighbours,
        ]
        subprocess.run(
            ["ip", "-n", self.namespace, "-batch", "-"], input="\n".join(commands), text=True, check=True
        )
        self.hosts.parent.mkdir(parents=True, exist_ok=True)
        self.hosts.touch()

    def delete_namespace(self) -> None:
        _ip("netns", "del", self.namespace, check=False)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.hosts.parent)

    @property
    def hosts(self) -> Path:
        """Return the file that `ip netns exec` mounts at /etc/hosts."""
        return Path("/etc/netns") / self.namespace / "hosts"


class Relay:
    """A port in a network namespace that passes its connections to a server of this machine."""

    def __init__(self, namespace: str, address: tuple[str, int], server: tuple[str, int]) -> None:
        self._server = server
        with ThreadPoolExecutor(1) as other:  # setns concerns one thread; a socket stays where it was made
            self._listener = other.submit(self._listen, namespace, address).result()
        threading.Thread(target=self._accept, daemon=True).start()

    def _listen(self, namespace: str, address: tuple[str, int]) -> socket.socket:
        with open(f"/run/netns/{namespace}") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), 0x40000000) == 0  # CLONE_NEWNET
        return socket.create_server(address)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                with contextlib.suppress(ConnectionError):
                    server = socket.create_connection(self._server)
                    for pair in ((client, server), (server, client)):
                        threading.Thread(target=_copy, args=pair, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


class Pods:
    """The Job's pods; a context manager that removes all of them at its end."""

    def __init__(
        self, documents: list[Document], folder: Path, *, store: str = "",
        secrets: dict[str, dict[str, str]] | None = None,
    ) -> None:  # fmt: skip
        """store: URL of a server of this machine, which the Job reaches at its AWS_ENDPOINT_URL."""
        self._server, self._store, self._secrets = store, "", secrets or {}
        self._relay: Relay | None = None
        self.job, self.config, self.folder = one(documents, "Job", "trainer"), settings(documents), folder
        self.spec = self.job["spec"]
        assert self.spec["podReplacementPolicy"] == "Failed", (
            "this controller replaces no pod that still terminates"
        )
        self.nodes = int(self.spec["completions"])
        self.run = Job(folder / self.config["RUN_DIR"].lstrip("/"), [])  # reads the run's files
        self.failures: list[tuple[int, int | None]] = []
        """(pod, exit code) of each failed pod that counts; the code is None for a lost node."""
        self.succeeded = set[int]()
        self._current: dict[int, Pod] = {}
        self._all: list[Pod] = []
        self._ended: queue.Queue[Pod | None] = queue.Queue()
        self._nameless: tuple[int, ...] = ()
        self._names_lock = threading.Lock()
        self._suspend_lock = threading.Lock()
        self._is_suspended = False
        self._numbers = itertools.count()
        (folder / "recipe").mkdir(parents=True)
        (folder / "recipe/recipe.yaml").write_text(self.config["recipe.yaml"])
        self.run.folder.parent.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> "Pods":
        _ip(
            "netns", "add", SWITCH
        )  # the switch has a namespace, too, so that this machine's firewall does not apply
        _ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        _ip("-n", SWITCH, "link", "set", "bridge", "up")
        if self._server:
            self._start_store(urlsplit(self.config["AWS_ENDPOINT_URL"]), urlsplit(self._server))
        return self

    def _start_store(self, endpoint: SplitResult, server: SplitResult) -> None:
        assert endpoint.hostname
        assert endpoint.port
        assert server.hostname
        assert server.port
        pod = Pod(-1, next(self._numbers), endpoint.hostname)
        pod.create_namespace()
        pod.has_ended.set()  # it runs no process
        self._all.append(pod)
        self._relay = Relay(pod.namespace, (pod.address, endpoint.port), (server.hostname, server.port))
        self._store = f"{pod.address} {pod.name}"

    def __exit__(self, *_: object) -> None:
        with self._suspend_lock:
            self._is_suspended = True  # no replacement from now on
        self._ended.put(None)
        for pod in self._all:
            pod.mark_deleted()
            pod.kill()
            pod.has_ended.wait(10)
            pod.delete_namespace()
        if self._relay:
            self._relay.close()
        _ip("netns", "del", SWITCH)

    def __getitem__(self, index: int) -> Pod:
        """Return the newest pod of an index."""
        return self._current[index]

    # The cluster: names, nodes, the kubelets

    def name_all(self, *, without: tuple[int, ...] = ()) -> None:
        """Make the living pods' names resolve, except `without`, as the headless Service does."""
        self._nameless = without
        self._write_names()

    def _write_names(self) -> None:
        with self._names_lock:
            living = [pod for pod in self._current.values() if not pod.has_ended.is_set()]
            named = [pod for pod in living if pod.index not in self._nameless]
            for pod in self._all:
                own = (
                    f"{pod.address} {pod.name} {pod.name.partition('.')[0]}"  # always known to the pod itself
                )
                others = [f"{other.address} {other.name}" for other in named if other.index != pod.index]
                # No MLflow server listens there: the tests read the journal.
                text = "\n".join(["127.0.0.1 localhost", "127.0.0.1 mlflow", self._store, own, *others, ""])
                with (
                    contextlib.suppress(FileNotFoundError),
                    open(pod.hosts, "r+") as file,
                ):  # in place: it is mounted
                    file.write(text)
                    file.truncate()

    def host(self, pod: int) -> str:
        return f"{self.job['metadata']['name']}-{pod}.{pod_of(self.job)['subdomain']}"

    def kill_rank(self, rank: int) -> None:
        for pod in self._living():
            if (pid := pod.rank(rank)) is not None:
                kill(pid, signal.SIGKILL)

    def freeze(self, pod: int) -> Pod:
        """Make the pod's node lose power: no packet leaves or arrives, and no process runs."""
        self[pod].is_frozen = True
        self[pod].set_network("down")
        self[pod].stop_processes()
        return self[pod]

    def thaw(self, pod: Pod) -> None:
        """Let a frozen pod run again, also after its replacement."""
        pod.is_frozen = False
        pod.set_network("up")
        pod.continue_processes()

    def replace_lost(self, pod: int) -> None:
        """Set the pod of a frozen node to Failed, as the recovery controller does after minutes.

        The Job controller replaces it. The processes of the old pod stay as they are.
        """
        self[pod].is_disrupted = True
        self._lose(self[pod])

    def evict(self, pod: int, *, is_replaced: bool = True) -> float:
        """Evict the pod as a drain does; return the seconds until it is gone.

        is_replaced: False if there is no node for its replacement; `start_pod` starts that later.
        """
        self[pod].is_disrupted = True
        self[pod].is_replaced = is_replaced
        return self._delete([self[pod]])

    def start_pod(self, pod: int) -> Pod:
        """Start a pod with a namespace and an address of its own; its name moves to it."""
        new = Pod(pod, next(self._numbers), self.host(pod))
        new.create_namespace()
        for name in ("runs", "data"):
            self.volume(new, name).mkdir(parents=True, exist_ok=True)
        if pod == 0:  # rank 0 writes the run
            self.run.folder = self.volume(new, "runs") / Path(self.config["RUN_DIR"]).name
        self._all.append(new)
        self._current[pod] = new
        self._write_names()
        threading.Thread(target=self._run_pod, args=(new,), daemon=True).start()
        return new

    def volume(self, pod: Pod, name: str) -> Path:
        (volume,) = (volume for volume in pod_of(self.job)["volumes"] if volume["name"] == name)
        return self.folder / pod.namespace / name if "emptyDir" in volume else self.folder / name

    def _living(self) -> list[Pod]:
        return [pod for pod in list(self._current.values()) if not pod.has_ended.is_set()]

    def _run_pod(self, pod: Pod) -> None:
        """Run a pod's containers one after another, until one fails; report the exit code."""
        template = pod_of(self.job)
        for container in (*template["initContainers"], *template["containers"]):
            with open(self.folder / f"pod-{pod.index}.log", "ab") as log:
                process = pod.start(partial(self._container, pod, container, log))
            code = process.wait() if process else 128 + signal.SIGTERM
            if code:
                break
        if not pod.has_ended.is_set():  # otherwise the node was lost, and its pod has been replaced
            pod.container, pod.code = container["name"], code if code >= 0 else 128 - code
            if code:
                shutil.rmtree(self.folder / pod.namespace, ignore_errors=True)  # what only this pod could see
            self._end(pod)
            pod.delete_namespace()

    def _end(self, pod: Pod) -> None:
        pod.has_ended.set()
        self._write_names()
        self._ended.put(pod)

    def _lose(self, pod: Pod) -> None:
        assert pod.is_frozen
        pod.mark_deleted()
        self._end(pod)

    def _delete(self, pods: list[Pod]) -> float:
        """Delete pods as their kubelets do, within the grace period; return the seconds it took."""
        start = time.monotonic()
        for pod in pods:
            pod.mark_deleted()
        for pod in pods:
            if pod.is_frozen:
                self._lose(pod)
            else:
                pod.terminate()
        for pod in pods:
            remaining = start + pod_of(self.job)["terminationGracePeriodSeconds"] - time.monotonic()
            if not pod.has_ended.wait(max(0, remaining)):
                pod.kill()
                pod.has_ended.wait()
        return time.monotonic() - start

    def _container(self, pod: Pod, container: Document, log: Any) -> subprocess.Popen[bytes]:
        """Start a container's process.

        Unlike a cluster it uses this machine's Python in place of the image, a folder in place of
        each mount, and a hosts file in place of DNS, without the seconds that DNS caches a name.
        """
        mounts = {f"/{name}/": self.volume(pod, name) for name in ("recipe", "runs", "data")}
        words = []
        for word in container["command"]:
            for name, value in self.config.items():
                word = word.replace(f"$({name})", value)  # noqa: PLW2901
            for inside, outside in mounts.items():
                word = re.sub(f"(^|=){inside}", rf"\1{outside}/", word)  # noqa: PLW2901
            words.append(word)
        env = {name: value for name, value in self.config.items() if name != "recipe.yaml"}
        for source in container["envFrom"]:
            env |= self._secrets.get(source.get("secretRef", {}).get("name"), {})
        env |= {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            "HOME": str(self.folder),
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "PIPELINE_FINISHED": str(
                self.folder / f"{pod.namespace}-finished"
            ),  # in a cluster in the pod's own /tmp
        }
        namespaces = [
            "ip",
            "netns",
            "exec",
            pod.namespace,
            "unshare",
            "--uts",
            "--pid",
            "--fork",
            "--kill-child",
        ]
        set_name = ["--mount-proc", "sh", "-c", 'hostname "$0"; exec "$@"', pod.name.partition(".")[0]]
        command = [*namespaces, *set_name, *words]
        return subprocess.Popen(
            command, stdout=log, stderr=log, env=env, cwd=self.folder, start_new_session=True
        )

    # The Job controller

    def start(self) -> "Pods":
        for pod in range(self.nodes):
            self.start_pod(pod)
        return self

    def start_and_watch(self, timeout: float) -> Callable[[], int]:
        """Start all pods and call `wait` in a thread; return a function that returns its result."""
        self.start()
        pool = ThreadPoolExecutor(1)
        future = pool.submit(self.wait, timeout)
        pool.shutdown(wait=False)
        return future.result

    def wait(self, timeout: float = 600) -> int:
        """Replace failed pods as the Job controller does; return the Job's exit code.

        The code is 0 if the Job is complete, otherwise the exit code that failed it. Then the other
        pods are deleted.
        """
        end, failed = time.monotonic() + timeout, None
        while failed is None and not self._is_complete():
            try:
                pod = self._ended.get(timeout=max(0.1, end - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"still running after {timeout} s:\n{self.logs()}") from None
            assert pod is not None, "the pods have been removed"
            if pod.code == 0:
                self.succeeded.add(pod.index)
                continue
            action = self._action(pod)
            if action != "Ignore":
                self.failures.append((pod.index, pod.code))
            if action == "FailJob" or len(self.failures) > self.spec["backoffLimit"]:
                failed = pod.code or 1
            elif pod.is_replaced:
                time.sleep(1)  # a cluster waits 10 s at first and twice as long each time
                with self._suspend_lock:
                    if not self._is_suspended:
                        self.start_pod(pod.index)
        self._delete(self._living())
        return failed or 0

    def suspend(self) -> float:
        """Set `spec.suspend` to true; return the seconds until all pods are gone."""
        with self._suspend_lock:
            self._is_suspended = True
        pods = self._living()
        for pod in pods:
            pod.is_replaced = False
        return self._delete(pods)

    def resume(self) -> None:
        """Set `spec.suspend` to false."""
        self._is_suspended = False
        for pod in set(range(self.nodes)) - self.succeeded:
            self.start_pod(pod)

    def _is_complete(self) -> bool:
        rules = self.spec.get("successPolicy", {}).get("rules", [])
        return len(self.succeeded) == self.nodes or any(
            set(_indexes(rule["succeededIndexes"])) <= self.succeeded for rule in rules
        )

    def _action(self, pod: Pod) -> str:
        """Return the action of the first rule of `podFailurePolicy` that matches a failed pod."""
        for rule in self.spec.get("podFailurePolicy", {}).get("rules", []):
            conditions = [condition["type"] for condition in rule.get("onPodConditions", [])]
            codes = rule.get("onExitCodes")
            if (pod.is_disrupted and "DisruptionTarget" in conditions) or (codes and _matches(codes, pod)):
                return str(rule["action"])
        return "Count"

    def wait_for_step(self, step: int, timeout: float = 180) -> int:
        self.wait_until(lambda: self.run.step() >= step, f"step {step}", timeout)
        return self.run.step()

    def wait_until(self, condition: Callable[[], object], what: str, timeout: float = 180) -> float:
        """Wait until the condition is true; return the seconds it took."""
        start = time.monotonic()
        while not condition():
            assert time.monotonic() - start < timeout, f"no {what} in {timeout} s:\n{self.logs()}"
            time.sleep(0.05)
        return time.monotonic() - start

    def logs(self) -> str:
        return "\n".join(
            f"== {path.name}\n{path.read_text()[-4000:]}" for path in sorted(self.folder.glob("pod-*.log"))
        )


def rendered(data: Path | str, *words: str, nodes: int = 2, **options: Any) -> list[Document]:
    """Return the manifests of a Job that trains on the CPU, with one loader worker a node."""
    overrides = (*words, f"data.root={data}", "data.workers=1")
    request = RenderOptions(nodes=nodes, gpus=0, overrides=overrides, **options)
    return [document for text in render(request).values() for document in yaml.safe_load_all(text)]


def _indexes(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def _matches(codes: Document, pod: Pod) -> bool:
    """Return True if a rule's `onExitCodes` matches a failed pod."""
    is_container = codes.get("containerName", pod.container) == pod.container
    return (
        is_container and pod.code is not None and (pod.code in codes["values"]) == (codes["operator"] == "In")
    )


def _address(number: int) -> tuple[str, str]:
    """Return the IP and the MAC address of the pod with this number."""
    number %= _ADDRESSES
    return f"10.231.7.{10 + number}", f"02:00:00:00:07:{10 + number:02x}"


def _runs(pid: int, *, is_told: bool) -> bool:
    """Return True unless a process has stopped or ended. is_told: SIGSTOP was sent to it."""
    state = _stat(pid)[0]
    return state not in ("T", "Z") and not (is_told and state == "D")


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc after the name; those of a zombie if the process has ended."""
    try:
        return process_stat(pid)
    except OSError:
        return ["Z", "0"]


def _ip(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout
