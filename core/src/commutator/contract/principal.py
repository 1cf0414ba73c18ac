"""Principals: who sends a request, what they may do, and how much of a deployment they may use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal

from attrs import frozen

from commutator.contract.settings import setting

__all__ = [
    "ANONYMOUS",
    "Authenticator",
    "AuthenticatorConfig",
    "Credentials",
    "Limits",
    "Permission",
    "Principal",
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

    requests_per_minute: int | None = None
    """Client requests that begin in a minute."""
    tokens_per_minute: int | None = None
    """Prompt and generated tokens in a minute."""
    tokens_per_day: int | None = None
    """Prompt and generated tokens in a day of UTC."""
    concurrent_requests: int | None = None
    """Client requests that run or wait at the same time."""
    answers: int | None = None
    """Answers to one request: prompts times ``n``."""
    max_model_len: int | None = None
    """Longest prompt plus answer in tokens."""
    tier_share: float | None = None
    """The largest part of each storage tier that its blocks may take, above 0, at most 1."""


@frozen(kw_only=True)
class Principal:
    """A named sender of requests, for as long as one request takes: its rights may change."""

    name: str
    """Stands in logs, metrics and usage: 1 to 64 letters, digits, ``.``, ``_``, ``-``, ``@``."""
    models: frozenset[str] | None = None
    """The models that it may use, by the names that clients give; None allows all."""
    cache_salt: str | None = None
    """Replaces the request's salt, so that only principals with the same value share KV.

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


ANONYMOUS = Principal(name="anonymous", permissions=frozenset({"admin"}))
"""Everyone, where a deployment asks nobody who they are."""


@frozen(kw_only=True)
class Credentials:
    """What a client sent to prove who it is."""

    bearer: str | None
    """The token of the header ``Authorization: Bearer TOKEN``; None without one."""
    headers: Mapping[str, str]
    """All headers of the request, names in lower case."""
    peer: str | None
    """The client's IP address; None on a Unix socket."""


@frozen(kw_only=True)
class AuthenticatorConfig:
    """Options of every `auth` entry; each authenticator plugin adds its own."""

    kind: str = setting("The authenticator plugin.")


class Authenticator(ABC):
    """Tells who sends a request. One instance for each `auth` entry in each front-door process."""

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
