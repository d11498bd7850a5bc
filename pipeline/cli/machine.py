"""Commands about machines: doctor, rehearse, k8s render."""

import argparse
import os
import re
from dataclasses import fields

from pipeline.cli.arguments import (
    OVERRIDES_HELP,
    Parser,
    memory_quantity,
    path,
    path_or_uri,
    positive_int,
    variable,
    word,
)
from pipeline.errors import RequestError


def add_commands(commands: "argparse._SubParsersAction[Parser]") -> None:
    doctor = commands.add_parser("doctor", help="what would go wrong here, before it does; exit 0 if RECIPE can run")
    doctor.add_argument(
        "recipe", nargs="?", type=path_or_uri, default="digits", metavar="RECIPE", help="default digits"
    )
    doctor.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=OVERRIDES_HELP)
    doctor.add_argument(
        "--world", type=positive_int, metavar="N", help="processes in the whole job (default: the node's, or 1)"
    )
    doctor.add_argument(
        "--nodes", type=positive_int, metavar="M", help="machines that they are spread over (default as above)"
    )
    doctor.add_argument("--json", action="store_true", help="findings for machines")
    doctor.add_argument(
        "--sanity", action="store_true",
        help="also train a little on your data: first loss, one batch learnt by heart, shuffled labels not learnt",
    )  # fmt: skip
    doctor.set_defaults(run=_doctor)

    rehearse = commands.add_parser(
        "rehearse", help="the multi-node job on this machine, one container a node",
        description="Runs RECIPE in --nodes containers that see each other as the pods of the Kubernetes job do. Data is"
        " what --data shows them as /data. A node that fails is replaced; all is removed at the end.",
    )  # fmt: skip
    rehearse.add_argument("recipe", type=path_or_uri, metavar="RECIPE")
    rehearse.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=OVERRIDES_HELP)
    rehearse.add_argument("--nodes", type=positive_int, required=True, metavar="N", help="containers")
    rehearse.add_argument("--nproc", type=positive_int, default=1, metavar="M", help="processes in each (default 1)")
    rehearse.add_argument("--gpus", type=positive_int, default=0, metavar="G", help="GPUs for each (default none: CPU)")
    rehearse.add_argument("--image", default="ddp-pipeline", help="image to run (default ddp-pipeline)")
    rehearse.add_argument("--data", type=path, metavar="FOLDER", help="seen by the nodes, read-only, as /data")
    rehearse.add_argument(
        "--runs", metavar="VOLUME", help="Docker volume for /runs, kept (default: one that is removed)"
    )
    rehearse.add_argument(
        "--kill", type=_kill, action="append", default=[], metavar="NODE@STEP",
        help="SIGKILL a node once that step is reported; may be given often",
    )  # fmt: skip
    rehearse.add_argument(
        "--cut", type=_cut, action="append", default=[], metavar="NODE@STEP:SECONDS",
        help="take a node's network away for so long; may be given often",
    )  # fmt: skip
    rehearse.add_argument(
        "--env", type=variable, action="append", default=[], metavar="NAME=VALUE", help="a variable of the nodes"
    )
    rehearse.set_defaults(run=_rehearse)

    k8s = commands.add_parser("k8s", help="manifests of the cluster job").add_subparsers(
        metavar="ACTION", required=True
    )
    render = k8s.add_parser(
        "render", help="write the manifests for a recipe, an image, N nodes and G GPUs a node",
        description="Prints the manifests, or writes them to --out. Without options they are those of k8s/.",
        argument_default=argparse.SUPPRESS,  # what is not given has its default where it is rendered
    )  # fmt: skip
    add = render.add_argument
    add("recipe", nargs="?", type=path_or_uri, metavar="RECIPE", help="default digits")
    add("overrides", nargs="*", default=[], metavar="key=value", help=OVERRIDES_HELP)
    add("--nodes", type=positive_int, metavar="N", help="pods (default 2)")
    add("--gpus", type=positive_int, metavar="G", help="GPUs, and processes, of each (default 1)")
    add("--cpu", action="store_const", const=0, dest="gpus", help="no GPUs")
    add("--nproc", type=positive_int, metavar="M", help="processes of each without GPUs (default 1)")
    add("--image", type=word, help="in a registry that the nodes can pull from, best by digest")
    add("--mlflow-image", type=word, metavar="IMAGE", help="likewise")
    add(
        "--mlflow-auth",
        action="store_true",
        help="MLflow asks for the password of your Secrets mlflow-auth and -credentials",
    )
    add("--pull-secret", type=word, metavar="NAME", help="the registry's credentials, a Secret there")
    add("--namespace", type=word, metavar="NAME", help="default ddp-pipeline")
    add("--storage-class", type=word, metavar="NAME", help="one that gives ReadWriteMany (default: the cluster's own)")
    add("--single-node", action="store_true", help="all pods on one machine (kind, minikube): ReadWriteOnce will do")
    add("--cpus", type=positive_int, metavar="C", help="CPUs of each pod (default 8 a GPU, 2 a process without)")
    add("--memory", type=memory_quantity, help="of each pod, 64Gi for example (default 24Gi a GPU, 4Gi without)")
    add("--shm", type=memory_quantity, help="/dev/shm of each pod, out of its memory (default 8Gi a GPU, 1Gi without)")
    add("--out", type=path, default=None, metavar="FOLDER", help="folder to write them to")
    render.set_defaults(run=_render)


def _kill(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)@(\d+)", text, re.ASCII)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not NODE@STEP, 1@40 for example")
    return int(match[1]), int(match[2])


def _cut(text: str) -> tuple[int, int, float]:
    match = re.fullmatch(r"(\d+)@(\d+):(\d+(?:\.\d+)?)", text, re.ASCII)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not NODE@STEP:SECONDS, 1@40:5 for example")
    return int(match[1]), int(match[2]), float(match[3])


def _doctor(options: argparse.Namespace) -> str | int:
    from pipeline.preflight import doctor

    return doctor.examine(
        options.recipe,
        options.overrides,
        options.world,
        options.nodes,
        as_json=options.json,
        with_sanity=options.sanity,
    )


def _rehearse(options: argparse.Namespace) -> str | int:
    from pipeline.deploy.rehearse import Fault, Request, rehearse

    if options.data and not os.path.isdir(options.data):
        raise RequestError(f"--data {options.data} is not a folder")
    request = Request(
        recipe=options.recipe, overrides=options.overrides, num_nodes=options.nodes, nproc=options.nproc,
        gpus=options.gpus, image=options.image, data=options.data, runs=options.runs, env=tuple(options.env),
        faults=tuple(Fault(*fault) for fault in (*options.kill, *options.cut)),
    )  # fmt: skip
    return rehearse(request)


def _render(options: argparse.Namespace) -> str:
    from pipeline.deploy.k8s import Request, render, write

    given = {field.name: getattr(options, field.name) for field in fields(Request) if hasattr(options, field.name)}
    manifests = render(Request(**{**given, "overrides": tuple(options.overrides)}))
    if options.out is None:
        return "---\n".join(manifests.values()).rstrip()
    write(manifests, options.out)
    return f"{len(manifests)} manifests are in {options.out}: kubectl apply -f {options.out}"
