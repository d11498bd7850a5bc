"""The trained model in another format, compared with the model itself on real images before anybody gets the file.

Promise: a file that is left behind gave, loaded anew, the model's own answers on validation images, one at a time and all
together. `torch.export` and `onnx` hold the model as `Served` has it, from pixels of 0 to 255 to probabilities, for any
number of images; `safetensors` holds the weights alone, by their names, and says in its metadata what they are of.
"""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import RequestError, StorageError
from pipeline.files import replacing

if TYPE_CHECKING:
    from torch import Tensor, nn

    from pipeline.config.schema import Config

SUFFIXES = {"torch.export": "pt2", "onnx": "onnx", "safetensors": "safetensors"}
_WANTED = {"torch.export": (), "onnx": ("onnx", "onnxruntime", "onnxscript"), "safetensors": ("safetensors",)}
_IMAGES = 8
_TOLERANCE = 1e-4

Answer = Callable[["Tensor"], "Tensor"]


def export(target: Path, form: str, out: Path | None, overrides: list[str]) -> str:
    """`pipeline export`: what was written, and how near it is. RequestError for a library that is not there."""
    missing = [name for name in _WANTED[form] if importlib.util.find_spec(name) is None]
    if missing:
        raise RequestError(
            f"--to {form} wants {' and '.join(missing)}, which the lock file has not: pip install {' '.join(missing)}"
        )

    from pipeline.config.load import from_yaml, refuse_another_model
    from pipeline.model.architectures import Served
    from pipeline.record import checkpoint

    source = checkpoint.find(target)
    contents = checkpoint.read_model(source)
    trained = from_yaml(contents["config"], str(source))
    config = from_yaml(contents["config"], str(source), overrides)
    refuse_another_model(trained, config, str(source))
    model = checkpoint.eval_model(contents, config.model)
    pixels, what = _pixels(config, contents, trained, overrides)
    served = Served(model).eval()

    folder = source.absolute().parent
    run = folder.parent if folder.name == "checkpoints" else folder
    path = out or run / "export" / f"{source.name.split('.')[0]}.{SUFFIXES[form]}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            if form == "safetensors":
                loaded = _safetensors(model, config, contents, temporary)
            else:
                loaded = {"torch.export": _torch_export, "onnx": _onnx}[form](served, pixels, temporary)
            difference = _largest_difference(served, loaded, pixels)
            if not difference <= _TOLERANCE:
                raise StorageError(
                    f"{form} answers otherwise than the model, by up to {difference:.1e} of a probability: nothing was"
                    " written"
                )
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from None
    return (
        f"{path}: the model of step {contents['step']}; on {what}, at once and one by one, no"
        f" probability differs by more than {difference:.1e}"
    )


def _pixels(
    config: "Config", contents: dict[str, Any], trained: "Config", overrides: list[str]
) -> tuple["Tensor", str]:
    """Return the first validation images, [8, 3, size, size] float32 of 0 to 255, and a text that says what they are.

    Noise takes their place if the data of the training is not here and the command names no other.
    """
    import torch

    from pipeline.data.augment import evaluation_geometry
    from pipeline.data.loader import EvalBatches
    from pipeline.data.sources import open_validation

    try:
        images = open_validation(config, contents, trained, overrides)[0].val
    except RequestError:
        if any(word.startswith("data.") for word in overrides):
            raise
        size, _ = evaluation_geometry(config.evaluate, config.augment)
        noise = torch.randint(256, (_IMAGES, 3, size, size), generator=torch.Generator().manual_seed(0))
        return noise.float(), f"{_IMAGES} pictures of noise (no validation images here; data.root=FOLDER names some)"
    evaluate = config.evaluate.model_copy(update={"batch": _IMAGES})
    batch = EvalBatches(images, config.model_copy(update={"evaluate": evaluate}))[0]
    if batch.outage:
        raise batch.outage
    return batch.images.contiguous().float(), f"{len(batch.images)} validation images"


def _largest_difference(served: "nn.Module", loaded: Answer, pixels: "Tensor") -> float:
    import torch

    with torch.inference_mode():
        expected = served(pixels)
        together, alone = loaded(pixels), torch.cat([loaded(pixels[i : i + 1]) for i in range(len(pixels))])
        return float(torch.maximum((together - expected).abs(), (alone - expected).abs()).max())


def _torch_export(served: "nn.Module", pixels: "Tensor", path: Path) -> Answer:
    import torch

    program = torch.export.export(served, (pixels[:2],), dynamic_shapes=({0: torch.export.Dim("images")},))
    with open(path, "wb") as file:  # by its name torch wants the suffix .pt2
        torch.export.save(program, file)
    with open(path, "rb") as file:
        loaded: Answer = torch.export.load(file).module()
    return loaded


def _onnx(served: "nn.Module", pixels: "Tensor", path: Path) -> Answer:
    import onnxruntime
    import torch

    program = torch.onnx.export(
        served, (pixels[:2],), dynamo=True, verbose=False, input_names=["pixels"], output_names=["probabilities"],
        dynamic_shapes=({0: torch.export.Dim("images")},),
    )  # fmt: skip
    assert program is not None
    program.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"pixels": images.numpy()})[0])


def _safetensors(model: "nn.Module", config: "Config", contents: dict[str, Any], path: Path) -> Answer:
    from safetensors.torch import load_file, save_file

    from pipeline.model.architectures import Served, build

    metadata = {
        "arch": config.model.arch,
        "classes": json.dumps(contents["classes"]),
        "step": str(contents["step"]),
        "pixels": "RGB of 0 to 255, minus the mean and divided by the deviation of ImageNet",
    }
    save_file({name: one.contiguous() for name, one in model.state_dict().items()}, path, metadata)
    again = build(config.model, len(contents["classes"]))
    again.load_state_dict(load_file(path))
    return Served(again).eval()
