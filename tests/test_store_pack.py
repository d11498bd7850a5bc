"""A pack in a bucket has the bytes of the local one, after any kill."""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Result, environment, pipeline
from object_store import Bucket, FaultProxy
from test_pack import encoded, photo

from pipeline.addons.datasets.write_pack import pack
from pipeline.addons.store.bucket import Store
from pipeline.errors import RequestError

pytestmark = pytest.mark.usefixtures("jpegtran")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make photos for about ten shards; most are PNG files, which take little time to pack."""
    root = tmp_path_factory.mktemp("images")
    for number in range(48):
        path = root / ("val" if number < 8 else "train") / "ab"[number % 2] / f"{number:02}"
        path.parent.mkdir(parents=True, exist_ok=True)
        is_png = number % 4 > 0
        image = encoded(photo(240, 320, number), "PNG") if is_png else encoded(photo(90, 120, number))
        path.with_suffix(".png" if is_png else ".jpg").write_bytes(image)
    return root


@pytest.fixture(scope="module")
def local(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the local pack, which every pack in a bucket must equal."""
    out = tmp_path_factory.mktemp("local") / "pack"
    pack(images, out, "lossless", 0.1)
    return out


def files(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir()}


def objects(bucket: Bucket, prefix: str = "pack") -> dict[str, bytes]:
    """Return all objects below a prefix: name -> contents."""
    return {key.removeprefix(f"{prefix}/"): bucket.read(key) for key in bucket.names(f"{prefix}/")}


def start(*words: str, tmp: Path, **env: str) -> "subprocess.Popen[str]":
    """Start a command whose temporary files go to `tmp`."""
    tmp.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "pipeline", *words], env=environment(TMPDIR=str(tmp), **env), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: "subprocess.Popen[str]") -> Result:
    out, err = process.communicate(timeout=240)
    return Result(process.returncode, out, err, 0)


def wait_for(condition: Any, process: "subprocess.Popen[str]") -> None:
    """Wait until the condition is true or the process has ended."""
    while process.poll() is None and not condition():
        time.sleep(0.005)


def test_a_pack_in_a_bucket_has_the_bytes_of_a_local_one_and_is_not_written_again(
    images: Path, bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    damaged = shutil.copytree(images, tmp_path / "images")
    (damaged / "train/a/12.jpg").write_bytes(b"not an image")
    line = pack(damaged, tmp_path / "pack", "raw=64", 0.1)
    place = f"{bucket.place}/a/pack"
    assert line.endswith("; 1 bad")
    for _ in range(2):
        assert pack(damaged, Store(place), "raw=64", 0.1) == line.replace(str(tmp_path / "pack"), place)
    assert objects(bucket, "a/pack") == files(tmp_path / "pack")
    written = [request.split()[1] for request in fault_proxy.requests if request.startswith("PUT")]
    assert len(written) == len(set(written))


def test_a_killed_pack_resumes_and_ends_with_the_same_objects(
    images: Path, local: Path, bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path, seed: int
) -> None:
    fault_proxy.latency_ms = 20
    words = ("data", "pack", str(images), f"{bucket.place}/pack")
    requests = 2 * len(list(local.glob("*.tar")))  # of a start, at least: two PUT for each shard
    for number in np.random.default_rng(seed).integers(3, requests, 3):
        del fault_proxy.requests[:]
        process = start(*words, tmp=tmp_path / "tmp")
        wait_for(lambda number=number: len(fault_proxy.requests) >= number, process)
        process.kill()
        finish(process)
        assert list((tmp_path / "tmp").iterdir()) == [], "no temporary file is left"
        left = objects(bucket)
        complete = {name[1:-5] for name in left if re.fullmatch(r"\.(train|val)-\d+\.tar\.json", name)}
        assert all(left[name] == (local / name).read_bytes() for name in left if name.endswith(".tar"))
        assert complete <= left.keys()
    del fault_proxy.requests[:]
    result = finish(start(*words, tmp=tmp_path / "tmp"))
    assert result.code == 0, result.err
    assert objects(bucket) == files(local), f"seed {seed}"
    written = {request.rpartition("/")[2] for request in fault_proxy.requests if request.startswith("PUT")}
    assert not written & complete, "a complete shard is not packed again"


def test_a_prefix_with_other_contents_is_left_unchanged(images: Path, local: Path, bucket: Bucket) -> None:
    bucket.write("mine/notes.txt", b"mine")
    with pytest.raises(RequestError, match=rf"^{bucket.place}/mine is not empty and holds no pack"):
        pack(images, Store(f"{bucket.place}/mine"), "lossless", 0.1)
    assert bucket.names() == ["mine/notes.txt"]
    for path in local.iterdir():
        bucket.write(f"pack/{path.name}", path.read_bytes())
    with pytest.raises(RequestError, match=rf"^{bucket.place}/pack holds a pack of another source, level"):
        pack(images, Store(f"{bucket.place}/pack"), "raw=64", 0.1)
    assert objects(bucket) == files(local)


def test_a_dead_store_is_temporary_and_no_output_holds_a_secret(
    images: Path, local: Path, bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    words = ("data", "pack", str(images), f"{bucket.place}/pack")
    process = start(*words, tmp=tmp_path / "tmp")
    wait_for(lambda: any(".tar" in request for request in fault_proxy.requests), process)
    fault_proxy.die()
    dead = finish(process)
    assert (dead.code, "the store is out of reach" in dead.error) == (75, True)
    fault_proxy.revive()
    fault_proxy.rates = {"500": 0.05, "503": 0.05, "truncate": 0.03}
    whole = finish(start(*words, tmp=tmp_path / "tmp"))
    assert whole.code == 0, whole.err
    assert fault_proxy.counts
    assert objects(bucket) == files(local)
    for result in (dead, whole):
        assert bucket.server.secret not in result.out + result.err
        assert "Signature=" not in result.out + result.err


def test_a_disk_without_room_for_the_shards_is_named(images: Path, bucket: Bucket, small_disk: Path) -> None:
    result = pipeline("data", "pack", str(images), f"{bucket.place}/pack", TMPDIR=str(small_disk))
    assert result.code == 4
    assert "set TMPDIR to a folder on a larger disk" in result.error
    assert list(small_disk.iterdir()) == []
