"""What published weights were trained with: mean and deviation, side and crop.

timm and torchvision know it without the network, but import torch, which may come only after the
variables of a portable run are set. So another interpreter looks it up, and `load` writes it into
the configuration: a checkpoint is complete, and predict, export and a resume look nothing up.
"""

import json
import subprocess
import sys
from contextlib import suppress
from typing import Any

from pipeline.config.schema import Config
from pipeline.config.sections import Model
from pipeline.errors import RequestError

_KEYS = ("model.mean", "model.std", "augment.size", "evaluate.resize")


def settle(config: Config, stated: set[str]) -> list[str]:
    """Return what the published weights say of keys that are not `stated`, as key=value."""
    if stated.issuperset(_KEYS):
        return []
    command = [sys.executable, "-m", __name__, str(config.model.init), config.model.arch]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    if done.returncode:
        reason = (done.stderr.splitlines() or [f"exit code {done.returncode}"])[-1]
        raise RequestError(f"model.init={config.model.init} cannot be looked up: {reason}")
    found: dict[str, Any] = json.loads(done.stdout)
    if not found:  # no such weights: `pretrained.read` says which there are
        return []
    size = config.augment.size if "augment.size" in stated else found["side"]
    resize = round(found["resize"] * (config.evaluate.size or size) / found["side"])
    values = dict(zip(_KEYS, (found["mean"], found["std"], size, resize), strict=True))
    return [f"{key}={value}" for key, value in values.items() if key not in stated]


def describe(options: Model) -> str:
    """Return the mean and the deviation of the colours, for the plan; "" for ImageNet's."""
    if options.mean is None and options.std is None:
        return ""
    words = (
        f"{name} {value or 'of ImageNet'}"
        for name, value in (("mean", options.mean), ("deviation", options.std))
    )
    return ", ".join(words) + (f", of the weights of {options.init}" if options.init else "")


def look_up(init: str, arch: str) -> dict[str, Any]:
    """Return mean, std, side and resize of the published weights, or {} if there are none."""
    if init == "torchvision":
        from pipeline.addons.models.pretrained import pretrained_weights

        weights = pretrained_weights(arch)
        if not weights:
            return {}
        preset = weights["DEFAULT"].transforms()
        return {
            "mean": preset.mean,
            "std": preset.std,
            "side": preset.crop_size[0],
            "resize": preset.resize_size[0],
        }
    with suppress(ImportError, RuntimeError):  # no timm, or no such tag
        import timm

        if entry := timm.get_pretrained_cfg(arch.removeprefix("timm/")):
            side = entry.input_size[1]
            return {"mean": entry.mean, "std": entry.std, "side": side, "resize": int(side / entry.crop_pct)}
    return {}


if __name__ == "__main__":
    print(json.dumps(look_up(*sys.argv[1:])))
