"""Commands and flags of version 0.2 that are gone: what replaces each, as the end of a sentence."""

from pipeline.errors import RequestError

_LINKS = "measure the links with nccl-tests, and a node's GPUs with 'dcgmi diag'"
_KUSTOMIZE = "a kustomization adds it, see docs/kubernetes.md"
_REPLACED: dict[str, str] = {
    "bench": "run python benchmarks/NAME.py from the source",
    "--gpu-images-per-s": "compare time/images_per_s and time/waiting_for_data of a short run",
    "--sanity": "train a few steps with train.max_steps, and look at the loss and report/index.html",
    "--gang-check": _LINKS,
    "--numa-binding": "give it to torchrun, which starts the processes then",
    "--gang": f"{_LINKS}; in place of the one of k8s render, give --queue NAME (Kueue)",
    "--topology": _KUSTOMIZE,
    "--rdma": _KUSTOMIZE,
    "--example": "the source has the examples in k8s/examples, to copy",
    "--priority-class": _KUSTOMIZE,
    "--sheet": "the page of 'pipeline report' shows the most confident mistakes",
    "completion": "argcomplete's 'register-python-argcomplete pipeline' prints that script",
    "runs": "MLflow lists the runs, see 'make ui'; 'pipeline report RUN_DIR' writes the page of one",
}


def refuse_replaced(name: str) -> None:
    """Raise RequestError if a command or flag of version 0.2 is gone."""
    if name in _REPLACED:
        raise RequestError(f"there is no {name!r} since version 0.3: {_REPLACED[name]}")
