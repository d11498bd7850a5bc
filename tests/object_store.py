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
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from email.message import Message
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from harness import SHARING, environment, free_ports

from pipeline.supervision import die_with_parent

BIN = Path(sys.executable).parent


class S3Server:
    """A real S3 server that can be killed and restarted on the same port and folder.

    It ends with this process. A subclass has its `command`.
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

    def start(self) -> "S3Server":
        (self.folder / "data").mkdir(parents=True, exist_ok=True)
        keys = {"AWS_ACCESS_KEY_ID": self.key, "AWS_SECRET_ACCESS_KEY": self.secret}
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                self.command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
                cwd=self.folder, env=environment(**keys, TMPDIR=str(self.folder), HOME=str(self.folder)),
                preexec_fn=functools.partial(die_with_parent, os.getpid()),  # noqa: PLW1509 (it makes two system calls)
            )  # fmt: skip
        return self

    def client(self) -> Any:
        """Return a client that does not retry."""
        options = Config(connect_timeout=5, read_timeout=20, retries={"total_max_attempts": 1})
        return boto3.client(
            "s3", endpoint_url=self.endpoint, aws_access_key_id=self.key, aws_secret_access_key=self.secret,
            region_name="us-east-1", config=options,
        )  # fmt: skip

    def wait_ready(self) -> "S3Server":
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
        client, name = self.client(), f"test-{secrets.token_hex(6)}"
        client.create_bucket(Bucket=name)
        client.put_object(Bucket=name, Key="ready", Body=b"")
        client.delete_object(Bucket=name, Key="ready")
        return name

    def delete_bucket(self, name: str) -> None:
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
    server: S3Server
    name: str

    @property
    def place(self) -> str:
        return f"s3://{self.name}"

    def names(self, prefix: str = "") -> list[str]:
        listing = self.server.client().get_paginator("list_objects_v2")
        pages = listing.paginate(Bucket=self.name, Prefix=prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", ())]

    def read(self, key: str) -> bytes:
        return bytes(self.server.client().get_object(Bucket=self.name, Key=key)["Body"].read())

    def write(self, key: str, data: bytes) -> None:
        self.server.client().put_object(Bucket=self.name, Key=key, Body=data)

    def delete(self, key: str) -> None:
        self.server.client().delete_object(Bucket=self.name, Key=key)


ERRORS = {"403": "AccessDenied", "500": "InternalError", "503": "SlowDown"}
"""Faults that are an answer: its status and S3's code."""
FAULTS = (*ERRORS, "truncate", "corrupt", "stall")


