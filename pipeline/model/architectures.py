"""Classification models by name."""

from collections.abc import Callable
from functools import partial

import torch
import torchvision
from torch import nn

from pipeline.config.sections import Model
from pipeline.errors import RequestError, one_line
from pipeline.lazy import addon

_NOT_AN_ARGUMENT = (
    "num_classes", "weights", "weights_backbone", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay",
    "checkpoint_path", "cache_dir", "scriptable", "exportable", "no_jit", "features_only", "in_chans",
)  # fmt: skip
"""Arguments that would fetch or open weights, or make another kind of model."""

# With an auxiliary head, the model returns a tuple in training.
_OPTIONS = {name: {"aux_logits": False, "init_weights": True} for name in ("googlenet", "inception_v3")}


def build(options: Model, num_classes: int) -> nn.Module:
    """Return the model with random weights from torch's default generator.

    Raises RequestError if there is no such model, or if it does not take its arguments.
    """
    arch, args = options.arch, options.args
    if options.is_function:
        builder = addon("models.functions").own_builder(arch)
    else:
        if refused := [name for name in args if name in _NOT_AN_ARGUMENT]:
            remedy = "weights come from model.init, classes from the data"
            raise RequestError(f"model.args.{refused[0]} cannot be set", remedy)
        builder = _builder(arch)
    try:
        model = builder(num_classes=num_classes, **args)
    except RequestError:
        raise
    except Exception as error:
        if not args and not options.is_function:
            raise  # no fault of the request: memory, for example
        given = f" with model.args={args}" if args else ""
        problem = f"{type(error).__name__}: {one_line(error)}"
        raise RequestError(
            f"model.arch={arch} cannot be made{given} ({problem})", "correct its arguments"
        ) from error
    if not isinstance(model, nn.Module) or next(model.parameters(), None) is None:
        raise RequestError(
            f"model.arch={arch} returns a {type(model).__name__}, not a torch.nn.Module with parameters"
        )
    return model.to(memory_format=torch.channels_last) if options.channels_last else model


def _builder(arch: str) -> Callable[..., nn.Module]:
    if arch.startswith("timm/"):
        return addon("models.functions").timm_builder(arch)  # type: ignore[no-any-return]
    zoo = addon("models.zoo").MODELS
    names = [*torchvision.models.list_models(module=torchvision.models), *zoo]
    if arch not in names:
        raise addon("models.functions").no_such_model(arch, names)
    builder = zoo.get(arch) or partial(torchvision.models.get_model, arch, weights=None)
    return partial(builder, **_OPTIONS.get(arch, {}))
