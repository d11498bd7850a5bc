"""The client of object stores, against real servers, with the faults that a network has."""

import hashlib
import http.client
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import SHARING
from object_store import ERRORS, Bucket, FaultProxy, S3Server, hostile_store
from test_security import foreign_server

from pipeline.addons.datasets.pack_target import open_target
from pipeline.addons.store import bucket as store_module
from pipeline.addons.store.bucket import ConflictError, MissingError, Store
from pipeline.data.access import OutageError
from pipeline.errors import RequestError, RunError

BYTES = random.Random(0).randbytes
LARGE = 33 << 20  # more than one part


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait 2 s for an answer instead of 20."""
    monkeypatch.setattr(store_module, "_READ_TIMEOUT_S", 2)


def get(url: str, first: int, last: int) -> tuple[int, bytes]:
    """Return the status and the body of a ranged read without credentials."""
    asked = urllib.request.Request(url, headers={"Range": f"bytes={first}-{last}"})
    with urllib.request.urlopen(asked) as answer:
        return answer.status, answer.read()


class TestFaultProxy:
    """The proxy's faults are those that it counts."""

    BODY = BYTES(200_000)

    @pytest.fixture
    def request_object(self, bucket: Bucket, fault_proxy: FaultProxy) -> Callable[..., http.client.HTTPResponse]:
        bucket.write("name", self.BODY)
        path = Store(bucket.place).presign("name", 600).removeprefix(fault_proxy.endpoint)

        def request(timeout: float = 1) -> http.client.HTTPResponse:
            connection = http.client.HTTPConnection("127.0.0.1", fault_proxy.port, timeout=timeout)
            connection.request("GET", path)
            return connection.getresponse()

        assert request().read() == self.BODY
        return request

    @pytest.mark.parametrize("fault", ERRORS)
    def test_an_error_is_one_of_s3(self, fault_proxy: FaultProxy, request_object: Any, fault: str) -> None:
        fault_proxy.rates = {fault: 1}
        answer = request_object()
        assert (answer.status, fault_proxy.counts) == (int(fault), Counter({fault: 1}))
        assert f"<Error><Code>{ERRORS[fault][1]}</Code>" in answer.read().decode()

    def test_a_body_is_truncated_wrong_late_or_never_complete(
        self, fault_proxy: FaultProxy, request_object: Any
    ) -> None:
        fault_proxy.rates = {"truncate": 1}
        with pytest.raises(http.client.IncompleteRead) as broken:
            request_object().read()
        assert broken.value.partial == self.BODY[:100_000]

        fault_proxy.rates = {"corrupt": 1}
        body = request_object().read()
        assert len(body) == len(self.BODY)
        assert sum(ours != theirs for ours, theirs in zip(self.BODY, body, strict=True)) == 1

        fault_proxy.rates, fault_proxy.pause_s = {"pause": 1}, 0.5
        started = time.monotonic()
        assert request_object().read() == self.BODY
        assert 0.5 <= time.monotonic() - started < 1

        fault_proxy.rates = {"stall": 1}
        answer = request_object()
        assert answer.read(100_000) == self.BODY[:100_000]
        with pytest.raises(TimeoutError):
            answer.read(1)
        assert fault_proxy.counts == dict.fromkeys(("truncate", "corrupt", "pause", "stall"), 1)

    @pytest.mark.parametrize("latency", [30, 300])
    def test_latency_is_of_each_request_and_not_of_the_others(
        self, fault_proxy: FaultProxy, request_object: Any, latency: float
    ) -> None:
        fault_proxy.latency_ms = latency
        started = time.monotonic()
        with ThreadPoolExecutor(10) as pool:
            assert set(pool.map(lambda _: request_object(5).read(), range(10))) == {self.BODY}
        assert latency / 1000 <= time.monotonic() - started < 3 * latency / 1000 + 0.3

    def test_a_dead_proxy_refuses_and_cuts_and_comes_back_on_its_port(
        self, fault_proxy: FaultProxy, request_object: Any
    ) -> None:
        fault_proxy.rates = {"stall": 1}
        answer = request_object(30)
        fault_proxy.die()
        with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
            answer.read()
        for _ in range(3):
            with pytest.raises(ConnectionRefusedError):
                request_object()
        assert fault_proxy.counts["dead"] == 1
        fault_proxy.rates = {}
        fault_proxy.revive()
        assert request_object().read() == self.BODY

    def test_faults_follow_from_the_seed_and_hit_only_the_requests_named(self, bucket: Bucket) -> None:
        hit = []
        for seed in (1, 1, 2):
            with FaultProxy(bucket.server.endpoint, seed, rates={"503": 0.3}, only=r"^GET .*\.tar$") as proxy:
                statuses = []
                for number in range(40):
                    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=5)
                    connection.request("GET", f"/{bucket.name}/{('a.tar', 'b.json')[number % 2]}")
                    statuses.append(connection.getresponse().status)
                hit.append([number for number, status in enumerate(statuses) if status == 503])
                assert len(hit[-1]) == proxy.counts["503"] > 0
        assert not any(number % 2 for number in hit[0] + hit[2])
        assert hit[0] == hit[1] != hit[2]


