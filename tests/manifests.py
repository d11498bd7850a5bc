"""Check the manifests by schema and by rules between fields that no schema can express."""

import functools
import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate

KUBERNETES = ("1.36", "1.37")
Document = dict[str, Any]

_UNITS = {"Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def problems(documents: list[Document]) -> list[str]:
    """Return the rules that a set of manifests breaks, one line for each."""
    return [f"{d.get('kind')}: {line}" for d in documents for line in _schema(d)] or [
        *_rules(documents),
        *(line for d in documents for line in _restricted(d, locks_memory="NCCL_NET" in settings(documents))),
    ]


def problems_alone(document: Document) -> list[str]:
    """Return the rules that a single manifest breaks."""
    return list(_schema(document)) or [*_restricted(document)]


def _schema(document: Document) -> tuple[str, ...]:
    return _schema_of(json.dumps(document))


@functools.cache  # the library reads its schemas anew for each document
def _schema_of(text: str) -> tuple[str, ...]:
    document, found = json.loads(text), []
    for version in (
        KUBERNETES[1:] if "scheduling" in document.get("spec", {}) else KUBERNETES
    ):  # a field of 1.37
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
            found.append(f"{version}: {str(error).splitlines()[0]}")
    return tuple(found)


def one(documents: list[Document], kind: str, name: str) -> Document:
    (found,) = [d for d in documents if d["kind"] == kind and d["metadata"]["name"] == name]
    return found


def pod_of(document: Document) -> Document:
    pod: Document = document["spec"]["template"]["spec"]
    return pod


def containers(pod: Document) -> list[Document]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def settings(documents: list[Document]) -> dict[str, str]:
    data: dict[str, str] = one(documents, "ConfigMap", "trainer")["data"]
    return data


def _rules(documents: list[Document]) -> Iterator[str]:
    job, config = one(documents, "Job", "trainer"), settings(documents)
    service = one(documents, "Service", "trainer")
    spec, template, pod = job["spec"], job["spec"]["template"], pod_of(job)
    namespace = one(documents, "Namespace", job["metadata"].get("namespace", "default"))["metadata"]["name"]
    if any(d["metadata"].get("namespace") != namespace for d in documents if d["kind"] != "Namespace"):
        yield "all is in one namespace"
    labels = template["metadata"]["labels"]
    if not service["spec"]["selector"].items() <= labels.items():
        yield "the Service selects the Job's pods"
    if service["spec"].get("clusterIP") != "None" or not service["spec"].get("publishNotReadyAddresses"):
        yield "the Service gives names to pods, also to those that are not ready"
    if pod.get("subdomain") != service["metadata"]["name"]:
        yield "the pods' subdomain is the Service"
    nodes = config.get("PET_NNODES", "1").rpartition(":")[2]
    if not nodes == str(spec.get("completions")) == str(spec.get("parallelism")):
        yield "the rendezvous has as many nodes as the Job has completions and parallel pods"
    if spec.get("completionMode") != "Indexed":
        yield "pods keep their names"
    yield from _rendezvous(job, config, nodes)
    yield from _failures(spec, pod, config)
    yield from _pods(documents, job, config)


def _rendezvous(job: Document, config: dict[str, str], nodes: str) -> Iterator[str]:
    if nodes == "1":
        return
    name = job["metadata"]["name"]
    if config.get("PET_RDZV_ENDPOINT", "").split(":")[0] != f"{name}-0.{pod_of(job).get('subdomain')}":
        yield "the rendezvous is at node 0, by its pod's name"
    if config.get("PET_RDZV_BACKEND") != "pipeline":
        yield "a node that is lost, or dark, ends no other: the rendezvous of deploy/rendezvous.py"
    if int(config.get("PET_MAX_RESTARTS", "0")) < 1:
        yield "after the loss of a node the other pods restart their ranks"


def _failures(spec: Document, pod: Document, config: dict[str, str]) -> Iterator[str]:
    if pod.get("restartPolicy") != "Never":
        yield "podFailurePolicy needs restartPolicy Never"
    if spec.get("podReplacementPolicy") != "Failed":
        yield "a pod is replaced after it has ended, not while it terminates"
    if spec.get("successPolicy") != {"rules": [{"succeededIndexes": "0"}]}:
        yield "the Job is complete once rank 0's pod is"
    tolerated = {
        t["key"]: t.get("tolerationSeconds") for t in pod.get("tolerations", []) if t["effect"] == "NoExecute"
    }
    if tolerated != {"node.kubernetes.io/not-ready": 15, "node.kubernetes.io/unreachable": 15}:
        yield "the pods of a lost node are deleted after 15 s"
    rules = spec.get("podFailurePolicy", {}).get("rules", [])
    fails = [rule["onExitCodes"] for rule in rules if rule["action"] == "FailJob"]
    names = {container["name"] for container in pod.get("initContainers", [])}
    if not any(
        rule.get("operator") == "In"
        and set(rule["values"]) == {2, 3, 4}
        and rule.get("containerName") in names
        for rule in fails
    ):
        yield "a permanent failure (exit code 2, 3 or 4 of the preflight) fails the Job"
    ignored = [
        c["type"] for rule in rules if rule["action"] == "Ignore" for c in rule.get("onPodConditions", [])
    ]
    if "DisruptionTarget" not in ignored:
        yield "a drain or a preemption does not count"
    if spec.get("backoffLimit", 6) < 2 * spec.get("completions", 1):
        yield "the backoff limit tolerates the loss of node 0, which ends every pod"
    shutdown = int(config.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
    if pod.get("terminationGracePeriodSeconds", 30) <= shutdown:
        yield "the grace period is longer than torchrun's shutdown timeout"
    if shutdown < 60:
        yield "torchrun's shutdown timeout covers a step and a save"


def _pods(documents: list[Document], job: Document, config: dict[str, str]) -> Iterator[str]:
    pod, server = pod_of(job), one(documents, "Deployment", "mlflow")
    if len({container["image"] for container in containers(pod)}) != 1:
        yield "preflight and trainer use the same image"
    requests = [request_of(container) for container in containers(pod)]
    if any(request != requests[0] for request in requests):
        yield "preflight and trainer have the same request"
    yield from _processes(pod)
    shm = next((v for v in pod["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"), None)
    mounts = {m["name"]: m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
    limits = pod["containers"][0]["resources"]["limits"]
    if not shm or mounts.get(shm["name"]) != "/dev/shm":
        yield "/dev/shm is a memory volume of the pod"
    elif bytes_of(shm["emptyDir"]["sizeLimit"]) * 2 > bytes_of(limits["memory"]):
        yield "/dev/shm leaves memory for the training"
    gpus = limits.get("nvidia.com/gpu")
    if gpus is not None and str(gpus) != config["PET_NPROC_PER_NODE"]:
        yield "one process for each GPU"
    if gpus is not None and not any(word == "run.device=cuda" for word in requests[0]):
        yield "a pod that asks for GPUs and gets none fails"
    host = config["MLFLOW_TRACKING_URI"].removeprefix("http://")
    (flag, allowed, *more) = server["spec"]["template"]["spec"]["containers"][0]["args"]
    if flag != "--allowed-hosts" or host not in allowed.split(","):
        yield "MLflow allows the host name and port that the trainers call"
    service = one(documents, "Service", "mlflow")
    if host != f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}":
        yield "the trainers call MLflow's Service"
    if server["spec"]["strategy"]["type"] != "Recreate" or server["spec"]["replicas"] != 1:
        yield "SQLite has one writer"
    container = server["spec"]["template"]["spec"]["containers"][0]
    secrets = {
        source["secretRef"]["name"] for source in container.get("envFrom", []) if "secretRef" in source
    }
    has_auth = more == ["--app-name", "basic-auth"]
    if has_auth != ("mlflow-auth" in secrets) or (more and not has_auth):
        yield "a server with basic authentication has a password from its Secret"
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = str(container[kind])
        if "/api/2.0/mlflow/experiments/search" not in probe or (has_auth and "Authorization" not in probe):
            yield "a probe makes a call that a trainer makes"
    if container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] < 60:
        yield "the startup probe covers a cold start"
    claims = {d["metadata"]["name"] for d in documents if d["kind"] == "PersistentVolumeClaim"}
    for spec in (pod, pod_of(server)):
        if spec.get("enableServiceLinks") is not False:
            yield "no Service injects MLFLOW_PORT"
        if spec.get("automountServiceAccountToken") is not False:
            yield "no service account token in a pod"
        if (
            not {
                v["persistentVolumeClaim"]["claimName"]
                for v in spec["volumes"]
                if "persistentVolumeClaim" in v
            }
            <= claims
        ):
            yield "every claim exists"
    yield from _storage(documents, job, config)
    yield from _network(documents, job, server)
    if any(d["kind"] == "Deployment" and d["metadata"]["name"] == "recovery" for d in documents):
        yield from _recovery(documents, job)


def _storage(documents: list[Document], job: Document, config: dict[str, str]) -> Iterator[str]:
    """Yield what loses a run with its pod, shows a credential, or opens more than the store."""
    pod, egress = pod_of(job), one(documents, "NetworkPolicy", "trainer")["spec"]["egress"]
    request = request_of(pod["containers"][0])
    outside = [rule for rule in egress if any(peer.keys() != {"podSelector"} for peer in rule.get("to", []))]
    (runs,) = (volume for volume in pod["volumes"] if volume["name"] == "runs")
    mirrors = [
        word for word in request if word.startswith("checkpoint.mirror=s3://") and word.endswith("$(RUN_DIR)")
    ]
    sources = [
        source["secretRef"]["name"] for source in pod["containers"][0]["envFrom"] if "secretRef" in source
    ]
    if any(re.search("KEY|TOKEN|PASSWORD|SECRET", name) for name in config) or any(
        d["kind"] == "Secret" for d in documents
    ):
        yield "no credential is in a manifest"
    if "persistentVolumeClaim" in runs:
        if outside or "store-credentials" in sources:
            yield "a Job on volumes knows no object store"
        return
    if not mirrors:
        yield "a run on the disk of its pod is mirrored, each to a place of its own"
    if any(
        d["spec"]["accessModes"] != ["ReadWriteOnce"]
        for d in documents
        if d["kind"] == "PersistentVolumeClaim"
    ):
        yield "with an object store no volume is shared"
    if "store-credentials" not in sources or any(
        container["envFrom"] != pod["containers"][0]["envFrom"] for container in containers(pod)
    ):
        yield "preflight and trainer have the store's credentials"
    mounts = {mount["name"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    if any("persistentVolumeClaim" in volume for volume in pod["volumes"]) or "readOnly" in mounts["data"]:
        yield "the trainers write to disks of their own"
    url = urlsplit(config.get("AWS_ENDPOINT_URL", "https://s3.amazonaws.com"))
    port = url.port or {"http": 80, "https": 443}[url.scheme]
    if len(outside) != 1 or outside[0].get("ports") != [{"port": port}]:
        yield "the trainers reach one port outside, the store's"
    for peer in (peer for rule in outside for peer in rule["to"]):
        block = peer.get("ipBlock", {"cidr": "10.0.0.0/24"})
        if block["cidr"].endswith("/0") and not {"169.254.0.0/16", "fe80::/10"} & {*block.get("except", [])}:
            yield "no metadata service of a cloud can be reached"


def _recovery(documents: list[Document], job: Document) -> Iterator[str]:
    """Yield what gives the recovery more rights than it needs, or keeps it from its work."""
    deployment, role = one(documents, "Deployment", "recovery"), one(documents, "Role", "recovery")
    pod, binding = pod_of(deployment), one(documents, "RoleBinding", "recovery")
    rights = {(*rule["apiGroups"], *rule["resources"]): {*rule["verbs"]} for rule in role["rules"]}
    if rights != {("", "pods"): {"list", "delete"}, ("", "pods/status"): {"patch"}}:
        yield "the recovery may list and delete pods and patch their status, nothing else"
    account = {"kind": "ServiceAccount", "name": "recovery", "namespace": job["metadata"]["namespace"]}
    if (
        binding["subjects"] != [account]
        or binding["roleRef"]["kind"] != "Role"
        or binding["roleRef"]["name"] != "recovery"
    ):
        yield "the role is bound to the recovery, in its own namespace"
    if pod.get("serviceAccountName") != "recovery" or pod.get("automountServiceAccountToken") is not True:
        yield "the recovery has the token of its account"
    if one(documents, "ServiceAccount", "recovery").get("automountServiceAccountToken") is not False:
        yield "no other pod gets the token of the recovery"
    if pod["containers"][0]["image"] != pod_of(job)["containers"][0]["image"]:
        yield "the recovery is part of the training image"
    if pod["containers"][0]["command"] != ["tini", "--", "pipeline", "k8s", "recover"]:
        yield "the recovery runs pipeline k8s recover"
    if deployment["spec"]["template"]["metadata"]["labels"] != {"app": "recovery"}:
        yield "the recovery is no trainer"
    lost = [t for t in pod_of(job)["tolerations"] if t["effect"] == "NoExecute"]
    if pod.get("tolerations") != lost:
        yield "the recovery leaves a lost node as fast as the trainers"
    policy = one(documents, "NetworkPolicy", "recovery")["spec"]
    if policy["podSelector"] != {"matchLabels": {"app": "recovery"}} or policy["egress"] != [
        {"ports": [{"port": number} for number in (443, 6443, 8443, 16443)]}
    ] or "ingress" in policy:  # fmt: skip
        yield "the recovery reaches the API server, and nobody reaches the recovery"


def request_of(container: Document) -> list[str]:
    """Return the words after `pipeline doctor`, or after `torchrun … train`."""
    words: list[str] = container["command"]
    start = words.index("doctor" if "doctor" in words else "train") + 1
    return words[start:]


def _processes(pod: Document) -> Iterator[str]:
    for container in containers(pod):
        words = container["command"]
        if (
            container["securityContext"].get("runAsUser") == 0
        ):  # setpriv becomes user 10001, then starts the init
            setpriv, *options = words[: words.index("tini")]
            if setpriv != "setpriv" or options != [
                "--reuid=10001", "--inh-caps=+ipc_lock", "--ambient-caps=+ipc_lock",
            ]:  # fmt: skip
                yield f"{container['name']}: root is given up before anything else, except IPC_LOCK"
            words = words[words.index("tini") :]
        if words[:2] != ["tini", "--"]:
            yield f"{container['name']}: an init passes SIGTERM on from the first moment"
        if container.get("terminationMessagePolicy") != "FallbackToLogsOnError":
            yield f"{container['name']}: kubectl describe shows the last lines of the log"


def _network(documents: list[Document], job: Document, server: Document) -> Iterator[str]:
    policies = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "NetworkPolicy"}
    trainer, mlflow = policies.get("trainer"), policies.get("mlflow")
    if not trainer or not mlflow:
        yield "trainers and MLflow have network policies"
        return
    for_all_pods = [spec for spec in policies.values() if spec["podSelector"] == {}]
    if not any({*spec["policyTypes"]} == {"Ingress", "Egress"} and spec.keys() == {"podSelector", "policyTypes"}
               for spec in for_all_pods):  # fmt: skip
        yield "a pod without another policy has no traffic in or out"
    labels = job["spec"]["template"]["metadata"]["labels"]
    if any("ports" in rule for rule in trainer["ingress"]) or not all(
        peer["podSelector"]["matchLabels"].items() <= labels.items()
        for rule in trainer["ingress"] for peer in rule["from"]
    ):  # fmt: skip
        yield "trainers accept traffic from trainers, on all ports, and from no other pod"
    dns = [rule for rule in trainer["egress"] if any(port["port"] == 53 for port in rule.get("ports", []))]
    if (
        not dns
        or any("to" in rule for rule in dns)
        or {p["protocol"] for p in dns[0]["ports"]} != {"UDP", "TCP"}
    ):
        yield "DNS is allowed: port 53, both protocols, to anywhere"
    to_mlflow = [
        rule for rule in trainer["egress"] if any(port["port"] == 5000 for port in rule.get("ports", []))
    ]
    peers = [peer["podSelector"]["matchLabels"] for rule in to_mlflow for peer in rule.get("to", [])]
    server_labels = server["spec"]["template"]["metadata"]["labels"].items()
    if not any(peer.items() <= server_labels for peer in peers):
        yield "trainers can call MLflow"


def _restricted(document: Document, *, locks_memory: bool = False) -> Iterator[str]:
    """Yield what breaks Pod Security `restricted`, and writable root file systems, too.

    locks_memory: trainers have IPC_LOCK for RDMA, and start as root to get it.
    """
    if document["kind"] == "Namespace":
        level = "privileged" if locks_memory else "restricted"
        if document["metadata"]["labels"].get("pod-security.kubernetes.io/enforce") != level:
            yield f"the namespace enforces Pod Security {level}"
        return
    if document["kind"] not in ("Job", "Deployment"):
        return
    pod = pod_of(document)
    context = pod.get("securityContext", {})
    if any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")):
        yield "no namespace of the host"
    if any(set(volume) & {"hostPath"} for volume in pod.get("volumes", [])):
        yield "no path of the host"
    if any(
        "sizeLimit" not in volume["emptyDir"] for volume in pod.get("volumes", []) if "emptyDir" in volume
    ):
        yield "a scratch volume has a size limit"
    if context.get("runAsNonRoot") is not True or context.get("runAsUser", 0) == 0:
        yield "no root"
    if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "the default seccomp profile"
    for container in containers(pod):
        security = container.get("securityContext", {})
        if security.get("allowPrivilegeEscalation") is not False or security.get("privileged"):
            yield f"{container['name']}: no new privileges"
        if locks_memory and container["name"] == "trainer":
            if security.get("capabilities") != {"drop": ["ALL"], "add": ["IPC_LOCK", "SETUID"]}:
                yield f"{container['name']}: IPC_LOCK, and SETUID to give up root"
        elif security.get("capabilities") != {"drop": ["ALL"]} or "runAsUser" in security:
            yield f"{container['name']}: no capabilities, and the pod's user"
        if security.get("readOnlyRootFilesystem") is not True:
            yield f"{container['name']}: a read-only root file system"
        if any(port.get("hostPort") for port in container.get("ports", [])):
            yield f"{container['name']}: no port of the host"
        resources = container.get("resources", {})
        if "memory" not in resources.get("limits", {}) or "cpu" not in resources.get("requests", {}):
            yield f"{container['name']}: requests and limits"


def bytes_of(quantity: str) -> int:
    match = re.fullmatch(r"(\d+)([MGT]i)", quantity)
    assert match, quantity
    return int(match[1]) * _UNITS[match[2]]
