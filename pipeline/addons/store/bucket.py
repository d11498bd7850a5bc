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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from pipeline.config.credentials import hide_credentials
from pipeline.data.interface import OutageError
from pipeline.data.names import printable_name
from pipeline.errors import RequestError, RunError, TemporaryError, one_line

SCHEME = "s3://"
_CONNECT_TIMEOUT_S, _READ_TIMEOUT_S = 5, 20
_ATTEMPTS = 5  # of boto3: for 5xx, a time-out or SlowDown, with growing pauses
_PART_BYTES = 16 << 20  # of a multipart upload
_MAX_READ_BYTES = 1 << 28
"""Size of an object that is read into memory, unless the caller gives another limit."""
_REQUEST_ERRORS = (
    "InvalidBucketName", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch",
    "ExpiredToken", "InvalidToken", "AuthorizationHeaderMalformed",
)  # fmt: skip
"""Errors that the same request would end with again: a wrong name, or wrong credentials."""
_REDIRECTS = (301, 302, 307, 308)


class ConflictError(Exception):
    """A conditional write that the store refused: the object is not in the stated condition."""

    def __init__(self, is_repeated: bool) -> None:
        super().__init__()
        self.is_repeated = is_repeated
        """An earlier attempt may have succeeded, and only its answer was lost."""


class MissingError(RunError):
    """An object that does not exist."""