@pytest.fixture(params=["bucket", "weak_bucket"])
def any_bucket(request: pytest.FixtureRequest) -> Bucket:
    found: Bucket = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("prefix", ["", "/some/prefix with ümlaut"])
def test_objects_are_written_read_listed_and_deleted(any_bucket: Bucket, tmp_path: Path, prefix: str) -> None:
    store = Store(any_bucket.place + prefix)
    assert list(store.list()) == []
    assert store.head("a") is None
    for read in (store.read, lambda name: list(store.stream(name)), lambda name: store.read_to(name, tmp_path / "no")):
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
    assert (store.read("empty"), list(store.stream("empty"))) == (b"", [])
    assert [(entry.name, entry.size) for entry in store.list()] == [
        ("empty", 0), ("folder/a", 1000), ("folder/large", LARGE)
    ]  # fmt: skip
    assert [entry.name for entry in store.list("folder/l")] == ["folder/large"]
    assert any_bucket.names() == [f"{prefix}/{name}".strip("/") for name in ("empty", "folder/a", "folder/large")]
    store.delete("folder/a")
    assert [entry.name for entry in store.list()] == ["empty", "folder/large"]


def test_a_listing_has_more_than_one_page(bucket: Bucket) -> None:
    store = Store(f"{bucket.place}/many")
    names = [f"{number:05}" for number in range(1100)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: store.write(name, b"x"), names))
    assert [entry.name for entry in store.list()] == names


def test_a_large_object_is_streamed_and_ranges_are_read_with_a_presigned_url(bucket: Bucket, tmp_path: Path) -> None:
    store, large = Store(bucket.place), BYTES(LARGE)
    store.write("large", large)
    pieces = list(store.stream("large"))
    assert b"".join(pieces) == large
    assert max(map(len, pieces)) <= 8 << 20
    url = store.presign("large", 60)
    assert "X-Amz-Signature=" in url, "version 4: what boto3 does by default is refused by most stores"
    assert get(url, 5, 1004) == (206, large[5:1005])
    with pytest.raises(urllib.error.HTTPError, match="403"):
        get(url.replace("large", "larger"), 5, 1004)


def test_an_object_that_changes_while_it_is_streamed_is_an_error(bucket: Bucket) -> None:
    store = Store(bucket.place)
    store.write("a", bytes(20 << 20))
    pieces = store.stream("a")
    next(pieces)
    store.write("a", b"1" * (20 << 20))
    with pytest.raises(ConflictError):
        next(pieces)


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


