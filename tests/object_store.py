"""Start real S3 servers, and inject faults between a server and its clients.

`python tests/object_store.py [--latency MS]` starts a server with a bucket and a proxy in front of
it, for work by hand and for benchmarks: the proxy then has a process of its own.
"""

import argparse
import asyncio
import contextlib
import functools
import os
import random
import re
import secrets
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from harness import SHARING, environment

from pipeline.orphan import die_with_parent

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
                assert time.monotonic() < end, (self.folder / "server.log").read_text(errors="replace")[
                    -3000:
                ]
                assert self.process.poll() is None, (self.folder / "server.log").read_text(errors="replace")[
                    -3000:
                ]
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
        client = self.client()
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=name):
            keys = [{"Key": entry["Key"]} for entry in page.get("Contents", ())]
            if keys:
                client.delete_objects(Bucket=name, Delete={"Objects": keys})
        with contextlib.suppress(ClientError):  # an upload that was never completed is in it
            client.delete_bucket(Bucket=name)

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
        pages = (
            self.server.client().get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        )
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]

    def read(self, key: str) -> bytes:
        return bytes(self.server.client().get_object(Bucket=self.name, Key=key)["Body"].read())

    def write(self, key: str, data: bytes) -> None:
        self.server.client().put_object(Bucket=self.name, Key=key, Body=data)

    def delete(self, key: str) -> None:
        self.server.client().delete_object(Bucket=self.name, Key=key)


ERRORS = {
    "403": ("403 Forbidden", "AccessDenied", "Access Denied."),
    "500": (
        "500 Internal Server Error",
        "InternalError",
        "We encountered an internal error. Please try again.",
    ),
    "503": ("503 Slow Down", "SlowDown", "Please reduce your request rate."),
}
"""Faults that are an answer: status, code and message, as Amazon S3 gives them."""
FAULTS = (*ERRORS, "truncate", "corrupt", "stall")


@dataclass
class FaultProxy:
    """An HTTP proxy in front of an S3 server, whose faults can be changed at any time.

    The server sees the Host that the client has signed, so signatures stay valid. Faults are drawn
    for each request from a generator with `seed`. A context manager: it listens inside.
    """

    upstream: str
    """The server's endpoint: http://host:port."""
    seed: int = 0
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
    """A regular expression; faults hit only requests whose `METHOD /bucket/key?query` it finds."""

    counts: Counter[str] = field(default_factory=Counter)
    """The faults that were really injected; `dead` for each connection that `die` has cut."""
    requests: list[str] = field(default_factory=list)
    """All requests as `METHOD /bucket/key?query`, with ` bytes=…` if they asked for a range."""

    def __enter__(self) -> "FaultProxy":
        unknown = set(self.rates) - set(FAULTS)
        assert not unknown, unknown
        self._random = random.Random(self.seed)
        (self.port,) = free_ports(1)
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", self.port))
        self._listener.setblocking(False)
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault proxy", daemon=True)
        self._thread.start()
        self._in_loop(self._open())
        self.is_dead = False
        return self

    def __exit__(self, *_: object) -> None:
        self.die()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._listener.close()

    def die(self) -> None:
        """Cut all connections and refuse new ones. The port stays ours."""
        if not self.is_dead:
            self._in_loop(self._close())
        self.is_dead = True

    def revive(self) -> None:
        if self.is_dead:
            self._in_loop(self._open())
        self.is_dead = False

    def _in_loop(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _open(self) -> None:
        self._listener.listen(512)
        self._accepting = asyncio.create_task(self._accept())

    async def _close(self) -> None:
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        self._listener.shutdown(socket.SHUT_RDWR)  # a forked process may also hold it: close is not enough
        for task in self._connections:
            task.cancel()
            self.counts["dead"] += 1
        if self._connections:
            await asyncio.wait(self._connections)

    async def _accept(self) -> None:
        while True:
            connection, _ = await self._loop.sock_accept(self._listener)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = asyncio.create_task(self._serve(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: socket.socket) -> None:
        """Forward the requests of one connection until one of its ends closes it."""
        reader, writer = await asyncio.open_connection(sock=connection, limit=_BUFFER)
        server: asyncio.StreamWriter | None = None
        try:
            address = self.upstream.partition("://")[2].split(":")
            answers, server = await asyncio.open_connection(address[0], int(address[1]), limit=_BUFFER)
            while await self._forward(reader, writer, answers, server):
                pass
        except (OSError, EOFError, asyncio.CancelledError):
            with contextlib.suppress(OSError):  # the client has closed it
                connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )  # reset it
        finally:
            if server:
                server.transport.abort()
            writer.close()

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
        answers: asyncio.StreamReader, server: asyncio.StreamWriter,
    ) -> bool:  # fmt: skip
        """Answer one request; return True if the connection can take another."""
        head = await _read_head(reader)
        if not head:
            return False
        method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
        asked = f"{method} {path}"
        bytes_range = _header(head, b"range")
        self.requests.append(f"{asked} {bytes_range}" if bytes_range else asked)
        fault = ""
        if re.search(self.only, asked):
            fault = self._draw()
            if self.latency_ms:
                await asyncio.sleep(self.latency_ms / 1000)
        if _header(head, b"expect"):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = re.sub(rb"(?i)\r\nexpect:[^\r]*", b"", head)
        if fault in ERRORS:
            async for _ in _body(reader, head):
                pass
            self.counts[fault] += 1
            writer.write(_error(fault, with_body=method != "HEAD"))
            await writer.drain()
            return True
        server.write(head)
        async for piece in _body(reader, head):
            server.write(piece)
            await server.drain()
        answer = await _read_head(answers)
        if not answer:
            return False
        pieces = _body(answers, answer, of=method)
        if not fault:
            writer.write(answer)
            async for piece in pieces:
                writer.write(piece)
                await writer.drain()
            return True
        body = b"".join([piece async for piece in pieces])
        return await self._spoil(fault, writer, answer, body)

    def _draw(self) -> str:
        """Return the fault of the next request, or ""."""
        drawn = self._random.random()
        for fault, rate in self.rates.items():
            drawn -= rate
            if drawn < 0:
                return fault
        return ""

    async def _spoil(self, fault: str, writer: asyncio.StreamWriter, answer: bytes, body: bytes) -> bool:
        """Send an answer with a fault; return True if the connection can take another request."""
        half = len(body) // 2
        if fault == "corrupt":
            if body:
                self.counts[fault] += 1
                body = body[:half] + bytes([body[half] ^ 0xFF]) + body[half + 1 :]
            writer.write(answer + body)
            await writer.drain()
            return True
        self.counts[fault] += 1
        whole = answer + body
        sent = len(answer) + half if body else 0
        writer.write(whole[:sent])
        await writer.drain()
        if fault == "truncate":
            return False
        await asyncio.sleep(1e6)  # until the client or `die` closes it
        return False