@dataclass(frozen=True)
class StoredObject:
    name: str
    """Below the store's prefix."""
    size: int
    etag: str
    """The store's identifier of these contents, for a conditional write."""
    modified: datetime
    """By the store's clock."""
    seen: datetime | None = None
    """Time of the answer by the store's clock; None in a listing, or if the store does not say."""

    @property
    def age_s(self) -> float:
        """Seconds since it was written, by the store's clock."""
        return (self.seen - self.modified).total_seconds() if self.seen else 0.0


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
            keys = ", and the keys in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" if "@" in place else ""
            raise RequestError(
                f"{hide_credentials(place)} is not allowed",
                f"give s3://bucket/prefix, such as s3://my-data/imagenet{keys}",
            )
        self.bucket, self.prefix = match[1], (match[2] or "").strip("/")
        self.place = f"{SCHEME}{self.bucket}/{self.prefix}".rstrip("/")
        self._client = _connect(self.place)

    def __str__(self) -> str:
        return self.place

    def key(self, name: str) -> str:
        """Return the key of an object in the bucket."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def head(self, name: str) -> StoredObject | None:
        """Return what the store says about an object, or None if there is none."""
        try:
            with self._requesting(name):
                return _stored_object(name, self._client.head_object(Bucket=self.bucket, Key=self.key(name)))
        except MissingError:
            return None  # or no bucket: the answer to HEAD does not tell

    def read(self, name: str, limit: int = _MAX_READ_BYTES) -> bytes:
        """Return an object. Raises MissingError, RequestError if it has more than `limit` bytes."""
        return self.read_described(name, limit)[0]

    def read_described(self, name: str, limit: int = _MAX_READ_BYTES) -> tuple[bytes, StoredObject]:
        """Return an object, and what the store says about it. Raises as `read` does."""
        from botocore.exceptions import BotoCoreError
        from urllib3.exceptions import HTTPError

        for attempt in range(_ATTEMPTS):
            with self._requesting(name):
                answer = self._client.get_object(Bucket=self.bucket, Key=self.key(name))
                if answer["ContentLength"] > limit:
                    answer["Body"].close()
                    found = f"{self.place}/{name} has {answer['ContentLength']:,} bytes"
                    raise RequestError(f"{found}, more than the {limit:,} allowed")
                try:
                    return answer["Body"].read(), _stored_object(name, answer)
                except (
                    BotoCoreError,
                    HTTPError,
                ):  # boto3 repeats a request, but not for a body that breaks off
                    if attempt == _ATTEMPTS - 1:
                        raise
            time.sleep(2 ** (attempt - 1))
        raise AssertionError

    def read_to(self, name: str, path: Path) -> None:
        """Write an object to the file `path`. Raises MissingError, OSError.

        Raises TemporaryError if the object is replaced meanwhile.
        """
        from s3transfer.exceptions import S3DownloadFailedError

        try:
            with self._requesting(name):
                self._client.download_file(self.bucket, self.key(name), str(path), Config=_transfer_config())
        except (S3DownloadFailedError, ConflictError):
            problem = f"{self.place}/{name} changes while it is read"
            raise TemporaryError(problem, "give the same command again") from None

    def write(self, name: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> str:
        """Write an object and return its etag. It is there completely or not at all.

        if_absent, if_match: write only if there is no such object, or if it has this etag. Raises
        ConflictError if not. A writer must not write the bytes that another one writes: by them it
        recognises its own write whose answer was lost.
        """
        condition = {"IfNoneMatch": "*"} if if_absent else {"IfMatch": if_match} if if_match else {}
        try:
            with self._requesting(name):
                answer = self._client.put_object(
                    Bucket=self.bucket, Key=self.key(name), Body=data, **condition
                )
                return str(answer["ETag"])
        except ConflictError as conflict:
            if conflict.is_repeated:
                with suppress(MissingError):
                    contents, found = self.read_described(name)
                    if contents == data:
                        return found.etag
            raise

    def upload(self, path: Path, name: str, on_progress: Callable[[int], None] | None = None) -> None:
        """Write a file as an object, a large one in parts. It is visible only once it is complete.

        on_progress: called with the number of bytes of each part of a request that was sent. Raises
        OSError if the file cannot be read.
        """
        with self._requesting(name):
            # without threads: the upload may run in a thread that outlives the main one
            config = _transfer_config(use_threads=False)
            self._client.upload_file(
                str(path), self.bucket, self.key(name), Callback=on_progress, Config=config
            )

    def list(self, folder: str = "") -> Iterator[StoredObject]:
        """Yield the objects whose names start with `folder`, in the order of their names."""
        start = len(self.key(""))
        with self._requesting(folder):
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self.bucket, Prefix=self.key(folder)):
                for entry in page.get("Contents", ()):
                    yield StoredObject(
                        entry["Key"][start:], entry["Size"], entry["ETag"], entry["LastModified"]
                    )

    def delete(self, name: str) -> None:
        """Delete an object; one that does not exist is no error."""
        with self._requesting(name):
            self._client.delete_object(Bucket=self.bucket, Key=self.key(name))

    def abort_uploads(self, folder: str) -> None:
        """Remove the parts of uploads that were cut off, which a listing does not show."""
        with self._requesting(folder):
            answer = self._client.list_multipart_uploads(Bucket=self.bucket, Prefix=self.key(folder))
            for upload in answer.get("Uploads", ()):
                self._client.abort_multipart_upload(
                    Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                )

    def presign(self, name: str, seconds: int) -> str:
        """Return a URL that reads this object without credentials for so many seconds: a secret."""
        parameters = {"Bucket": self.bucket, "Key": self.key(name)}
        with self._requesting(name):
            return str(
                self._client.generate_presigned_url("get_object", Params=parameters, ExpiresIn=seconds)
            )

    @contextmanager
    def _requesting(self, name: str) -> Iterator[None]:
        """Raise errors of boto3 as ours: none of its messages holds a credential."""
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError
        from urllib3.exceptions import HTTPError

        try:
            yield
        except (Boto3Error, BotoCoreError, ClientError, HTTPError, KeyError) as error:
            # a transfer in parts wraps the error of a request
            cause = error.__cause__ or error.__context__ if isinstance(error, Boto3Error) else error
            raise _error_of(f"{self.place}/{name}".rstrip("/"), cause or error) from None


def _connect(place: str) -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ModuleNotFoundError:
        remedy = "pip install 'ddp-pipeline[s3]'"
        raise RequestError(f"{place} needs Python packages that are not installed", remedy) from None
    from botocore.exceptions import BotoCoreError

    for variable in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        if "@" in os.environ.get(variable, "").partition("://")[2]:
            raise RequestError(
                f"{variable} holds a user or a password", "give them in AWS_ACCESS_KEY_ID and so on"
            )
    options = Config(
        connect_timeout=_CONNECT_TIMEOUT_S, read_timeout=_READ_TIMEOUT_S, max_pool_connections=16,
        retries={"mode": "standard", "total_max_attempts": _ATTEMPTS}, tcp_keepalive=True,
        signature_version="s3v4",  # boto3's default for presigned URLs is version 2, which most stores refuse
    )  # fmt: skip
    try:
        session = boto3.session.Session()
        region = (
            os.environ.get("AWS_REGION") or session.region_name
        )  # boto3 itself knows AWS_DEFAULT_REGION only
        client = session.client("s3", config=options, region_name=region or "us-east-1")
    except (BotoCoreError, ValueError) as error:  # a profile that does not exist, an endpoint that is no URL
        raise RequestError(f"{place} cannot be reached with this environment: {error}") from None
    client.meta.events.register_first("needs-retry.s3", _end_at_redirect)
    return client


def _end_at_redirect(response: Any, operation: Any, **_: object) -> None:
    """Raise ClientError for a redirect that names no region of S3.

    boto3 asks for the region with another request, which is redirected, too, and so on without end.
    """
    from botocore.exceptions import ClientError

    if response is None or response[0].status_code not in _REDIRECTS:
        return
    answer = response[1]
    if (
        "x-amz-bucket-region" not in answer["ResponseMetadata"]["HTTPHeaders"]
        and "Region" not in answer["Error"]
    ):
        raise ClientError(answer, operation.name)


def _transfer_config(**options: Any) -> Any:
    from boto3.s3.transfer import TransferConfig

    return TransferConfig(
        multipart_threshold=2 * _PART_BYTES, multipart_chunksize=_PART_BYTES, max_concurrency=4, **options
    )


def _stored_object(name: str, answer: Any) -> StoredObject:
    """Return what an answer of the store says about an object."""
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    seen = parsedate_to_datetime(date) if date else None
    return StoredObject(name, answer["ContentLength"], answer["ETag"], answer["LastModified"], seen)


def _error_of(place: str, error: BaseException) -> Exception:
    """Return what an error of boto3 means."""
    from botocore.exceptions import ClientError, NoCredentialsError

    if isinstance(error, NoCredentialsError):
        remedy = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        return RequestError(f"{place} needs credentials, and none are found", remedy)
    if isinstance(error, KeyError):  # a web page, such as that of the store's console
        problem = f"{place}: the answer lacks {error}, so it is not that of a store"
        return RequestError(problem, "check AWS_ENDPOINT_URL")
    if not isinstance(error, ClientError):
        return _outage(place, str(error))
    answer, details = error.response["ResponseMetadata"], error.response.get("Error", {})
    status = answer["HTTPStatusCode"]
    code, message = (printable_name(one_line(details.get(key, ""))) for key in ("Code", "Message"))
    if status in (409, 412):
        return ConflictError(answer.get("RetryAttempts", 0) > 0)
    if code == "NoSuchBucket":
        return RequestError(f"{place}: there is no such bucket", "create it, or name another")
    if status == 404:
        return MissingError(f"{place} does not exist")
    if status in _REDIRECTS:
        problem = f"{place}: the store redirects to another address ({status}), which is not followed"
        return RequestError(problem, "set AWS_ENDPOINT_URL and AWS_REGION to those of the store")
    if status in (403, 405, 501) or code in _REQUEST_ERRORS:
        remedy = "check the credentials in the environment (AWS_ACCESS_KEY_ID, …), their rights,"
        remedy += " and AWS_ENDPOINT_URL"
        return RequestError(f"{place} is refused by the store ({status} {code}: {message})", remedy)
    return _outage(place, f"{status} {code} {message}")


def _outage(place: str, reason: str) -> OutageError:
    problem = f"the store is out of reach ({place}: {printable_name(one_line(reason))})"
    return OutageError(problem, "give the same command again once it is back")
