"""Start real S3 servers, and inject faults between a server and its clients.

`python tests/object_store.py [--latency MS]` starts a server with a bucket and a proxy in front of
it, for work by hand and for benchmarks: the proxy then has a process of its own.
"""

import contextlib
import functools
import os
import random
import re
import secrets
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from harness import SHARING, environment

from pipeline.supervision import die_with_parent

BIN = Path(sys.executable).parent


def free_ports(count: int) -> list[int]:
    """Return different TCP ports that nothing uses at the moment."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


class S3Server:
    """A real S3 server that can be killed and restarted on the same port and folder.

    It ends with this process. `env` has what its clients need, and nothing else of AWS.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, *self.more_ports = free_ports(10)
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.key, self.secret = f"key{secrets.token_hex(8)}", f"secret{secrets.token_hex(16)}"
        self.env = {
            "AWS_ACCESS_KEY_ID": self.key, "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_ENDPOINT_URL": self.endpoint, "AWS_REGION": "us-east-1",
            # what this machine's user has configured must not matter
            "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip

    def command(self) -> list[str]:
        raise NotImplementedError

    def start(self) -> "S3Server":
        data = self.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        keys = {"AWS_ACCESS_KEY_ID": self.key, "AWS_SECRET_ACCESS_KEY": self.secret}
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                self.command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
                cwd=self.folder, env=environment(**keys, TMPDIR=str(self.folder), HOME=str(self.folder)),
                preexec_fn=functools.partial(die_with_parent, os.getpid()),  # noqa: PLW1509 (it makes two system calls)
            )  # fmt: skip
        return self

    def client(self) -> Any:
        """Return a boto3 client of this server, which does not retry."""
        options = Config(connect_timeout=5, read_timeout=20, retries={"total_max_attempts": 1})
        return boto3.client(
            "s3", endpoint_url=self.endpoint, aws_access_key_id=self.key, aws_secret_access_key=self.secret,
            region_name="us-east-1", config=options,
        )  # fmt: skip

    def wait_ready(self) -> "S3Server":
        """Wait until it stores an object."""
        end = time.monotonic() + 60 * SHARING
        while True:
            try:
                self.delete_bucket(self.make_bucket())
                return self
            except (BotoCoreError, ClientError):
                log = (self.folder / "server.log").read_text(errors="replace")[-3000:]
                assert time.monotonic() < end, log
                assert self.process.poll() is None, log
                time.sleep(0.1)

    def make_bucket(self) -> str:
        """Make a bucket that takes objects; return its name."""
        name = f"test-{secrets.token_hex(6)}"
        client = self.client()
        client.create_bucket(Bucket=name)
        client.put_object(Bucket=name, Key="ready", Body=b"")
        client.delete_object(Bucket=name, Key="ready")
        return name

    def delete_bucket(self, name: str) -> None:
        """Delete a bucket with all its objects, so that the server has their disk back."""
        bucket = Bucket(self, name)
        for key in bucket.names():
            bucket.delete(key)
        with contextlib.suppress(ClientError):  # an upload that was never completed is in it
            self.client().delete_bucket(Bucket=name)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Weed(S3Server):
    """SeaweedFS: honours ranges, If-None-Match and If-Match. Starts in 1 s, takes 130 MB."""

    def command(self) -> list[str]:
        ports = (
            "s3.port.grpc", "filer.port", "filer.port.grpc", "master.port", "master.port.grpc", "volume.port",
            "volume.port.grpc", "admin.port", "admin.port.grpc",
        )  # fmt: skip
        return [
            # `mini` starts faster than `server`, which waits 3 s for the election of its master
            str(BIN / "weed"), f"-logdir={self.folder}", "mini", f"-dir={self.folder / 'data'}",
            "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-s3.port={self.port}",
            *(f"-{name}={port}" for name, port in zip(ports, self.more_ports, strict=True)),
            "-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false",
            "-master.telemetry=false",
            # each bucket takes a volume of its own; the default limit follows from the free disk
            "-volume.max=2000", "-master.volumeSizeLimitMB=64", "-s3.autoCreateBucket=false",
        ]  # fmt: skip

    def kill(self) -> None:
        super().kill()
        for port in (self.port, *self.more_ports):
            for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):  # the server does not ask where
                path.unlink(missing_ok=True)