def test_the_weak_server_ignores_conditions_and_answers_ranges_with_200(weak_bucket: Bucket) -> None:
    """Show what `doctor` must refuse; if this fails, the tests need another weak server."""
    store = Store(weak_bucket.place)
    store.write("lease", b"1", if_absent=True)
    store.write("lease", b"2", if_absent=True)
    store.write("lease", b"3", if_match='"0123456789abcdef0123456789abcdef"')
    store.write("large", bytes(10 << 20))
    assert get(store.presign("large", 60), 5, 1004) == (200, bytes(1000))
    with pytest.raises(RequestError, match="answers a ranged read with 200, not 206"):
        list(store.stream("large"))


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
            again = [etag for etag in pool.map(lambda number, same=same: write(number, **same), range(8)) if etag]
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


def test_every_method_survives_faults(bucket: Bucket, fault_proxy: FaultProxy, impatient: None, tmp_path: Path) -> None:
    fault_proxy.pause_s = 3  # longer than the time limit
    rates = {"500": 0.02, "503": 0.02, "truncate": 0.02, "stall": 0.01, "pause": 0.01}
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
        assert store.read(name) == b"".join(store.stream(name)) == contents[name] + b"!"
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


def test_wrong_bytes_are_noticed_where_the_store_keeps_checksums(bucket: Bucket, fault_proxy: FaultProxy) -> None:
    store = Store(bucket.place)
    contents = BYTES(100_000)
    store.write("a", contents)
    fault_proxy.only, fault_proxy.rates = "^GET", {"corrupt": 0.3}
    assert {hashlib.sha256(store.read("a")).digest() for _ in range(10)} == {hashlib.sha256(contents).digest()}
    assert fault_proxy.counts["corrupt"]


