"""`pipeline export`: write the trained model in another format and compare it with the original.

Promise: a file that is written was loaded again, and gave the model's own probabilities on
validation images, one by one and in one batch. `torch.export` and `onnx` hold the model as
`ExportedModel`, from pixels of 0 to 255 to probabilities, for any number of images. `safetensors`
holds only the weights, by name; its metadata describes their model.
"""

import importlib.util
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.addons.models.eval_batches import EvalBatches, evaluation_geometry
from pipeline.addons.models.inputs import for_evaluation, target_of
from pipeline.addons.models.trained import ExportedModel, eval_model
from pipeline.addons.models.validation import open_validation
from pipeline.config.schema import Config
from pipeline.data.interface import OutageError
from pipeline.errors import NotFiniteError, RequestError, StorageError
from pipeline.files import replacing
from pipeline.model.architectures import build
from pipeline.model.weights import load_weights
from pipeline.record import checkpoint_contents, checkpoint_files

_IMAGES = 8
_TOLERANCE = 1e-4
Predictor = Callable[[Tensor], Tensor]
"""[B, 3, H, W] float32 of 0..255 -> [B, classes] probabilities."""


def export(target: Path, kind: str, out: Path | None, overrides: list[str]) -> str:
    """Run `pipeline export`; return the file's path and its largest difference from the model.

    Raises RequestError if a library of the format is not installed.
    """
    suffix, libraries, write = _FORMATS[kind]
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    if missing:
        raise RequestError(f"--to {kind} needs {' and '.join(missing)}", f"pip install {' '.join(missing)}")
    source = checkpoint_files.find(target)
    contents = checkpoint_contents.read_model(source)
    trained, config = for_evaluation(contents["config"], str(source), overrides)
    pixels, description = _comparison_images(config, contents, trained, overrides)
    served = ExportedModel(eval_model(contents, config.model), config.model).eval()
    with torch.inference_mode():
        expected = served(pixels)
    if not expected.isfinite().all():
        raise NotFiniteError(
            f"the logits of {source} are not finite on {description}: use another checkpoint"
        )

    folder = source.absolute().parent
    run = folder.parent if folder.name == "checkpoints" else folder
    path = out or run / "export" / f"{source.name.split('.')[0]}.{suffix}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target_of(path)) as temporary:
            loaded = write(served, pixels, temporary, config, contents)
            with torch.inference_mode():
                found = torch.stack([loaded(pixels), torch.cat([loaded(image[None]) for image in pixels])])
            difference = float((found - expected).abs().max())
            if not difference <= _TOLERANCE:
                raise StorageError(
                    f"probabilities of the {kind} model differ from the original's by up to {difference:.1e}:"
                    " nothing was written; try another format"
                )
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from None
    limit = f"in one batch and one by one, no probability differs by more than {difference:.1e}"
    return f"{path}: the model of step {contents['step']}; on {description}, {limit}"


def _comparison_images(
    config: Config, contents: dict[str, Any], trained: Config, overrides: list[str]
) -> tuple[Tensor, str]:
    """Return validation images, [8, 3, size, size] float32 of 0..255, and their description.

    Noise replaces them if the training data is not here and the overrides name no other data.
    """
    try:
        images = open_validation(config, contents, trained, overrides)[0].val
        batch = EvalBatches(images, config.replacing("evaluate", batch=_IMAGES))[0].readable()
    except (RequestError, OutageError):
        if any(override.startswith("data.") for override in overrides):
            raise
        size, _ = evaluation_geometry(config.evaluate, config.augment)
        noise = torch.randint(256, (_IMAGES, 3, size, size), generator=torch.Generator().manual_seed(0))
        why = "validation images not found; give data.root=FOLDER"
        return noise.float(), f"{_IMAGES} images of noise ({why})"
    return batch.images.contiguous().float(), f"{len(batch.images)} validation images"


def _write_torch_export(served: ExportedModel, pixels: Tensor, path: Path, *_: Any) -> Predictor:
    program = torch.export.export(served, (pixels[:2],), dynamic_shapes=({0: torch.export.Dim("images")},))
    buffer = io.BytesIO()  # torch aborts the process if it cannot write to a file
    torch.export.save(program, buffer)
    path.write_bytes(buffer.getbuffer())
    with open(path, "rb") as file:  # given a path, torch.export requires the suffix .pt2
        loaded: Predictor = torch.export.load(file).module()
    return loaded


def _write_onnx(served: ExportedModel, pixels: Tensor, path: Path, *_: Any) -> Predictor:
    import onnxruntime

    program = torch.onnx.export(
        served, (pixels[:2],), dynamo=True, verbose=False, input_names=["pixels"],
        output_names=["probabilities"], dynamic_shapes=({0: torch.export.Dim("images")},),
    )  # fmt: skip
    assert program is not None
    program.save(path)
    model = path if str(path).isprintable() else path.read_bytes()  # it opens no path that is not UTF-8
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"pixels": images.numpy()})[0])


def _write_safetensors(
    served: ExportedModel, pixels: Tensor, path: Path, config: Config, contents: dict[str, Any]
) -> Predictor:
    from safetensors.torch import load, save

    metadata = {
        "arch": config.model.arch, "args": json.dumps(config.model.args), "step": str(contents["step"]),
        "classes": json.dumps(contents["classes"]),
        "pixels": "RGB of 0 to 255, minus the mean and divided by the deviation of ImageNet",
    }  # fmt: skip
    # safetensors refuses tensors that share memory, such as tied weights
    state = served.model.state_dict()
    weights = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
    path.write_bytes(save(weights, metadata))  # save_file makes a file that only its owner can read
    loaded = build(config.model, len(contents["classes"]))
    load_weights(loaded, load(path.read_bytes()))
    return ExportedModel(loaded, config.model).eval()


_FORMATS: dict[str, tuple[str, tuple[str, ...], Callable[..., Predictor]]] = {
    "torch.export": ("pt2", (), _write_torch_export),
    "onnx": ("onnx", ("onnx", "onnxruntime", "onnxscript"), _write_onnx),
    "safetensors": ("safetensors", ("safetensors",), _write_safetensors),
}
"""By --to: the suffix of the file, the libraries that it needs, and what writes and loads it."""
