"""Object stores: S3 and whatever speaks its protocol. A place is named s3://bucket/prefix.

Credentials, region and endpoint come from the environment, as in other tools: AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL, a profile, the role of a machine or of a Kubernetes service account. boto3, the
client that AWS maintains and that MLflow also uses, finds them and repeats what fails. It makes the
few requests for indices, checkpoints and leases; the many reads of images are `store.ranges`. No
torch here, and no boto3 in a training that names no bucket.
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from pipeline.addons.datasets.names import printable_name
from pipeline.addons.ops.credentials import hide_credentials, without_password
from pipeline.data.interface import OutageError
from pipeline.errors import RequestError, RunError, one_line

_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S = 5, 20
_ATTEMPTS = 5  # of boto3: for 5xx, a time-out or SlowDown, with growing pauses
_MAX_READ_BYTES = 1 << 28  # size of an object that is read into memory, unless the caller gives another limit
_REDIRECTS = (301, 302, 307, 308)
_REFUSALS = (*_REDIRECTS, 401, 403, 404, 405, 501)
_REFUSAL_CODES = ("InvalidBucketName", "ExpiredToken", "InvalidToken", "AuthorizationHeaderMalformed")
"""Errors of status 400 that the same request would end with again."""
_REMEDY = (
    "check the credentials in the environment (AWS_ACCESS_KEY_ID, …), their rights, AWS_ENDPOINT_URL,"
    " AWS_REGION, and the name of the bucket"
)


class ConflictError(Exception):
    """A conditional write that the store refused: the object is not in the stated condition."""


class MissingError(RunError):
    """An object that does not exist."""


@dataclass(frozen=True)
class StoredObject:
    name: str  # below the store's prefix
    size: int
    etag: str  # the store's identifier of these contents, for a conditional write
    age_s: float = 0  # seconds since it was written, by the store's clock; 0 in a listing


class Store:
    """The objects below s3://bucket/prefix.

    May be used by several threads, but not by a process forked from the one that made it.
    Every method raises RequestError for credentials or a bucket that the store refuses, and
    OutageError if it does not answer as S3 does after `_ATTEMPTS` attempts.
    """

    def __init__(self, place: str) -> None:
        """Make no request yet. Raises RequestError if `place` is not s3://bucket/prefix."""
        match = re.fullmatch(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/([^?#]*))?", place)
        if not match or ".." in place.split("/"):
            remedy = "give s3://bucket/prefix, and the keys in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            raise RequestError(f"{hide_credentials(place)} is not allowed", remedy)
        self.bucket, self.prefix = match[1], (match[2] or "").strip("/")
        self.place = f"s3://{self.bucket}/{self.prefix}".rstrip("/")
        self._client = _connect(self.place)

    def __str__(self) -> str:
        return self.place

    def read(self, name: str, limit: int = _MAX_READ_BYTES) -> bytes:
        """Return an object. Raises MissingError, RequestError if it has more than `limit` bytes."""
        return self.read_described(name, limit)[0]

    def read_described(self, name: str, limit: int = _MAX_READ_BYTES) -> tuple[bytes, StoredObject]:
        """Return an object, and what the store says about it. Raises as `read` does."""
        from botocore.exceptions import BotoCoreError

        for attempt in range(_ATTEMPTS):
            with self._requesting(name):
                answer = self._client.get_object(**self._address(name))
                date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
                age = parsedate_to_datetime(date) - answer["LastModified"] if date else timedelta()
                found = StoredObject(name, answer["ContentLength"], answer["ETag"], age.total_seconds())
                if found.size > limit:
                    answer["Body"].close()
                    problem = f"{self.place}/{name} has {found.size:,} bytes, more than the {limit:,} allowed"
                    raise RequestError(problem)
                try:
                    return answer["Body"].read(), found
                except BotoCoreError:  # boto3 repeats a request, but not for a body that breaks off
                    if attempt == _ATTEMPTS - 1:
                        raise
            time.sleep(2 ** (attempt - 1))
        raise AssertionError

    def honours_ranges(self, name: str) -> bool:
        """Return True if the store returns a part of an object instead of all of it."""
        with self._requesting(name):
            answer = self._client.get_object(**self._address(name), Range="bytes=0-0")
            answer["Body"].close()
            return bool(answer["ResponseMetadata"]["HTTPStatusCode"] == 206)

    def read_to(self, name: str, path: Path) -> None:
        """Write an object to the file `path`. Raises MissingError, OSError."""
        try:
            with self._requesting(name):
                self._client.download_file(**self._address(name), Filename=str(path))
        except ConflictError:  # some stores name this in other words than Amazon
            problem = f"{self.place}/{name} changes while it is read"
            raise OutageError(problem, "give the same command again") from None

    def write(self, name: str, data: bytes, *, if_absent: bool = False, if_match: str = "") -> str:
        """Write an object and return its etag. It is there completely or not at all.

        if_absent, if_match: write only if there is no such object, or if it has this etag. Raises
        ConflictError if not, and if it has other bytes: by them a writer recognises its own write
        whose answer was lost.
        """
        condition = {"IfNoneMatch": "*"} if if_absent else {"IfMatch": if_match} if if_match else {}
        try:
            with self._requesting(name):
                return str(self._client.put_object(**self._address(name), Body=data, **condition)["ETag"])
        except ConflictError:
            with suppress(MissingError):
                contents, found = self.read_described(name)
                if contents == data:
                    return found.etag
            raise

    def upload(self, path: Path, name: str) -> None:
        """Write a file as an object, a large one in parts. It is visible only once it is complete.

        Raises OSError if the file cannot be read.
        """
        from boto3.s3.transfer import TransferConfig

        with self._requesting(name):
            # without threads: the upload may run in a thread that outlives the main one
            config = TransferConfig(use_threads=False)
            self._client.upload_file(Filename=str(path), **self._address(name), Config=config)

    def list(self, folder: str = "") -> Iterator[StoredObject]:
        """Yield the objects whose names start with `folder`, in the order of their names."""
        start = len(self._key(""))
        with self._requesting(folder):
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self.bucket, Prefix=self._key(folder)):
                for entry in page.get("Contents", ()):
                    yield StoredObject(entry["Key"][start:], entry["Size"], entry["ETag"])

    def delete(self, name: str) -> None:
        """Delete an object; one that does not exist is no error."""
        with self._requesting(name):
            self._client.delete_object(**self._address(name))

    def presign(self, name: str, seconds: int) -> str:
        """Return a URL that reads this object without credentials for so many seconds: a secret."""
        with self._requesting(name):
            address = self._address(name)
            return str(self._client.generate_presigned_url("get_object", address, ExpiresIn=seconds))

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def _address(self, name: str) -> dict[str, str]:
        return {"Bucket": self.bucket, "Key": self._key(name)}

    @contextmanager
    def _requesting(self, name: str) -> Iterator[None]:
        """Raise errors of boto3 as ours: none of its messages holds a credential."""
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError
        from s3transfer.exceptions import S3DownloadFailedError  # the object was replaced meanwhile
        from urllib3.exceptions import HTTPError

        try:
            yield
        except (Boto3Error, BotoCoreError, ClientError, HTTPError, KeyError, S3DownloadFailedError) as error:
            # a transfer in parts wraps the error of a request
            cause = error.__cause__ or error.__context__ if isinstance(error, Boto3Error) else error
            raise _error_of(f"{self.place}/{name}".rstrip("/"), cause or error) from None


def _connect(place: str) -> Any:
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ModuleNotFoundError:
        remedy = "pip install 'ddp-pipeline[s3]'"
        raise RequestError(f"{place} needs Python packages that are not installed", remedy) from None

    options = Config(
        connect_timeout=_CONNECT_TIMEOUT_S, read_timeout=_READ_TIMEOUT_S, max_pool_connections=16,
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS}, tcp_keepalive=True,
        signature_version="s3v4",  # boto3's default for presigned URLs is version 2, which most stores refuse
    )  # fmt: skip
    try:
        session = boto3.session.Session()
        # boto3 itself knows AWS_DEFAULT_REGION only
        region = os.environ.get("AWS_REGION") or session.region_name or "us-east-1"
        client = session.client("s3", config=options, region_name=region)
    except (BotoCoreError, ValueError) as error:  # a profile that does not exist, an endpoint that is no URL
        problem = f"{place} cannot be reached with this environment: {without_password(str(error))}"
        raise RequestError(problem) from None
    client.meta.events.register_first("needs-retry.s3", _end_at_redirect)
    return client


def _end_at_redirect(response: Any, operation: Any, **_: object) -> None:
    """Raise ClientError for a redirect. boto3 may follow it, and then the next one, without end."""
    from botocore.exceptions import ClientError

    if response and response[0].status_code in _REDIRECTS:
        raise ClientError(response[1], operation.name)


def _error_of(place: str, error: BaseException) -> Exception:
    from botocore.exceptions import ClientError, NoCredentialsError

    reason = without_password(str(error))  # it may hold the endpoint
    if isinstance(error, KeyError):  # a web page, such as that of the store's console
        return RequestError(f"{place}: the answer is not that of a store: it lacks {reason}", _REMEDY)
    if isinstance(error, NoCredentialsError):
        return RequestError(f"{place}: {reason}", _REMEDY)
    if isinstance(error, ClientError):
        answer, details = error.response["ResponseMetadata"], error.response.get("Error", {})
        status = answer["HTTPStatusCode"]
        code = one_line(details.get("Code", ""))
        reason = f"{status} {code} {one_line(details.get('Message', ''))}"
        if status in (409, 412):
            return ConflictError()
        if status == 404 and code != "NoSuchBucket":
            return MissingError(f"{place} does not exist")
        if status in _REFUSALS or code in _REFUSAL_CODES:
            return RequestError(f"{place} is refused by the store ({printable_name(reason)})", _REMEDY)
    problem = f"the store is out of reach ({place}: {printable_name(one_line(reason))})"
    return OutageError(problem, "give the same command again once it is back")
