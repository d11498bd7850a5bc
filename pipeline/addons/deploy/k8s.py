"""`pipeline k8s render`: write the Kubernetes manifests for a recipe, an image, N nodes and G GPUs.

Promise: `k8s/` in this repository is what this renders for the defaults. Nodes, processes and
timeouts are given once and written wherever they belong, and a pod gets the same variables as a
node of a rehearsal (`deploy.node`). The templates are in `manifests/`, in the order in which they
are applied.
"""

import json
import math
import os
import re
import sys
from contextlib import suppress
from dataclasses import replace
from ipaddress import ip_network
from pathlib import Path
from textwrap import indent
from typing import Any
from urllib.parse import urlsplit

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipeline.addons.datasets.sources import data_size
from pipeline.addons.deploy import node
from pipeline.addons.deploy.code import pack
from pipeline.addons.deploy.options import RenderOptions
from pipeline.addons.models.inputs import target_of
from pipeline.addons.ops.model import check_model_builds, check_model_exists
from pipeline.config.load import load, parse_yaml, read_recipe
from pipeline.config.schema import Config
from pipeline.errors import RequestError, StorageError
from pipeline.files import FULL, atomic_write
from pipeline.planning import divide_batch, make_plan
from pipeline.world import World

_TEMPLATES = Path(__file__).parent / "manifests"
_PUBLIC_ADDRESSES: dict[str, tuple[str, ...]] = {
    "0.0.0.0/0": ("10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"),
    "::/0": ("fc00::/7", "fe80::/10"),
}
"""All addresses -> except those of private networks and of a cloud's metadata service."""


def render(request: RenderOptions) -> dict[str, str]:
    """Return the text of each manifest by file name. Raises RequestError for an invalid value."""
    for word in request.overrides:
        if word.startswith("run.dir="):
            problem = f"{word} has no effect in a pod"
            raise RequestError(problem, "set RUN_DIR in 10-config.yaml, or rename the recipe")
    request, config = _complete(request)
    node.check_resume_is_auto(config)
    if request.code:
        sys.path.append(os.path.abspath(request.code))  # the recipe's model may be a function there
    _check_store(request, config)
    _check_pods(request, config)
    _check_plan(request, config)
    left_out = {"15-code.yaml": not request.code, "60-recovery.yaml": request.no_recovery}
    names = sorted(path.name for path in _TEMPLATES.glob("[0-9]*.yaml") if not left_out.get(path.name))
    values = _values(request, config)
    return {name: _fill(name, values) for name in names}


def render_sync(request: RenderOptions, run: str) -> dict[str, str]:
    """Return the text of a Job that sends the run in /runs/`run` to MLflow, by file name.

    It may call the function that makes the recipe's model.
    """
    if request.store:
        mirror = f"{request.store.rstrip('/')}/runs/{run}"
        problem = f"--sync {run} reads the claim runs, and --store has none"
        raise RequestError(problem, f"copy {mirror} to a folder, then run 'pipeline sync FOLDER'")
    job = re.sub("[^a-z0-9]+", "-", f"sync-{run.lower()}").strip("-")[:63].rstrip("-")
    model = load(request.recipe, [*request.overrides]).model
    trusted = model.arch if model.is_function else ""
    values = {**vars(request), "sync": run, "sync_job": job, "trusted": trusted, "code": _code_of(request)}
    files = {"15-code.yaml": _fill("15-code.yaml", values)} if request.code else {}
    return {**files, f"{job}.yaml": _fill("sync.yaml", values)}


def write(manifests: dict[str, str], folder: Path) -> list[str]:
    """Write each manifest to its file; return the names of files that had other contents.

    Raises RequestError, also for a file that this command did not write, or StorageError.
    """
    replaced = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in (folder / name for name in manifests):
            text = manifests[path.name]
            before = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else text
            if not _objects(before) & _objects(text):
                problem = f"{path} was not written by 'pipeline k8s render'"
                raise RequestError(problem, "remove it, or give another --out")
            replaced += [path.name] if before != text else []
        stale = {path.name for path in _TEMPLATES.glob("[0-9]*.yaml")} - manifests.keys()
        for path in (folder / name for name in stale if len(manifests) > 2):
            if path.exists():
                problem = f"{path} is of an earlier render with other options, and would be applied, too"
                raise RequestError(problem, "remove it, or give another --out")
        for name, text in manifests.items():
            atomic_write(target_of(folder / name), text.encode())
        return replaced
    except OSError as error:
        kind = StorageError if error.errno in FULL else RequestError
        problem = f"{error.filename or folder} cannot be written: {error.strerror}"
        raise kind(problem, "give --out a folder that can") from None


