"""`pipeline k8s render`: write the Kubernetes manifests for a recipe, an image, N nodes and G GPUs.

Promise: `k8s/` in this repository is what this renders for the defaults. Nodes, processes and
timeouts are given once and written wherever they belong, and a pod gets the same variables as a
node of a rehearsal (`deploy.node`). The templates are in `manifests/`, in the order in which they
are applied.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipeline import __version__
from pipeline.config.load import from_yaml, load, recipe_text
from pipeline.deploy import node
from pipeline.errors import RequestError

_TEMPLATES = Path(__file__).parent / "manifests"


@dataclass(frozen=True, kw_only=True)
class RenderOptions:
    recipe: str = "digits"
    overrides: Sequence[str] = ()
    nodes: int = 2
    gpus: int = 1
    """GPUs of a node, one process each; 0: train on the CPU."""
    nproc: int = 1
    """Processes of a node without GPUs."""
    image: str = f"ddp-pipeline:{__version__}"
    mlflow_image: str = f"ddp-pipeline-mlflow:{__version__}"
    mlflow_auth: bool = False
    """MLflow requires a password, that of the Secret `mlflow-auth`."""
    pull_secret: str | None = None
    namespace: str = "ddp-pipeline"
    storage_class: str | None = None
    """None: the cluster's default."""
    single_node: bool = False
    """All pods on one machine (kind, minikube): volumes for one node, and no anti-affinity."""
    cpus: int | None = None
    """CPUs of a pod. None: 8 per process with GPUs, 2 without."""
    memory: str | None = None
    shm: str | None = None


def render(request: RenderOptions) -> dict[str, str]:
    """Return the text of each manifest by file name.

    Raises RequestError if the recipe or a value is invalid.
    """
    overrides = [*request.overrides, "run.dir=/runs"]  # in a pod run.dir comes from the ConfigMap
    config = load(request.recipe, overrides)
    node.check_resume_is_auto(config)
    templates = Environment(loader=FileSystemLoader(_TEMPLATES), undefined=StrictUndefined, keep_trailing_newline=True)
    templates.filters["quoted"] = json.dumps
    values = _values(request)
    names = sorted(path.name for path in _TEMPLATES.glob("*.yaml"))
    manifests = {name: templates.get_template(name).render(values) for name in names}
    config_map = "10-config.yaml"
    try:
        config_in_pod = from_yaml(yaml.safe_load(manifests[config_map])["data"]["recipe.yaml"], config_map, overrides)
    except (yaml.YAMLError, RequestError):
        config_in_pod = None
    if config_in_pod != config:
        remedy = "start its lines without indentation, and use plain letters in its name"
        raise RequestError(f"recipe {request.recipe} changes when it is embedded in a ConfigMap: {remedy}")
    return manifests


def write(manifests: dict[str, str], folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in manifests.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise RequestError(f"{folder} cannot be written: {error.strerror}: give --out a folder that can") from None


def _values(request: RenderOptions) -> dict[str, object]:
    """Return the variables of the templates: the request's fields, and what follows from them."""
    name, text = recipe_text(request.recipe)
    processes = request.gpus or request.nproc
    access = "ReadWriteOnce" if request.single_node else "ReadWriteMany"
    arguments = ["/recipe/recipe.yaml", *request.overrides, "run.dir=$(RUN_DIR)"]
    return {
        **vars(request),
        "job": node.JOB, "host": node.host_name(0), "environment": node.environment(request.nodes, processes),
        "run": name, "recipe": text.rstrip(), "access": access,
        "claims": [("data", access, "300Gi"), ("runs", access, "50Gi"), ("mlflow", "ReadWriteOnce", "20Gi")],
        "cpus": str(request.cpus or (8 if request.gpus else 2) * processes),
        "memory": request.memory or f"{node.memory_gib(request.gpus, request.nproc)}Gi",
        "shm": request.shm or f"{(8 if request.gpus else 1) * processes}Gi",
        "spread": request.nodes > 1 and not request.single_node,
        "backoff_limit": node.max_replacements(request.nodes), "grace_period": node.SHUTDOWN_TIMEOUT_S + 30,
        "command": ", ".join(node.COMMAND), "arguments": ", ".join(json.dumps(argument) for argument in arguments),
    }  # fmt: skip
