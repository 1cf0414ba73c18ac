"""The options of the `s3` tier."""

from __future__ import annotations

from typing import Any, Literal
from urllib.parse import urlsplit

from attrs import Attribute, frozen

from commutator import (
    Memory,
    NonNegativeInt,
    PositiveInt,
    PositiveSeconds,
    Secret,
    Size,
    TierConfig,
    setting,
)


def _is_url(_: S3TierConfig, _field: Attribute[Any], value: str | None) -> None:
    if value is None:
        return
    parts = urlsplit(value)
    if parts.scheme not in {"http", "https"} or not parts.netloc or parts.path.strip("/"):
        raise ValueError('endpoint: expected "http://HOST:PORT" or "https://HOST:PORT"')


def _with_a_key(config: S3TierConfig, field: Attribute[Any], value: Secret | None) -> None:
    if value is not None and config.access_key is None:
        raise ValueError(f"{field.name}: give access_key and secret_key, too")


def _is_name(_: S3TierConfig, field: Attribute[Any], value: str) -> None:
    if not value.strip():
        raise ValueError(f"{field.name}: expected the bucket's name, got {value!r}")


@frozen(kw_only=True)
class S3TierConfig(TierConfig):
    """Options of the `s3` tier: where the bucket is, and how it is used."""

    memory = Memory.OBJ

    bucket: str = setting("The bucket.", validator=_is_name)
    prefix: str = setting("First part of every object's key.", "commutator")
    endpoint: str | None = setting(
        "URL of the store, such as http://127.0.0.1:9000; Amazon S3 by default.",
        None,
        validator=_is_url,
    )
    region: str = setting("The bucket's region.", "us-east-1")
    access_key: Secret | None = setting(
        "With secret_key. Without them, AWS's own chain applies: environment variables, profile, "
        "instance role.",
        None,
    )
    secret_key: Secret | None = setting("See access_key.", None)
    session_token: Secret | None = setting(
        "For temporary credentials.", None, validator=_with_a_key
    )
    ca_file: str | None = setting(
        "PEM file with the certificates to trust; the system's by default.", None
    )
    addressing: Literal["auto", "path", "virtual"] = setting(
        "The bucket's place in URLs: in the path or in the host's name. auto: in the path with an "
        "endpoint, else in the host's name.",
        "auto",
    )
    create_bucket: bool = setting("Create the bucket when it does not exist.", False)
    capacity: Size | None = setting(
        "Most bytes of objects that this worker tracks, stored or found. To make room, it deletes "
        "objects that it has stored since its start, and forgets others. No limit by default. Let "
        "the bucket's life-cycle rules expire objects.",
        None,
    )
    max_concurrency: PositiveInt = setting("Requests in flight, of each kind.", 16)
    request_timeout_s: PositiveSeconds = setting(
        "A request without an answer in this time has failed.", 3.0
    )
    list_limit: NonNegativeInt = setting(
        "Most objects to list at the start, 1000 in each request; others are found when they are "
        "looked up.",
        10_000,
    )

    def __attrs_post_init__(self) -> None:
        if (self.access_key is None) != (self.secret_key is None):
            raise ValueError("give both access_key and secret_key, or neither of them")

    @property
    def path_style(self) -> bool:
        """Whether URLs have the bucket in their path."""
        if self.addressing == "auto":
            return self.endpoint is not None
        return self.addressing == "path"
