"""The operations on a bucket that NIXL's OBJ backend lacks (look up, list, delete), by boto3."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Any, cast

import boto3
import botocore.session
from attrs import frozen
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    NoCredentialsError,
    PartialCredentialsError,
)
from botocore.httpsession import URLLib3Session
from botocore.utils import get_environ_proxies
from urllib3.exceptions import HTTPError

from commutator.errors import TierError
from commutator_s3.config import S3TierConfig

_DELETED_AT_ONCE = 1000
"""S3's limit of keys in one request."""
_LONGEST_ANSWER_BYTES = 8 << 20
"""Of a look-up, list, deletion or error. A list of 1,000 long names has about 2 MiB."""
_PIECE_BYTES = 1 << 16
_FIRST_WAVE = 4
_GROWTH = 4
_REFUSED = {"403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"}


@frozen(kw_only=True, repr=False)
class Credentials:
    """Credentials in plain text; None: use AWS's own chain."""

    access_key: str | None = None
    secret_key: str | None = None
    session_token: str | None = None


@frozen
class FoundObject:
    """An object of the bucket."""

    name: str
    size_bytes: int


@frozen
class _Whole:
    """An answer that was read, as boto3 reads it."""

    content: bytes

    def stream(self) -> Iterator[bytes]:
        yield self.content


