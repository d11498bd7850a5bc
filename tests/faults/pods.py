"""Run the pods of a rendered Job as processes in network namespaces, and act as the Job controller.

The manifests define each container's command and environment, the pods' names, the exit codes that
end the Job, and how many failures it tolerates. `Pods._container` lists the differences from a
cluster.
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

from harness import Job, children, command_line, kill, variable
from manifests import Document, one, pod_of, settings

BIN = Path(sys.executable).parent
PREFIX = f"pods-{os.getpid()}"
SWITCH = f"{PREFIX}-switch"


def missing() -> str | None:
    """Return why this machine cannot make network namespaces, or None if it can."""
    if not shutil.which("ip") or not shutil.which("unshare"):
        return "the commands ip and unshare are not installed"
    trial = subprocess.run(["ip", "netns", "add", f"{PREFIX}-try"], capture_output=True, text=True, check=False)
    if trial.returncode:
        return f"no network namespace can be made here: {trial.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", f"{PREFIX}-try"], check=True)
    return None


class Pods:
    """The Job's pods; a context manager that removes all of them at its end."""

    def __init__(self, documents: list[Document], folder: Path) -> None:
        self.job, self.config, self.folder = one(documents, "Job", "trainer"), settings(documents), folder
        self.nodes = int(self.job["spec"]["completions"])
        self.run = Job(folder / self.config["RUN_DIR"].lstrip("/"), [])  # reads the run's files
        self.failures: list[tuple[int, int]] = []
        """(pod, exit code) of each pod that failed."""
        self._ended: queue.Queue[tuple[int, str, int]] = queue.Queue()
        self._is_open = True
        self._main: dict[int, subprocess.Popen[bytes]] = {}
        (folder / "recipe").mkdir(parents=True)
        (folder / "recipe/recipe.yaml").write_text(self.config["recipe.yaml"])
        self.run.folder.parent.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> "Pods":
        self._remove()
        _ip("netns", "add", SWITCH)  # the switch has a namespace, too, so that this machine's firewall does not apply
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
        self._is_open = False
        for pod in range(self.nodes):
            self.kill_pod(pod)
        self._remove()

    def name_all(self, *, without: tuple[int, ...] = ()) -> None:
        """Make the pods' names resolve, as the headless Service does, except those of `without`."""
        names = [f"10.231.7.{10 + pod} {self.host(pod)} {self.host(pod).partition('.')[0]}"
                 for pod in range(self.nodes) if pod not in without]  # fmt: skip
        # No MLflow server listens there: the tests read the journal.
        text = "\n".join(["127.0.0.1 localhost", "127.0.0.1 mlflow", *names, ""])
        for pod in range(self.nodes):
            (Path("/etc/netns") / self._namespace(pod) / "hosts").write_text(text)

    def host(self, pod: int) -> str:
        return f"{self.job['metadata']['name']}-{pod}.{pod_of(self.job)['subdomain']}"

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

        The code is 0 if all pods succeed, otherwise the exit code that failed the Job.
        """
        spec = self.job["spec"]
        permanent = {
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
            self.failures.append((pod, code))
            if (container, code) in permanent or len(self.failures) > spec["backoffLimit"]:
                return code
            if not done:  # after one pod has succeeded, the training is complete
                time.sleep(1)  # a cluster waits 10 s at first and twice as long each time
                self.start_pod(pod)
            else:
                done.add(pod)
        return 0

    def kill_rank(self, rank: int) -> None:
        for process in self._main.values():
            for pid in children(process.pid):
                if variable(pid, "RANK") == str(rank):
                    kill(pid, signal.SIGKILL)

    def kill_pod(self, pod: int) -> None:
        """Kill all processes of the pod at once."""
        for pid in self.processes(pod):
            kill(pid, signal.SIGKILL)

    def partition(self, pod: int) -> None:
        _ip("-n", SWITCH, "link", "set", f"port{pod}", "down")

    def heal(self, pod: int) -> None:
        _ip("-n", SWITCH, "link", "set", f"port{pod}", "up")

    def processes(self, pod: int) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self._namespace(pod), check=False).split()]

    def trainers(self, pod: int) -> list[int]:
        """Return the living ranks and loader workers of a pod."""
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

    def logs(self) -> str:
        return "\n".join(
            f"== {path.name}\n{path.read_text()[-4000:]}" for path in sorted(self.folder.glob("pod-*.log"))
        )

    def start_pod(self, pod: int) -> None:
        threading.Thread(target=self._run_pod, args=(pod,), daemon=True).start()

    def _run_pod(self, pod: int) -> None:
        """Run a pod's containers one after another, until one fails; report the exit code."""
        template = pod_of(self.job)
        for container in (*template["initContainers"], *template["containers"]):
            if not self._is_open:
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
        """Start a container's process.

        Unlike a cluster it uses this machine's Python in place of the image, and a folder in place
        of each mount.
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
        in_namespace = ["ip", "netns", "exec", self._namespace(pod), "unshare", "--uts", "sh", "-c"]
        command = [*in_namespace, 'hostname "$0"; exec "$@"', self.host(pod).partition(".")[0], *words]
        return subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=self.folder, start_new_session=True)

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
