"""A teacher: a model whose logits the training imitates, beside the labels (`model.teacher`).

Hinton et al., "Distilling the knowledge in a neural network", 2015. Rank 0 reads the teacher and
sends it to all processes. It sees the pixels of the student, also mixed ones, in evaluation mode:
its logits are a function of the position, and a resume is exact. A checkpoint holds the digest of
its weights, so that no other teacher takes its place.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.addons.datasets.names import class_of
from pipeline.addons.models import pretrained, published
from pipeline.addons.models.inputs import MODEL_URI_PREFIX, check_model
from pipeline.addons.models.trained import eval_model, weights_digest
from pipeline.config.load import from_yaml
from pipeline.config.schema import Config
from pipeline.config.sections import Model
from pipeline.errors import RequestError, RunError, one_line
from pipeline.group import Group
from pipeline.model.architectures import build
from pipeline.model.normalise import mean_and_std
from pipeline.parallel.strategy import autocast
from pipeline.plan import Plan
from pipeline.record import checkpoint_contents, checkpoint_files


class Teacher:
    """Returns its logits for the pixels of a pass."""

    def __init__(self, model: nn.Module, options: Model, config: Config, device: torch.device) -> None:
        self._model = model.eval().requires_grad_(False).to(device)
        self._autocast = partial(autocast, device, config.train.precision)
        self._name = config.model.teacher
        self.identity = {"teacher": weights_digest(model.state_dict())}
        """The part of a checkpoint that says which teacher its training had."""
        mean, std = (value.to(device) for value in mean_and_std(config.model))
        own_mean, own_std = (value.to(device) for value in mean_and_std(options))
        is_same = torch.equal(mean, own_mean) and torch.equal(std, own_std)
        self._scale_shift = None if is_same else (std / own_std, (mean - own_mean) / own_std)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return logits, [B, classes]. pixels: [B, 3, H, W] float32, normalised for the student."""
        if self._scale_shift:
            scale, shift = self._scale_shift
            pixels = pixels * scale + shift
        with torch.no_grad(), self._autocast():
            logits: Tensor = self._model(pixels)
        return logits

    def check(self, contents: dict[str, Any]) -> None:
        """Raise RequestError if a checkpoint is of a training with another teacher."""
        before, now = contents.get("teacher"), self.identity["teacher"]
        if before != now:
            problem = (
                f"model.teacher={self._name} has the weights {now[:16]}, not {str(before)[:16]} as before"
            )
            raise RequestError(problem, "give the teacher that the run was started with")


def make_teacher(
    config: Config, plan: Plan, classes: tuple[str, ...], group: Group, log: Callable[[str], None]
) -> Teacher:
    """Return the teacher. All processes call this together, and raise RunError together."""
    read = partial(_read, str(config.model.teacher), classes)
    own, error = group.run_long_task(read) if group.is_main else group.run_long_task(lambda: (None, None))
    group.raise_together(error)
    text = group.all_gather(own[1].model_dump_json() if own else "")[0]  # of rank 0
    options = Model.model_validate_json(text)
    model = (own[0] if own else build(options, len(classes))).to(group.device)
    group.broadcast([*model.state_dict().values()])
    teacher = Teacher(model, options, config, group.device)
    for side in plan.image_sizes:
        try:
            teacher(torch.zeros((2, 3, side, side), device=group.device))
        except Exception as reason:
            problem = f"model.teacher={config.model.teacher} cannot take images of {side} px"
            raise RequestError(problem, f"set augment.size to its own ({one_line(reason)})") from None
    log(f"teacher {config.model.teacher}: {options.arch}, weights sha256:{teacher.identity['teacher'][:16]}")
    return teacher


def _read(name: str, classes: tuple[str, ...]) -> tuple[tuple[nn.Module, Model] | None, RunError | None]:
    """Return the model and its options, or the error that it cannot be had."""
    try:
        model, options, names = _read_timm(name) if name.startswith("timm/") else _read_run(name)
    except RunError as error:
        return None, error
    own, ours = [*map(class_of, names)], [*map(class_of, classes)]
    if own == ours:
        return (model, options), None
    differ = f"it has {len(own)} classes, and the data {len(ours)}"
    for number, (theirs, wanted) in enumerate(zip(own, ours, strict=False)):
        if theirs != wanted:
            differ = f"its class {number} is {theirs!r}, and that of the data {wanted!r}"
            break
    problem = f"model.teacher={name}: {differ}"
    return None, RequestError(problem, "give a teacher of the same classes in the same order")


def _read_run(name: str) -> tuple[nn.Module, Model, list[str]]:
    check_model(name)
    if name.startswith(MODEL_URI_PREFIX):
        from pipeline.addons.mlflow.registry import fetch_model

        contents = fetch_model(name)
    else:
        contents = checkpoint_contents.read_model(checkpoint_files.find(Path(name)))
    options = from_yaml(contents["config"], name).model
    return eval_model(contents, options), options, contents["classes"]


def _read_timm(name: str) -> tuple[nn.Module, Model, list[str]]:
    model = pretrained.timm_model(Model(arch=name))
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset(model)
    if not subset:
        raise RequestError(
            f"model.teacher={name}: timm does not know the names of its classes", "give another"
        )
    found = published.look_up("timm", name)
    options = Model(arch=name, mean=found["mean"], std=found["std"])
    return model, options, ImageNetInfo(subset).label_names()


def distil(loss: Tensor, logits: Tensor, teacher: Tensor, options: tuple[float, float]) -> Tensor:
    """Return the mean loss of a pass with a teacher. loss: against the labels, [].

    The divergence of the softened outputs is multiplied by the square of the temperature, so that
    its gradients stay as large as those of the labels.
    """
    alpha, temperature = options
    student, target = (torch.log_softmax(found.float() / temperature, 1) for found in (logits, teacher))
    divergence = functional.kl_div(student, target, reduction="batchmean", log_target=True)
    return (1 - alpha) * loss + alpha * temperature**2 * divergence
