"""Principals: who sends a request, what they may do, and how much of a deployment they may use."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from attrs import Attribute, define, frozen

from commutator.contract.settings import Bounds, PositiveInt, setting

__all__ = [
    "ANONYMOUS",
    "SALT_SEPARATOR",
    "Authenticator",
    "AuthenticatorConfig",
    "Credentials",
    "Limits",
    "Permission",
    "Principal",
    "PrincipalConfig",
    "check_principal_name",
    "own_salt",
]

Permission = Literal["explain", "pin", "metrics", "admin"]
"""What a principal may do besides generating.

"explain": ask why a request was routed as it was, and name the worker that serves it. "pin": keep
blocks in the tiers. "metrics": read /metrics and /health in detail. "admin": everything that
changes the deployment: drain, roles, the KV commands; it includes the others.
"""


@frozen(kw_only=True)
class Limits:
    """How much a principal may use; None is no limit."""

    requests_per_minute: PositiveInt | None = setting(
        "Client requests that begin in a minute.", None
    )
    tokens_per_minute: PositiveInt | None = setting(
        "Prompt and generated tokens in a minute.", None
    )
    tokens_per_day: PositiveInt | None = setting(
        "Prompt and generated tokens in a day of UTC.", None
    )
    concurrent_requests: PositiveInt | None = setting(
        "Client requests that run or wait at the same time.", None
    )
    answers: PositiveInt | None = setting("Answers to one request: prompts times `n`.", None)
    max_model_len: PositiveInt | None = setting("Longest prompt plus answer in tokens.", None)

    @property
    def are_counted(self) -> bool:
        """Whether some of them are about several requests, which a limiter counts."""
        return (
            self.requests_per_minute is not None
            or self.tokens_per_minute is not None
            or self.tokens_per_day is not None
            or self.concurrent_requests is not None
        )


@frozen(kw_only=True)
class Principal:
    """A named sender of requests, for as long as one request takes: its rights may change."""

    name: str
    """Stands in logs, metrics and usage: 1 to 64 letters, digits, ``.``, ``_``, ``-``, ``@``."""
    models: frozenset[str] | None = None
    """The models that it may use, by the names that clients give; None allows all."""
    cache_salt: str | None = None
    """Goes before the request's own salt, so that only principals with the same value share KV.

    None leaves the request's own: everyone who sends the same salt, or none, shares KV."""
    priority: tuple[int, int] | None = None
    """Lowest and highest priority value that its requests may have; None allows all."""
    weight: float = 1.0
    """Its share of busy workers in proportion to others' weights; above 0."""
    limits: Limits = Limits()
    """How much it may use."""
    permissions: frozenset[Permission] = frozenset()
    """What it may do besides generating."""

    def may(self, permission: Permission) -> bool:
        """Whether it has the permission, by itself or as part of "admin"."""
        return permission in self.permissions or "admin" in self.permissions


_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")


def check_principal_name(name: str) -> None:
    """Raises ValueError for what is no name of a principal."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"expected 1 to 64 letters, digits, '.', '_', '-' and '@', got {name[:80]!r}"
        )


SALT_SEPARATOR = "\x1f"
"""Between a principal's salt and the request's own: no principal's salt holds it."""


def own_salt(name: str) -> str:
    """The cache salt of the principal ``name`` where its KV is its own, as it is by default."""
    return f"principal/{name}"


def _in_order(_: object, _field: Attribute[Any], value: tuple[int, ...] | None) -> None:
    if value is not None and (len(value) != 2 or value[0] > value[1]):  # noqa: PLR2004
        raise ValueError("expected the lowest and the highest value, such as [0, 10]")


def _is_salt(_: object, _field: Attribute[Any], value: str | None) -> None:
    if value is not None and not (0 < len(value) <= _LONGEST_SALT and value.isprintable()):
        raise ValueError(f"expected 1 to {_LONGEST_SALT} printable characters")


_LONGEST_SALT = 256


@frozen(kw_only=True)
class PrincipalConfig:
    """What a principal may do and use, in the words of a configuration."""

    models: tuple[str, ...] | None = setting(
        "The models that it may use; others do not exist for it. All by default.", None
    )
    shares_cache_with: str | None = setting(
        "The principal whose KV cache it shares. By default its cache is its own.", None
    )
    cache_salt: str | None = setting(
        "Principals with the same value share their KV cache, in place of `shares_cache_with`.",
        None,
        validator=_is_salt,
    )
    priority: tuple[int, ...] | None = setting(
        "The lowest and the highest value of `priority` that its requests may have; a lower value "
        "is served earlier. A request that names none has 0, or what is nearest to it.",
        (0, 2**31 - 1),
        validator=_in_order,
    )
    weight: Annotated[float, Bounds(above=0)] = setting(
        "Its share of busy workers, in proportion to others' weights.", 1.0
    )
    limits: Limits = setting("How much it may use; no limit by default.", factory=Limits)
    permissions: tuple[Permission, ...] = setting(
        "What it may do besides generating: `explain` (ask why a worker was chosen, and see which "
        "one it was), `pin` (`cache_control`), `metrics` (/metrics, /health), `admin` (all of "
        "these, and changing workers).",
        (),
    )

    def principal(self, name: str) -> Principal:
        """The principal of these rights. Raises ValueError for what is no name."""
        check_principal_name(name)
        salt = self.cache_salt or own_salt(self.shares_cache_with or name)
        lowest_and_highest = None if self.priority is None else (self.priority[0], self.priority[1])
        return Principal(
            name=name,
            models=None if self.models is None else frozenset(self.models),
            cache_salt=salt,
            priority=lowest_and_highest,
            weight=self.weight,
            limits=self.limits,
            permissions=frozenset(self.permissions),
        )


ANONYMOUS = Principal(name="anonymous", permissions=frozenset({"admin"}))
"""Everyone, where a deployment asks nobody who they are."""


@define(kw_only=True)  # made for each request, and a frozen class takes twice as long to fill
class Credentials:
    """What a client sent to prove who it is."""

    bearer: str | None
    """The token of the header ``Authorization: Bearer TOKEN``, or else of ``X-Api-Key``; None
    without one."""
    headers: Mapping[str, str]
    """All headers of the request; names in lower case find theirs, however it was sent."""
    peer: str | None
    """The client's IP address; None on a Unix socket."""


@frozen(kw_only=True)
class AuthenticatorConfig:
    """Options of every `auth` entry; each authenticator plugin adds its own."""

    kind: str = setting("The authenticator plugin.")


class Authenticator(ABC):
    """Tells who sends a request. One instance for each `auth` entry in each front-door process."""

    known: Mapping[str, Principal] = MappingProxyType({})
    """Principals by the value of the header ``Authorization``, where that alone decides.

    That of the first entry is looked at before anybody is asked, which saves time in each request.
    An authenticator that has one makes it in its constructor and keeps it, enters no more than
    there are keys, and removes a key before ``authenticate`` answers otherwise: keys that expire
    have no place in it. Default: none.
    """

    async def start(self) -> None:
        """Called once, before the front door accepts requests: read files, fetch keys.

        The front door does not start when it raises.
        """

    async def stop(self) -> None:
        """Called once, after the last request ended. An exception is logged."""

    @abstractmethod
    async def authenticate(self, credentials: Credentials) -> Principal | None:
        """The principal; None when the credentials are none of this authenticator's.

        The entries are asked in their order; a request that none knows is answered 401. Raises
        ``commutator.errors.AuthenticationError`` to refuse credentials that are its own but not
        valid (expired, revoked); later entries are then not asked. Called for each request, so
        cache what is slow. An exception of another kind is logged and refuses the request.
        """
