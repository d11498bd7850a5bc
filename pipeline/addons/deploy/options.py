"""The options of `pipeline k8s render`: the fields of one class are the flags of the command.

What they do not cover (a priority class, affinity, sidecars) a kustomization adds, see
docs/kubernetes.md.
"""

import argparse
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from ipaddress import ip_address, ip_network
from typing import Any
from urllib.parse import urlsplit

from pipeline import __version__
from pipeline.cli.arguments import Parser, path_or_uri, positive_int


def count_or_range(text: str) -> tuple[int | None, int]:
    """Return (MIN, MAX) of MIN:MAX, or (None, N) of N."""
    low, colon, high = text.rpartition(":")
    if not colon:
        return None, positive_int(text)
    if positive_int(low) > positive_int(high):
        raise argparse.ArgumentTypeError(f"{text!r} is not MIN:MAX with MIN at most MAX, such as 1:4")
    return (int(low) if low != high else None), int(high)


def matching(pattern: str, expected: str) -> Callable[[str], str]:
    """Return the type of an argument that matches a pattern; errors call it `expected`."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
        return text

    return check


_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_RULE = "use lower-case letters, digits and -, start and end with a letter or digit, 63 characters at most"
namespace_name = matching(_LABEL, f"a Kubernetes name (RFC 1123): {_RULE}")
_subdomain = matching(rf"{_LABEL}(\.{_LABEL})*", f"a Kubernetes name, RFC 1123: {_RULE}; parts joined by .")
_memory = matching(r"[1-9]\d*[MGT]i", "an amount of memory, such as 512Mi or 64Gi")
_store = matching(
    r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/(?!\.\.?(/|$))[\w.-]+)*/?",
    "a place in an object store, such as s3://my-bucket/imagenet",
)
_PART = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
image_name = matching(
    rf"([\w.-]+(:\d+)?/)?{_PART}(/{_PART})*(:\w[\w.-]{{0,127}})?(@sha256:[0-9a-f]{{64}})?",
    "an image: give [REGISTRY/]NAME[:TAG] or [REGISTRY/]NAME@sha256:…, with the name in lower case",
)


def _endpoint(text: str) -> str:
    """Return the URL of a store without a path. It never holds a password: a Secret does."""
    with suppress(ValueError):
        url = urlsplit(text)
        if re.fullmatch("[0-9.]+|.*:.*", host := url.hostname or ""):
            ip_address(host)
        given = re.fullmatch(r"(https?://([a-z0-9][a-z0-9.-]*|\[[0-9a-f:]+\])(:\d+)?)/?", text)
        if given and url.port != 0:
            return given[1]
    expected = "the URL of a store without user and path, such as https://s3.example.org:9000"
    shown = text.rpartition("@")[2]
    raise argparse.ArgumentTypeError(f"{shown!r} is not {expected}")


def _cidr(text: str) -> str:
    with suppress(ValueError):
        return str(ip_network(text))
    raise argparse.ArgumentTypeError(f"{text!r} is not a network, such as 10.0.0.0/24")


def _flag(help: str, kind: Any = None, metavar: str | None = None, default: Any = None) -> Any:
    """Return the field of a flag. kind: its type, or None for a switch."""
    if not kind:
        return field(default=False, metadata={"help": help, "action": "store_true"})
    return field(default=default, metadata={"help": help, "type": kind, "metavar": metavar})


@dataclass(frozen=True, kw_only=True)
class RenderOptions:
    recipe: str = "digits"
    overrides: Sequence[str] = ()
    min_nodes: int | None = None  # the fewest that train, from --nodes MIN:MAX; None: all
    nodes: int = _flag(
        "number of pods (default 2); MIN:MAX: train with those that are there", count_or_range, "N", 2
    )
    gpus: int = _flag("GPUs per pod, with one process each (default 1)", positive_int, "G", 1)
    nproc: int = _flag("with --cpu: processes per pod (default 1)", positive_int, "M", 1)
    image: str = _flag(
        "training image, in a registry that the nodes can pull from; best by digest",
        image_name,
        default=f"ddp-pipeline:{__version__}",
    )
    mlflow_image: str = _flag(
        "MLflow image, likewise", image_name, "IMAGE", f"ddp-pipeline-mlflow:{__version__}"
    )
    mlflow_auth: bool = _flag(
        "have MLflow ask for a password, which is in your Secrets mlflow-auth and mlflow-credentials"
    )
    pull_secret: str | None = _flag("Secret with the registry's credentials", _subdomain, "NAME")
    namespace: str = _flag(
        "namespace of all objects (default ddp-pipeline)", namespace_name, "NAME", "ddp-pipeline"
    )
    storage_class: str | None = _flag(
        "one with ReadWriteMany (default: the cluster's default)", _subdomain, "NAME"
    )
    store: str | None = _flag(
        "keep data and runs in this bucket, no volume is shared", _store, "s3://BUCKET/PREFIX"
    )
    store_endpoint: str | None = _flag(
        "URL of a store that is not AWS's; its password is in your Secret store-credentials", _endpoint, "URL"
    )
    store_cidr: str | None = _flag(
        "the only addresses of it that trainers may reach (default: every public one)", _cidr, "CIDR"
    )
    service_account: str | None = _flag(
        "the trainers' ServiceAccount, if your cloud gives it the rights to the bucket", _subdomain, "NAME"
    )
    single_node: bool = _flag("all pods run on one machine (kind, minikube): use ReadWriteOnce")
    cpus: int | None = _flag("CPUs per pod (default 8 per GPU, or 2 per process on CPU)", positive_int, "C")
    memory: str | None = _flag("memory per pod (default 24Gi per GPU, or 4Gi per process on CPU)", _memory)
    shm: str | None = _flag(
        "part of it for /dev/shm (default 8Gi per GPU, or 1Gi per process on CPU)", _memory
    )
    runtime_class: str | None = _flag(
        "the pods' RuntimeClass, if NVIDIA's runtime is not the nodes' default", _subdomain, "NAME"
    )
    queue: str | None = _flag(
        "Kueue's LocalQueue, which starts all pods together or none", _subdomain, "NAME"
    )
    code: str | None = _flag(
        "run the Python modules and packages of this folder, without a new image", path_or_uri, "FOLDER"
    )
    no_recovery: bool = _flag("leave out 60-recovery.yaml, which replaces the pods of a node that lost power")

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
            name = f"--{option.name.replace('_', '-')}"
            group.add_argument(name, default=argparse.SUPPRESS, **option.metadata)
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
