"""A pack in a bucket has the bytes of the local one, after any kill."""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from harness import Result, environment, pipeline, refused
from object_store import Bucket, FaultProxy
from test_pack import encoded, photo

from pipeline.addons.datasets.write_pack import pack
from pipeline.addons.store.bucket import Store

pytestmark = pytest.mark.usefixtures("jpegtran")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a bad file and photos for ten shards, mostly PNG, which take little time to pack."""
    root = tmp_path_factory.mktemp("images")
    for number in range(48):
        folder = root / ("val" if number < 8 else "train") / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        if number % 4:
            (folder / f"{number:02}.png").write_bytes(encoded(photo(240, 320, number), "PNG"))
        else:
            (folder / f"{number:02}.jpg").write_bytes(encoded(photo(90, 120, number)))
    (root / "train/a/bad.jpg").write_bytes(b"not an image")
    return root


@pytest.fixture(scope="module")
def local(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the local pack, which every pack in a bucket must equal."""
    out = tmp_path_factory.mktemp("local") / "pack"
    pack(images, out, "lossless", 0.1)
    return out


def files(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir()}


def objects(bucket: Bucket) -> dict[str, bytes]:
    return {key.removeprefix("a/pack/"): bucket.read(key) for key in bucket.names("a/pack/")}


def written(proxy: FaultProxy) -> set[str]:
    return {request.rpartition("/")[2] for request in proxy.requests if request.startswith("PUT")}


def test_a_pack_that_loses_its_store_and_is_killed_resumes_to_the_same_objects(
    images: Path, local: Path, bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path, seed: int
) -> None:
    place = f"{bucket.place}/a/pack"
    words = ("data", "pack", str(images), place)
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    def pack_until(requests: int, act: Callable[[subprocess.Popen[str]], None]) -> Result:
        """Start to pack, and `act` at a request; what is then left is sound."""
        del fault_proxy.requests[:]
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeline", *words], env=environment(TMPDIR=str(temporary)),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        while process.poll() is None and len(fault_proxy.requests) < requests:
            time.sleep(0.005)
        act(process)
        out, err = process.communicate(timeout=240)
        assert list(temporary.iterdir()) == [], "no temporary file is left"
        left = objects(bucket)
        assert all(left[name] == (local / name).read_bytes() for name in left if name.endswith(".tar"))
        return Result(process.returncode, out, err, 0)

    fault_proxy.latency_ms = 20
    dead = pack_until(5, lambda _: fault_proxy.die())
    assert (dead.code, "the store is out of reach" in dead.error) == (75, True)
    fault_proxy.revive()
    fault_proxy.rates = dict.fromkeys(("500", "503", "truncate"), 0.05)
    requests = 2 * len(list(local.glob("*.tar")))  # of a start, at least: two PUT for each shard
    numbers = np.random.default_rng(seed).integers(3, requests, 3)
    killed = [pack_until(number, subprocess.Popen.kill) for number in numbers]
    left = objects(bucket)
    complete = {name[1:-5] for name in left if re.fullmatch(r"\.(train|val)-\d+\.tar\.json", name)}
    assert complete <= left.keys()
    del fault_proxy.requests[:]
    whole = pipeline(*words, TMPDIR=str(temporary), code=0)
    assert objects(bucket) == files(local), f"seed {seed}"
    assert not complete & written(fault_proxy), "a complete shard is not packed again"
    assert fault_proxy.counts
    del fault_proxy.requests[:]
    line = pack(images, Store(place), "lossless", 0.1)
    assert line.endswith("; 1 bad")
    assert line == pack(images, local, "lossless", 0.1).replace(str(local), place)
    for prefix, says in (
        ("a", "is not empty and holds no pack"),
        ("a/pack", "holds a pack of another source"),
    ):
        other = Store(f"{bucket.place}/{prefix}")
        assert refused(lambda other=other: pack(images, other, "raw=64", 0.1)).startswith(f"{other} {says}")
    assert not written(fault_proxy), "neither a complete pack is written again, nor other contents"
    for result in (dead, *killed, whole):
        for secret in (bucket.server.secret, "Signature="):
            assert secret not in result.out + result.err


def test_a_disk_without_room_for_the_shards_is_named(images: Path, bucket: Bucket, small_disk: Path) -> None:
    result = pipeline("data", "pack", str(images), f"{bucket.place}/pack", TMPDIR=str(small_disk), code=4)
    assert "TMPDIR" in result.error
    assert list(small_disk.iterdir()) == []
