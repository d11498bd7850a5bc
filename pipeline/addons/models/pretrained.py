"""First weights: of torchvision, timm, a file, a run or MLflow, with a head for the data's classes.

Rank 0 reads them and sends them to all processes, so no other process needs the file or the
network. The tensors whose shape does not fit are those of the head: it keeps its random weights,
and the run logs that. On resume the checkpoint's weights replace them.

Frozen modules have no gradient, no decay and no moment, and stay in evaluation mode: running
statistics that followed the new data would no longer match the frozen weights.
"""

import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor
from torch.nn import Module, Parameter

from pipeline.addons.models.archive import check_archive
from pipeline.addons.models.functions import timm_builder
from pipeline.addons.models.inputs import MODEL_URI_PREFIX
from pipeline.addons.models.trained import eval_weights, read_model
from pipeline.config.load import from_yaml
from pipeline.config.sections import Model
from pipeline.errors import RequestError, StorageError, TemporaryError, nearest, one_line
from pipeline.group import Group
from pipeline.model.weights import load_weights
from pipeline.record import checkpoint_contents, checkpoint_files


def read(options: Model, model: Module) -> dict[str, Tensor]:
    """Return the tensors that `model.init` names and that fit the shapes of `model`.

    Raises RequestError if they cannot be found or are of another architecture, TemporaryError if
    they cannot be fetched now.
    """
    assert options.init is not None
    given, ours = _read(options, options.init), model.state_dict()
    fitting = {name: given[name] for name in ours if name in given and given[name].shape == ours[name].shape}
    if 2 * len(fitting) < len(ours):
        problem = f"model.init={options.init} fits {len(fitting)} of {len(ours)} tensors of {options.arch}"
        raise RequestError(problem, "it is of another architecture; set model.arch to its own")
    return fitting


def load_pretrained(
    model: Module, weights: dict[str, Tensor] | None, options: Model, group: Group, log: Callable[[str], None]
) -> None:
    """Load the `weights` that `read` returned on rank 0 into `model`, in every process."""
    if weights is not None:
        load_weights(model, weights, strict=False)
        random = [name for name in model.state_dict() if name not in weights]
        log(f"first weights from {options.init}" + (f"; {', '.join(random)} start random" if random else ""))
    group.broadcast(list(model.state_dict().values()))


def freeze(model: Module, names: str) -> str:
    """Freeze the modules that `model.freeze` names; return a line that says what is still trained.

    Raises RequestError for a module that the model does not have, or if nothing is left to train.
    """
    modules, parameters = frozen_parts(model, names)
    for module in modules.values():
        module.eval()
    for parameter in parameters:
        parameter.requires_grad_(False)
    left = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if not left:
        raise RequestError(f"model.freeze={names} leaves nothing to train", "do not freeze the head")
    total = sum(parameter.numel() for parameter in model.parameters())
    return f"{', '.join(modules)} frozen: {left:,} of {total:,} weights are trained"


def frozen_parts(model: Module, names: str) -> tuple[dict[str, Module], list[Parameter]]:
    """Return the modules that `model.freeze` names, and all parameters that it freezes."""
    modules = dict(model.named_modules())
    chosen, parameters = [name.strip() for name in names.split(",")], []
    if names == "backbone":
        chosen = [name for name in _children(model) if name not in heads(model)]
        parameters = [*model.parameters(recurse=False)]  # a transformer's class token
    for name in chosen:
        if name not in modules or not name:
            close = nearest(name, list(modules))
            raise RequestError(f"model.freeze={names}: the model has no module {name!r}{close}")
        parameters += modules[name].parameters()
    return {name: modules[name] for name in chosen}, parameters


class FrozenUntil:
    """Freezes the parts of `model.freeze` before a step, that of `model.freeze_until`.

    Their gradients are exchanged from the start, and dropped: so neither DDP's buckets nor the
    optimizer change at that step, and what is frozen depends on nothing but the step.
    """

    def __init__(self, model: Module, names: str | None, until: int) -> None:
        self._until = until
        self._modules, self._parameters = frozen_parts(model, names or "") if until else ({}, [])

    def before_step(self, step: int) -> None:
        for module in self._modules.values() if step <= self._until else ():
            module.train(step == self._until)  # in evaluation mode, running statistics stay

    def before_update(self, step: int) -> None:
        for parameter in self._parameters if step < self._until else ():
            parameter.grad = None  # the optimizer leaves it out, with its decay and moments


def _children(model: Module) -> list[str]:
    return [name for name, child in model.named_children() if any(True for _ in child.parameters())]


def heads(model: Module) -> list[str]:
    """Return the children with a classifier: those that timm names, or the last with weights."""
    children = _children(model)
    is_timm = type(model).__module__.startswith("timm.")
    named = model.get_classifier() if is_timm else ()  # type: ignore[operator]
    classifiers = {*named} if isinstance(named, tuple | list) else {named}
    found = [name for name in children if classifiers.intersection(model.get_submodule(name).modules())]
    return found or children[-1:]


