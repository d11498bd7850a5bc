"""The index of a large data set: made once, then memory-mapped, and flat in a worker's memory."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.addons.datasets import manifest
from pipeline.addons.datasets.holdout import HoldOut
from pipeline.addons.datasets.index import Index, Split
from pipeline.addons.datasets.manifest import open_index

IMAGENET = 1_281_167

EPOCHS = """
import sys
import numpy as np
from pathlib import Path
from pipeline.addons.datasets.index import Index
from pipeline.addons.datasets.sources import FolderImages

images = FolderImages(Path("/"), Index.from_bytes(np.memmap(sys.argv[1], np.uint8, "r")).train)
for epoch in range(4):
    for i in np.random.default_rng(epoch).permutation(len(images)).tolist():
        images.name(i), int(images.labels[i])
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    print(sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")))
"""


def entries(count: int) -> list[tuple[bytes, int, int]]:
    return [(b"train/n%08d/n%08d_%d.JPEG" % (i % 1000, i % 1000, i), 110_000, i % 1000) for i in range(count)]


@pytest.mark.fault("E6")
@pytest.mark.parametrize("count", [50_000, pytest.param(IMAGENET, marks=pytest.mark.long)])
def test_the_memory_of_a_worker_does_not_grow(tmp_path: Path, count: int) -> None:
    path = tmp_path / "index"
    splits = (Split.from_entries(entries(size)) for size in (count, 1000))
    path.write_bytes(Index(*splits, ("a", "b")).to_bytes())
    done = subprocess.run([sys.executable, "-c", EPOCHS, path], capture_output=True, text=True, check=True)
    _, first, *later = map(int, done.stdout.split())  # from the second epoch on, two permutations exist
    assert max(later) < 1.02 * first + 1024, "KiB: 2 %, and the allocations of Python itself"


@pytest.mark.parametrize("count", [5_000, pytest.param(IMAGENET, marks=pytest.mark.long)])
def test_a_cached_start_takes_a_second(tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    root, classes = tmp_path / "images", min(1000, count // 50)
    for split, images in (("train", count), ("val", 50 * classes)):
        folders = [root / split / f"n{label:08d}" for label in range(classes)]
        for folder in folders:
            folder.mkdir(parents=True)
        for i in range(images):
            (folders[i % classes] / f"{i}.JPEG").touch()
    built = open_index(root, HoldOut(), tmp_path, check_sizes=False)
    assert len(built.train) == count
    monkeypatch.setattr(manifest, "scan", None)  # a call would fail
    start = time.process_time()
    assert open_index(root, HoldOut(), tmp_path, check_sizes=False).digest == built.digest
    assert time.process_time() - start < 1, "s of CPU time"