class Bucket:
    """One bucket. Every method waits for the network, and raises TierError with advice."""

    def __init__(self, config: S3TierConfig, credentials: Credentials) -> None:
        self.name = config.bucket
        where = config.endpoint or f"Amazon S3, {config.region}"
        self._where = f"S3 bucket {self.name} at {where}"
        self._region = config.region
        self._waves = config.max_concurrency
        self._pool = ThreadPoolExecutor(config.max_concurrency, thread_name_prefix="s3")
        self._timeout_s = config.request_timeout_s
        session = botocore.session.get_session()
        with self._explained():
            self._client = boto3.session.Session(botocore_session=session).client(
                "s3",
                endpoint_url=config.endpoint,
                region_name=config.region,
                aws_access_key_id=credentials.access_key,
                aws_secret_access_key=credentials.secret_key,
                aws_session_token=credentials.session_token,
                config=Config(
                    s3={"addressing_style": "path" if config.path_style else "virtual"},
                    retries={"total_max_attempts": 2, "mode": "standard"},
                    # The header inside each object has a checksum; simple servers know no trailers.
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                ),
            )
        # With what boto3 takes from the environment for a session of its own.
        self._session = URLLib3Session(
            verify=(
                config.ca_file
                or session.get_config_variable("ca_bundle")
                or os.environ.get("REQUESTS_CA_BUNDLE")
                or True
            ),
            proxies=get_environ_proxies(self._client.meta.endpoint_url),
            timeout=config.request_timeout_s,
            max_pool_connections=config.max_concurrency,
        )
        self._client.meta.events.register("before-send.s3", self._send)

    def check(self, *, create: bool) -> None:
        """Check that the bucket can be listed; with ``create``, create a missing one."""
        with self._explained():
            try:
                self._client.list_objects_v2(Bucket=self.name, MaxKeys=1)
            except ClientError as error:
                if not create or _code(error) not in {"404", "NoSuchBucket"}:
                    raise
                self._create()

    def first_found(self, names: Sequence[Sequence[str]]) -> list[FoundObject | None]:
        """For each block, the first of its possible objects that exists.

        None for the first block without one, and for all after it. Sends parallel requests in
        growing waves: a missing chain costs few requests.
        """
        found: list[FoundObject | None] = []
        wave = min(_FIRST_WAVE, self._waves)
        while len(found) < len(names) and None not in found:
            found += self._pool.map(self._first, names[len(found) : len(found) + wave])
            wave = min(wave * _GROWTH, self._waves)
        count = found.index(None) if None in found else len(found)
        return found[:count] + [None] * (len(names) - count)

    def listing(self, prefix: str, most: int) -> Iterator[tuple[str, int]]:
        """Names and sizes of the first ``most`` objects under ``prefix``, in the order of names."""
        with self._explained():
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self.name, Prefix=prefix, PaginationConfig={"PageSize": min(most, 1000)}
            )
            # A server that answers with empty pages for ever must not keep the tier from opening.
            pages = islice(pages, 2 + 2 * most // 1000)
            objects = (item for page in pages for item in page.get("Contents", ()))
            for item in islice(objects, most):
                yield item["Key"], item["Size"]

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; one that is missing counts as deleted."""
        for start in range(0, len(names), _DELETED_AT_ONCE):
            batch = names[start : start + _DELETED_AT_ONCE]
            wanted = {"Objects": [{"Key": name} for name in batch], "Quiet": True}
            with self._explained():
                answer = self._client.delete_objects(Bucket=self.name, Delete=wanted)
            if errors := answer.get("Errors"):
                reason = errors[0].get("Message") or errors[0].get("Code")
                raise TierError(f"{self._where}: {len(errors)} objects cannot be deleted: {reason}")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()
        self._session.close()

    def _send(self, request: AWSPreparedRequest, event_name: str = "", **_: object) -> AWSResponse:
        """Send a request in place of boto3, which reads answers without end.

        Redirects are not followed. To follow one, boto3 first asks for the bucket's region by
        HeadBucket, which nothing here does.
        """
        last_s = time.monotonic() + 2 * self._timeout_s
        request.stream_output = True
        response = self._session.send(request)
        moved = 300 <= response.status_code < 400  # noqa: PLR2004
        if moved or event_name.endswith("HeadBucket"):
            response.raw.close()
            region = response.headers.get("x-amz-bucket-region", "another region")
            raise TierError(
                f"{self._where}: the bucket is in {region}, or elsewhere: HTTP "
                f"{response.status_code}; set region or endpoint, as redirects are not followed"
            )
        content = bytearray()
        while piece := self._piece(response):
            content += piece
            late = time.monotonic() > last_s
            if late or len(content) > _LONGEST_ANSWER_BYTES:
                response.raw.close()
                most = f"{2 * self._timeout_s:g} s" if late else f"{_LONGEST_ANSWER_BYTES} bytes"
                raise TierError(f"{self._where}: an answer did not end within {most}")
        response.raw.release_conn()
        whole = _Whole(bytes(content))
        return AWSResponse(response.url, response.status_code, response.headers, whole)

    @staticmethod
    def _piece(response: AWSResponse) -> bytes:
        try:
            return cast("bytes", response.raw.read1(_PIECE_BYTES))
        except HTTPError as error:
            raise ConnectionClosedError(endpoint_url=response.url) from error

    def _first(self, names: Sequence[str]) -> FoundObject | None:
        for name in names:
            if (size_bytes := self._size(name)) is not None:
                return FoundObject(name, size_bytes)
        return None

    def _size(self, name: str) -> int | None:
        with self._explained():
            try:
                return int(self._client.head_object(Bucket=self.name, Key=name)["ContentLength"])
            except ClientError as error:
                if _code(error) in {"404", "NoSuchKey"}:
                    return None
                raise

    def _create(self) -> None:
        options: dict[str, Any] = {}
        # S3 refuses its default region as a constraint.
        if self._region != "us-east-1":
            options["CreateBucketConfiguration"] = {"LocationConstraint": self._region}
        try:
            self._client.create_bucket(Bucket=self.name, **options)
        except ClientError as error:
            # Another worker created it first.
            if _code(error) != "BucketAlreadyOwnedByYou":
                raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise TierError(
                f"{self._where}: no credentials: set access_key and secret_key, or the environment "
                "variables, profile or role that AWS's tools use"
            ) from error
        except ClientError as error:
            raise TierError(f"{self._where}: {_advice(error)}") from error
        except (BotoCoreError, OSError, ValueError) as error:
            raise TierError(f"{self._where} cannot be reached: {error}") from error


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _advice(error: ClientError) -> str:
    code = _code(error)
    if code in {"404", "NoSuchBucket"}:
        return "there is no such bucket; create it, or set create_bucket: true"
    if code in _REFUSED:
        return f"refused ({code}); check the credentials and what they allow"
    if code in {"301", "PermanentRedirect", "AuthorizationHeaderMalformed"}:
        return f"the bucket is in another region ({code}); set region"
    return str(error)
