"""Check rendered manifests by schema, and by the rules that options may break.

What no option changes is read in k8s/, which equals the rendered defaults, and runs in the cluster.
"""

import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import kubernetes_validate

KUBERNETES = ("1.36", "1.37")
Document = dict[str, Any]

RESTRICTED = {
    "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
}  # fmt: skip
_MIB = {"Mi": 1, "Gi": 2**10, "Ti": 2**20}


def problems(documents: list[Document]) -> list[str]:
    """Return the rules that a set of manifests breaks, one line for each."""
    if found := [line for document in documents for line in schema_problems(json.dumps(document))]:
        return found
    rules = [rule(documents) for rule in (_nodes, _pods, _server, _storage, _network)]
    rules += [_restricted_pod(document) for document in documents]
    return [line for rule in rules for is_kept, line in rule if not is_kept]


def problems_of(document: Document) -> list[str]:
    """Return the rules that a single manifest breaks."""
    broken = [line for is_kept, line in _restricted_pod(document) if not is_kept]
    return [*schema_problems(json.dumps(document)), *broken]


@functools.cache  # the library reads its schemas anew for each document
def schema_problems(text: str) -> list[str]:
    """Return what the schemas of Kubernetes say against a document."""
    document, found = json.loads(text), []
    for version in KUBERNETES:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
            found.append(f"{document.get('kind')}: {version}: {str(error).splitlines()[0]}")
    return found


def one(documents: list[Document], kind: str, name: str) -> Document:
    (found,) = [d for d in documents if d["kind"] == kind and d["metadata"]["name"] == name]
    return found


def pod_of(document: Document) -> Document:
    return document["spec"]["template"]["spec"]


def containers(pod: Document) -> list[Document]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def settings(documents: list[Document]) -> dict[str, str]:
    return one(documents, "ConfigMap", "trainer")["data"]


def words_of(container: Document) -> list[str]:
    """Return the words after `pipeline doctor`, or after `torchrun … train`."""
    words: list[str] = container["command"]
    start = words.index("doctor" if "doctor" in words else "train") + 1
    return words[start:]


def claims_of(pod: Document) -> set[str]:
    volumes = pod.get("volumes", [])
    return {v["persistentVolumeClaim"]["claimName"] for v in volumes if "persistentVolumeClaim" in v}


def secrets_of(container: Document) -> set[str]:
    sources = container.get("envFrom", [])
    return {source["secretRef"]["name"] for source in sources if "secretRef" in source}


# Each yields (is kept, rule).
Rules = Iterator[tuple[bool, str]]


