"""The client of object stores, against real servers, with the faults that a network has."""

import itertools
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import SHARING
from object_store import Bucket, FaultProxy, S3Server, hostile_store
from test_security import foreign_server

from pipeline.addons.datasets.pack_target import open_target
from pipeline.addons.store import bucket as store_module
from pipeline.addons.store.bucket import ConflictError, MissingError, Store
from pipeline.data.interface import OutageError
from pipeline.errors import RequestError, RunError

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
    assert store.head("a") is None
    for read in (store.read, lambda name: store.read_to(name, tmp_path / "no")):
        with pytest.raises(MissingError, match=f"^{store}/a does not exist$"):
            read("a")
    store.delete("a")
    small, large = BYTES(1000), BYTES(LARGE)
    etag = store.write("folder/a", small)
    assert (store.read("folder/a"), store.read_described("folder/a")[1].etag) == (small, etag)
    found = store.head("folder/a")
    assert found
    assert (found.name, found.size, found.etag, 0 <= found.age_s < 60) == ("folder/a", 1000, etag, True)
    with pytest.raises(RequestError, match=r"has 1,000 bytes, more than the 999 allowed"):
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


def test_a_listing_has_more_than_one_page(bucket: Bucket) -> None:
    store = Store(f"{bucket.place}/many")
    names = [f"{number:05}" for number in range(1100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.write(name, b"x"), names))
    assert [entry.name for entry in store.list()] == names


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
    assert store.head("lease") is None


def test_one_of_several_writers_at_once_wins(bucket: Bucket) -> None:
    stores = [Store(bucket.place) for _ in range(8)]

    def write(number: int, **condition: Any) -> str | None:
        try:
            return stores[number].write("lease", random.randbytes(20), **condition)
        except ConflictError:
            return None

    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):  # with other bytes each time: the etag is their digest
            stores[0].delete("lease")
            won = [etag for etag in pool.map(lambda number: write(number, if_absent=True), range(8)) if etag]
            assert len(won) == 1
            same = {"if_match": won[0]}
            again = [
                etag for etag in pool.map(lambda number, same=same: write(number, **same), range(8)) if etag
            ]
            assert again == [stores[0].read_described("lease")[1].etag]


@pytest.mark.parametrize("condition", ["if_absent", "if_match"])
def test_a_conditional_write_whose_answer_is_lost_is_no_conflict(
    bucket: Bucket, fault_proxy: FaultProxy, impatient: None, condition: str
) -> None:
    direct = bucket.server.client()
    store = Store(bucket.place)
    arguments: dict[str, Any] = {"if_absent": True}
    if condition == "if_match":
        arguments = {"if_match": store.write("lease", b"mine before")}
    fault_proxy.only, fault_proxy.rates = "^PUT", {"truncate": 1}
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(store.write, "lease", b"mine", **arguments)
        while not fault_proxy.counts["truncate"]:
            time.sleep(0.001)
        fault_proxy.rates = {}
        assert writing.result() == direct.head_object(Bucket=bucket.name, Key="lease")["ETag"]
    assert sum(asked.startswith("PUT") for asked in fault_proxy.requests) >= 2
    with pytest.raises(ConflictError):
        store.write("lease", b"mine", **arguments)


def test_every_method_survives_faults(
    bucket: Bucket, fault_proxy: FaultProxy, impatient: None, tmp_path: Path
) -> None:
    rates = {"500": 0.02, "503": 0.02, "truncate": 0.02, "stall": 0.02}
    store = Store(f"{bucket.place}/prefix")
    contents = {f"{number:03}": BYTES(1000 + number) for number in range(60)}
    path = tmp_path / "large"
    path.write_bytes(BYTES(LARGE))
    fault_proxy.rates = rates

    def use(name: str) -> None:
        etag = store.write(name, contents[name], if_absent=True)
        assert store.write(name, contents[name] + b"!", if_match=etag) != etag
        found = store.head(name)
        assert found
        assert found.size == len(contents[name]) + 1
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
    assert fault_proxy.counts.keys() == rates.keys()
    assert 0.05 < fault_proxy.counts.total() / len(fault_proxy.requests) < 0.12


