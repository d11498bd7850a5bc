"""`pipeline k8s recover`: let the Job replace the pods of a node that has lost its power.

Promise: a pod of the trainer that should have ended 15 s ago, and whose node has not reported its
end, becomes Failed. No other pod is touched.

A Job with `podReplacementPolicy: Failed` starts a replacement once the old pod is Failed
(`isPodFailed` in Kubernetes' pkg/controller/job/job_controller.go). Only the kubelet of the pod's
node reports that, so the Job waits for ever if the node is dead. This controller does what pod
garbage collection does for a node that is gone (`markFailedAndDeletePodWithCondition` in
pkg/controller/podgc/gc_controller.go): it patches the pod's status to Failed, then deletes the pod
without grace. The Job controller counts the pod, removes its finalizer and starts the replacement.
If the deletion fails, only the old pod's object stays.

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
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, NoReturn

from pipeline.errors import OK, RequestError, one_line
from pipeline.files import parse_json

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""The folder in which Kubernetes gives a pod its token, namespace and the API server's CA."""
DELAY = timedelta(seconds=15)
"""Time between the end of a pod's grace period and this controller's action."""
_POLL_S = 5
_TIMEOUT_S = 10
_MAX_ANSWER = 8 << 20  # bytes: about 800 pods, for which 128 MiB of memory are enough
_SELECTOR = "labelSelector=app%3Dtrainer&fieldSelector=status.phase%21%3DSucceeded%2Cstatus.phase%21%3DFailed"
_MALFORMED = (ValueError, TypeError, KeyError, AttributeError)  # an answer that is not what it should be


def recover(account: Path = ACCOUNT) -> NoReturn:
    """End overdue pods until SIGTERM. Raises RequestError outside a cluster."""
    api = connect(account)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(OK))
    _log(f"watching the pods app=trainer in namespace {api.namespace}")
    before: set[str] = set()
    while True:
        lines = list(end_overdue_pods(api))
        for line in lines:
            if line not in before:  # an error that lasts is printed once
                _log(line)
        before = set(lines)
        time.sleep(_POLL_S)


def _log(line: str) -> None:
    print(f"recovery | {line}", file=sys.stderr, flush=True)


class ApiError(Exception):
    """A request to the API server failed; the text is one line that says why."""


@dataclass(frozen=True)
class ApiServer:
    """The API server as a pod reaches it. Token and CA are read for each request: they rotate."""

    host: str
    port: int
    account: Path
    namespace: str

    def request(
        self, verb: str, path: str, body: object = None, content_type: str = "application/json"
    ) -> tuple[Any, datetime]:
        """Return the answer and the time at the API server. Raises ApiError.

        path: what follows the namespace in the URL.
        """
        url = f"/api/v1/namespaces/{self.namespace}/{path}"
        try:
            context = ssl.create_default_context(cafile=self.account / "ca.crt")
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # Python 3.13 refuses the CAs of some clusters
            token = (self.account / "token").read_text(encoding="utf-8").strip()
            headers = {"Authorization": f"Bearer {token}", "Content-Type": content_type}
            server = HTTPSConnection(self.host, self.port, timeout=_TIMEOUT_S, context=context)
            with closing(server) as connection:
                connection.request(verb, url, None if body is None else json.dumps(body), headers)
                response = connection.getresponse()
                answer = parse_json(response.read(_MAX_ANSWER))
            if response.status < 400:
                return answer, parsedate_to_datetime(response.headers["Date"])
            # 403: the Role of 60-recovery.yaml allows it
            problem = f"answer {response.status} {one_line(answer['message'], 500)}"
        except (OSError, HTTPException, *_MALFORMED) as error:
            problem = one_line(error, 500) or type(error).__name__
        raise ApiError(f"{verb} {url}: {problem}; trying again")


def connect(account: Path) -> ApiServer:
    """Return the API server of the cluster in which this pod runs."""
    try:
        host, port = os.environ["KUBERNETES_SERVICE_HOST"], int(os.environ["KUBERNETES_SERVICE_PORT"])
        return ApiServer(host, port, account, (account / "namespace").read_text(encoding="utf-8").strip())
    except (KeyError, ValueError, OSError):
        problem = f"this is not a pod with a service account: KUBERNETES_SERVICE_HOST or {account} is missing"
        raise RequestError(problem, "apply 60-recovery.yaml of 'pipeline k8s render'") from None


def end_overdue_pods(api: ApiServer) -> Iterator[str]:
    """End each overdue pod; yield a line for each, and for each request that fails."""
    try:
        pods, now = api.request("GET", f"pods?{_SELECTOR}")
        overdue = [pod for pod in pods["items"] if _is_overdue(pod["metadata"], now)]
    except ApiError as error:
        yield str(error)
        return
    except _MALFORMED:
        yield "GET pods: the answer is not a list of pods; trying again"
        return
    for pod in overdue:
        try:
            yield _end(api, pod, now)
        except ApiError as error:
            yield str(error)


def _is_overdue(metadata: dict[str, str], now: datetime) -> bool:
    # deletionTimestamp includes the grace period; both times are the API server's
    end = metadata.get("deletionTimestamp")
    return end is not None and now - datetime.fromisoformat(end) > DELAY


def _end(api: ApiServer, pod: dict[str, Any], now: datetime) -> str:
    """Mark the pod as Failed, then delete it; return the line for the log."""
    metadata, node = pod["metadata"], pod.get("spec", {}).get("nodeName", "none")
    name, uid, end = metadata["name"], metadata["uid"], metadata["deletionTimestamp"]
    message = f"its grace period ended at {end}, and node {node} has not reported its end"
    failed: dict[str, object] = {"phase": "Failed", "reason": "NodeDidNotAnswer", "message": message}
    conditions = pod.get("status", {}).get("conditions") or []
    if not any((c["type"], c["status"]) == ("DisruptionTarget", "True") for c in conditions):
        # the Job's podFailurePolicy does not count a pod with this condition
        failed["conditions"] = [{
            "type": "DisruptionTarget", "status": "True", "reason": "DeletionByRecovery", "message": message,
            "lastTransitionTime": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }]  # fmt: skip
    # only to the version that was listed: a pod that has ended since stays as it is
    patch = {"metadata": {"uid": uid, "resourceVersion": metadata["resourceVersion"]}, "status": failed}
    api.request("PATCH", f"pods/{name}/status", patch, "application/strategic-merge-patch+json")
    options = {
        "apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0,
        "preconditions": {"uid": uid},  # never a later pod of that name
    }  # fmt: skip
    api.request("DELETE", f"pods/{name}", options)
    return f"pod {name} on node {node}: {message}; marked as Failed, so that the Job replaces it"