def _nodes(documents: list[Document]) -> Rules:
    job, config = one(documents, "Job", "trainer"), settings(documents)
    spec, pod = job["spec"], pod_of(job)
    (namespace,) = (d["metadata"] for d in documents if d["kind"] == "Namespace")
    names = {d["metadata"].get("namespace") for d in documents if d["kind"] != "Namespace"}
    yield names == {namespace["name"]}, "all is in one namespace"
    enforced = namespace["labels"].get("pod-security.kubernetes.io/enforce")
    yield enforced == "restricted", "Pod Security restricted"
    nodes = int(config.get("PET_NNODES", "1").rpartition(":")[2])
    count = spec.get("completions"), spec.get("parallelism")
    yield count == (nodes, nodes), "the Job has as many pods as the rendezvous has nodes"
    host = config.get("PET_RDZV_ENDPOINT", "").partition(":")[0]
    yield nodes == 1 or host == f"trainer-0.{pod.get('subdomain')}", "the rendezvous is at node 0"
    yield spec["backoffLimit"] >= 2 * spec["completions"], "the loss of node 0 ends every pod"
    yield spec["successPolicy"]["rules"] == [{"succeededIndexes": "0"}], "pod 0 completes the Job"
    yield spec["podReplacementPolicy"] == "Failed", "an index has one pod at a time"
    fail, *_, ignore = spec["podFailurePolicy"]["rules"]
    codes = fail["onExitCodes"]["containerName"], fail["onExitCodes"]["values"]
    permanent = (fail["action"], *codes) == ("FailJob", "preflight", [2, 3, 4])
    yield permanent, "a permanent error fails the Job at once"
    evicted = [{"type": "DisruptionTarget", "status": "True"}]
    yield (ignore["action"], ignore["onPodConditions"]) == ("Ignore", evicted), "an eviction does not count"
    shutdown = int(config["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    yield 60 <= shutdown < pod["terminationGracePeriodSeconds"], "a step and a save < torchrun < the pod"


def _pods(documents: list[Document]) -> Rules:
    config, pod = settings(documents), pod_of(one(documents, "Job", "trainer"))
    *_, preflight, trainer = containers(pod)
    for field in ("image", "envFrom", "volumeMounts", "resources"):
        yield preflight[field] == trainer[field], f"preflight and trainer have the same {field}"
    yield words_of(preflight) == words_of(trainer), "preflight and trainer have the same request"
    limits = trainer["resources"]["limits"]
    (shm,) = (volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm")
    shared, memory = (int(size[:-2]) * _MIB[size[-2:]] for size in (shm["sizeLimit"], limits["memory"]))
    yield 2 * shared <= memory, "/dev/shm leaves memory"
    (cache,) = (mount["name"] for mount in trainer["volumeMounts"] if mount["mountPath"] == "/cache")
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == cache)
    yield "sizeLimit" in volume.get("emptyDir", {}), "compiled code is on the disk of the pod"
    gpus = limits.get("nvidia.com/gpu")
    if gpus is not None:
        yield str(gpus) == config["PET_NPROC_PER_NODE"], "one process for each GPU"
        yield "run.device=cuda" in words_of(trainer), "a pod that asks for GPUs and gets none fails"
    for container in (preflight, trainer):
        yield container["command"][:2] == ["tini", "--"], "an init passes SIGTERM on from the first moment"


def _server(documents: list[Document]) -> Rules:
    """MLflow: reached by the name that it allows, and with a password if it has one."""
    (server,) = pod_of(one(documents, "Deployment", "mlflow"))["containers"]
    service = one(documents, "Service", "mlflow")
    host = f"mlflow:{service['spec']['ports'][0]['port']}"
    flag, allowed, *more = server["args"]
    yield settings(documents)["MLFLOW_TRACKING_URI"] == f"http://{host}", "the trainers call the Service"
    yield flag == "--allowed-hosts" and host in allowed.split(","), "MLflow allows the name they call"
    has_password = more == ["--app-name", "basic-auth"]
    yield has_password or not more, "a server has basic authentication or none"
    in_secret = "mlflow-auth" in secrets_of(server) and "env" not in server
    yield has_password == in_secret, "its password is in a Secret that the user makes"
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        as_trainer = "Authorization" in str(server[kind])
        yield as_trainer or not has_password, "a probe makes a call that a trainer makes"


def _storage(documents: list[Document]) -> Rules:
    """No run is lost with its pod, no credential is shown, nothing but the store is reached."""
    config, pod = settings(documents), pod_of(one(documents, "Job", "trainer"))
    trainer = pod["containers"][0]
    claims = [d for d in documents if d["kind"] == "PersistentVolumeClaim"]
    secrets = [name for name in config if re.search("KEY|TOKEN|PASSWORD|SECRET", name)]
    secrets += [d["metadata"]["name"] for d in documents if d["kind"] == "Secret"]
    yield not secrets, "no credential is in a manifest"
    mounted = claims_of(pod) | claims_of(pod_of(one(documents, "Deployment", "mlflow")))
    yield mounted <= {claim["metadata"]["name"] for claim in claims}, "every claim exists"
    egress = one(documents, "NetworkPolicy", "trainer")["spec"]["egress"]
    outside = [rule for rule in egress if any(peer.keys() != {"podSelector"} for peer in rule.get("to", []))]
    if "runs" in mounted:
        yield not outside and "store-credentials" not in secrets_of(trainer), "volumes need no object store"
        return
    mirrors = re.findall(r"checkpoint.mirror=s3://\S*\$\(RUN_DIR\)", " ".join(words_of(trainer)))
    yield len(mirrors) == 1, "a run on the disk of its pod is mirrored, each to a place of its own"
    yield all(claim["spec"]["accessModes"] == ["ReadWriteOnce"] for claim in claims), "nothing is shared"
    yield "store-credentials" in secrets_of(trainer), "the pods have the store's credentials"
    yield claims_of(pod) == set(), "the trainers write to disks of their own"
    mounts = {mount["name"]: mount for mount in trainer["volumeMounts"]}
    yield "readOnly" not in mounts["data"], "the cache of the data is written"
    ports = [port["port"] for rule in outside for port in rule["ports"]]
    yield len(ports) == 1, "the trainers reach one port outside"


def _network(documents: list[Document]) -> Rules:
    policies = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "NetworkPolicy"}
    deny = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    yield policies["default-deny"] == deny, "a pod without another policy has no traffic in or out"
    labels = one(documents, "Job", "trainer")["spec"]["template"]["metadata"]["labels"]
    (service,) = (d for d in documents if d["kind"] == "Service" and d["metadata"]["name"] == "trainer")
    yield service["spec"]["selector"].items() <= labels.items(), "the Service selects the Job's pods"
    peers = [peer for rule in policies["trainer"]["ingress"] for peer in rule["from"]]
    yield peers == [{"podSelector": {"matchLabels": service["spec"]["selector"]}}], "trainers hear trainers"


def _restricted_pod(document: Document) -> Rules:
    """Pod Security `restricted`, and read-only root file systems."""
    if document["kind"] not in ("Job", "Deployment"):
        return
    pod = pod_of(document)
    context = pod.get("securityContext", {})
    yield not any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")), "no namespace of the host"
    yield not any("hostPath" in volume for volume in pod.get("volumes", [])), "no path of the host"
    scratch = [volume["emptyDir"] for volume in pod.get("volumes", []) if "emptyDir" in volume]
    yield all("sizeLimit" in volume for volume in scratch), "a scratch volume has a limit"
    yield context.get("runAsNonRoot") is True and context.get("runAsUser", 0) > 0, "no root"
    yield context.get("seccompProfile") == {"type": "RuntimeDefault"}, "the default seccomp profile"
    yield pod.get("enableServiceLinks") is False, "no Service injects MLFLOW_PORT"
    has_token = document["metadata"]["name"] == "recovery"
    yield pod.get("automountServiceAccountToken") is has_token, "no token in a pod but the recovery's"
    for container in containers(pod):
        name, resources = container["name"], container.get("resources", {})
        yield container.get("securityContext") == RESTRICTED, f"{name}: no privileges, nothing to write"
        yield "memory" in resources.get("limits", {}), f"{name}: limits"
        yield "cpu" in resources.get("requests", {}), f"{name}: requests"
