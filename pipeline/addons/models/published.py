"""The input that published weights were trained with: mean and deviation, side and crop.

`load` writes it into the configuration, so that a checkpoint is complete. timm and torchvision know
it without the network, but import torch, which must not come before the variables of a portable
run: so another interpreter asks them.
"""

import json
import subprocess
import sys
from functools import cache
from typing import Any

from pipeline.config.schema import Config
from pipeline.errors import RequestError

_KEYS = ("model.mean", "model.std", "augment.size", "evaluate.resize")


def settle(config: Config, stated: set[str]) -> list[str]:
    """Return what the published weights say of keys that are not `stated`, as key=value."""
    mean, std, side, resize = _ask(str(config.model.init), config.model.arch)
    size = config.augment.size if "augment.size" in stated else side
    resize = round(resize * (config.evaluate.size or size) / side)
    values = zip(_KEYS, (mean, std, size, resize), strict=True)
    return [f"{key}={value}" for key, value in values if key not in stated]


@cache
def _ask(init: str, arch: str) -> Any:
    """Return what `look_up` returns in another interpreter."""
    command = [sys.executable, "-m", __name__, init, arch]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    if done.returncode:
        reason = (done.stderr.splitlines() or ["it was killed"])[-1]
        raise RequestError(f"model.init={init} of {arch}: {reason[:200]}")
    return json.loads(done.stdout)


def look_up(init: str, arch: str) -> tuple[Any, Any, int, int]:
    """Return mean, std, side and resize of the published weights of an architecture."""
    if init == "torchvision":
        from torchvision.models import get_model_weights

        preset = get_model_weights(arch)["DEFAULT"].transforms()
        return preset.mean, preset.std, preset.crop_size[0], preset.resize_size[0]
    import timm

    entry = timm.get_pretrained_cfg(arch.removeprefix("timm/"), allow_unregistered=False)
    return entry.mean, entry.std, entry.input_size[1], int(entry.input_size[1] / entry.crop_pct)


if __name__ == "__main__":
    print(json.dumps(look_up(*sys.argv[1:])))