class Rclone(S3Server):
    """`rclone serve s3`: ignores If-None-Match and If-Match, answers a range with 200, not 206."""

    def command(self) -> list[str]:
        return [str(BIN / "rclone"), "serve", "s3", "--config", os.devnull,
                "--cache-dir", str(self.folder / "cache"), "--addr", f"127.0.0.1:{self.port}",
                "--auth-key", f"{self.key},{self.secret}", str(self.folder / "data")]  # fmt: skip


@dataclass
class Bucket:
    """A bucket of its own for a test."""

    server: S3Server
    name: str

    @property
    def place(self) -> str:
        return f"s3://{self.name}"

    def names(self, prefix: str = "") -> list[str]:
        """Return the keys of all objects, in order."""
        paginator = self.server.client().get_paginator("list_objects_v2")
        pages = paginator.paginate(Bucket=self.name, Prefix=prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]

    def read(self, key: str) -> bytes:
        return bytes(self.server.client().get_object(Bucket=self.name, Key=key)["Body"].read())

    def write(self, key: str, data: bytes) -> None:
        self.server.client().put_object(Bucket=self.name, Key=key, Body=data)

    def delete(self, key: str) -> None:
        self.server.client().delete_object(Bucket=self.name, Key=key)


ERRORS = {
    "403": ("403 Forbidden", "AccessDenied"),
    "500": ("500 Internal Server Error", "InternalError"),
    "503": ("503 Slow Down", "SlowDown"),
}
"""Faults that are an answer: status and code, as Amazon S3 gives them."""
FAULTS = (*ERRORS, "truncate", "corrupt", "stall")