def _read(options: Model, init: str) -> dict[str, Tensor]:
    arch = options.arch
    if init == "timm":
        return timm_model(options).state_dict()
    if init.startswith(MODEL_URI_PREFIX):
        return _weights_of_run(options, read_model(init))
    if init == "torchvision" or re.fullmatch(r"[A-Z][A-Z0-9_]*", init):
        return _published(arch, "DEFAULT" if init == "torchvision" else init)
    if not os.path.exists(init):
        names = ", ".join(pretrained_weights(arch)) or "none"
        remedy = f"models:/NAME@ALIAS, or torchvision's weights of {arch} ({names})"
        raise RequestError(f"model.init={init} does not exist", f"give a file, a run's folder, {remedy}")
    if os.path.isfile(init) and not checkpoint_files.NAME.fullmatch(Path(init).name):
        return _read_state_dict(Path(init))
    try:
        path = checkpoint_files.find(Path(init))
    except StorageError as error:
        raise RequestError(f"model.init={init} is not allowed: {error.problem}", error.remedy) from None
    return _weights_of_run(options, checkpoint_contents.read_model(path))


def _weights_of_run(options: Model, contents: dict[str, Any]) -> dict[str, Tensor]:
    theirs = from_yaml(contents["config"], str(options.init)).model
    if theirs.mean and not options.mean:
        given = " ".join(f"model.{key}={json.dumps(getattr(theirs, key))}" for key in ("mean", "std"))
        problem = f"model.init={options.init} was trained on pixels of another mean than ImageNet's"
        raise RequestError(problem, f"add {given.replace(', ', ',')}")
    return eval_weights(contents)


def _published(arch: str, name: str) -> dict[str, Tensor]:
    names = pretrained_weights(arch)
    if name not in names:
        problem = f"model.init={name} is none of torchvision's weights of {arch}{nearest(name, list(names))}"
        raise RequestError(problem, f"give {' or '.join(names) or 'a file'}")
    try:
        return dict(names[name].get_state_dict(progress=False, check_hash=True, weights_only=True))
    except OSError as error:
        remedy = "put the file into torch's cache (TORCH_HOME), or name a path"
        raise TemporaryError(f"model.init={name} cannot be fetched ({error})", remedy) from error
    except Exception as error:  # torch raises many types for a file that holds no weights
        problem = f"its file in torch's cache (TORCH_HOME) holds no weights ({one_line(error)})"
        raise StorageError(f"model.init={name}: {problem}", "remove it") from None


def timm_model(options: Model) -> Module:
    """Return timm's model with its published weights and its own number of classes.

    huggingface_hub fetches them once, into its cache. timm gets the tensors and no name of a file,
    of which it might unpickle another.
    """
    make = timm_builder(options.arch)
    from huggingface_hub import errors, hf_hub_download
    from safetensors.torch import load_file
    from timm import get_pretrained_cfg

    try:
        entry = get_pretrained_cfg(options.arch.removeprefix("timm/"), allow_unregistered=False)
        if not entry.hf_hub_id:
            raise ValueError("timm knows none in the Hugging Face Hub")
        tensors = load_file(hf_hub_download(entry.hf_hub_id, "model.safetensors"))
    except Exception as error:  # both raise a dozen kinds
        is_away = isinstance(error, errors.LocalEntryNotFoundError)  # and not in the cache
        problem = f"the published weights of {options.arch} cannot be read: {one_line(error, 200)}"
        remedy = "connect once, or put model.safetensors into huggingface_hub's cache (HF_HOME)"
        raise (TemporaryError if is_away else RequestError)(problem, remedy) from None
    overlay = {"pretrained": True, "pretrained_cfg_overlay": {"state_dict": tensors}}
    return make(**overlay, **options.args)


def _read_state_dict(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file that safetensors or torch.save wrote, by name.

    A training program's dict around them (`state_dict`, `model`, `model_state_dict`) and DDP's
    prefix are removed. Raises StorageError if the file holds no state dict.
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            found: Any = load_file(path)
        else:
            data = path.read_bytes()
            if data.startswith(b"PK"):  # torch's format before 1.6 is no archive
                check_archive(data)
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        for name in ("state_dict", "model", "model_state_dict"):
            if isinstance(found.get(name), dict):
                found = found[name]
        tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
        weights = {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
        if not weights:
            raise ValueError("it holds no tensors")
    except ImportError:
        raise RequestError(f"{path} needs safetensors", "pip install safetensors") from None
    except Exception as error:  # torch and safetensors raise half a dozen kinds for what is not their own
        raise StorageError(f"{path} is not a state dict: {one_line(error)}") from None
    return weights


def pretrained_weights(arch: str) -> dict[str, Any]:
    """Return torchvision's pretrained weights of an architecture, by name."""
    names = torchvision.models.list_models(module=torchvision.models)
    return dict(torchvision.models.get_model_weights(arch).__members__) if arch in names else {}
