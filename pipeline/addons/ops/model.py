"""Checks that a model can take the passes of a plan, by shapes alone."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.addons.models import pretrained, teacher
from pipeline.addons.models.functions import meta_model
from pipeline.addons.models.timm_optimizers import check_optimizer_exists
from pipeline.addons.shard.fsdp import check_can_shard
from pipeline.addons.shard.partition import split_into_stages
from pipeline.config.schema import Config
from pipeline.config.sections import Model
from pipeline.errors import RequestError, list_first, one_line
from pipeline.model.architectures import build
from pipeline.plan import Plan
from pipeline.train.optimizer import parameter_groups
from pipeline.world import World

# Layers for images whose gradient torch's deterministic mode refuses on CUDA: those that its
# documentation lists and whose kernels call alertNotDeterministic (torch 2.14). Of torchvision's
# classification models AlexNet and VGG have one.
_NOT_DETERMINISTIC = (
    "AdaptiveAvgPool2D", "AdaptiveMaxPool2D", "FractionalMaxPool2D", "GridSampler2D", "MaxUnpool2D",
    "UpsampleBicubic2D",
)  # fmt: skip


def check_model_builds(
    config: Config, plan: Plan, here: World, *, is_resumed: bool, classes: tuple[str, ...] = ()
) -> dict[str, Tensor] | None:
    """Check that the model can be built, run, frozen, split and differentiated as planned.

    classes: those of the data, to check the teacher's. Returns the initial weights if model.init
    names some. A resumed run does not need them: its weights are in the checkpoint.
    """
    check_optimizer_exists(config)
    options, arch = config.model, config.model.arch
    model, logits = check_passes(options, plan.num_classes, plan.bn_batch, plan.image_sizes, plan.eval_size)
    parameter_groups(model, config.optimizer)
    if config.is_deterministic_on_gpus and here.uses_gpu(config.run.device):
        _check_gradients_are_deterministic(arch, logits)
    if config.parallel == "ddp" and here.size > 1 and not config.run.exact:
        _check_weights_have_gradients(arch, model, logits)
    if config.parallel == "fsdp":
        check_can_shard(model)
    if plan.stages > 1:
        split_into_stages(model, arch, plan.stages, plan.image_size)
    if options.teacher and classes:
        teacher.read(options.teacher, classes)
    return pretrained.read(options, model) if options.init and not is_resumed else None


def check_model_exists(options: Model, num_classes: int) -> nn.Module:
    """Check that there are the model and the modules to freeze; return it without weights."""
    return _freeze(meta_model(options, num_classes), options)


def _freeze(model: nn.Module, options: Model) -> nn.Module:
    if options.freeze_until:
        pretrained.frozen_parts(model, options.freeze or "")
    elif options.freeze:
        pretrained.freeze(model, options.freeze)
    return model


def check_passes(
    options: Model, num_classes: int, batch: int, sizes: Sequence[int], eval_size: int
) -> tuple[nn.Module, Tensor]:
    """Try a training pass of each size, and an evaluation pass, on the meta device: shapes alone.

    sizes: the sides of the training images, in ascending order. Returns the model and the logits of
    the first pass. Raises RequestError if there is no such model, if the images or the batch are
    too small for it, or if it does not return logits, [B, classes].
    """
    smallest = "augment.size" if len(sizes) == 1 else "augment.first_size"
    hint = " or set model.args.img_size" if options.arch.startswith("timm/") else ""
    # a library's model that trains on images of a size is evaluated on them, too: not tried
    evaluation = [("evaluate.size", 2, eval_size)] if options.is_function or eval_size not in sizes else []
    found = []
    for key, images, side in [*((smallest, batch, side) for side in sizes), *evaluation]:
        try:
            model, logits = _try_pass(options, num_classes, images, side, is_training=key == smallest)
        except RequestError:
            raise
        except Exception as error:  # batch norm, for one, raises ValueError for one value per channel
            problem = f"{options.arch} cannot take passes of {images} images of {side} px"
            keys = "batch.global, batch.accumulate, exact.shards, number of processes"
            remedy = f"raise {key}{hint}, or have more images in a pass ({keys})"
            raise RequestError(f"{problem} ({one_line(error, 300)})", remedy) from None
        returned = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        if returned not in [(images, num_classes), (min(images, 2), num_classes)]:
            problem = f"model.arch={options.arch} returns {returned} for {images} images"
            wanted = f"not logits of shape {(images, num_classes)}"
            raise RequestError(f"{problem}, {wanted}", "give a model that returns one number per class")
        found.append((model, logits))
    return found[0]


def _try_pass(
    options: Model, num_classes: int, images: int, side: int, *, is_training: bool
) -> tuple[nn.Module, Any]:
    """Return the model and what it returns for zeros, on the meta device."""
    try:
        model = check_model_exists(options, num_classes).train(is_training)
        return model, model(torch.zeros(images, 3, side, side, device="meta"))
    except Exception:
        if not options.is_function:
            raise
    # a model that needs values, as one of your own may, gets two images on the CPU
    model = _freeze(build(options, num_classes), options).train(is_training)
    return model, model(torch.zeros(min(images, 2), 3, side, side))


def _check_gradients_are_deterministic(arch: str, logits: Tensor) -> None:
    """Check that CUDA can compute the gradients of `logits` the same each time.

    Raises RequestError if it cannot: in its deterministic mode torch refuses such a layer, but only
    in the first backward pass. It refuses it also if the layer changes no size; in a frozen part of
    the model there is no gradient.
    """
    nodes, seen = [logits.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        layer = node.name().removesuffix("Backward0")
        if layer in _NOT_DETERMINISTIC:
            layer = layer.replace("2D", "2d")
            problem = f"{arch} has the layer {layer}, whose gradient on a GPU differs each time"
            remedy = "train without run.deterministic and run.exact, or with run.device=cpu"
            raise RequestError(problem, f"choose another model.arch, or {remedy}")
        nodes += [before for before, _ in node.next_functions]


def _check_weights_have_gradients(arch: str, model: nn.Module, logits: Tensor) -> None:
    """Raise RequestError if `logits` do not depend on a weight: DDP waits for every gradient."""
    try:
        logits.sum().backward()  # type: ignore[no-untyped-call]
    except Exception:  # no gradient at all, or one that needs values: DDP reports what is missing
        return
    unused = [name for name, param in model.named_parameters() if param.requires_grad and param.grad is None]
    if unused:
        problem = f"model.arch={arch} does not use {list_first(unused, 3)} for its logits"
        needed = "with several processes parallel=ddp needs a gradient of each weight"
        remedy = "remove the unused layers, set requires_grad=False on their weights"
        raise RequestError(f"{problem}, but {needed}", f"{remedy}, or train with run.exact=true")
