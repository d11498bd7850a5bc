"""`pipeline k8s watch`: show how the Job in a cluster goes, and end when it ends, well or badly.

kubectl asks the cluster. Standard output gets the log of pod 0's trainer and of its replacements,
standard error a line for each change of a pod, with the reason if a container failed. A Job that
fails deletes its running pods with their logs, but not the pod that failed.
"""

import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from pipeline.addons.deploy.node import JOB
from pipeline.errors import CRASH, RequestError, TemporaryError, from_exit_code, one_line
from pipeline.files import parse_json

_POLL_S = 2
_PATIENCE_S = 30  # with a cluster that does not answer, or has no Job
_INDEX = "batch.kubernetes.io/job-completion-index"
Object = dict[str, Any]


def watch(namespace: str) -> str:
    """Return a line once the Job is complete.

    Raises an error with the exit code that failed the Job, otherwise with 1; TemporaryError if the
    cluster has no Job or does not answer.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TemporaryError.code))
    kubectl, said, followed = ["kubectl", "--namespace", namespace], dict[str, str](), ""
    log: subprocess.Popen[bytes] | None = None
    try:
        while True:
            is_followed = log is not None and log.poll() is None
            job, pods = _look(kubectl)
            for name, pod in pods.items():
                if said.get(name) != (state := _state(pod)):
                    print(f"{name}: {state}", file=sys.stderr, flush=True)
                    said[name] = state
                if is_followed or pod["metadata"]["labels"].get(_INDEX) != "0":
                    continue
                states = [kind for c in _containers(pod) if c["name"] == "trainer" for kind in c["state"]]
                if "running" in states or ("terminated" in states and name != followed):
                    words = ["logs", name, "--container=trainer", "--follow"]
                    words += ["--since=5s"] if name == followed else []  # the connection was lost
                    log, followed, is_followed = subprocess.Popen([*kubectl, *words]), name, True
            for end in job["status"].get("conditions") or []:
                if end["status"] == "True" and end["type"] in ("Complete", "Failed"):
                    if log:
                        with suppress(subprocess.TimeoutExpired):
                            log.wait(10)
                    if end["type"] == "Complete":
                        return f"the Job {JOB} is complete"
                    message = end.get("message", end["type"])
                    code = re.search(r"exit code (\d+) matching FailJob", message)
                    raise from_exit_code(int(code[1]) if code else CRASH)(f"the Job has failed: {message}")
            time.sleep(_POLL_S)
    finally:
        if log:
            log.terminate()


def _look(kubectl: list[str]) -> tuple[Object, dict[str, Object]]:
    """Return the Job and its pods by name, the oldest first. Raises TemporaryError."""
    words = ["get", "jobs,pods", f"--selector=app={JOB}", "--output=json", "--request-timeout=20s"]
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            done = subprocess.run([*kubectl, *words], capture_output=True, encoding="utf-8", check=False)
        except FileNotFoundError:
            raise RequestError("kubectl is not installed", "install it") from None
        found = [] if done.returncode else parse_json(done.stdout)["items"]
        found.sort(key=lambda item: item["metadata"]["creationTimestamp"])
        for job in (item for item in found if item["kind"] == "Job"):
            return job, {item["metadata"]["name"]: item for item in found if item["kind"] == "Pod"}
        if time.monotonic() > deadline:
            problem = f"namespace {kubectl[-1]} has no Job {JOB}: apply the manifests, or give --namespace"
            raise TemporaryError(f"kubectl: {one_line(done.stderr, 500)}" if done.returncode else problem)
        time.sleep(_POLL_S)


def _containers(pod: Object) -> list[Object]:
    return [*pod["status"].get("initContainerStatuses", []), *pod["status"].get("containerStatuses", [])]


def _state(pod: Object) -> str:
    """Return what a pod does, or why it does nothing, as one line."""
    status, state = pod["status"], pod["status"].get("phase", "Pending")
    why = [status] if status.get("reason") else []  # evicted, or of a lost node
    why += [c for c in status.get("conditions", []) if (c["type"], c["status"]) == ("PodScheduled", "False")]
    state += "".join(f": {found.get('reason')}: {found.get('message')}" for found in why)
    for container in _containers(pod):
        name, state_of = container["name"], container["state"] or {"waiting": {}}
        ((kind, detail),) = state_of.items()
        if kind == "terminated" and detail["exitCode"]:
            lines = detail.get("message", "").strip().splitlines() or [detail.get("reason", "")]
            line = [lines[-1], *(line for line in lines if "pipeline: " in line)][-1]
            return one_line(f"{name} ended with exit code {detail['exitCode']}: {line}", 1000)
        if kind in ("running", "terminated"):
            state = f"{name} {'runs' if kind == 'running' else 'is done'}"
        elif kind == "waiting" and detail.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            state = f"{name} waits: {detail['reason']}: {detail.get('message', '')}"
    return one_line(state + (", to be deleted" if "deletionTimestamp" in pod["metadata"] else ""), 1000)
