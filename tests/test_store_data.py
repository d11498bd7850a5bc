"""A pack in a bucket gives the batches of the local pack, whatever the network and the cache do."""

import json
import os
import shutil
import subprocess
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import pytest
from harness import SMALL, Job, read_rows, refused
from object_store import FAULTS, Bucket, FaultProxy
from server import foreign_server
from streams import prepare, stream

from pipeline.addons.datasets import pack
from pipeline.addons.datasets.sources import open_source
from pipeline.addons.datasets.write_pack import pack as make
from pipeline.addons.store import ranges
from pipeline.addons.store.ranges import Range, RangeReader
from pipeline.data.interface import Images, OutageError, UnreadableError

READS = r"GET .*\.tar"
PACK = ("data.source=pack", "data.workers=0")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, digits: Path, jpegtran: str) -> Path:
    root = tmp_path_factory.mktemp("packed") / "digits"
    make(digits, root, "lossless", 0.1)
    return root


def upload(bucket: Bucket, root: Path) -> str:
    for path in root.iterdir():
        bucket.write(f"digits/{path.name}", path.read_bytes())
    return f"{bucket.place}/digits"


@pytest.fixture
def place(bucket: Bucket, packed: Path) -> str:
    return upload(bucket, packed)


def images(place: str | Path, *overrides: str) -> Images:
    return open_source(prepare(Path(), 1, "data.source=pack", *overrides, f"data.root={place}")[0]).train


def read_all(found: Images, count: int = 0) -> list[bytes]:
    samples = range(count or len(found))
    found.expect(samples)
    return [read(found, i) for i in samples]


def read(found: Images, i: int) -> bytes:
    """Read an image, several times if its attempts fail, as the loader does."""
    for _ in range(5):
        with suppress(OutageError):
            return bytes(found.read(i))
    return bytes(found.read(i))


def ranged_reads(proxy: FaultProxy) -> int:
    return sum("bytes=" in request for request in proxy.requests)


def job(folder: Path, root: str | Path, *more: str, nproc: int = 1) -> Job:
    words = ["digits", *PACK, f"data.root={root}", *SMALL, "train.max_steps=12",
             "checkpoint.every=3 steps", "evaluate.every=1000 steps", "track.every=1 steps"]  # fmt: skip
    return Job(folder, [*words, *more], nproc=nproc)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, packed: Path) -> Job:
    return job(tmp_path_factory.mktemp("local") / "run", packed).finished()


@pytest.mark.full
@pytest.mark.fault("K1", ci=1, long=20)
@pytest.mark.parametrize(
    ("world", "workers"),
    [(1, 2), pytest.param(2, 0, marks=pytest.mark.long), pytest.param(4, 2, marks=pytest.mark.long)],
)
def test_a_run_with_5_percent_of_failing_reads_trains_the_same(
    tmp_path: Path, place: str, bucket: Bucket, fault_proxy: FaultProxy, uninterrupted: Job,
    world: int, workers: int, seed: int,
) -> None:  # fmt: skip
    fault_proxy._random.seed(seed)
    fault_proxy.rates = dict.fromkeys(FAULTS, 0.05 / len(FAULTS))
    fault_proxy.only, fault_proxy.latency_ms = READS, 30
    run = job(tmp_path / "run", place, f"data.workers={workers}", nproc=world)
    result = run.run(code=0)
    assert run.trace() == uninterrupted.trace()
    assert "bad image" not in result.err
    metrics = [row["metrics"] for row in read_rows(run.folder / "journal.jsonl") if "metrics" in row]
    counted = sum(window.get("data/failed_reads", 0) for window in metrics)
    assert 0 < counted <= fault_proxy.counts.total()
    if world == 1:
        assert result.out == uninterrupted.output()
    for path in [run.folder.with_suffix(".err"), *filter(Path.is_file, run.folder.rglob("*"))]:
        assert b"X-Amz" not in path.read_bytes(), path
        assert bucket.server.secret.encode() not in path.read_bytes(), path


