"""`pipeline export`: write the trained model in another format and compare it with the original.

Promise: a file that is written was loaded again, and gave the model's own probabilities on
validation images and on noise of other sizes. `torch.export` and `onnx` hold the model as
`PictureModel`, from one decoded picture of any size to probabilities; or with --pixels as
`ExportedModel`, from the pixels of any number of images. `safetensors` holds only the weights, by
name. The metadata of each describes the model.
"""

import importlib.util
import io
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.addons.models.eval_batches import evaluation_geometry
from pipeline.addons.models.inputs import for_evaluation, target_of
from pipeline.addons.models.picture import PictureModel
from pipeline.addons.models.trained import ExportedModel, eval_weights, exported_model, weights_digest
from pipeline.addons.models.validation import open_validation
from pipeline.config.schema import Config
from pipeline.data.augment import center_crop
from pipeline.data.interface import OutageError, UnreadableError
from pipeline.errors import NotFiniteError, RequestError, StorageError
from pipeline.files import replacing
from pipeline.model.architectures import build
from pipeline.model.weights import load_weights
from pipeline.record import checkpoint_contents, checkpoint_files

_IMAGES = 8
_NOISE = ((400, 300), (30, 700), (50, 1), (1, 50))
"""Height and width of each picture of noise. The model is traced with the first."""
_PIXELS_TOLERANCE, _PICTURE_TOLERANCE = 1e-4, 5e-3
Predictor = Callable[[Tensor], Tensor]  # the input of an exported model -> its probabilities


def export(target: Path, kind: str, out: Path | None, overrides: list[str], *, takes_pixels: bool) -> str:
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
    geometry = evaluation_geometry(config.evaluate, config.augment)
    pictures, description = _comparison_pictures(config, contents, trained, overrides)
    pixels = torch.stack([center_crop(picture, *geometry) for picture in pictures]).float()
    served = original = exported_model(contents, config.model)
    with torch.inference_mode():
        expected = original(pixels)
    if not expected.isfinite().all():
        problem = f"the logits of {source} are not finite on {description}"
        raise NotFiniteError(f"{problem}: use another checkpoint")
    if takes_pixels:
        given, expected, tolerance = [pixels, *pixels[:, None]], expected.repeat(2, 1), _PIXELS_TOLERANCE
    else:
        served = PictureModel(original.model, geometry, config.model, original.several_labels).eval()
        given, tolerance = [picture.permute(1, 2, 0) for picture in pictures], _PICTURE_TOLERANCE

    folder = source.absolute().parent
    run = folder.parent if folder.name == "checkpoints" else folder
    path = out or run / "export" / f"{source.name.split('.')[0]}.{suffix}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target_of(path)) as temporary:
            loaded = write(served, given[0], temporary, _metadata(config, contents), config)
            with torch.inference_mode():
                found = torch.cat([loaded(item).view(-1, expected.shape[1]) for item in given])
            difference = float((found - expected).abs().max())
            if not difference <= tolerance:
                problem = f"probabilities of the {kind} model differ from the original's by up to"
                remedy = "nothing was written; try another format"
                raise StorageError(f"{problem} {difference:.1e}: {remedy}")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from None
    limit = f"no probability differs by more than {difference:.1e}"
    return f"{path}: the model of step {contents['step']}; on {description}, {limit}"


def _comparison_pictures(
    config: Config, contents: dict[str, Any], trained: Config, overrides: list[str]
) -> tuple[list[Tensor], str]:
    """Return pictures, [3, H, W] uint8, and their description: noise, then validation images.

    It is noise only if the training data is not here and the overrides name no other data.
    """
    source = torch.Generator().manual_seed(0)
    pictures = [torch.randint(256, (3, *sides), generator=source, dtype=torch.uint8) for sides in _NOISE]
    try:
        images = open_validation(config, contents, trained, overrides)[0].val
        samples = range(min(_IMAGES, len(images)))
        images.expect(samples)
        for sample in samples:
            with suppress(UnreadableError):
                picture = images.open(sample)
                pictures.append(picture.region(0, 0, picture.height, picture.width))
    except (RequestError, OutageError):
        if any(override.startswith("data.") for override in overrides):
            raise
        why = "validation images not found; give data.root=FOLDER"
        return pictures[: len(_NOISE)], f"{len(_NOISE)} images of noise ({why})"
    return pictures, f"{len(pictures) - len(_NOISE)} validation images and {len(_NOISE)} of noise"


