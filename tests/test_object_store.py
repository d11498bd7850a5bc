"""The client of object stores, against real servers, with the faults that a network has."""

import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import refused, wait_until
from object_store import Bucket, FaultProxy
from server import foreign_server

from pipeline.addons.store import bucket as store_module
from pipeline.addons.store.bucket import ConflictError, MissingError, Store
from pipeline.data.interface import OutageError
from pipeline.errors import RequestError

BYTES = random.Random(0).randbytes
LARGE = 33 << 20  # more than one part


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait 2 s for an answer instead of 20."""
    monkeypatch.setattr(store_module, "_READ_TIMEOUT_S", 2)


def test_objects_are_written_read_listed_and_deleted(bucket: Bucket, tmp_path: Path) -> None:
    prefix = "some/prefix with ümlaut"
    store = Store(f"{bucket.place}/{prefix}")
    assert list(store.list()) == []
    for read in (store.read, lambda name: store.read_to(name, tmp_path / "no")):
        with pytest.raises(MissingError, match=f"^{store}/a does not exist$"):
            read("a")
    store.delete("a")
    small, large = BYTES(1000), BYTES(LARGE)
    etag = store.write("folder/a", small)
    contents, found = store.read_described("folder/a")
    assert (contents, found.size, found.etag, 0 <= found.age_s < 60) == (small, 1000, etag, True)
    with pytest.raises(RequestError, match="has 1,000 bytes, more than the 999 allowed"):
        store.read("folder/a", limit=999)
    path = tmp_path / "large"
    path.write_bytes(large)
    store.upload(path, "folder/large")
    store.read_to("folder/large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == store.read("folder/large") == large
    store.write("empty", b"")
    sizes = [(entry.name, entry.size) for entry in store.list()]
    assert sizes == [("empty", 0), ("folder/a", 1000), ("folder/large", LARGE)]
    assert [entry.name for entry in store.list("folder/l")] == ["folder/large"]
    assert bucket.names() == [f"{prefix}/{name}" for name in ("empty", "folder/a", "folder/large")]


def test_conditional_writes(bucket: Bucket) -> None:
    store = Store(bucket.place)
    first = store.write("lease", b"1", if_absent=True)
    with pytest.raises(ConflictError):
        store.write("lease", b"2", if_absent=True)
    second = store.write("lease", b"3", if_match=first)
    for stale in (first, '"0123456789abcdef0123456789abcdef"'):
        with pytest.raises(ConflictError):
            store.write("lease", b"4", if_match=stale)
    assert (store.read("lease"), store.read_described("lease")[1].etag) == (b"3", second)
    store.delete("lease")
    with pytest.raises((ConflictError, MissingError)):
        store.write("lease", b"5", if_match=second)
    assert list(store.list()) == []


def test_a_conditional_write_whose_answer_is_lost_is_no_conflict(
    bucket: Bucket, fault_proxy: FaultProxy
) -> None:
    store = Store(bucket.place)
    before = store.write("lease", b"mine before")
    fault_proxy.only, fault_proxy.rates = "^PUT", {"truncate": 1}
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(store.write, "lease", b"mine", if_match=before)
        while not fault_proxy.counts["truncate"]:
            time.sleep(0.001)
        fault_proxy.rates = {}
        assert writing.result() == store.read_described("lease")[1].etag
    assert sum(asked.startswith("PUT") for asked in fault_proxy.requests) >= 3
    with pytest.raises(ConflictError):
        store.write("lease", b"of another", if_match=before)


def test_every_method_survives_faults(
    bucket: Bucket, fault_proxy: FaultProxy, impatient: None, tmp_path: Path
) -> None:
    store = Store(f"{bucket.place}/prefix")
    contents = {f"{number:03}": BYTES(1000 + number) for number in range(60)}
    path = tmp_path / "large"
    path.write_bytes(BYTES(LARGE))
    fault_proxy.rates = dict.fromkeys(("500", "503", "truncate", "stall"), 0.02)

    def use(name: str) -> None:
        etag = store.write(name, contents[name], if_absent=True)
        assert store.write(name, contents[name] + b"!", if_match=etag) != etag
        assert store.read(name) == contents[name] + b"!"
        store.read_to(name, tmp_path / name)
        assert (tmp_path / name).read_bytes() == contents[name] + b"!"

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(use, contents))
    store.upload(path, "large")
    store.read_to("large", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == path.read_bytes()
    assert [entry.name for entry in store.list()] == [*contents, "large"]
    for name in contents:
        store.delete(name)
    assert [entry.name for entry in store.list()] == ["large"]
    assert fault_proxy.counts.keys() == fault_proxy.rates.keys()


METHODS: dict[str, Callable[[Store, Path], Any]] = {
    "read": lambda store, path: store.read("a"),
    "read_to": lambda store, path: store.read_to("a", path.with_name("to")),
    "write": lambda store, path: store.write("a", b""),
    "create": lambda store, path: store.write("a", b"", if_absent=True),
    "upload": lambda store, path: store.upload(path, "a"),
    "list": lambda store, path: list(store.list()),
    "delete": lambda store, path: store.delete("a"),
}
WRONG: dict[str, dict[str, str | None]] = {
    "secret": {"AWS_SECRET_ACCESS_KEY": "wrongsecret"},
    "none": {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None},
    "half": {"AWS_SECRET_ACCESS_KEY": None},
    "bucket": {},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_requests_are_refused_at_once_in_one_line_without_a_secret(
    bucket: Bucket, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: str
) -> None:
    for name, value in WRONG[wrong].items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    (tmp_path / "file").write_bytes(bytes(LARGE))
    place = "s3://no-such-bucket/x" if wrong == "bucket" else bucket.place
    # it begins with HEAD, whose answer does not tell a missing bucket from a missing object
    names = METHODS.keys() - ({"read_to"} if wrong == "bucket" else set())
    for name in names:
        line = refused(lambda name=name: METHODS[name](Store(place), tmp_path / "file"))
        assert place in line
        assert not any(secret in line for secret in (bucket.server.secret, bucket.server.key, "wrongsecret"))
    assert len(fault_proxy.requests) <= len(names), "no request is repeated"


@pytest.mark.parametrize("fault", ["dead", "stall", "500"])
def test_a_store_that_is_dead_or_always_fails_is_an_outage_after_bounded_time(
    bucket: Bucket, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    monkeypatch.setattr(store_module, "_READ_TIMEOUT_S", 0.5)
    (tmp_path / "file").write_bytes(bytes(LARGE))
    bucket.write("a", b"some bytes")
    if fault == "dead":
        fault_proxy.die()
    else:
        fault_proxy.rates = {fault: 1}

    def use(name: str) -> None:
        with pytest.raises(OutageError, match=f"^the store is out of reach .{bucket.place}"):
            METHODS[name](Store(bucket.place), tmp_path / "file")

    started = time.monotonic()
    with ThreadPoolExecutor(len(METHODS)) as pool:
        # a store that deletes the object and cannot say so changes what the others see
        list(pool.map(use, METHODS.keys() - {"create", "delete"}))
    assert time.monotonic() - started < 120


def test_an_upload_that_is_killed_leaves_no_object(
    bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path
) -> None:
    path = tmp_path / "large"
    path.write_bytes(bytes(LARGE))
    fault_proxy.latency_ms = 300
    program = (
        "import sys; from pathlib import Path; from pipeline.addons.store.bucket import Store;"
        " Store(sys.argv[1]).upload(Path(sys.argv[2]), 'large')"
    )
    with subprocess.Popen([sys.executable, "-c", program, bucket.place, str(path)]) as process:
        wait_until(lambda: len(fault_proxy.requests) >= 3, "a part")
        process.kill()
    assert process.returncode
    assert not bucket.names()
    assert any("uploadId" in request for request in fault_proxy.requests)


def test_a_place_that_is_none_and_an_endpoint_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("s3://", "s3://B/x", "s3://a/x", "s3://bucket/../x", "s3://bucket/x?y"):
        with pytest.raises(RequestError, match="is not allowed: give s3://bucket/prefix"):
            Store(place)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "no url")
    with pytest.raises(RequestError, match="no url"):
        Store("s3://bucket/x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:geheim@127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with pytest.raises(OutageError, match=r"127\.0\.0\.1:1") as refused:
        Store("s3://bucket/x").read("a")
    assert "geheim" not in str(refused.value)
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    with pytest.raises(RequestError, match="no-such-profile"):
        Store("s3://bucket/x")


def test_an_answer_that_is_too_large_or_no_stores_is_refused(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = {"ETag": "a", "Last-Modified": "Mon, 23 Nov 2026 20:00:00 GMT", "Content-Length": "3000000000"}
    for headers, says in ((large, "has 3,000,000,000 bytes, more than"), ({}, "is not that of a store")):
        with foreign_server(**headers) as (uri, _):
            monkeypatch.setenv("AWS_ENDPOINT_URL", uri)
            with pytest.raises(RequestError, match=says):
                Store(bucket.place).read("a")


def test_a_redirect_is_refused_at_once_and_not_followed(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(bytes(LARGE))
    with (
        foreign_server() as (target, seen),
        foreign_server(301, Location=f"{target}/elsewhere?x=y") as (uri, asked),
    ):
        monkeypatch.setenv("AWS_ENDPOINT_URL", uri)
        for method in METHODS.values():
            with pytest.raises(RequestError, match="301"):
                method(Store(bucket.place), tmp_path / "file")
    assert len(asked) == len(METHODS)
    assert seen == []