METHODS: dict[str, Callable[[Store, Path], Any]] = {
    "head": lambda store, path: store.head("a"),
    "read": lambda store, path: store.read("a"),
    "read_to": lambda store, path: store.read_to("a", path.with_name("to")),
    "stream": lambda store, path: list(store.stream("a")),
    "write": lambda store, path: store.write("a", b""),
    "create": lambda store, path: store.write("a", b"", if_absent=True),
    "upload": lambda store, path: store.upload(path, "a"),
    "list": lambda store, path: list(store.list()),
    "delete": lambda store, path: store.delete("a"),
}
WRONG: dict[str, tuple[dict[str, str | None], str]] = {
    "secret": ({"AWS_SECRET_ACCESS_KEY": "wrongsecret"}, r"is refused by the store \(403 .*: check the credentials"),
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
    for method in METHODS.values():
        started = time.monotonic()
        with pytest.raises(RequestError, match=says) as refused:
            method(Store(place), tmp_path / "file")
        assert time.monotonic() - started < 3 * SHARING
        message = str(refused.value)
        assert place in message
        assert "\n" not in message
        _assert_no_secret(message, bucket.server)


def _assert_no_secret(message: str, server: S3Server) -> None:
    for secret in (server.secret, server.key, "wrongsecret", "wrongkey"):
        assert secret not in message


def test_a_dead_store_is_an_outage_after_bounded_time(bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(LARGE))
    fault_proxy.die()
    _assert_outages(bucket, tmp_path / "file", METHODS, seconds=20)
    fault_proxy.revive()
    store = Store(bucket.place)
    store.write("a", b"")
    for name, method in METHODS.items():
        if name != "create":
            method(store, tmp_path / "file")


@pytest.mark.parametrize("fault", ["stall", "truncate", "500"])
def test_a_store_that_always_fails_is_an_outage_after_bounded_time(
    bucket: Bucket, fault_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    monkeypatch.setattr(store_module, "_READ_TIMEOUT_S", 0.5)
    (tmp_path / "file").write_bytes(bytes(LARGE))
    bucket.write("a", b"some bytes")
    fault_proxy.rates = {fault: 1}
    # a store that deletes the object and cannot say so changes what the others see
    _assert_outages(bucket, tmp_path / "file", METHODS.keys() - {"create", "delete"}, seconds=40)
    assert set(fault_proxy.counts) == {fault}


def _assert_outages(bucket: Bucket, path: Path, names: Iterable[str], seconds: float) -> None:
    """Assert that each method, all at the same time, raises OutageError within `seconds`."""

    def use(name: str) -> None:
        store = Store(bucket.place)
        with pytest.raises(OutageError, match=f"^the store is out of reach .{bucket.place}") as gone:
            METHODS[name](store, path)
        _assert_no_secret(str(gone.value), bucket.server)

    started = time.monotonic()
    with ThreadPoolExecutor(len(METHODS)) as pool:
        list(pool.map(use, names))
    assert time.monotonic() - started < seconds


def test_an_upload_that_is_killed_leaves_no_object(bucket: Bucket, fault_proxy: FaultProxy, tmp_path: Path) -> None:
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
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    with pytest.raises(RequestError, match="no-such-profile"):
        Store("s3://bucket/x")


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_refused_at_once_and_not_followed(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int
) -> None:
    (tmp_path / "file").write_bytes(bytes(LARGE))
    with foreign_server() as (target, seen), foreign_server(status, Location=f"{target}/elsewhere?x=y") as (uri, asked):
        monkeypatch.setenv("AWS_ENDPOINT_URL", uri)
        for method in METHODS.values():
            with pytest.raises(RequestError, match=rf"redirects \({status}\) to {target}, .*: set AWS_ENDPOINT_URL"):
                method(Store(bucket.place), tmp_path / "file")
    assert len(asked) == len(METHODS)
    assert seen == []


def test_a_bucket_in_another_region_is_asked_again_in_its_region(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with foreign_server(301, **{"x-amz-bucket-region": "eu-west-1"}) as (uri, asked):
        monkeypatch.setenv("AWS_ENDPOINT_URL", uri)
        with pytest.raises(RequestError, match=r"redirects \(301\) to another address"):
            Store(bucket.place).read("a")
    assert [signed.split("/")[2] for _, signed in asked] == ["us-east-1", "eu-west-1"]


def test_what_a_store_says_is_one_short_printable_line(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "first\nsecond \x9b31m" + "A" * 5000
    for status, code in ((403, "AccessDenied"), (403, "B" * 5000), (400, "C" * 5000)):
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
        with hostile_store(status, body, len(body)) as endpoint:
            monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
            with pytest.raises(RunError) as refusal:
                Store(bucket.place).read("a")
        assert len(str(refusal.value)) < 800
        assert str(refusal.value).isprintable()


def test_a_web_server_in_place_of_a_store_is_named(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the console of a store, on another port."""
    with hostile_store(200, b"<html>", 6, is_store=False) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        for call in (Store(bucket.place).read, Store(bucket.place).head):
            with pytest.raises(RequestError, match="is not that of a store: check AWS_ENDPOINT_URL"):
                call("a")


def test_a_large_object_that_is_replaced_while_it_is_read_is_read_again(tmp_path: Path, bucket: Bucket) -> None:
    old, new = BYTES(LARGE), BYTES(LARGE)
    bucket.write("journal", old)
    store = Store(bucket.place)
    events = store._client.meta.events

    def replace(**_: object) -> None:
        events.unregister("after-call.s3.HeadObject", replace)
        bucket.write("journal", new)

    events.register("after-call.s3.HeadObject", replace)
    store.read_to("journal", tmp_path / "journal")
    assert (tmp_path / "journal").read_bytes() == new


def test_an_object_of_any_size_is_not_read_into_memory(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    with hostile_store(200, b"", 3_000_000_000) as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        for read in (Store(bucket.place).read, open_target(Store(bucket.place)).read):
            with pytest.raises(RequestError, match="has 3,000,000,000 bytes, more than the 268,435,456 allowed"):
                read(".packing.json")


def test_a_server_ends_with_the_tests(tmp_path: Path) -> None:
    program = f"""
import os, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
from pathlib import Path
from object_store import Rclone
server = Rclone(Path({str(tmp_path)!r})).start().wait_ready()
print(server.port, flush=True)
os.kill(os.getpid(), 9)
"""
    started = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert started.returncode == -signal.SIGKILL, started.stderr
    time.sleep(0.2)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(started.stdout)), timeout=1)
