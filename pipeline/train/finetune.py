"""First weights from elsewhere: torchvision's, those of another run, or a model in MLflow, under a head of the data's own
classes.

Rank 0 reads them and sends them to all, so that nobody else needs the file or the network. What does not fit by its shape
is the head: it keeps its random first weights, and the run says so. A resumption overwrites them with its checkpoint's.

What is frozen has no gradient, no decay and no moment, and is in evaluation mode for good: running statistics that follow
the new data would undo what the weights beside them were made for.
"""

import os
import urllib.error
from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from pipeline.config import REGISTRY, Model, nearest
from pipeline.group import Group
from pipeline.model.architectures import published_weights
from pipeline.record import checkpoint
from pipeline.verdict import RequestError, TemporaryError, Verdict


def take_over(model: nn.Module, options: Model, group: Group, say: Callable[[str], None]) -> None:
    """Load what `model.init` names into `model`, at every process. RequestError if it fits nowhere."""
    problem = None
    if group.is_main:
        try:
            say(_load_fitting(model, options))
        except Verdict as found:
            problem = found
    group.raise_together(problem)
    group.broadcast(list(model.state_dict().values()))


def freeze(model: nn.Module, names: str) -> str:
    """Freeze the modules that `model.freeze` names; a line that says how much is left. RequestError for a name it lacks."""
    children = [name for name, child in model.named_children() if any(True for _ in child.parameters())]
    modules = dict(model.named_modules())
    chosen = children[:-1] if names == "backbone" else [name.strip() for name in names.split(",")]  # the head is last
    own = dict(model.named_parameters(recurse=False)) if names == "backbone" else {}  # a transformer's class token
    for one in own.values():
        one.requires_grad_(False)
    for name in chosen:
        if name not in modules or not name:
            raise RequestError(
                f"model.freeze={names}: the model has no module {name!r}"
                + (nearest(name, list(modules)) or f": it has {', '.join(children)}, and what is in them")
            )
        modules[name].eval().requires_grad_(False)
    left = sum(one.numel() for one in model.parameters() if one.requires_grad)
    if not left:
        raise RequestError(f"model.freeze={names} leaves nothing to train: leave the head out, {children[-1]}")
    total = sum(one.numel() for one in model.parameters())
    return f"{', '.join([*own, *chosen])} frozen: {left:,} of {total:,} weights are trained"


def _load_fitting(model: nn.Module, options: Model) -> str:
    assert options.init is not None
    theirs, mine = _read(options.arch, options.init), model.state_dict()
    fitting = {name: tensor for name, tensor in theirs.items() if name in mine and mine[name].shape == tensor.shape}
    anew = [name for name in mine if name not in fitting]
    if 2 * len(fitting) < len(mine):
        raise RequestError(
            f"model.init={options.init} fits {len(fitting)} of {len(mine)} tensors of {options.arch}: it is of another"
            " architecture; set model.arch to its own"
        )
    model.load_state_dict(fitting, strict=False)
    return f"first weights from {options.init}" + (f"; {', '.join(anew)} anew" if anew else "")


def _read(arch: str, init: str) -> dict[str, Tensor]:
    if init.startswith(REGISTRY):
        from pipeline.record.mlflow import fetch_model

        served, _ = fetch_model(init)
        own = "model."  # of `Served`, beside what it normalises with
        return {name.removeprefix(own): one for name, one in served.state_dict().items() if name.startswith(own)}
    if os.path.exists(init):
        path = checkpoint.find(Path(init))
        return checkpoint.judged_weights(checkpoint.read_model(path))
    names = published_weights(arch)
    if init not in names:
        raise RequestError(
            f"model.init={init} is neither a file or folder here, nor models:/NAME@ALIAS, nor one of torchvision's weights"
            f" of {arch}" + (nearest(init, list(names)) or f": there are {', '.join(names) or 'none'}")
        )
    try:
        weights: dict[str, Tensor] = names[init].get_state_dict(progress=False, check_hash=True)
    except (OSError, urllib.error.URLError) as error:
        raise TemporaryError(
            f"model.init={init} cannot be fetched ({error}): put the file into torch's cache (TORCH_HOME), or name a path"
        ) from error
    return weights
