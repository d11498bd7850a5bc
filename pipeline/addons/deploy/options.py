"""The options of `pipeline k8s render`, each in one place: a field with a help text is a flag."""

import argparse
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from ipaddress import ip_address, ip_network
from typing import Any
from urllib.parse import urlsplit

from pipeline import __version__
from pipeline.cli.arguments import Parser, count_or_range, positive_int

EXAMPLES = ("mlflow-shared", "stage-imagenet", "trainjob")  # files in manifests/examples/


def matching(pattern: str, expected: str) -> Callable[[str], str]:
    """Return the type of an argument that matches a pattern; errors call it `expected`."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
        return text

    return check


_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_RULE = "use lower-case letters, digits and -, start and end with a letter or digit"
_label = matching(_LABEL, f"a Kubernetes name (RFC 1123): {_RULE}, 63 characters at most")
_subdomain = matching(
    rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*", f"a Kubernetes name (RFC 1123): {_RULE}, in parts joined by ."
)
_PART = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
image_name = matching(
    rf"([\w.-]+(:\d+)?/)?{_PART}(/{_PART})*(:\w[\w.-]{{0,127}})?(@sha256:[0-9a-f]{{64}})?",
    "an image: give [REGISTRY/]NAME[:TAG] or [REGISTRY/]NAME@sha256:…, with the name in lower case",
)
_node_label = matching(
    rf"(?=.{{1,317}}$)({_LABEL}(\.{_LABEL})*/)?[A-Za-z0-9]([-\w.]{{0,61}}[A-Za-z0-9])?",
    "a node label, such as topology.kubernetes.io/zone",
)
_resource = matching(
    rf"{_LABEL}(\.{_LABEL})*/[A-Za-z0-9]([-\w.]{{0,61}}[A-Za-z0-9])?",
    "a device's resource, such as rdma/hca_shared_devices_a",
)
_store = matching(
    r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/(?!\.\.?(/|$))[\w.-]+)*/?",
    "a place in an object store, such as s3://my-bucket/imagenet",
)
_memory = matching(r"[1-9]\d*[MGT]i", "an amount of memory, such as 512Mi or 64Gi")


def _endpoint(text: str) -> str:
    """Return the URL of a store without a path."""
    if "@" in text:
        raise argparse.ArgumentTypeError(
            "a user and a password do not belong in it: the Secret store-credentials has them"
        )
    with suppress(ValueError):
        url = urlsplit(text)
        if re.fullmatch("[0-9.]+|.*:.*", host := url.hostname or ""):
            ip_address(host)
        given = re.fullmatch(r"(https?://([a-z0-9][a-z0-9.-]*|\[[0-9a-f:]+\])(:\d+)?)/?", text)
        if given and url.port != 0:
            return given[1]
    raise argparse.ArgumentTypeError(
        f"{text!r} is not the URL of a store, such as https://s3.example.org:9000"
    )


def _cidr(text: str) -> str:
    with suppress(ValueError):
        return str(ip_network(text))
    raise argparse.ArgumentTypeError(f"{text!r} is not a network, such as 10.0.0.0/24")


def _flag(default: Any, help: str, kind: Any = None, metavar: str | None = None) -> Any:
    """Return the field of a flag. kind: its type, the list of its values, or None for a switch."""
    if kind is None:
        settings: dict[str, Any] = {"action": "store_true"}
    else:
        settings = {"choices" if isinstance(kind, list) else "type": kind, "metavar": metavar}
    return field(default=default, metadata={"help": help, **settings})


@dataclass(frozen=True, kw_only=True)
class RenderOptions:
    recipe: str = "digits"
    overrides: Sequence[str] = ()
    min_nodes: int | None = None
    """The fewest that train, from --nodes MIN:MAX; None: all."""
    nodes: int = _flag(
        2,
        "number of pods (default 2); MIN:MAX: train with those that are there, if their number divides the batch",
        count_or_range,
        "N",
    )
    gpus: int = _flag(1, "GPUs per pod, with one process each (default 1)", positive_int, "G")
    nproc: int = _flag(1, "with --cpu: processes per pod (default 1)", positive_int, "M")
    image: str = _flag(
        f"ddp-pipeline:{__version__}",
        "training image, in a registry that the nodes can pull from; best by digest",
        image_name,
    )
    mlflow_image: str = _flag(
        f"ddp-pipeline-mlflow:{__version__}", "MLflow image, likewise", image_name, "IMAGE"
    )
    mlflow_auth: bool = _flag(
        False, "have MLflow ask for a password, which is in your Secrets mlflow-auth and mlflow-credentials"
    )
    pull_secret: str | None = _flag(None, "Secret with the registry's credentials", _subdomain, "NAME")
    namespace: str = _flag("ddp-pipeline", "namespace of all objects (default ddp-pipeline)", _label, "NAME")
    storage_class: str | None = _flag(
        None, "one with ReadWriteMany (default: the cluster's default)", _subdomain, "NAME"
    )
    store: str | None = _flag(
        None,
        "keep data and runs in this bucket, and share no volume between pods",
        _store,
        "s3://BUCKET/PREFIX",
    )
    store_endpoint: str | None = _flag(
        None,
        "URL of a store that is not AWS's; its credentials are in your Secret store-credentials",
        _endpoint,
        "URL",
    )
    store_cidr: str | None = _flag(
        None,
        "addresses of the store, the only ones that trainers may reach (default: every public address)",
        _cidr,
        "CIDR",
    )
    service_account: str | None = _flag(
        None,
        "the trainers' ServiceAccount, if your cloud gives it the rights to the bucket",
        _subdomain,
        "NAME",
    )
    single_node: bool = _flag(False, "all pods run on one machine (kind, minikube): use ReadWriteOnce")
    cpus: int | None = _flag(
        None, "CPUs per pod (default 8 per GPU, or 2 per process on CPU)", positive_int, "C"
    )
    memory: str | None = _flag(
        None, "memory per pod (default 24Gi per GPU, or 4Gi per process on CPU)", _memory
    )
    shm: str | None = _flag(
        None, "part of it for /dev/shm (default 8Gi per GPU, or 1Gi per process on CPU)", _memory
    )
    numa_binding: str | None = None
    """A flag of `train`, too: `add_numa_binding`."""
    runtime_class: str | None = _flag(
        None,
        "the pods' RuntimeClass, such as nvidia, if NVIDIA's container runtime is not the nodes' default",
        _subdomain,
        "NAME",
    )
    priority_class: str | None = _flag(None, "the pods' PriorityClass", _subdomain, "NAME")
    queue: str | None = _flag(None, "Kueue's LocalQueue that admits the job", _subdomain, "NAME")
    gang: str | None = _flag(
        None,
        "native: start all pods together or none (alpha in Kubernetes 1.37, which 1.36 refuses)",
        ["native"],
    )
    topology: str | None = _flag(
        None,
        "prefer nodes with one value of this label, such as topology.kubernetes.io/zone; preferred, not required: in a"
        " full zone a replaced pod would wait for ever",
        _node_label,
        "LABEL",
    )
    rdma: str | None = _flag(
        None,
        "RDMA device of each pod, such as rdma/hca_shared_devices_a; its namespace has Pod Security privileged",
        _resource,
        "RESOURCE",
    )
    no_recovery: bool = _flag(
        False, "leave out 60-recovery.yaml, which replaces the pods of a node that lost power"
    )

    @property
    def processes(self) -> int:
        """Return the processes of a pod."""
        return self.gpus or self.nproc

    @property
    def cpus_of_pod(self) -> int:
        return self.cpus or (8 if self.gpus else 2) * self.processes

    @property
    def shm_of_pod(self) -> str:
        return self.shm or f"{(8 if self.gpus else 1) * self.processes}Gi"


def add_flags(parser: Parser) -> None:
    """Add the flags of `RenderOptions`. Those that are not given leave nothing in the namespace."""
    hardware = parser.add_mutually_exclusive_group()
    for option in fields(RenderOptions):
        if option.metadata:
            group = hardware if option.name == "gpus" else parser
            group.add_argument(
                f"--{option.name.replace('_', '-')}", default=argparse.SUPPRESS, **option.metadata
            )
    hardware.add_argument(
        "--cpu", action="store_const", const=0, default=argparse.SUPPRESS, dest="gpus",
        help="train on the CPU, without GPUs",
    )  # fmt: skip


def options_of(given: dict[str, Any]) -> RenderOptions:
    """Return the options of a command line, without what belongs to the command itself."""
    names = {option.name for option in fields(RenderOptions)}
    chosen = {name: value for name, value in given.items() if name in names}
    if "nodes" in chosen:
        chosen["min_nodes"], chosen["nodes"] = chosen["nodes"]
    return RenderOptions(**chosen)