def _objects(text: str) -> set[tuple[str, str]]:
    """Return kind and name of each object in a manifest. The name of code ends with a digest."""
    with suppress(yaml.YAMLError, LookupError, TypeError):
        objects = filter(None, yaml.safe_load_all(text))
        return {(found["kind"], found["metadata"]["name"].partition("-code-")[0]) for found in objects}
    return set()


def _code_of(request: RenderOptions) -> dict[str, Any] | None:
    return pack(Path(request.code)) if request.code else None


def _fill(template: str, values: dict[str, object]) -> str:
    loader = FileSystemLoader(_TEMPLATES)
    templates = Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True)
    templates.filters["quoted"] = json.dumps
    return str(templates.get_template(template).render(values))


def _complete(request: RenderOptions) -> tuple[RenderOptions, Config]:
    """Return the request with the overrides that its flags imply, and its configuration."""
    config, words = load(request.recipe, [*request.overrides]), []
    is_given = any(word.startswith("run.device=") for word in request.overrides)
    if request.gpus and not is_given and config.run.device == "auto":
        words.append("run.device=cuda")  # or a pod whose runtime gives it no GPU would train on the CPU
    if request.store:
        store = request.store.rstrip("/")
        if config.data.source == "pack" and not str(config.data.root).startswith("s3://"):
            words.append(f"data.root={store}/data")
        if not config.checkpoint.mirror:
            # RUN_DIR is /runs/NAME: a mirror holds one run
            words.append(f"checkpoint.mirror={store}$(RUN_DIR)")
        request = replace(request, store=store)
    request = replace(request, overrides=[*request.overrides, *words])
    return request, load(request.recipe, [*request.overrides, "run.dir=/runs"])  # in a pod: RUN_DIR


def _check_store(request: RenderOptions, config: Config) -> None:
    """Raise RequestError for what needs a bucket and has none, or a volume that all pods share."""
    if not request.store:
        places = {"data.root=": config.data.root, "checkpoint.mirror=": config.checkpoint.mirror}
        flags = {"--store-endpoint ": request.store_endpoint, "--store-cidr ": request.store_cidr}
        given = [f"{key}{place}" for key, place in places.items() if str(place).startswith("s3://")]
        given += [f"{flag}{value}" for flag, value in flags.items() if value]
        if given:
            raise RequestError(f"{given[0]} needs pods that reach a bucket", "add --store s3://BUCKET/PREFIX")
        return
    if config.data.source in ("folder", "table"):
        images = config.data.root if config.data.source == "folder" else config.data.table
        problem = f"data.source={config.data.source} needs a volume that all pods share, and --store has none"
        remedy = f"run 'pipeline data pack {images} {request.store}/data', and add data.source=pack"
        raise RequestError(problem, remedy)
    if config.data.cache and Path("/data") not in Path(config.data.cache).parents:
        raise RequestError(f"data.cache={config.data.cache} is not on the pods' disk", "use /data/cache")
    if not str(config.checkpoint.mirror).startswith("s3://"):
        problem = f"checkpoint.mirror={config.checkpoint.mirror} would lose the run with the disk of its pod"
        raise RequestError(problem, "leave it out")


def _check_pods(request: RenderOptions, config: Config) -> None:
    """Raise RequestError if the options contradict each other, or the recipe."""
    memory, shm, device = _memory_of(request), request.shm_of_pod, config.run.device
    if 2 * _bytes(shm) > _bytes(memory):
        raise RequestError(f"--shm {shm} is more than half of --memory {memory}", "raise --memory")
    if request.gpus and request.nproc != 1:
        raise RequestError(f"--nproc {request.nproc} is for pods without GPUs", "add --cpu")
    if device == ("cpu" if request.gpus else "cuda"):
        pods = f"ask for {request.gpus} GPUs" if request.gpus else "with --cpu have no GPU"
        raise RequestError(f"run.device={device}, but the pods {pods}", "leave it out, or change --cpu")
    if not request.gpus and config.model.batchnorm == "sync" and request.nodes * request.processes > 1:
        problem = "model.batchnorm=sync: torch synchronises batch norm on GPUs only"
        raise RequestError(problem, "use local or average")


