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

from pipeline.config.help import nearest
from pipeline.config.schema import REGISTRY, Model
from pipeline.errors import RequestError, StorageError, TemporaryError
from pipeline.group import Group
from pipeline.model.architectures import published_weights
from pipeline.record import checkpoint


def read(options: Model, model: nn.Module) -> dict[str, Tensor]:
    """Return those tensors of what `model.init` names that fit into `model`, whose shapes alone matter.

    RequestError if it cannot be found or is of another architecture, TemporaryError if it cannot be fetched now.
    """
    assert options.init is not None
    theirs, mine = _read(options.arch, options.init), model.state_dict()
    fitting = {name: tensor for name, tensor in theirs.items() if name in mine and mine[name].shape == tensor.shape}
    if 2 * len(fitting) < len(mine):
        raise RequestError(
            f"model.init={options.init} fits {len(fitting)} of {len(mine)} tensors of {options.arch}: it is of another"
            " architecture; set model.arch to its own"
        )
    return fitting


def load_pretrained(
    model: nn.Module, weights: dict[str, Tensor] | None, options: Model, group: Group, log: Callable[[str], None]
) -> None:
    """Load rank 0's `weights`, which `read` returned there, into `model`, at every process."""
    if weights is not None:
        model.load_state_dict(weights, strict=False)
        random = [name for name in model.state_dict() if name not in weights]
        log(f"first weights from {options.init}" + (f"; {', '.join(random)} start random" if random else ""))
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


def _read(arch: str, init: str) -> dict[str, Tensor]:
    if init.startswith(REGISTRY):
        from pipeline.record.mlflow.registry import fetch_model

        return checkpoint.eval_weights(fetch_model(init))
    if os.path.exists(init):
        try:
            path = checkpoint.find(Path(init))
        except StorageError as error:
            raise RequestError(f"model.init={init} is not allowed: {error}") from None
        return checkpoint.eval_weights(checkpoint.read_model(path))
    names = published_weights(arch)
    if init not in names:
        raise RequestError(
            f"model.init={init} is neither a file or folder here, nor models:/NAME@ALIAS, nor one of torchvision's weights"
            f" of {arch}" + (nearest(init, list(names)) or f": there are {', '.join(names) or 'none'}")
        )
    try:
        weights: dict[str, Tensor] = names[init].get_state_dict(progress=False, check_hash=True, weights_only=True)
    except (OSError, urllib.error.URLError) as error:
        raise TemporaryError(
            f"model.init={init} cannot be fetched ({error}): put the file into torch's cache (TORCH_HOME), or name a path"
        ) from error
    except Exception as error:  # torch raises half a dozen kinds for what is not a file of weights
        raise StorageError(
            f"model.init={init}: its file in torch's cache (TORCH_HOME) is not one of weights"
            f" ({' '.join(str(error).split())[:200]}): remove it"
        ) from None
    return weights
