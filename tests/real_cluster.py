"""A namespace of its own on a real cluster, through kubectl: for tests/on_cluster.py.

Promise: nothing outside the namespace is changed, and the namespace is deleted only if this process
made it, or if it carries LABEL from an earlier test. Interrupted kubectl commands change nothing in
that: the namespace has a token of this process.
"""

import contextlib
import json
import secrets
import subprocess
from pathlib import Path
from typing import Any

from manifests import Document, one, pod_of

LABEL = "ddp-pipeline/cluster-test"
HELPER = "helper"
"""A pod with the volume of the runs: reads journals while trainers come and go."""

_MLFLOW = """\
import json, mlflow, sys
client, found = mlflow.MlflowClient("http://127.0.0.1:5000"), []
ids = [experiment.experiment_id for experiment in client.search_experiments()]
for run in client.search_runs(ids, f"attributes.run_name = '{sys.argv[1]}'"):
    points = [client.get_metric_history(run.info.run_id, key) for key in run.data.metrics]
    steps = [(point.key, point.step) for history in points for point in history]
    found.append({"status": run.info.status, "points": steps})
print(json.dumps(found))
"""


class Failure(Exception):
    """A promise that does not hold, or a command that failed; the text is one line."""


class Cluster:
    """One namespace, made on entry and deleted on exit."""

    def __init__(self, namespace: str, evidence: Path) -> None:
        self.namespace, self.evidence = namespace, evidence
        self._token = secrets.token_hex(8)

    def kubectl(self, *arguments: str, text: str | None = None, timeout: float = 120) -> str:
        """Return the output of kubectl. Raises Failure. text: its standard input."""
        command = ["kubectl", "--namespace", self.namespace, *arguments]
        try:
            # a session of its own: Ctrl-C at the terminal must not end the commands that clean up
            done = subprocess.run(
                command, input=text or "", capture_output=True, text=True, timeout=timeout, check=False,
                start_new_session=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise Failure(f"kubectl {arguments[0]} {arguments[1]}: no answer in {timeout:g} s") from None
        except FileNotFoundError:
            raise Failure("kubectl is not installed") from None
        if done.returncode:
            raise Failure(f"kubectl {' '.join(arguments[:4])}: {' '.join(done.stderr.split())}")
        return done.stdout

    def get(self, *what: str) -> Any:
        return json.loads(self.kubectl("get", *what, "--output", "json"))

    def make(self, namespace: Document) -> None:
        """Create the namespace. Raises Failure if it exists and is not that of a test."""
        self.delete(LABEL)
        namespace["metadata"].setdefault("labels", {})[LABEL] = self._token
        self.kubectl("create", "--filename", "-", text=json.dumps(namespace))

    def delete(self, label: str = "") -> None:
        """Delete the namespace if it has this label; without one: if this process made it."""
        chosen = ("--selector", label or f"{LABEL}={self._token}")
        words = ("delete", "namespaces", f"--field-selector=metadata.name={self.namespace}", *chosen)
        self.kubectl(*words, "--timeout=600s", timeout=630)

    def start(self, documents: list[Document]) -> None:
        """Replace the Job by a new one, and wait until MLflow answers."""
        self.kubectl("delete", "job", "trainer", "--ignore-not-found", "--cascade=foreground",
                     "--timeout=180s", timeout=200)  # fmt: skip
        self.apply(documents)
        if not self.kubectl("get", "pod", HELPER, "--ignore-not-found", "--output", "name"):
            self.start_helper(documents)
        self.kubectl("rollout", "status", "deployment/mlflow", "--timeout=600s", timeout=630)

    def apply(self, documents: list[Document]) -> None:
        """Apply the documents, without the namespace: that of `make` has a label of its own.

        Raises Failure if a second time changes something.
        """
        items = [document for document in documents if document["kind"] != "Namespace"]
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
        for _ in range(2):
            lines = self.kubectl("apply", "--filename", "-", text=text).splitlines()
        if changed := [line for line in lines if not line.endswith(" unchanged")]:
            raise Failure(f"applied twice, and {', '.join(changed)}")

    def describe(self) -> str:
        """Return the version of Kubernetes, and the number of nodes."""
        version = json.loads(self.kubectl("version", "--output", "json"))["serverVersion"]["gitVersion"]
        return f"Kubernetes {version.partition('-')[0]}, {len(self.get('nodes')['items'])} nodes"

    def start_helper(self, documents: list[Document], avoid_node: str | None = None) -> None:
        """Start the helper anew, on a node other than `avoid_node`."""
        self.kubectl("delete", "pod", HELPER, "--ignore-not-found", timeout=180)
        self.apply([helper(documents, avoid_node)])
        self.kubectl("wait", "--for=condition=Ready", f"pod/{HELPER}", "--timeout=600s", timeout=630)

    def journal(self, run: str) -> list[dict[str, Any]]:
        """Return the rows of the run's journal, [] if there is none yet."""
        rows = []
        with contextlib.suppress(Failure, ValueError):  # the last row may be incomplete
            for line in self.kubectl("exec", HELPER, "--", "cat", f"/runs/{run}/journal.jsonl").splitlines():
                rows.append(json.loads(line))
        return rows

    def pods(self, index: int | None = None) -> list[dict[str, Any]]:
        """Return the pods of the trainers, of one index or of all."""
        of_index = f",batch.kubernetes.io/job-completion-index={index}" if index is not None else ""
        return self.get("pods", "--selector", f"app=trainer{of_index}")["items"]

    def evict(self, pod: str) -> None:
        """Evict a pod as a drain does, through the Eviction API, without touching its node."""
        metadata = {"name": pod, "namespace": self.namespace}
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/eviction"
        self.kubectl("create", "--raw", path, "--filename", "-", text=json.dumps(eviction))

    def end_of(self, job: str) -> str | None:
        """Return "Complete" or "Failed: why" once the Job has ended, else None."""
        for condition in self.get("job", job).get("status", {}).get("conditions") or []:
            if condition["status"] == "True" and condition["type"] == "Failed":
                return f"Failed: {condition.get('reason')}: {condition.get('message')}"
            if condition["status"] == "True" and condition["type"] == "Complete":
                return "Complete"
        return None

    def mlflow_runs(self, run: str) -> list[dict[str, Any]]:
        """Return status and points (metric, step) of each MLflow run of that name."""
        answer = self.kubectl("exec", "deployment/mlflow", "--", "python3", "-c", _MLFLOW, run, timeout=300)
        return json.loads(answer)

    def save_evidence(self, case: str) -> Path:
        """Write logs, events, objects and the journal to files; return their folder."""
        folder = self.evidence / case
        folder.mkdir(parents=True, exist_ok=True)
        for file, *words in (
            ("dump.txt", "cluster-info", "dump", "--output-directory", str(folder)),
            ("objects.txt", "describe", "jobs,pods,pvc,endpointslices"),
            ("journal.jsonl", "exec", HELPER, "--", "cat", f"/runs/{case}/journal.jsonl"),
            ("files.txt", "exec", HELPER, "--", "ls", "-lR", f"/runs/{case}"),
        ):
            try:
                (folder / file).write_text(self.kubectl(*words))
            except Failure as error:
                (folder / file).write_text(f"{error}\n")
        return folder


def helper(documents: list[Document], avoid_node: str | None = None) -> Document:
    """Return a pod that mounts the volume of the runs, with the image and rights of a trainer."""
    job = one(documents, "Job", "trainer")
    trainer = pod_of(job)["containers"][0]
    kept = "enableServiceLinks automountServiceAccountToken imagePullSecrets securityContext tolerations"
    spec = {key: value for key, value in pod_of(job).items() if key in kept.split()}
    spec["volumes"] = [volume for volume in pod_of(job)["volumes"] if volume["name"] == "runs"]
    spec["terminationGracePeriodSeconds"] = 0
    spec["containers"] = [{
        "name": HELPER, "image": trainer["image"], "command": ["sleep", "infinity"],
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": trainer["securityContext"],
        "volumeMounts": [{"name": "runs", "mountPath": "/runs"}],
    }]  # fmt: skip
    if avoid_node:
        term = {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": [avoid_node]}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
        spec["affinity"] = {"nodeAffinity": required}
    metadata = {"name": HELPER, "namespace": job["metadata"]["namespace"], "labels": {"app": HELPER}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