@pytest.mark.full
@pytest.mark.fault("K1", ci=2, long=10)
def test_a_run_waits_for_a_bucket_that_is_dead_and_one_that_stays_dead_ends_it(
    tmp_path: Path, place: str, fault_proxy: FaultProxy, uninterrupted: Job, seed: int
) -> None:
    run = job(tmp_path / "run", place, "run.timeout=16").start().wait_for_step(1 + seed % 3)
    fault_proxy.die()
    run.wait_until(lambda: "waiting for it" in run.log(), "warning about the bucket")
    time.sleep(1)
    fault_proxy.revive()
    run.wait_for_step(5 + seed % 4)
    fault_proxy.die()
    assert run.wait(code=75).error.startswith(f"the store is out of reach ({place}/train-0000.tar: ")
    fault_proxy.revive()
    assert run.run().out == uninterrupted.output()
    assert run.trace() == uninterrupted.trace()


def test_every_failed_read_is_repeated_and_counted(place: str, packed: Path, fault_proxy: FaultProxy) -> None:
    found = images(place)
    ranges.pop_failures()  # of another test
    fault_proxy.rates, fault_proxy.only = dict.fromkeys(FAULTS, 0.02), READS
    assert read_all(found, 400) == read_all(images(packed), 400)
    assert set(fault_proxy.counts) == set(FAULTS)
    assert ranges.pop_failures() == [fault_proxy.counts.total()]
    assert ranges.pop_failures() == [0]


