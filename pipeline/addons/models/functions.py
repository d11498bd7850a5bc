"""Models of timm, models that a function of the user returns, and any model without values.

Promise: only code that the user named runs here (`trust`). timm is imported only for `timm/NAME`,
and gets no argument that makes it fetch or open a file.
"""

import importlib
import os
import re
import sys
from collections.abc import Callable
from functools import partial

import torch
import torchvision
from torch import nn

from pipeline.addons.models.trust import check_is_trusted
from pipeline.config.sections import Model
from pipeline.errors import RequestError, nearest, one_line
from pipeline.model.architectures import build


def timm_builder(arch: str) -> Callable[..., nn.Module]:
    """Return the function that makes timm's model with random weights.

    Raises RequestError if timm is not installed or lacks the model.
    """
    try:
        import timm
    except ImportError:
        raise RequestError(f"model.arch={arch} needs timm", "pip install 'ddp-pipeline[timm]'") from None
    name = arch.removeprefix("timm/")
    if not timm.is_model(name):  # also for hf-hub:…, which would fetch a model
        close = nearest(name, timm.list_models(), 0.7)
        raise RequestError(f"model.arch={arch} is no model of timm {timm.__version__}{close}", "give another")
    return partial(timm.create_model, name, pretrained=False)


def own_builder(arch: str) -> Callable[..., nn.Module]:
    """Return the function package.module:function of the user.

    Packages are found as in `python -m`: installed, or in the current folder. Raises RequestError
    if the user has not named it, or if it cannot be imported.
    """
    module_name, _, name = arch.partition(":")
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", arch):
        raise RequestError(f"model.arch={arch} is not allowed", "give package.module:function")
    check_is_trusted(arch)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, so that no file in it replaces a library
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # it is the user's code
        problem = f"model.arch={arch} cannot be imported ({type(error).__name__}: {one_line(error)})"
        raise RequestError(problem, "install the package, or start in the folder that holds it") from error
    function = getattr(module, name, None)
    if not callable(function):
        names = [key for key in vars(module) if not key.startswith("_")]
        raise RequestError(f"model.arch={arch}: {module_name} has no function {name}{nearest(name, names)}")
    return function  # type: ignore[no-any-return]


def no_such_model(arch: str, names: list[str]) -> RequestError:
    """Return the error about a name that is not one of torchvision's classifiers `names`."""
    problem = f"model.arch={arch} is not a classification model of torchvision {torchvision.__version__}"
    close = nearest(arch, names, 0.7)
    return RequestError(problem + close, "" if close else f"the models are {', '.join(names)}")


def meta_model(options: Model, num_classes: int) -> nn.Module:
    """Return the model on the meta device: shapes without values."""
    try:
        with torch.device("meta"):
            return build(options, num_classes)
    except (NotImplementedError, RuntimeError, RequestError):  # RegNet computes its widths with tensors
        return build(options, num_classes).to("meta")