_BUFFER = 1 << 20
"""Limit of a stream's buffer: an image passes in one piece."""


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    """Return the first line and the headers; b"" at the end of the connection."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


@contextlib.contextmanager
def answering(pieces: list[bytes], pause_s: float = 0) -> Iterator[str]:
    """Start a server that answers each request with these pieces; yield its endpoint."""

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.recv(1 << 16)
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause_s)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def hostile_store(
    status: int, body: bytes, stated_bytes: int, *, is_store: bool = True
) -> contextlib.AbstractContextManager[str]:
    """Start a server that gives every GET the same answer; is_store: with a store's headers."""
    headers = f"HTTP/1.1 {status} Answer\r\nContent-Length: {stated_bytes}\r\nConnection: close\r\n"
    if is_store:
        headers += 'ETag: "a"\r\nLast-Modified: Mon, 23 Nov 2026 20:00:00 GMT\r\n'
    return answering([headers.encode() + b"\r\n" + body])


def _header(head: bytes, name: bytes) -> str:
    """Return the value of a header, or ""."""
    found = re.search(rb"(?i)\r\n" + name + rb":[ \t]*([^\r]*)", head)
    return found[1].decode() if found else ""


async def _body(reader: asyncio.StreamReader, head: bytes, of: str = "") -> AsyncIterator[bytes]:
    """Yield the body that follows `head`, as it is sent. of: the method, for an answer."""
    if of == "HEAD" or (of and head[9:12] in (b"204", b"304")):
        return
    if _header(head, b"transfer-encoding").lower() == "chunked":
        size = -1
        while size:
            line = await reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            yield line + await reader.readexactly(size + 2)
        return
    left = int(_header(head, b"content-length") or 0)
    while left:
        piece = await reader.read(min(left, _BUFFER))
        if not piece:
            raise EOFError
        left -= len(piece)
        yield piece


def _error(fault: str, *, with_body: bool) -> bytes:
    """Return an answer that is an error of S3."""
    status, code, message = ERRORS[fault]
    body = (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{code}</Code><Message>{message}</Message>'
        "<RequestId>0</RequestId></Error>"
    ) if with_body else ""  # fmt: skip
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()


def _serve() -> None:
    parser = argparse.ArgumentParser(
        description="Start an S3 server with a bucket, and a proxy with latency."
    )
    parser.add_argument("--latency", type=float, default=0, metavar="MS")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # remove the folder, as at Ctrl-C
    folder = Path(tempfile.mkdtemp(prefix="object-store-"))
    server = Weed(folder).start()
    try:
        bucket = server.wait_ready().make_bucket()
        with FaultProxy(server.endpoint, latency_ms=options.latency) as proxy:
            env = server.env | {
                "AWS_ENDPOINT_URL": proxy.endpoint,
                "DIRECT": server.endpoint,
                "BUCKET": bucket,
            }
            print(
                *(f"export {name}={shlex.quote(value)}" for name, value in env.items()), sep="\n", flush=True
            )
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
    finally:
        server.kill()
        shutil.rmtree(folder)


if __name__ == "__main__":
    _serve()
