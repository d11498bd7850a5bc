"""The commands rehearse, k8s render, k8s recover."""

import argparse
import os
import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address, ip_network
from typing import NoReturn
from urllib.parse import urlsplit

from pipeline.cli.arguments import (
    Commands,
    Parser,
    add_command,
    add_numa_binding,
    add_recipe,
    count_or_range,
    path,
    positive_int,
)
from pipeline.errors import RequestError


def _matching(pattern: str, expected: str) -> Callable[[str], str]:
    """Return the type of an argument that matches a pattern; errors call it `expected`."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
        return text

    return check


EXAMPLES = ("mlflow-shared", "stage-imagenet", "trainjob")  # files in deploy/manifests/examples/
_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_RULE = "use lower-case letters, digits and -, start and end with a letter or digit"
_label = _matching(_LABEL, f"a Kubernetes name (RFC 1123): {_RULE}, 63 characters at most")
_subdomain = _matching(
    rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*", f"a Kubernetes name (RFC 1123): {_RULE}, in parts joined by ."
)
_PART = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_image = _matching(
    rf"([\w.-]+(:\d+)?/)?{_PART}(/{_PART})*(:\w[\w.-]{{0,127}})?(@sha256:[0-9a-f]{{64}})?",
    "an image: give [REGISTRY/]NAME[:TAG] or [REGISTRY/]NAME@sha256:…, with the name in lower case",
)
_node_label = _matching(
    rf"(?=.{{1,317}}$)({_LABEL}(\.{_LABEL})*/)?[A-Za-z0-9]([-\w.]{{0,61}}[A-Za-z0-9])?",
    "a node label, such as topology.kubernetes.io/zone",
)
_resource = _matching(
    rf"{_LABEL}(\.{_LABEL})*/[A-Za-z0-9]([-\w.]{{0,61}}[A-Za-z0-9])?",
    "a device's resource, such as rdma/hca_shared_devices_a",
)
_store = _matching(
    r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/(?!\.\.?(/|$))[\w.-]+)*/?",
    "a place in an object store, such as s3://my-bucket/imagenet",
)
_run = _matching(r"[A-Za-z0-9][\w.-]{0,99}", "a run's name: give that of its folder in /runs, such as digits")
_memory = _matching(r"[1-9]\d*[MGT]i", "an amount of memory, such as 512Mi or 64Gi")
_kill = _matching(r"\d+@\d+", "NODE@STEP, such as 1@40")
_cut = _matching(r"\d+@\d+:\d+(\.\d+)?", "NODE@STEP:SECONDS, such as 1@40:5")


def add_commands(commands: Commands) -> None:
    _add_rehearse(commands)
    description = "Write Kubernetes manifests for a training job; replace pods of lost nodes."
    k8s = commands.add_parser("k8s", help="write Kubernetes manifests", description=description)
    actions = k8s.add_commands("ACTION")
    _add_render(actions)
    add_command(
        actions, "recover", _recover, "in a cluster: let the Job replace the pods of a node that is lost",
        "Mark each trainer pod of this namespace as Failed whose grace period ended 15 s ago and whose node has not"
        " reported its end, and delete it, so that the Job replaces it. Runs until it is stopped, in the pod of"
        " 60-recovery.yaml.",
        "pipeline k8s recover",
    )  # fmt: skip


def _add_rehearse(commands: Commands) -> None:
    parser = add_command(
        commands, "rehearse", _rehearse, "run a multi-node job on this machine, with one container per node",
        "Run RECIPE in --nodes containers on this machine, which reach each other like the pods of the Kubernetes"
        " job. The containers see the folder --data as /data. A node that fails is replaced. Everything is removed"
        " at the end.",
        "pipeline rehearse digits --nodes 2 --kill 1@40",
        "pipeline rehearse digits run.exact=true --nodes 1:3 --cut 2@40:60",
    )  # fmt: skip
    add_recipe(parser)
    add = parser.add_argument
    help = "number of containers; MIN:MAX: train with those that are there, if their number divides the batch"
    add("--nodes", type=count_or_range, required=True, metavar="N", help=help)
    help = "without --gpus: processes per container (default 1)"
    add("--nproc", type=positive_int, default=1, metavar="M", help=help)
    add("--gpus", type=positive_int, default=0, metavar="G", help="GPUs per container (default none: CPU)")
    add("--image", type=_image, default="ddp-pipeline", help="image to run (default ddp-pipeline)")
    add("--data", type=path, metavar="FOLDER", help="folder to mount read-only as /data")
    add("--runs", metavar="VOLUME", help="Docker volume for /runs, which is kept (default: a temporary one)")
    for flag, kind, metavar, help in (
        ("--kill", _kill, "NODE@STEP", "kill a node (SIGKILL) once this step is logged"),
        ("--cut", _cut, "NODE@STEP:SECONDS", "cut a node's network for this long once this step is logged"),
        ("--env", _variable, "NAME=VALUE", "set an environment variable in the containers"),
    ):
        add(flag, type=kind, action="append", default=[], metavar=metavar, help=f"{help}; may be repeated")


def _variable(text: str) -> str:
    name, equals, _ = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{name!r} is not NAME=VALUE")  # the value may be a secret
    return text


def _rehearse(options: argparse.Namespace) -> str | int:
    from pipeline.addons.deploy.rehearse import Fault, RehearsalOptions, rehearse

    if options.data and not os.path.isdir(options.data):
        raise RequestError(f"--data {options.data} is not a folder")
    faults = []
    for fault in (*options.kill, *options.cut):
        node, step, *seconds = re.split("[@:]", fault)
        faults.append(Fault(int(node), int(step), *map(float, seconds)))
    low, high = options.nodes
    return rehearse(RehearsalOptions(
        recipe=options.recipe, overrides=options.overrides, num_nodes=high, min_nodes=low, nproc=options.nproc,
        gpus=options.gpus, image=options.image, data=options.data, runs=options.runs, env=options.env, faults=faults,
    ))  # fmt: skip


def _add_render(actions: Commands) -> None:
    parser = add_command(
        actions, "render", _render, "write the manifests for a recipe, an image, N nodes and G GPUs per node",
        "Print the manifests, or write them to --out. Without options they are those of k8s/. With --sync or --example,"
        " print only that manifest.",
        "pipeline k8s render my.yaml --nodes 4 --gpus 8 --image IMAGE --out job",
        argument_default=argparse.SUPPRESS,  # the defaults are those of deploy.k8s.RenderOptions
    )  # fmt: skip
    add = parser.add_argument
    add_recipe(parser, "name or path (default digits)", nargs="?")
    help = "number of pods (default 2); MIN:MAX: train with those that are there, if their number divides the batch"
    add("--nodes", type=count_or_range, metavar="N", help=help)
    hardware = parser.add_mutually_exclusive_group()
    help = "GPUs per pod, with one process each (default 1)"
    hardware.add_argument("--gpus", type=positive_int, metavar="G", help=help)
    hardware.add_argument("--cpu", action="store_const", const=0, dest="gpus", help="train on the CPU, without GPUs")
    add("--nproc", type=positive_int, metavar="M", help="with --cpu: processes per pod (default 1)")
    add("--image", type=_image, help="training image, in a registry that the nodes can pull from; best by digest")
    add("--mlflow-image", type=_image, metavar="IMAGE", help="MLflow image, likewise")
    help = "have MLflow ask for a password, which is in your Secrets mlflow-auth and mlflow-credentials"
    add("--mlflow-auth", action="store_true", help=help)
    add("--pull-secret", type=_subdomain, metavar="NAME", help="Secret with the registry's credentials")
    add("--namespace", type=_label, metavar="NAME", help="namespace of all objects (default ddp-pipeline)")
    help = "one with ReadWriteMany (default: the cluster's default)"
    add("--storage-class", type=_subdomain, metavar="NAME", help=help)
    _add_store(parser)
    add("--single-node", action="store_true", help="all pods run on one machine (kind, minikube): use ReadWriteOnce")
    add("--cpus", type=positive_int, metavar="C", help="CPUs per pod (default 8 per GPU, or 2 per process on CPU)")
    add("--memory", type=_memory, help="memory per pod (default 24Gi per GPU, or 4Gi per process on CPU)")
    add("--shm", type=_memory, help="part of it for /dev/shm (default 8Gi per GPU, or 1Gi per process on CPU)")
    add_numa_binding(parser)
    help = "the pods' RuntimeClass, such as nvidia, if NVIDIA's container runtime is not the nodes' default"
    add("--runtime-class", type=_subdomain, metavar="NAME", help=help)
    add("--priority-class", type=_subdomain, metavar="NAME", help="the pods' PriorityClass")
    add("--queue", type=_subdomain, metavar="NAME", help="Kueue's LocalQueue that admits the job")
    help = "native: start all pods together or none (alpha in Kubernetes 1.37, which 1.36 refuses)"
    add("--gang", choices=["native"], help=help)
    help = (
        "prefer nodes with one value of this label, such as topology.kubernetes.io/zone; preferred, not required: in a"
        " full zone a replaced pod would wait for ever"
    )
    add("--topology", type=_node_label, metavar="LABEL", help=help)
    help = "RDMA device of each pod, such as rdma/hca_shared_devices_a; its namespace has Pod Security privileged"
    add("--rdma", type=_resource, metavar="RESOURCE", help=help)
    help = "leave out 60-recovery.yaml, which replaces the pods of a node that lost power"
    add("--no-recovery", action="store_false", dest="recovery", help=help)
    other = parser.add_mutually_exclusive_group()
    help = "print only a Job that sends the run in /runs/RUN to MLflow, for a run that ended while MLflow was away"
    other.add_argument("--sync", type=_run, metavar="RUN", help=help)
    help = f"print only an example, with the given images and namespace: {', '.join(EXAMPLES)}"
    other.add_argument("--example", choices=EXAMPLES, metavar="NAME", help=help)
    add("--out", type=path, default=None, metavar="FOLDER", help="write one file per manifest to this folder")


def _add_store(parser: Parser) -> None:
    add = parser.add_argument
    help = "keep data and runs in this bucket, and share no volume between pods"
    add("--store", type=_store, metavar="s3://BUCKET/PREFIX", help=help)
    help = "URL of a store that is not AWS's; its credentials are in your Secret store-credentials"
    add("--store-endpoint", type=_endpoint, metavar="URL", help=help)
    help = "addresses of the store, the only ones that trainers may reach (default: every public address)"
    add("--store-cidr", type=_cidr, metavar="CIDR", help=help)
    help = "the trainers' ServiceAccount, if your cloud gives it the rights to the bucket"
    add("--service-account", type=_subdomain, metavar="NAME", help=help)


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
    raise argparse.ArgumentTypeError(f"{text!r} is not the URL of a store, such as https://s3.example.org:9000")


def _cidr(text: str) -> str:
    with suppress(ValueError):
        return str(ip_network(text))
    raise argparse.ArgumentTypeError(f"{text!r} is not a network, such as 10.0.0.0/24")


def _render(options: argparse.Namespace) -> str:
    from pipeline.addons.deploy.k8s import RenderOptions, render, render_example, render_sync, write

    given = vars(options).copy()
    out, sync, example = given.pop("out"), given.pop("sync", None), given.pop("example", None)
    if "nodes" in given:
        given["min_nodes"], given["nodes"] = given["nodes"]
    request = RenderOptions(**{name: value for name, value in given.items() if name not in ("run", "parser")})
    if sync:
        manifests = render_sync(request, sync)
    elif example:
        manifests = render_example(request, example)
    else:
        manifests = render(request)
    if out is None:
        return "---\n".join(manifests.values()).rstrip()
    write(manifests, out)
    if len(manifests) == 1:
        file = out / next(iter(manifests))
        return f"wrote {file}: run kubectl apply -f {shlex.quote(str(file))}"
    return f"wrote {len(manifests)} manifests to {out}: run kubectl apply -f {shlex.quote(str(out))}"


def _recover(_: argparse.Namespace) -> NoReturn:
    from pipeline.addons.deploy.recovery import recover

    recover()
