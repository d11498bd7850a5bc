"""`pipeline k8s render`: the manifests of the cluster job, for a recipe, an image, N nodes and G GPUs.

Promise: `k8s/` in this repository is what comes out for the defaults, and no number stands in two places by hand: nodes,
processes and time-outs are written wherever they belong from one request, with the same variables for a node that a
rehearsal gives it (`operate.node`). The texts are in `manifests/`, in the order in which they are applied.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from pipeline import __version__
from pipeline.config.load import from_yaml, load, recipe_text
from pipeline.config.schema import Config
from pipeline.deploy import node
from pipeline.errors import RequestError

MANIFESTS = Path(__file__).parent / "manifests"
GRACE_S = node.SHUTDOWN_S + 30


@dataclass(frozen=True, kw_only=True)
class Request:
    recipe: str = "digits"
    overrides: tuple[str, ...] = ()
    nodes: int = 2
    gpus: int = 1
    """GPUs a node, one process each; 0: the CPU."""
    nproc: int = 1
    """Processes a node without GPUs."""
    image: str = f"ddp-pipeline:{__version__}"
    mlflow_image: str = f"ddp-pipeline-mlflow:{__version__}"
    mlflow_auth: bool = False
    """MLflow asks for a password: that of the Secret `mlflow-auth`."""
    pull_secret: str | None = None
    namespace: str = "ddp-pipeline"
    storage_class: str | None = None
    """None: the cluster's default."""
    single_node: bool = False
    """All pods on one machine (kind, minikube): volumes for one node, and no pod shuns another."""
    cpus: int | None = None
    """CPUs a pod. None: 8 a process with GPUs, 2 without."""
    memory: str | None = None
    shm: str | None = None


def render(request: Request) -> dict[str, str]:
    """Text of each manifest by its file's name. RequestError if the recipe is wrong or a value cannot be."""
    words = [*request.overrides, "run.dir=/runs"]  # a pod's own is of its ConfigMap
    config = load(request.recipe, words)
    node.check_resume(config)
    manifests = dict(_files(request))
    if _of_pods(manifests["10-config.yaml"], words) != config:
        raise RequestError(
            f"recipe {request.recipe} would not come out of its ConfigMap as it went in: begin its lines at the margin, and"
            " name it in plain letters"
        )
    return manifests


def write(manifests: dict[str, str], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in manifests.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise RequestError(f"{folder} cannot be written: {error.strerror}: give --out a folder that can") from None


def _of_pods(text: str, words: list[str]) -> Config | None:
    """What pods will make of the ConfigMap; None if they cannot read it."""
    try:
        return from_yaml(yaml.safe_load(text)["data"]["recipe.yaml"], "10-config.yaml", words)
    except (yaml.YAMLError, RequestError):
        return None


def _files(request: Request) -> Iterator[tuple[str, str]]:
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError:
        raise RequestError("rendering wants the Python package 'jinja2': pip install jinja2") from None

    templates = Environment(loader=FileSystemLoader(MANIFESTS), undefined=StrictUndefined, keep_trailing_newline=True)
    templates.filters["quoted"] = json.dumps
    values = _values(request)
    for path in sorted(MANIFESTS.glob("*.yaml")):
        yield path.name, templates.get_template(path.name).render(values)


def _values(request: Request) -> dict[str, object]:
    name, text = recipe_text(request.recipe)
    processes = request.gpus or request.nproc
    access = "ReadWriteOnce" if request.single_node else "ReadWriteMany"
    words = ["/recipe/recipe.yaml", *request.overrides, "run.dir=$(RUN_DIR)"]
    return {
        "namespace": request.namespace,
        "job": node.JOB,
        "host": node.host(0),
        "environment": node.environment(request.nodes, processes),
        "run": name,
        "recipe": text.rstrip(),
        "access": access,
        "claims": [("data", access, "300Gi"), ("runs", access, "50Gi"), ("mlflow", "ReadWriteOnce", "20Gi")],
        "storage_class": request.storage_class,
        "image": request.image,
        "mlflow_image": request.mlflow_image,
        "mlflow_auth": request.mlflow_auth,
        "pull_secret": request.pull_secret,
        "nodes": request.nodes,
        "gpus": request.gpus,
        "cpus": str(request.cpus or (8 if request.gpus else 2) * processes),
        "memory": request.memory or f"{node.memory_gib(request.gpus, request.nproc)}Gi",
        "shm": request.shm or f"{(8 if request.gpus else 1) * processes}Gi",
        "spread": request.nodes > 1 and not request.single_node,
        "backoff_limit": node.replacements(request.nodes),
        "grace": GRACE_S,
        "command": ", ".join(node.COMMAND),
        "words": ", ".join(json.dumps(word) for word in words),
    }
