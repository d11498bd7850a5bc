"""Odd and damaged images, such as the test images in Pillow's source distribution.

`make test ARGS="--corpus FOLDER tests/test_corpus.py"`: each file gives the pixels that Pillow
gives or is a named defect, from a folder and from a pack, in bounded memory and time.
"""

import resource
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from pipeline.addons.datasets.write_pack import pack
from pipeline.config.load import load
from pipeline.data.images import _16_BIT_MODES, _FORMATS, MAX_PIXELS, BadImageError, decode
from pipeline.data.interface import UnreadableError
from pipeline.data.sources import open_source

Pixels = NDArray[np.uint8] | None
"""[H, W, 3], or None for a file that cannot be decoded."""


@pytest.fixture
def corpus(pytestconfig: pytest.Config, tmp_path: Path) -> Path:
    """Return an image folder of links to the files of the corpus, each named .jpg."""
    found = pytestconfig.getoption("--corpus")
    if not found:
        pytest.skip("needs a folder of odd images: --corpus FOLDER, for example Tests/images of Pillow's sources")
    files = sorted(path for path in Path(found).resolve().rglob("*") if path.is_file())
    assert files, f"--corpus {found} holds no file"
    for folder, linked in {"train/a": files, "train/b": files[:1], "val/a": files[:1], "val/b": files[:1]}.items():
        (tmp_path / "images" / folder).mkdir(parents=True)
        for number, file in enumerate(linked):
            (tmp_path / "images" / folder / f"{number:05d}.jpg").symlink_to(file)
    return tmp_path / "images"


def by_pillow(file: Path) -> Pixels:
    """Decode a file with Pillow; 16-bit images, which it would clip, are scaled."""
    try:
        with Image.open(file, formats=_FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                return None
            if image.mode in _16_BIT_MODES:
                grey = np.rint(np.clip(np.asarray(image, np.int64), 0, 65535) / 257).astype(np.uint8)
                return np.repeat(grey[..., None], 3, axis=2)
            return np.asarray(image.convert("RGB"))
    except Exception:  # Pillow's plugins raise any
        return None


def decode_all(source: str, root: Path, expected: list[Pixels]) -> tuple[list[str], list[int], int, float]:
    """Decode all training images.

    Returns what differs, the ids of the bad ones, the added peak in MiB, the longest CPU seconds.
    """
    images = open_source(load("digits", [f"data.source={source}", f"data.root={root}"])).train
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    differs, bad, longest = [], [], 0.0
    for sample, theirs in enumerate(expected):
        start = time.process_time()
        try:
            ours = decode(images.read(sample)).permute(1, 2, 0).numpy()
        except (BadImageError, UnreadableError) as defect:
            bad.append(sample)
            if theirs is not None or not str(defect):
                differs.append(f"{images.name(sample)}: {defect}")
        else:
            if theirs is None or not np.array_equal(ours, theirs):
                differs.append(f"{images.name(sample)}: other pixels")
        longest = max(longest, time.process_time() - start)
    return differs, bad, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, longest


@pytest.mark.usefixtures("jpegtran")
@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about odd metadata
def test_each_file_has_the_pixels_of_pillow_or_is_a_named_defect(corpus: Path, tmp_path: Path) -> None:
    expected = [by_pillow(file) for file in sorted((corpus / "train").rglob("*.jpg"))]
    assert sum(pixels is not None for pixels in expected) > 0.1 * len(expected), "hardly any image in the corpus"
    pack(corpus, tmp_path / "pack", "lossless", 0.1)
    results = []
    for source, root in (("folder", corpus), ("pack", tmp_path / "pack")):
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            differs, bad, added_mib, longest = pool.submit(decode_all, source, root, expected).result()
        assert not differs
        assert added_mib < 512
        assert longest < 10
        results.append(bad)
    assert results[0] == results[1]
