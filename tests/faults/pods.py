"""The pods of a rendered Job as processes, each in a network namespace of its own, looked after as the Job controller does.

What runs is read from the manifests: each container's command, its environment, the names of the
pods, which exit codes end the Job and how many failures it outlives. What is not a cluster's is
said in `Pods._container`.
"""

import contextlib
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from harness import Job, children, command_line, kill, read_rows, variable
from manifests import Document, one, pod_of, settings

BIN = Path(sys.executable).parent
PREFIX = f"pods-{os.getpid()}"
SWITCH = f"{PREFIX}-switch"


def missing() -> str | None:
    """What this machine lacks to have network namespaces; None if it has all."""
    if not shutil.which("ip") or not shutil.which("unshare"):
        return "the commands ip and unshare are not here"
    tried = subprocess.run(["ip", "netns", "add", f"{PREFIX}-try"], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"no network namespace can be made here: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", f"{PREFIX}-try"], check=True)
    return None


class Pods:
    """The Job's pods. Use as a context: at its end everything is gone."""

    def __init__(self, documents: list[Document], folder: Path) -> None:
        self.job, self.config, self.folder = one(documents, "Job", "trainer"), settings(documents), folder
        self.nodes = int(self.job["spec"]["completions"])
        self.run = Job(folder / self.config["RUN_DIR"].lstrip("/"), [])  # to look at what it writes
        self.failures: list[tuple[int, int, float]] = []
        """(pod, exit code, when) of each pod that failed."""
        self._ended: queue.Queue[tuple[int, str, int]] = queue.Queue()
        self._going = True
        self._main: dict[int, subprocess.Popen[bytes]] = {}
        (folder / "recipe").mkdir(parents=True)
        (folder / "recipe/recipe.yaml").write_text(self.config["recipe.yaml"])
        self.run.folder.parent.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> "Pods":
        self._remove()
        _ip("netns", "add", SWITCH)  # a namespace for the switch too: no firewall of this machine looks into it
        _ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        _ip("-n", SWITCH, "link", "set", "bridge", "up")
        for pod in range(self.nodes):
            name = self._namespace(pod)
            _ip("netns", "add", name)
            _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"port{pod}", "netns", SWITCH)
            _ip("-n", SWITCH, "link", "set", f"port{pod}", "master", "bridge", "up")
            _ip("-n", name, "address", "add", f"10.231.7.{10 + pod}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
            (Path("/etc/netns") / name).mkdir(parents=True, exist_ok=True)
        self.name_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._going = False
        for pod in range(self.nodes):
            self.kill_pod(pod)
        self._remove()

    def name_all(self, *, without: tuple[int, ...] = ()) -> None:
        """Let the pods' names resolve, as the headless Service does; those of `without` do not."""
        names = [f"10.231.7.{10 + pod} {self.host(pod)} {self.host(pod).partition('.')[0]}"
                 for pod in range(self.nodes) if pod not in without]  # fmt: skip
        # MLflow's name leads to where nobody listens: the journal is what is looked at here
        text = "\n".join(["127.0.0.1 localhost", "127.0.0.1 mlflow", *names, ""])
        for pod in range(self.nodes):
            (Path("/etc/netns") / self._namespace(pod) / "hosts").write_text(text)

    def host(self, pod: int) -> str:
        return f"{self.job['metadata']['name']}-{pod}.{pod_of(self.job)['subdomain']}"

    def start(self) -> "Pods":
        for pod in range(self.nodes):
            self._start(pod)
        return self

    def start_and_watch(self, timeout: float) -> Callable[[], int]:
        """Start all, and look after them in the background; what is returned waits for the end and gives its code."""
        self.start()
        pool = ThreadPoolExecutor(1)
        watched = pool.submit(self.wait, timeout)
        pool.shutdown(wait=False)
        return watched.result

    def wait(self, timeout: float = 600) -> int:
        """As the Job controller: 0 once all pods have ended with 0; the exit code that ended the Job otherwise."""
        spec = self.job["spec"]
        final = {
            (rule["onExitCodes"]["containerName"], code)
            for rule in spec["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"
            for code in rule["onExitCodes"]["values"]
        }  # fmt: skip
        end, done = time.monotonic() + timeout, set[int]()
        while len(done) < self.nodes:
            try:
                pod, container, code = self._ended.get(timeout=max(0.1, end - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"still running after {timeout} s:\n{self.logs()}") from None
            if code == 0:
                done.add(pod)
                continue
            self.failures.append((pod, code, time.monotonic()))
            if (container, code) in final:
                return code
            if len(self.failures) > spec["backoffLimit"]:
                return code
            if not done:  # where one is through, the training is
                time.sleep(1)  # a cluster waits 10 s and doubles it
                self._start(pod)
            else:
                done.add(pod)
        return 0

    def kill_rank(self, rank: int) -> None:
        for process in self._main.values():
            for pid in children(process.pid):
                if variable(pid, "RANK") == str(rank):
                    kill(pid, signal.SIGKILL)

    def kill_pod(self, pod: int) -> None:
        """All that lives in it, at once."""
        for pid in self.processes(pod):
            kill(pid, signal.SIGKILL)

    def partition(self, pod: int) -> None:
        _ip("-n", SWITCH, "link", "set", f"port{pod}", "down")

    def heal(self, pod: int) -> None:
        _ip("-n", SWITCH, "link", "set", f"port{pod}", "up")

    def processes(self, pod: int) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self._namespace(pod), check=False).split()]

    def trainers(self, pod: int) -> list[int]:
        """Ranks of a pod that are alive, and their loader workers."""
        return [pid for pid in self.processes(pod) if "pipeline train" in command_line(pid).replace(" -u", "")
                and variable(pid, "RANK") is not None]  # fmt: skip

    def step(self) -> int:
        return self.run.step()

    def wait_for_step(self, step: int, timeout: float = 180) -> int:
        end = time.monotonic() + timeout
        while self.step() < step:
            assert time.monotonic() < end, f"no step {step} in {timeout} s:\n{self.logs()}"
            time.sleep(0.05)
        return self.step()

    def starts(self) -> int:
        """How often a training was begun or gone on with."""
        return sum(row.get("event") == "started" for row in read_rows(self.run.folder / "journal.jsonl"))

    def logs(self) -> str:
        return "\n".join(
            f"== {path.name}\n{path.read_text()[-4000:]}" for path in sorted(self.folder.glob("pod-*.log"))
        )

    def _start(self, pod: int) -> None:
        threading.Thread(target=self._live, args=(pod,), daemon=True).start()

    def _live(self, pod: int) -> None:
        template = pod_of(self.job)
        for container in (*template["initContainers"], *template["containers"]):
            if not self._going:
                return
            with open(self.folder / f"pod-{pod}.log", "ab") as log:
                process = self._container(pod, container, log)
                if container in template["containers"]:
                    self._main[pod] = process
                code = process.wait()
            if code:
                break
        self._ended.put((pod, container["name"], code if code >= 0 else 128 - code))

    def _container(self, pod: int, container: Document, log: Any) -> subprocess.Popen[bytes]:
        """A container's process.

        Not as in a cluster: this machine's Python for the image, a folder for each mount.
        """
        mounts = {"/recipe": self.folder / "recipe", "/runs": self.folder / "runs"}
        words = []
        for word in container["command"]:
            for name, value in self.config.items():
                word = word.replace(f"$({name})", value)  # noqa: PLW2901
            for inside, outside in mounts.items():
                word = word.replace(inside + "/", f"{outside}/")  # noqa: PLW2901
            words.append(word)
        env = {name: value for name, value in self.config.items() if name != "recipe.yaml"}
        env |= {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(self.folder), "MLFLOW_DISABLE_TELEMETRY": "true"}
        hostname = self.host(pod).partition(".")[0]
        inside = [
            "ip",
            "netns",
            "exec",
            self._namespace(pod),
            "unshare",
            "--uts",
            "sh",
            "-c",
            'hostname "$0"; exec "$@"',
        ]
        return subprocess.Popen(
            [*inside, hostname, *words], stdout=log, stderr=log, env=env, cwd=self.folder, start_new_session=True
        )

    def _namespace(self, pod: int) -> str:
        return f"{PREFIX}-{pod}"

    def _remove(self) -> None:
        for name in (SWITCH, *(self._namespace(pod) for pod in range(self.nodes))):
            _ip("netns", "del", name, check=False)
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(Path("/etc/netns") / name)


def _ip(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
    return done.stdout