def test_256_reads_are_in_flight_and_other_expectations_drop_them(
    place: str, packed: Path, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, local = images(place), read_all(images(packed), 512)
    fault_proxy.latency_ms, fault_proxy.only = 300, READS
    asked = ranged_reads(fault_proxy)
    found.expect(range(1000))
    assert found.read(0) == local[0]
    # a place is free as soon as one is taken
    assert ranged_reads(fault_proxy) - asked <= ranges.MAX_READS + 1
    start = time.monotonic()
    assert [found.read(i) for i in range(1, 512)] == local[1:]
    assert time.monotonic() - start < 75, "one after another they would take 150 s"
    fault_proxy.latency_ms = 0
    found.expect(range(340, 400))
    assert found.read(7) == local[7], "not expected"
    monkeypatch.setattr(ranges, "MAX_BYTES", 1000)  # of large images fewer are read ahead
    asked = ranged_reads(fault_proxy)
    found.expect(range(100))
    assert found.read(0) == local[0]
    assert 1 <= ranged_reads(fault_proxy) - asked < 20


def test_an_image_that_has_changed_in_the_bucket_is_named_and_replaced_as_in_the_local_pack(
    tmp_path: Path, bucket: Bucket, packed: Path
) -> None:
    root = shutil.copytree(packed, tmp_path / "damaged")
    offset = int(pack.open_index(packed).train.places[3 * 5 + 1])
    overwrite(root / "train-0000.tar", offset + 3)
    place = upload(bucket, root)
    with pytest.raises(UnreadableError, match=f"train-0000.tar has changed at byte {offset:,}"):
        images(place).read(5)
    local = stream(root, range(0, 30), *PACK)
    assert len(local[1]) == 1
    assert stream(place, range(0, 30), *PACK, world=2) == local


def overwrite(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(b"\xff\xff")


def measure_epochs(place: str) -> list[int]:
    """Return the resident memory of this process after each of 8 epochs, in KiB."""
    found, sizes = images(place), []
    for _ in range(8):
        read_all(found)
        sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 10)
    return sizes


@pytest.mark.full
def test_memory_stays_flat_over_epochs(place: str) -> None:
    with get_context("spawn").Pool(1) as pool:
        sizes = pool.apply(measure_epochs, (place,))
    assert sizes[-1] - sizes[1] < 4096, sizes


def test_credentials_that_are_away_for_a_moment_are_an_outage(
    tmp_path: Path, place: str, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each loader worker asks their source, such as a machine's role, for them."""
    names = {"AccessKeyId": "AWS_ACCESS_KEY_ID", "SecretAccessKey": "AWS_SECRET_ACCESS_KEY"}
    source, away, config = tmp_path / "answer", tmp_path / "away", tmp_path / "config"
    source.write_text(json.dumps({"Version": 1} | {key: os.environ[name] for key, name in names.items()}))
    for name in names.values():
        monkeypatch.delenv(name)
    config.write_text(f"[default]\ncredential_process = cat {source}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    found = images(place)
    source.rename(away)
    with pytest.raises(OutageError, match="the store is out of reach"):
        found.read(0)
    away.rename(source)
    assert read(found, 0) == images(packed).read(0)


def trickle(_: str) -> Iterator[bytes]:
    while True:
        time.sleep(0.2)
        yield b"x"


def test_a_wrong_part_is_never_used(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Range("large", 0, 1000, zlib.crc32(bytes(1000)))
    monkeypatch.setattr(ranges, "_SLOW_S", 1)
    ranges.pop_failures()  # of another test
    with foreign_server(206, lambda _: [bytes(1000)]) as (target, seen):
        for status, answer, says in (
            (206, lambda _: [b"x" * 1000], "has changed at byte 0"),
            (206, lambda _: [bytes(10)], "10 of 1,000 bytes"),
            (206, trickle, "the connection has stalled"),
            (200, lambda _: [bytes(1000)], "status 200, not 206"),
            (301, lambda _: [bytes(1000)], "status 301"),
        ):
            with foreign_server(status, answer, Location=f"{target}/bucket/large") as (uri, _):
                monkeypatch.setenv("AWS_ENDPOINT_URL", uri)
                with pytest.raises((OutageError, UnreadableError), match=says):
                    RangeReader(bucket.place, lambda _: asked).take(0)
            assert ranges.pop_failures() == [4], says
    assert seen == [], "no redirect is followed"


def test_starts_share_the_cache(tmp_path: Path, place: str, packed: Path, fault_proxy: FaultProxy) -> None:
    expected, _ = stream(packed, range(27, 33), *PACK, "augment.repeats=2")
    cached = ("data.source=pack", "augment.repeats=2", f"data.cache={tmp_path / 'cache'}")
    assert stream(place, range(27, 33), *cached, "data.workers=0", world=2)[0] == expected
    asked = ranged_reads(fault_proxy)
    assert stream(place, range(27, 33), *cached, "data.workers=2")[0] == expected
    assert ranged_reads(fault_proxy) - asked == 1, "the one that finds out whether the store honours ranges"


def test_the_cache_keeps_its_limit_and_reads_again_what_has_changed(
    tmp_path: Path, place: str, packed: Path, fault_proxy: FaultProxy
) -> None:
    limit = 100 << 10
    words = (f"data.cache={tmp_path / 'cache'}", f"data.cache_gib={limit / 2**30}")
    local, sizes = read_all(images(packed)), pack.open_index(packed).train.sizes
    kept = int((sizes.cumsum() <= limit).sum())
    assert kept > 500

    def reads(found: Images) -> int:
        """Return how many images of an epoch are asked of the bucket; all are those of the pack."""
        asked = ranged_reads(fault_proxy)
        assert read_all(found) == local
        return ranged_reads(fault_proxy) - asked

    found = images(place, *words)
    assert [reads(found), reads(found)] == [len(local), len(local) - kept]
    (file,) = (tmp_path / "cache").glob("*/train.images")
    assert 0.9 * limit < file.stat().st_blocks * 512 <= limit + 8192
    overwrite(file, int(sizes[:5].sum()) + 3)
    found = images(place, *words)
    assert [reads(found), reads(found)] == [len(local) - kept + 1, len(local) - kept]
    os.truncate(file, 1000)
    reads(found)


def test_a_cache_on_a_full_disk_is_reported_once_and_done_without(
    small_disk: Path, place: str, packed: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["mount", "-o", "remount,size=128k", str(small_disk)], check=True)
    local = read_all(images(packed))
    found = images(place, f"data.cache={small_disk / 'cache'}", "data.cache_gib=1")
    capfd.readouterr()
    assert [read_all(found), read_all(found)] == [local, local]
    (reported,) = [line for line in capfd.readouterr().err.splitlines() if "data.cache" in line]
    assert "No space left on device" in reported


def test_a_pack_that_is_missing_or_damaged_is_refused(bucket: Bucket, place: str) -> None:
    empty = f"{bucket.place}/nothing"
    assert f"data.root={empty} holds no complete pack" in refused(lambda: images(empty))
    bucket.write("digits/train-0000.tar", b"short")
    assert f"the pack {place} is damaged: train-0000.tar has 5 bytes" in refused(lambda: images(place))
    bucket.delete("digits/train-0000.tar")
    assert "train-0000.tar is missing" in refused(lambda: images(place))
    index = bucket.read("digits/pack.index")
    bucket.write("digits/pack.index", index[:-1] + bytes([index[-1] ^ 1]))
    assert "pack.index cannot be read" in refused(lambda: images(place))