@dataclass
class FaultProxy:
    """An HTTP proxy in front of a server, whose faults can be changed at any time.

    The server sees the Host that the client has signed. A context manager: it listens inside.
    """

    upstream: str  # http://host:port
    latency_ms: float = 0  # added to each request that matches `only`
    rates: dict[str, float] = field(default_factory=dict)
    """The fraction of requests with each fault:

    403, 500, 503: an error of S3 instead of the server's answer.
    truncate: half of the body, then the connection is closed; without a body no answer at all.
    corrupt: one byte of the body is wrong (requests whose answer has no body go unharmed).
    stall: half of the body, then nothing more on this connection; without a body no answer.
    """
    only: str = ""
    """A regular expression; faults hit only requests that it finds as `METHOD /key?query SIZE`."""
    counts: Counter[str] = field(default_factory=Counter)  # of faults that were really injected
    requests: list[str] = field(default_factory=list)
    """All requests as `METHOD /bucket/key?query`, with ` bytes=…` if they asked for a range."""
    authorizations: set[str] = field(default_factory=set)

    def __enter__(self) -> "FaultProxy":
        self._random, self._lock = random.Random(0), threading.Lock()
        self.connections: set[socket.socket] = set()
        (port,) = free_ports(1)  # one that was bound to port 0 would be lost in `die`
        self._server = ThreadingHTTPServer(("127.0.0.1", port), functools.partial(_Handler, self))
        self.endpoint = f"http://127.0.0.1:{port}"
        self.is_dead = True
        self.revive()
        return self

    def __exit__(self, *_: object) -> None:
        self.die()
        self._server.server_close()

    def die(self) -> None:
        """Cut all connections and refuse new ones. The port stays ours."""
        if not self.is_dead:
            self.is_dead = True
            self._server.shutdown()
            # a forked process may also hold them: to close them is not enough
            for end in [self._server.socket, *self.connections]:
                with contextlib.suppress(OSError):  # the client has closed it
                    end.shutdown(socket.SHUT_RDWR)

    def revive(self) -> None:
        if self.is_dead:
            self.is_dead = False
            self._server.socket.listen(512)
            threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> bool:
        """Answer a request; return True if its connection can take another."""
        method, path, _ = request.requestline.split(" ", 2)
        headers = request.headers
        self.requests.append(f"{method} {path} {headers.get('Range', '')}".strip())
        self.authorizations.add(headers.get("Authorization", ""))
        size = headers.get("Content-Length", "")
        fault, sent = "", request.rfile.read(int(size or 0))
        if re.search(self.only, f"{method} {path} {size}"):
            rates = self.rates | {"": 1 - sum(self.rates.values())}
            (fault,) = self._random.choices([*rates], [*rates.values()])
            time.sleep(self.latency_ms / 1000)
        head, body = _error(fault) if fault in ERRORS else self._ask(method, path, headers, sent)
        body = b"" if method == "HEAD" else body
        if fault == "corrupt" and not body:
            fault = ""
        if fault:
            with self._lock:
                self.counts[fault] += 1
        half = len(body) // 2
        if fault in ("truncate", "stall"):
            request.wfile.write(head + body[:half] if body else b"")
            if fault == "stall":
                request.connection.recv(1)  # until the client or `die` closes it
            return False
        if fault == "corrupt":
            body = body[:half] + bytes([body[half] ^ 0xFF]) + body[half + 1 :]
        request.wfile.write(head + body)
        return True

    def _ask(self, method: str, path: str, headers: Message, sent: bytes) -> tuple[bytes, bytes]:
        """Return the server's answer: its head and its body."""
        with contextlib.closing(HTTPConnection(self.upstream.removeprefix("http://"))) as server:
            server.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                if name.lower() != "expect":  # the client has got its 100
                    server.putheader(name, value)
            server.endheaders(sent)
            answer = server.getresponse()
            body = answer.read()
        if answer.headers.get("Transfer-Encoding"):
            del answer.headers["Transfer-Encoding"]
            answer.headers["Content-Length"] = str(len(body))
        lines = [f"HTTP/1.1 {answer.status} {answer.reason}"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        return "\r\n".join([*lines, "", ""]).encode("latin-1"), body


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, proxy: FaultProxy, *arguments: Any) -> None:
        self.proxy = proxy
        super().__init__(*arguments)

    def handle(self) -> None:
        self.proxy.connections.add(self.connection)
        with contextlib.suppress(OSError, HTTPException):  # an end has closed it
            super().handle()
        self.proxy.connections.discard(self.connection)

    def do_GET(self) -> None:
        self.close_connection = not self.proxy.answer(self)

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


def _error(fault: str) -> tuple[bytes, bytes]:
    """Return the head and the body of an error of S3."""
    code = ERRORS[fault]
    body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
    head = f"HTTP/1.1 {fault} {code}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode(), body.encode()


def _serve(latency_ms: float) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # remove the folder, as at Ctrl-C
    with tempfile.TemporaryDirectory(prefix="object-store-") as folder, contextlib.ExitStack() as stack:
        server = Weed(Path(folder)).start()
        stack.callback(server.kill)
        bucket = server.wait_ready().make_bucket()
        proxy = stack.enter_context(FaultProxy(server.endpoint, latency_ms=latency_ms))
        env = server.env | {"AWS_ENDPOINT_URL": proxy.endpoint, "BUCKET": bucket}
        print(*(f"export {name}={shlex.quote(value)}" for name, value in env.items()), sep="\n", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    _serve(float(sys.argv[2]) if sys.argv[1:2] == ["--latency"] else 0)
