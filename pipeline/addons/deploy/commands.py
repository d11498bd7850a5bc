"""The commands rehearse, k8s render, k8s watch, k8s recover."""

import argparse
import os
import re
import shlex

from pipeline.addons.deploy import options as flags
from pipeline.addons.deploy.options import matching, namespace_name
from pipeline.cli.arguments import Commands, add_command, add_recipe, path, positive_int
from pipeline.errors import RequestError, count_of
from pipeline.lazy import addon

_run = matching(r"[A-Za-z0-9][\w.-]{0,99}", "a run's name: give that of its folder in /runs, such as digits")
_kill = matching(r"\d+@\d+", "NODE@STEP, such as 1@40")
_cut = matching(r"\d+@\d+:\d+(\.\d+)?", "NODE@STEP:SECONDS, such as 1@40:5")


def add_commands(commands: Commands) -> None:
    parser = add_command(
        commands, "rehearse", _rehearse, "run a multi-node job on this machine, with one container per node",
        "Run RECIPE in --nodes containers on this machine, which reach each other like the pods of the"
        " Kubernetes job. The containers see the folder --data as /data. A node that fails is replaced."
        " Everything is removed at the end.",
        "pipeline rehearse digits --nodes 2 --kill 1@40",
        "pipeline rehearse digits run.exact=true --nodes 1:3 --cut 2@40:60",
    )  # fmt: skip
    add_recipe(parser)
    add = parser.add_argument
    help = "number of containers; MIN:MAX: train with those that are there, if their number divides the batch"
    add("--nodes", type=flags.count_or_range, required=True, metavar="N", help=help)
    help = "without --gpus: processes per container (default 1)"
    add("--nproc", type=positive_int, default=1, metavar="M", help=help)
    add("--gpus", type=positive_int, default=0, metavar="G", help="GPUs per container (default none: CPU)")
    add("--image", type=flags.image_name, default="ddp-pipeline", help="image to run (default ddp-pipeline)")
    add("--data", type=path, metavar="FOLDER", help="folder to mount read-only as /data")
    add("--runs", metavar="VOLUME", help="Docker volume for /runs, which is kept (default: a temporary one)")
    for flag, kind, metavar, help in (
        ("--kill", _kill, "NODE@STEP", "kill a node (SIGKILL) once this step is logged"),
        ("--cut", _cut, "NODE@STEP:SECONDS", "cut a node's network for this long once this step is logged"),
        ("--env", _variable, "NAME=VALUE", "set an environment variable in the containers"),
    ):
        add(flag, type=kind, action="append", default=[], metavar=metavar, help=f"{help}; may be repeated")

    description = "Write Kubernetes manifests for a training job, show how it goes, replace lost pods."
    k8s = commands.add_parser("k8s", help="write Kubernetes manifests", description=description)
    actions = k8s.add_commands("ACTION")
    parser = add_command(
        actions, "render", _render, "write the manifests for a recipe, an image, N nodes and G GPUs per node",
        "Print the manifests, or write them to --out. Without options they are those of k8s/.",
        "pipeline k8s render my.yaml --nodes 4 --gpus 8 --image IMAGE --out k8s",
        argument_default=argparse.SUPPRESS,  # the defaults are those of RenderOptions
    )  # fmt: skip
    add_recipe(parser, "name or path (default digits)", nargs="?")
    flags.add_flags(parser)
    help = "print only a Job that sends the run in /runs/RUN to MLflow, if it ended while MLflow was away"
    parser.add_argument("--sync", type=_run, default=None, metavar="RUN", help=help)
    help = "write one file per manifest to this folder"
    parser.add_argument("--out", type=path, default=None, metavar="FOLDER", help=help)

    parser = add_command(
        actions, "watch", lambda options: addon("deploy.watch").watch(options.namespace),
        "show how the Job in a cluster goes, until it ends",
        "Show the log of the Job's pod 0, and a line for each change of a pod, with kubectl. Ends when the"
        " Job does: with 0 if it is complete, otherwise with the exit code of the preflight that ended it,"
        " or 1.",
        "pipeline k8s watch",
    )  # fmt: skip
    help = "namespace of the Job (default ddp-pipeline)"
    parser.add_argument("--namespace", type=namespace_name, default="ddp-pipeline", metavar="NAME", help=help)
    add_command(
        actions, "recover", lambda _: addon("deploy.recovery").recover(),
        "in a cluster: let the Job replace the pods of a node that is lost",
        "Mark each trainer pod of this namespace as Failed that should have ended 15 s ago and whose node has"
        " not reported its end, and delete it, so that the Job replaces it. Runs until it is stopped, in the"
        " pod of 60-recovery.yaml.",
        "pipeline k8s recover",
    )  # fmt: skip


def _variable(text: str) -> str:
    name, equals, _ = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{name!r} is not NAME=VALUE")  # the value may be a secret
    return text


def _rehearse(options: argparse.Namespace) -> str | int:
    from pipeline.addons.deploy.rehearse import Fault, rehearse

    if options.data and not os.path.isdir(options.data):
        raise RequestError(f"--data {options.data} is not a folder")
    words = [re.split("[@:]", fault) for fault in (*options.kill, *options.cut)]
    faults = [Fault(int(node), int(step), *map(float, seconds)) for node, step, *seconds in words]
    return rehearse(options, faults)


def _render(options: argparse.Namespace) -> str:
    k8s, request, out = addon("deploy.k8s"), flags.options_of(vars(options)), options.out
    manifests = k8s.render_sync(request, options.sync) if options.sync else k8s.render(request)
    if out is None:
        return "---\n".join(manifests.values()).rstrip()
    replaced = k8s.write(manifests, out)
    place = str(out / next(iter(manifests)) if len(manifests) == 1 else out)
    changed = f" ({', '.join(replaced)} had other contents)" if replaced else ""
    wrote = f"wrote {count_of(len(manifests), 'manifest')} to {out}{changed}"
    return f"{wrote}: run kubectl apply -f {shlex.quote(place)}"
