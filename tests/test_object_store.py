"""The client of object stores, against real servers, with the faults that a network has."""

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import refused
from object_store import Bucket, FaultProxy
from server import foreign_server

from pipeline.addons.store import bucket as store_module
from pipeline.addons.store.bucket import ConflictError, MissingError, Store
from pipeline.data.interface import OutageError

BYTES = random.Random(0).randbytes
LARGE = 33 << 20  # more than one part
METHODS: dict[str, Callable[[Store, Path], Any]] = {
    "read": lambda store, path: store.read("a"),
    "read_to": lambda store, path: store.read_to("a", path.with_name("to")),
    "write": lambda store, path: store.write("a", b""),
    "create": lambda store, path: store.write("a", b"", if_absent=True),
    "upload": lambda store, path: store.upload(path, "a"),
    "list": lambda store, path: list(store.list()),
    "delete": lambda store, path: store.delete("a"),
}


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large"
    path.write_bytes(BYTES(LARGE))
    return path


def test_objects_are_written_read_listed_and_deleted(bucket: Bucket, large: Path) -> None:
    prefix = "some/prefix with ümlaut"
    store, back = Store(f"{bucket.place}/{prefix}"), large.with_name("back")
    assert list(store.list()) == []
    for read in (store.read, lambda name: store.read_to(name, back)):
        with pytest.raises(MissingError, match=f"^{store}/a does not exist$"):
            read("a")
    store.delete("a")
    small = BYTES(1000)
    etag = store.write("folder/a", small)
    contents, found = store.read_described("folder/a")
    assert (contents, found.size, found.etag, 0 <= found.age_s < 60) == (small, 1000, etag, True)
    assert "1,000 bytes" in refused(lambda: store.read("folder/a", limit=999))
    store.upload(large, "folder/large")
    store.read_to("folder/large", back)
    assert back.read_bytes() == store.read("folder/large") == large.read_bytes()
    store.write("empty", b"")
    sizes = {entry.name: entry.size for entry in store.list()}
    assert list(sizes.items()) == [("empty", 0), ("folder/a", 1000), ("folder/large", LARGE)]
    assert [entry.name for entry in store.list("folder/l")] == ["folder/large"]
    assert bucket.names() == [f"{prefix}/{name}" for name in sizes]


def test_a_conditional_write_replaces_nothing_of_another(bucket: Bucket, fault_proxy: FaultProxy) -> None:
    store = Store(bucket.place)
    first = store.write("lease", b"1", if_absent=True)
    with pytest.raises(ConflictError):
        store.write("lease", b"2", if_absent=True)
    second = store.write("lease", b"3", if_match=first)
    for stale in (first, '"0123456789abcdef0123456789abcdef"'):
        with pytest.raises(ConflictError):
            store.write("lease", b"4", if_match=stale)
    assert (store.read("lease"), store.read_described("lease")[1].etag) == (b"3", second)

    # a write whose answer is lost, and that finds itself when it is repeated, is no conflict
    fault_proxy.only, fault_proxy.rates = "^PUT", {"truncate": 1}
    del fault_proxy.requests[:]
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(store.write, "lease", b"mine", if_match=second)
        while not fault_proxy.counts["truncate"]:
            time.sleep(0.001)
        fault_proxy.rates = {}
        third = writing.result()
    assert store.read_described("lease")[1].etag == third
    assert sum(asked.startswith("PUT") for asked in fault_proxy.requests) >= 2
    with pytest.raises(ConflictError):
        store.write("lease", b"of another", if_match=second)

    store.delete("lease")
    with pytest.raises((ConflictError, MissingError)):
        store.write("lease", b"5", if_match=third)
    assert list(store.list()) == []


def test_every_method_survives_faults(
    bucket: Bucket, fault_proxy: FaultProxy, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_READ_TIMEOUT_S", 2)
    store = Store(f"{bucket.place}/prefix")
    names = [f"{number:03}" for number in range(60)]
    fault_proxy.rates = dict.fromkeys(("500", "503", "truncate", "stall"), 0.02)

    def use(name: str) -> None:
        contents, back = BYTES(1000), large.with_name(name)
        etag = store.write(name, b"first", if_absent=True)
        assert store.write(name, contents, if_match=etag) != etag
        store.read_to(name, back)
        assert store.read(name) == back.read_bytes() == contents

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(use, names))
    store.upload(large, "large")
    assert store.read("large") == large.read_bytes()
    assert [entry.name for entry in store.list()] == [*names, "large"]
    for name in names:
        store.delete(name)
    assert [entry.name for entry in store.list()] == ["large"]
    assert fault_proxy.counts.keys() == fault_proxy.rates.keys()