METHODS: dict[str, Callable[[Store, Path], Any]] = {
    "head": lambda store, path: store.head("a"),
    "read": lambda store, path: store.read("a"),
    "read_to": lambda store, path: store.read_to("a", path.with_name("to")),
    "write": lambda store, path: store.write("a", b""),
    "create": lambda store, path: store.write("a", b"", if_absent=True),
    "upload": lambda store, path: store.upload(path, "a"),
    "list": lambda store, path: list(store.list()),
    "delete": lambda store, path: store.delete("a"),
}
WRONG: dict[str, tuple[dict[str, str | None], str]] = {
    "secret": (
        {"AWS_SECRET_ACCESS_KEY": "wrongsecret"},
        r"is refused by the store \(403 .*: check the credentials",
    ),
    "key": ({"AWS_ACCESS_KEY_ID": "wrongkey"}, r"is refused by the store \(403 .*: check the credentials"),
    "no credentials": ({"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None}, "needs credentials"),
    "half": (
        {"AWS_SECRET_ACCESS_KEY": None},
        "cannot be reached with this environment: .* missing: AWS_SECRET_ACCESS_KEY",
    ),
    "bucket": ({}, "there is no such bucket: create it"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_requests_are_refused_at_once_in_one_line_without_a_secret(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: str
) -> None:
    changes, says = WRONG[wrong]
    for name, value in changes.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    (tmp_path / "file").write_bytes(bytes(LARGE))
    place = "s3://no-such-bucket/x" if wrong == "bucket" else bucket.place
    # these begin with HEAD, whose answer does not tell a missing bucket from a missing object
    names = METHODS.keys() - ({"head", "read_to"} if wrong == "bucket" else set())
    for name in names:
        started = time.monotonic()
        with pytest.raises(RequestError, match=says) as refused:
            METHODS[name](Store(place), tmp_path / "file")
        assert time.monotonic() - started < 3 * SHARING
        message = str(refused.value)
        assert place in message
        assert "\n" not in message
        _assert_no_secret(message, bucket.server)


def _assert_no_secret(message: str, server: S3Server) -> None:
    for secret in (server.secret, server.key, "wrongsecret", "wrongkey"):
        assert secret not in message


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
        with pytest.raises(OutageError, match=f"^the store is out of reach .{bucket.place}") as gone:
            METHODS[name](Store(bucket.place), tmp_path / "file")
        _assert_no_secret(str(gone.value), bucket.server)

    started = time.monotonic()
    with ThreadPoolExecutor(len(METHODS)) as pool:
        # a store that deletes the object and cannot say so changes what the others see
        list(pool.map(use, METHODS.keys() - {"create", "delete"}))
    assert time.monotonic() - started < 40
    fault_proxy.revive()
    fault_proxy.rates = {}
    Store(bucket.place).write("a", b"")


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
    command = [sys.executable, "-c", program, bucket.place, str(path)]
    for instant in itertools.count():  # after the first, second, … request of the upload
        asked = len(fault_proxy.requests)
        with subprocess.Popen(command) as process:
            while process.poll() is None and len(fault_proxy.requests) <= asked + instant:
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
        if not process.returncode:
            break
        time.sleep(0.5)  # what the server has received by then
        if bucket.names():  # killed after the server had completed it
            assert Store(bucket.place).read("large") == path.read_bytes()
            break
    assert instant >= 3
    assert bucket.read("large") == path.read_bytes()


def test_a_place_that_is_none_and_an_endpoint_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("s3://", "s3://B/x", "s3://a/x", "s3://bucket/../x", "s3://bucket/x?y"):
        with pytest.raises(RequestError, match="is not allowed: give s3://bucket/prefix"):
            Store(place)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "no url")
    with pytest.raises(RequestError, match="cannot be reached with this environment"):
        Store("s3://bucket/x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:geheim@127.0.0.1:1")
    with pytest.raises(RequestError, match="AWS_ENDPOINT_URL holds a user or a password") as refused:
        Store("s3://bucket/x")
    assert "geheim" not in str(refused.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    with pytest.raises(RequestError, match="no-such-profile"):
        Store("s3://bucket/x")


@pytest.mark.parametrize("status", [301, 307])
def test_a_redirect_is_refused_at_once_and_not_followed(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int
) -> None:
    (tmp_path / "file").write_bytes(bytes(LARGE))
    with (
        foreign_server() as (target, seen),
        foreign_server(status, Location=f"{target}/elsewhere?x=y") as (uri, asked),
    ):
        monkeypatch.setenv("AWS_ENDPOINT_URL", uri)
        for method in METHODS.values():
            with pytest.raises(RequestError, match=rf"redirects .*\({status}\)"):
                method(Store(bucket.place), tmp_path / "file")
    assert len(asked) == len(METHODS)
    assert seen == []


def test_a_hostile_answer_is_one_short_printable_line(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "first\nsecond \x9b31m" + "A" * 5000
    body = (
        f"<?xml version='1.0'?><Error><Code>{'C' * 5000}</Code><Message>{message}</Message></Error>".encode()
    )
    # the last is a web server, such as the console of a store on another port
    for status, text, is_store in ((403, body, True), (400, body, True), (200, b"<html>", False)):
        with hostile_store(status, text, len(text), is_store=is_store) as endpoint:
            monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
            with pytest.raises(RunError) as refusal:
                Store(bucket.place).read("a")
        assert len(str(refusal.value)) < 800
        assert str(refusal.value).isprintable()
    assert "is not that of a store" in str(refusal.value)


def test_an_object_of_any_size_is_not_read_into_memory(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hostile_store(200, b"", 3_000_000_000) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        for read in (Store(bucket.place).read, open_target(Store(bucket.place)).read):
            with pytest.raises(
                RequestError, match="has 3,000,000,000 bytes, more than the 268,435,456 allowed"
            ):
                read(".packing.json")