def _metadata(config: Config, contents: dict[str, Any]) -> dict[str, str]:
    side, resize = evaluation_geometry(config.evaluate, config.augment)
    evaluation = contents.get("evaluation") or {}
    return {
        "arch": config.model.arch, "args": json.dumps(config.model.args), "step": str(contents["step"]),
        "classes": json.dumps(contents["classes"]), "data": contents.get("data", ""),
        "side": str(side), "resize": str(resize), "thresholds": json.dumps(evaluation.get("thresholds")),
        "weights": f"sha256:{weights_digest(eval_weights(contents))}",
    }  # fmt: skip


def _dynamic(given: Tensor) -> tuple[str, tuple[dict[int, Any]]]:
    """Return the name of a model's input and its dimensions that may have any size."""
    name, *sides = ("pixels", "images") if given.dim() == 4 else ("picture", "height", "width")
    return name, ({number: torch.export.Dim(side) for number, side in enumerate(sides)},)


def _write_torch_export(served: ExportedModel, given: Tensor, path: Path, metadata: Any, _: Any) -> Predictor:
    program = torch.export.export(served, (given,), dynamic_shapes=_dynamic(given)[1])
    buffer = io.BytesIO()  # torch aborts the process if it cannot write to a file
    torch.export.save(program, buffer, extra_files={"metadata.json": json.dumps(metadata)})
    path.write_bytes(buffer.getbuffer())
    with open(path, "rb") as file:  # given a path, torch.export requires the suffix .pt2
        loaded: Predictor = torch.export.load(file).module()
    return loaded


def _write_onnx(served: ExportedModel, given: Tensor, path: Path, metadata: Any, _: Any) -> Predictor:
    import onnxruntime

    name, dimensions = _dynamic(given)
    program = torch.onnx.export(
        served, (given,), dynamo=True, verbose=False, input_names=[name],
        output_names=["probabilities"], dynamic_shapes=dimensions,
    )  # fmt: skip
    assert program is not None
    program.model.metadata_props.update(metadata)
    program.save(path)
    model = path if str(path).isprintable() else path.read_bytes()  # it opens no path that is not UTF-8
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])


def _write_safetensors(
    served: ExportedModel, given: Tensor, path: Path, metadata: dict[str, str], config: Config
) -> Predictor:
    from safetensors.torch import load, save

    mean, std = served.mean.flatten().tolist(), served.std.flatten().tolist()
    metadata = {**metadata, "pixels": f"RGB of 0 to 255, minus {mean} and divided by {std}"}
    # safetensors refuses tensors that share memory, such as tied weights
    state = served.model.state_dict()
    weights = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
    path.write_bytes(save(weights, metadata))  # save_file makes a file that only its owner can read
    loaded = build(config.model, len(json.loads(metadata["classes"])))
    load_weights(loaded, load(path.read_bytes()))
    return ExportedModel(loaded, config.model, served.several_labels).eval()


_FORMATS: dict[str, tuple[str, tuple[str, ...], Callable[..., Predictor]]] = {
    "torch.export": ("pt2", (), _write_torch_export),
    "onnx": ("onnx", ("onnx", "onnxruntime", "onnxscript"), _write_onnx),
    "safetensors": ("safetensors", ("safetensors",), _write_safetensors),
}
"""By --to: the suffix of the file, the libraries that it needs, and what writes and loads it."""