@pytest.mark.parametrize(
    "wrong",
    [{"AWS_SECRET_ACCESS_KEY": "wrongsecret"},
     {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None},
     {"AWS_SECRET_ACCESS_KEY": None},
     {"bucket": "s3://no-such-bucket/x"}],
    ids=["secret", "none", "half", "bucket"],
)  # fmt: skip
def test_wrong_requests_are_refused_at_once_in_one_line_without_a_secret(
    bucket: Bucket, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, large: Path,
    wrong: dict[str, str | None],
) -> None:  # fmt: skip
    for name, value in wrong.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    place = wrong.get("bucket") or bucket.place
    # it begins with HEAD, whose answer does not tell a missing bucket from a missing object
    names = METHODS.keys() - ({"read_to"} if "bucket" in wrong else set())
    for name in names:
        line = refused(lambda name=name: METHODS[name](Store(place), large))
        assert place in line
        assert not any(secret in line for secret in (bucket.server.secret, bucket.server.key, "wrongsecret"))
    assert len(fault_proxy.requests) <= len(names), "no request is repeated"


@pytest.mark.parametrize("fault", ["dead", "stall", "500"])
def test_a_store_that_is_dead_or_always_fails_is_an_outage_after_bounded_time(
    bucket: Bucket, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, large: Path, fault: str
) -> None:
    monkeypatch.setattr(store_module, "_READ_TIMEOUT_S", 0.5)
    bucket.write("a", b"some bytes")
    if fault == "dead":
        fault_proxy.die()
    else:
        fault_proxy.rates = {fault: 1}

    def use(name: str) -> None:
        with pytest.raises(OutageError, match=f"^the store is out of reach .{bucket.place}"):
            METHODS[name](Store(bucket.place), large)

    started = time.monotonic()
    with ThreadPoolExecutor(len(METHODS)) as pool:
        # a store that deletes the object and cannot say so changes what the others see
        list(pool.map(use, METHODS.keys() - {"create", "delete"}))
    assert time.monotonic() - started < 120


def test_a_place_that_is_none_and_an_endpoint_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("s3://", "s3://B/x", "s3://a/x", "s3://bucket/../x", "s3://bucket/x?y"):
        assert f"{place} is not allowed" in refused(lambda place=place: Store(place))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:geheim@127.0.0.1:1")
    with pytest.raises(OutageError, match=r"127\.0\.0\.1:1") as outage:
        Store("s3://bucket/x").read("a")
    assert "geheim" not in str(outage.value)
    for name, value in (("AWS_ENDPOINT_URL", "no url"), ("AWS_PROFILE", "no-such-profile")):
        monkeypatch.setenv(name, value)
        assert value in refused(lambda: Store("s3://bucket/x"))


def test_what_is_no_store_is_refused_at_once_and_no_redirect_is_followed(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, large: Path
) -> None:
    size = {"ETag": "a", "Last-Modified": "Mon, 23 Nov 2026 20:00:00 GMT", "Content-Length": "3000000000"}
    for headers, says in ((size, "has 3,000,000,000 bytes, more than"), ({}, "is not that of a store")):
        with foreign_server(**headers) as (uri, _):
            monkeypatch.setenv("AWS_ENDPOINT_URL", uri)
            assert says in refused(lambda: Store(bucket.place).read("a"))
    with (
        foreign_server() as (target, seen),
        foreign_server(301, Location=f"{target}/elsewhere?x=y") as (uri, asked),
    ):
        monkeypatch.setenv("AWS_ENDPOINT_URL", uri)
        for method in METHODS.values():
            assert "301" in refused(lambda method=method: method(Store(bucket.place), large))
    assert (len(asked), seen) == (len(METHODS), [])
