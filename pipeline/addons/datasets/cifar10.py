"""The binary form of CIFAR-10, which needs no pickle (www.cs.toronto.edu/~kriz/cifar.html).

Promise: the images are written without loss, and no name in the archive becomes a path.
"""

import os
import sys
import tarfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
_RECORD_BYTES = 1 + 3 * 32 * 32
"""Bytes of a label and an image."""


def unpack(archive: Path, folder: Path) -> None:
    """Write the images of the archive as folder/{train,val}/CLASS/NUMBER.png.

    Raises ValueError if it is not CIFAR-10.
    """
    splits = {f"cifar-10-batches-bin/data_batch_{number}.bin": "train" for number in range(1, 6)}
    splits["cifar-10-batches-bin/test_batch.bin"] = "val"
    written = Counter[str]()
    with tarfile.open(archive, "r|gz") as members, ThreadPoolExecutor(os.cpu_count()) as pool:
        for member in members:
            split = splits.pop(member.name, None)
            file = members.extractfile(member) if split and member.isfile() else None
            if split is None or file is None:
                continue
            if member.size % _RECORD_BYTES or member.size > _RECORD_BYTES * 10_000:
                raise ValueError(f"{member.name} has {member.size:,} bytes")
            records = np.frombuffer(file.read(), np.uint8).reshape(-1, _RECORD_BYTES)
            if len(records) and records[:, 0].max() >= len(_CLASSES):
                raise ValueError(f"{member.name} has a label of {records[:, 0].max()}")
            for name in _CLASSES:
                (folder / split / name).mkdir(parents=True, exist_ok=True)
            first = written[split]
            paths = [folder / split / _CLASSES[label] / f"{first + row:05}.png"
                     for row, label in enumerate(records[:, 0])]  # fmt: skip
            list(pool.map(_save_png, records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), paths))
            written[split] += len(records)
            print(f"{sum(written.values()):,} images unpacked", file=sys.stderr, flush=True)
    if splits:
        raise ValueError(f"it lacks {', '.join(splits)}")


def _save_png(pixels: NDArray[np.uint8], path: Path) -> None:
    Image.fromarray(np.ascontiguousarray(pixels)).save(path)
