"""A teacher: a model whose logits the training imitates, beside the labels (`model.teacher`).

Hinton et al., "Distilling the knowledge in a neural network", 2015. Rank 0 reads it and sends it to
all processes. In evaluation mode it sees the pixels of the student, mixed as they are: so a resume
is exact. A checkpoint holds the digest of its weights, and no other teacher takes its place.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.addons.datasets.names import class_of
from pipeline.addons.models import pretrained, published
from pipeline.addons.models.inputs import check_model
from pipeline.addons.models.trained import eval_model, read_model, weights_digest
from pipeline.config.load import from_yaml
from pipeline.config.schema import Config
from pipeline.config.sections import Model
from pipeline.errors import RequestError, RunError, one_line
from pipeline.group import Group
from pipeline.model.architectures import build
from pipeline.model.normalise import mean_and_std
from pipeline.parallel.strategy import autocast


class Teacher:
    """Returns its logits for the pixels of a pass. All processes make it together."""

    def __init__(self, config: Config, classes: tuple[str, ...], sizes: list[int], group: Group) -> None:
        """sizes: the sides of images. All raise RunError if there is no such teacher."""
        self.name = f"model.teacher={config.model.teacher}"
        to_read = partial(_try_to_read, str(config.model.teacher), classes)
        own, error = group.run_long_task(to_read if group.is_main else lambda: (None, None))
        group.raise_together(error)
        options = Model.model_validate_json(group.all_gather(own[1].model_dump_json() if own else "")[0])
        model = (own[0] if own else build(options, len(classes))).to(group.device)
        group.broadcast([*model.state_dict().values()])
        self.identity = {"teacher": weights_digest(model.state_dict())}
        """The part of a checkpoint that says which teacher its training had."""
        self._model = model.eval().requires_grad_(False)
        self._autocast = partial(autocast, group.device, config.train.precision)
        (mean, std), (own_mean, own_std) = mean_and_std(config.model), mean_and_std(options)
        self._scale = (std / own_std).to(group.device)
        self._shift = ((mean - own_mean) / own_std).to(group.device)
        try:
            for side in sizes:
                self(torch.zeros((2, 3, side, side), device=group.device))
        except (RuntimeError, AssertionError) as reason:
            remedy = "set augment.size to what it was trained with"
            problem = f"{self.name} cannot take the images ({one_line(reason)})"
            raise RequestError(problem, remedy).collective() from None

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return logits, [B, classes]. pixels: [B, 3, H, W] float32, normalised for the student."""
        with torch.no_grad(), self._autocast():
            logits: Tensor = self._model(pixels * self._scale + self._shift)
        return logits

    def check(self, contents: dict[str, Any]) -> None:
        """Raise RequestError if a checkpoint is of a training with another teacher."""
        if contents.get("teacher") != self.identity["teacher"]:
            problem = f"{self.name} has other weights than the teacher that the run was started with"
            raise RequestError(problem, "restore them, or give another run.dir").collective()


def read(name: str, classes: tuple[str, ...]) -> tuple[nn.Module, Model]:
    """Return the teacher and its options. Raises RunError if it cannot be had."""
    if name.startswith("timm/"):
        model, options, names = _read_timm(name)
    else:
        check_model(name)
        contents = read_model(name)
        options, names = from_yaml(contents["config"], name).model, contents["classes"]
        model = eval_model(contents, options)
    if [*map(class_of, names)] != [*map(class_of, classes)]:
        pairs = zip([*names, "missing"], [*classes, "missing"], strict=False)
        theirs, ours = next(pair for pair in pairs if class_of(pair[0]) != class_of(pair[1]))
        problem = f"model.teacher={name} has the class '{theirs}' where the data has '{ours}'"
        raise RequestError(problem, "give a teacher of the same classes in the same order")
    return model, options


def _try_to_read(name: str, classes: tuple[str, ...]) -> tuple[Any, RunError | None]:
    try:
        return read(name, classes), None
    except RunError as error:
        return None, error


def _read_timm(name: str) -> tuple[nn.Module, Model, list[str]]:
    model = pretrained.timm_model(Model(arch=name))
    from timm.data import ImageNetInfo, infer_imagenet_subset

    if not (subset := infer_imagenet_subset(model)):
        raise RequestError(f"model.teacher={name}: timm does not know its classes", "give another")
    mean, std, *_ = published.look_up("timm", name)
    return model, Model(arch=name, mean=mean, std=std), ImageNetInfo(subset).label_names()


def distil(loss: Tensor, logits: Tensor, teacher: Tensor, options: tuple[float, float]) -> Tensor:
    """Return the mean loss of a pass with a teacher. loss: against the labels, [].

    The divergence of the softened outputs is multiplied by the square of the temperature, so that
    its gradients stay as large as those of the labels.
    """
    alpha, temperature = options
    student, target = (torch.log_softmax(found.float() / temperature, 1) for found in (logits, teacher))
    divergence = functional.kl_div(student, target, reduction="batchmean", log_target=True)
    return (1 - alpha) * loss + alpha * temperature**2 * divergence
