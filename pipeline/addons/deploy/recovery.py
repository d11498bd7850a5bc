"""`pipeline k8s recover`: let the Job replace the pods of a node that has lost its power.

Promise: a pod of the trainer that should have ended 15 s ago, and whose node has not reported its
end, becomes Failed. No other pod is touched. A running pod that Kubernetes deletes because its node
is silent has no use for a grace period: it should have ended when it was deleted.

A Job with `podReplacementPolicy: Failed` starts a replacement once the old pod is Failed. Only the
kubelet of the pod's node reports that, so the Job waits for ever if the node is dead. This
controller does what pod garbage collection does for a node that is gone
(`markFailedAndDeletePodWithCondition` in Kubernetes' pkg/controller/podgc/gc_controller.go): it
patches the pod's status to Failed, then deletes the pod without grace.

A dead node cannot be told from one that is cut off and still trains. The lock of the run's folder
(`takeover.py`) decides: the replacement takes it over from a dead rank 0, and exits with 75
while a living one holds it.
"""

import json
import os
import signal
import ssl
import sys
import time
from contextlib import closing
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any, NoReturn

from pipeline.errors import OK, RequestError, one_line
from pipeline.files import parse_json

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The folder in which Kubernetes gives a pod its token, namespace and the API server's CA."""
DELAY = timedelta(seconds=15)  # between a pod's due end and this controller's action
_POLL_S = 5
_TIMEOUT_S = 10
_MAX_ANSWER = 8 << 20  # bytes: about 800 pods, for which 128 MiB of memory are enough
_SELECTOR = "labelSelector=app%3Dtrainer&fieldSelector=status.phase%21%3DSucceeded%2Cstatus.phase%21%3DFailed"


def recover(account: Path = ACCOUNT) -> NoReturn:
    """End overdue pods until SIGTERM. Raises RequestError outside a cluster."""
    api = ApiServer(account)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(OK))
    _log(f"watching the pods app=trainer in namespace {api.namespace}")
    before: list[str] = []
    while True:
        lines = end_overdue_pods(api)
        for line in lines:
            if line not in before:  # an error that lasts is printed once
                _log(line)
        before = lines
        time.sleep(_POLL_S)


def _log(line: str) -> None:
    print(f"recovery | {line}", file=sys.stderr, flush=True)


class ApiServer:
    """The API server as a pod reaches it. Token and CA are read for each request: they rotate."""

    def __init__(self, account: Path) -> None:
        """Raise RequestError outside a cluster."""
        try:
            self._account, self._host = account, os.environ["KUBERNETES_SERVICE_HOST"]
            self._port = int(os.environ["KUBERNETES_SERVICE_PORT"])
            self.namespace = (account / "namespace").read_text(encoding="utf-8").strip()
        except (KeyError, ValueError, OSError):
            problem = f"this is not a pod with a service account: no KUBERNETES_SERVICE_HOST, or no {account}"
            raise RequestError(problem, "apply 60-recovery.yaml of 'pipeline k8s render'") from None

    def request(
        self, verb: str, path: str, body: object = None, content_type: str = "application/json"
    ) -> tuple[Any, datetime]:
        """Return the answer and the server's time. path: what follows the namespace in the URL."""
        context = ssl.create_default_context(cafile=self._account / "ca.crt")
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # Python 3.13 refuses the CAs of some clusters
        token = (self._account / "token").read_text(encoding="utf-8").strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": content_type}
        server = HTTPSConnection(self._host, self._port, timeout=_TIMEOUT_S, context=context)
        with closing(server) as connection:
            url = f"/api/v1/namespaces/{self.namespace}/{path}"
            connection.request(verb, url, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            answer = parse_json(response.read(_MAX_ANSWER))
        if response.status >= 400:  # 403: the Role of 60-recovery.yaml allows it
            raise ValueError(f"answer {response.status} {answer['message']}")
        return answer, parsedate_to_datetime(response.headers["Date"])


def end_overdue_pods(api: ApiServer) -> list[str]:
    """End each overdue pod; return a line for each, and for each request that fails."""
    lines = []
    try:
        pods, now = api.request("GET", f"pods?{_SELECTOR}")
        overdue = [pod for pod in pods["items"] if now - _due(pod, now) > DELAY]
    except Exception as error:  # of the connection, or of an answer that is not what it should be
        return [_failure("list the pods", error)]
    for pod in overdue:
        try:
            lines.append(_end(api, pod, now))
        except Exception as error:
            lines.append(_failure(f"end pod {pod['metadata']['name']}", error))
    return lines


def _failure(what: str, error: Exception) -> str:
    return f"cannot {what}: {one_line(error, 500) or type(error).__name__}; trying again"


def _due(pod: dict[str, Any], now: datetime) -> datetime:
    """Return when the pod has to have ended, at the API server's clock; `now` if it need not."""
    metadata, conditions = pod["metadata"], pod.get("status", {}).get("conditions", [])
    if not (end := metadata.get("deletionTimestamp")):  # it includes the grace period
        return now
    marks = {mark for c in conditions for mark in (f"{c['type']}={c['status']}", c.get("reason"))}
    # the node controller sets Ready, and nothing else, to False once a node is silent
    is_silent = {"DeletionByTaintManager", "Ready=False", "ContainersReady=True"} <= marks
    grace = metadata["deletionGracePeriodSeconds"] if is_silent else 0
    return datetime.fromisoformat(end) - timedelta(seconds=grace)


def _end(api: ApiServer, pod: dict[str, Any], now: datetime) -> str:
    """Mark the pod as Failed, then delete it; return the line for the log."""
    metadata, node = pod["metadata"], pod.get("spec", {}).get("nodeName", "none")
    name, uid = metadata["name"], metadata["uid"]
    message = f"it was due to end at {_due(pod, now):%H:%M:%SZ}, and node {node} has not reported its end"
    # the Job's podFailurePolicy does not count a pod with this condition
    condition = {
        "type": "DisruptionTarget", "status": "True", "reason": "DeletionByRecovery", "message": message,
        "lastTransitionTime": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }  # fmt: skip
    status = {"phase": "Failed", "reason": "NodeDidNotAnswer", "message": message, "conditions": [condition]}
    # only to the version that was listed: a pod that has ended since stays as it is
    patch = {"metadata": {"uid": uid, "resourceVersion": metadata["resourceVersion"]}, "status": status}
    api.request("PATCH", f"pods/{name}/status", patch, "application/strategic-merge-patch+json")
    never_a_later_pod = {"preconditions": {"uid": uid}, "gracePeriodSeconds": 0}
    api.request("DELETE", f"pods/{name}", {"apiVersion": "v1", "kind": "DeleteOptions", **never_a_later_pod})
    return f"pod {name} on node {node}: {message}; marked as Failed, so that the Job replaces it"