@dataclass
class FaultProxy:
    """An HTTP proxy in front of an S3 server, whose faults can be changed at any time.

    The server sees the Host that the client has signed, so signatures stay valid. A context
    manager: it listens inside.
    """

    upstream: str
    """The server's endpoint: http://host:port."""
    latency_ms: float = 0
    """Added to each request that matches `only`."""
    rates: dict[str, float] = field(default_factory=dict)
    """The fraction of requests with each fault:

    403, 500, 503: an error of S3 instead of the server's answer.
    truncate: half of the body, then the connection is closed; without a body no answer at all.
    corrupt: one byte of the body is wrong (requests whose answer has no body go unharmed).
    stall: half of the body, then nothing more on this connection; without a body no answer.
    """
    only: str = ""
    """A regular expression; faults hit only requests that it finds as `METHOD /key?query SIZE`."""
    counts: Counter[str] = field(default_factory=Counter)
    """The faults that were really injected."""
    requests: list[str] = field(default_factory=list)
    """All requests as `METHOD /bucket/key?query`, with ` bytes=…` if they asked for a range."""
    authorizations: set[str] = field(default_factory=set)
    """The headers Authorization of all requests."""

    def __enter__(self) -> "FaultProxy":
        self._random, self._lock = random.Random(0), threading.Lock()
        self._connections: set[socket.socket] = set()
        (port,) = free_ports(1)  # one that was bound to port 0 would be lost in `die`
        self._listener = socket.create_server(("127.0.0.1", port))
        self.endpoint = f"http://127.0.0.1:{port}"
        self.is_dead = True
        self.revive()
        return self

    def __exit__(self, *_: object) -> None:
        self.die()
        self._listener.close()

    def die(self) -> None:
        """Cut all connections and refuse new ones. The port stays ours."""
        if not self.is_dead:
            self.is_dead = True
            # a forked process may also hold them: to close them is not enough
            self._listener.shutdown(socket.SHUT_RDWR)
            self._accepting.join()
            for connection in list(self._connections):
                with contextlib.suppress(OSError):  # the client has closed it
                    connection.shutdown(socket.SHUT_RDWR)

    def revive(self) -> None:
        if self.is_dead:
            self.is_dead = False
            self._listener.listen(512)
            self._accepting = threading.Thread(target=self._accept, daemon=True)
            self._accepting.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # `die`
            while True:
                connection, _ = self._listener.accept()
                self._connections.add(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """Forward the requests of one connection until one of its ends closes it."""
        host, port = self.upstream.partition("://")[2].split(":")
        with (
            contextlib.suppress(OSError, EOFError, ValueError),
            client,
            socket.create_connection((host, int(port))) as server,
        ):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            requests, answers = client.makefile("rb"), server.makefile("rb")
            while self._forward(client, requests, server, answers):
                pass
        self._connections.discard(client)

    def _forward(
        self, client: socket.socket, requests: BinaryIO, server: socket.socket, answers: BinaryIO
    ) -> bool:
        """Answer one request; return True if the connection can take another."""
        ready = select.poll()  # unlike select, for descriptors above 1,023, too
        for end in (client, server):
            ready.register(end, select.POLLIN)
        if server.fileno() in dict(ready.poll()):
            return False  # the server has closed an idle connection: the client must see that
        head = _read_head(requests)
        if not head:
            return False
        method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
        asked = f"{method} {path}"
        self.requests.append(f"{asked} {_header(head, b'range')}".strip())
        self.authorizations.add(_header(head, b"authorization"))
        fault = ""
        if re.search(self.only, f"{asked} {_header(head, b'content-length')}"):
            fault = self._draw()
            time.sleep(self.latency_ms / 1000)
        if _header(head, b"expect"):
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = re.sub(rb"(?i)\r\nexpect:[^\r]*", b"", head)
        sent = _read_body(requests, head)
        if fault in ERRORS:
            self._count(fault)
            client.sendall(_error(fault, with_body=method != "HEAD"))
            return True
        server.sendall(head + sent)
        answer = _read_head(answers)
        if not answer:
            return False
        body = b"" if method == "HEAD" else _read_body(answers, answer)
        half = len(body) // 2
        if fault in ("truncate", "stall"):
            self._count(fault)
            client.sendall(answer + body[:half] if body else b"")
            if fault == "stall":
                client.recv(1)  # until the client or `die` closes it
            return False
        if fault == "corrupt" and body:
            self._count(fault)
            body = body[:half] + bytes([body[half] ^ 0xFF]) + body[half + 1 :]
        client.sendall(answer + body)
        return True

    def _draw(self) -> str:
        """Return the fault of the next request, or ""."""
        drawn = self._random.random()
        for fault, rate in self.rates.items():
            drawn -= rate
            if drawn < 0:
                return fault
        return ""

    def _count(self, fault: str) -> None:
        with self._lock:
            self.counts[fault] += 1


def _read_head(stream: BinaryIO) -> bytes:
    """Return the first line and the headers; b"" at the end of the connection."""
    lines = [stream.readline()]
    while lines[-1] not in (b"", b"\r\n"):
        lines.append(stream.readline())
    return b"".join(lines) if lines[-1] else b""


def _header(head: bytes, name: bytes) -> str:
    """Return the value of a header, or ""."""
    found = re.search(rb"(?i)\r\n" + name + rb":[ \t]*([^\r]*)", head)
    return found[1].decode() if found else ""


def _read_body(stream: BinaryIO, head: bytes) -> bytes:
    """Return the body that follows `head`, as it is sent."""
    if _header(head, b"transfer-encoding").lower() != "chunked":
        return _read(stream, int(_header(head, b"content-length") or 0))
    body, size = b"", -1
    while size:
        line = stream.readline()
        size = int(line.split(b";")[0], 16)
        body += line + _read(stream, size + 2)
    return body


def _read(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _error(fault: str, *, with_body: bool) -> bytes:
    """Return an answer that is an error of S3."""
    status, code = ERRORS[fault]
    body = f"<Error><Code>{code}</Code><Message>{status}</Message></Error>" if with_body else ""
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()


def _serve(latency_ms: float) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # remove the folder, as at Ctrl-C
    folder = Path(tempfile.mkdtemp(prefix="object-store-"))
    server = Weed(folder).start()
    try:
        bucket = server.wait_ready().make_bucket()
        with FaultProxy(server.endpoint, latency_ms=latency_ms) as proxy:
            env = server.env | {"AWS_ENDPOINT_URL": proxy.endpoint, "BUCKET": bucket}
            lines = (f"export {name}={shlex.quote(value)}" for name, value in env.items())
            print(*lines, sep="\n", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
    finally:
        server.kill()
        shutil.rmtree(folder)


if __name__ == "__main__":
    _serve(float(sys.argv[2]) if sys.argv[1:2] == ["--latency"] else 0)