def _check_plan(request: RenderOptions, config: Config) -> None:
    """Run the checks of a start that need neither the cluster nor its data."""
    allowed = node.allowed_nodes(config, request.min_nodes, request.nodes, request.processes)
    nodes = max(allowed, default=request.nodes)
    size, cpus, has_gpu = nodes * request.processes, request.cpus_of_pod, request.gpus > 0
    world = World(size=size, local_size=request.processes, cpus=cpus, has_gpu=has_gpu)
    if config.data.source not in ("digits", "synthetic"):  # its size is known in the cluster only
        divide_batch(config, world.size)
        check_model_exists(config.model, num_classes=1000)
        return
    plan = make_plan(config, world, data_size(config))
    check_model_builds(config, plan, world, is_resumed=True)  # model.init is in the cluster
    if plan.prefetch_bytes > _bytes(_memory_of(request)):
        problem = f"--memory {_memory_of(request)} is less than the batches that its loader workers hold"
        raise RequestError(problem, "give more, or lower data.prefetch, evaluate.batch or augment.size")


def _memory_of(request: RenderOptions) -> str:
    return request.memory or f"{node.memory_gib(request.gpus, request.nproc)}Gi"


def _bytes(memory: str) -> int:
    return int(memory[:-2]) << {"Mi": 20, "Gi": 30, "Ti": 40}[memory[-2:]]


def _store_values(request: RenderOptions) -> dict[str, object]:
    """Return where the store is. Raises RequestError for an endpoint of an unknown namespace."""
    url = urlsplit(request.store_endpoint or "https://s3.amazonaws.com")
    host, port = url.hostname or "", url.port or {"http": 80, "https": 443}[url.scheme]
    service = re.fullmatch(r"[^.]+\.([^.]+)\.svc(\.cluster\.local)?", host)
    namespace, addresses = None, _PUBLIC_ADDRESSES
    if request.store_cidr:
        addresses = {request.store_cidr: ()}
    elif service:
        namespace, addresses = service[1], {}
    elif ":" in host or re.fullmatch(r"[\d.]+", host):
        addresses = {str(ip_network(host)): ()}
    elif "." not in host:
        problem = f"--store-endpoint {request.store_endpoint} does not say in which namespace {host} is"
        raise RequestError(problem, f"give {url.scheme}://{host}.NAMESPACE.svc:{port}")
    return {"store_port": port, "store_namespace": namespace, "store_addresses": addresses}


def _recipe_text(recipe: str) -> tuple[str, str]:
    """Return a recipe's name, and its YAML with the name in it, so that any file may hold it."""
    path, text = read_recipe(recipe)
    tree = {"recipe": path.stem, **parse_yaml(text, str(path))}
    with suppress(RequestError):
        named = f"recipe: {path.stem}\n{text}"  # keeps the comments; not valid above `---` or `{…}`
        if parse_yaml(named, "") == tree:
            return path.stem, named
    return tree["recipe"], yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _values(request: RenderOptions, config: Config) -> dict[str, object]:
    """Return the variables of the templates: the request's fields, and what follows from them."""
    name, text = _recipe_text(request.recipe)
    # with its own lines if a YAML block can hold them
    recipe = yaml.safe_dump(f"{text.rstrip()}\n", default_style="|", width=math.inf, allow_unicode=True)
    access = "ReadWriteOnce" if request.single_node or request.store else "ReadWriteMany"
    shared = [] if request.store else [("data", access, "300Gi"), ("runs", access, "50Gi")]
    arguments = ["/recipe/recipe.yaml", *request.overrides, "run.dir=$(RUN_DIR)"]
    allowed = node.allowed_nodes(config, request.min_nodes, request.nodes, request.processes)
    environment = node.environment(request.nodes, request.processes, allowed)
    if request.store_endpoint:
        environment["AWS_ENDPOINT_URL"] = request.store_endpoint
    return {
        **vars(request), "code": _code_of(request),
        "job": node.JOB, "host": node.host_name(0), "environment": environment,
        "run": name, "recipe": indent(recipe, "  ").strip(), "access": access,
        "claims": [*shared, ("mlflow", "ReadWriteOnce", "20Gi")],
        **_store_values(request),
        "data_size": f"{math.ceil(config.data.cache_gib * 11 / 10) if config.data.cache else 1}Gi",
        "cpus": str(request.cpus_of_pod), "memory": _memory_of(request), "shm": request.shm_of_pod,
        "spread": request.nodes > 1 and not request.single_node,
        "backoff_limit": node.max_replacements(request.nodes, request.min_nodes),
        "grace_period": node.SHUTDOWN_TIMEOUT_S + 30,
        "command": ", ".join(node.COMMAND),
        "arguments": ", ".join(json.dumps(argument) for argument in arguments),
    }  # fmt: skip
