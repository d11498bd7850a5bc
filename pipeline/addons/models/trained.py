"""The model in a checkpoint, for evaluation, prediction and export; the digest of its weights."""

import hashlib
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.addons.models.inputs import MODEL_URI_PREFIX
from pipeline.config.sections import Model
from pipeline.errors import StorageError, one_line
from pipeline.model.architectures import build
from pipeline.model.normalise import mean_and_std
from pipeline.model.weights import load_weights
from pipeline.record import checkpoint_contents, checkpoint_files


def read_model(target: str) -> dict[str, Any]:
    """Return what a checkpoint holds: that named, a run's newest one, or a model in MLflow."""
    if target.startswith(MODEL_URI_PREFIX):
        from pipeline.addons.mlflow.registry import fetch_model

        return fetch_model(target)
    return checkpoint_contents.read_model(checkpoint_files.find(Path(target)))


def eval_weights(contents: dict[str, Any]) -> dict[str, Tensor]:
    """Return the state dict that was evaluated: that of the EMA if there is one."""
    weights: dict[str, Tensor] = contents["average"] or contents["model"]
    return weights


def eval_model(contents: dict[str, Any], options: Model) -> nn.Module:
    """Return the model that was evaluated, in eval mode.

    Raises RequestError if its architecture is unknown, StorageError if the weights do not fit it.
    """
    model = build(options, len(contents["classes"])).eval()
    try:
        load_weights(model, eval_weights(contents))
    except (RuntimeError, ValueError) as error:
        expected = f"a {options.arch} with {len(contents['classes'])} classes ({one_line(error, 120)} …)"
        problem = f"the weights of the checkpoint are not those of {expected}"
        raise StorageError(problem, "use another checkpoint") from None
    return model


class ExportedModel(nn.Module):
    """The model with normalisation and softmax; with several labels a picture, sigmoid."""

    def __init__(self, model: nn.Module, options: Model, several_labels: bool | None = False) -> None:
        super().__init__()
        self.model, self.several_labels = model, several_labels
        self.mean: Tensor
        self.std: Tensor
        mean, std = mean_and_std(options)
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return probabilities [B, classes]. pixels: [B, 3, H, W] float32 in 0..255."""
        logits: Tensor = self.model((pixels - self.mean) / self.std)
        return logits.sigmoid() if self.several_labels else logits.softmax(1)


def exported_model(contents: dict[str, Any], options: Model) -> ExportedModel:
    """Return the model in a checkpoint from pixels to probabilities. Raises as `eval_model`."""
    return ExportedModel(eval_model(contents, options), options, contents.get("several_labels")).eval()


def weights_digest(weights: dict[str, Tensor]) -> str:
    """Return the SHA-256 of a state dict, as hex digits, see `digest_and_checksums`."""
    return digest_and_checksums(weights)[0]


def digest_and_checksums(weights: dict[str, Tensor]) -> tuple[str, str]:
    """Return the SHA-256 of a state dict, and the CRC-32 of each tensor's bytes, joined.

    The SHA-256 is over each parameter and buffer in name order: name, NUL, dtype, NUL, shape, NUL,
    bytes (little-endian). In the same order, each tensor has eight hex digits of the second string.
    """
    digest, checksums = hashlib.sha256(), []
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        shape = ",".join(str(length) for length in tensor.shape)
        data = tensor.reshape(-1).view(torch.uint8).numpy().data  # a view: the bytes are not copied
        digest.update(f"{name}\0{tensor.dtype}\0{shape}\0".encode())
        digest.update(data)
        checksums.append(f"{zlib.crc32(data):08x}")
    return digest.hexdigest(), "".join(checksums)
