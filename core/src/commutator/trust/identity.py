"""Who a process is between hosts: the URI in its certificate, and what each kind may do. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum

from attrs import Attribute, field, frozen

_SCHEME = "commutator://"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class Right(StrEnum):
    """What a process asks of another one on the network, for logs."""

    ANNOUNCE = "announce workers"
    """Register the workers of its own host, renew and end their leases."""
    WATCH = "watch the registry"
    GENERATE = "send requests to workers"
    """Also: ask them about their load and their tiers."""
    SHARE = "share loads and limits"
    """Exchange what front doors count."""
    BORROW = "borrow KV blocks"
    """Ask workers for the blocks that they lend."""
    OPERATE = "drain workers, change roles or empty caches"
    SERVE_WORKER = "serve as a worker"
    SERVE_REGISTRY = "serve the registry"


class Kind(StrEnum):
    """What a certificate is for."""

    HOST = "host"
    """A whole host of a cluster: its workers, its front doors, and who operates there."""
    WORKER = "worker"
    """A host that runs workers only."""
    FRONTEND = "frontend"
    """A host that runs front doors only."""
    OPERATOR = "operator"
    """A person, or a program, that operates the cluster."""

    @property
    def rights(self) -> frozenset[Right]:
        """Everything that its processes may do."""
        return _RIGHTS[self]


_RIGHTS: Mapping[Kind, frozenset[Right]] = {
    Kind.HOST: frozenset(Right),
    Kind.WORKER: frozenset({Right.ANNOUNCE, Right.WATCH, Right.BORROW, Right.SERVE_WORKER}),
    Kind.FRONTEND: frozenset({Right.WATCH, Right.GENERATE, Right.SHARE}),
    Kind.OPERATOR: frozenset({Right.WATCH, Right.OPERATE}),
}


def _is_a_name(_: object, attribute: Attribute[str], value: str) -> None:
    if not _NAME.fullmatch(value):
        raise ValueError(
            f"{attribute.name}: expected at most 63 letters, digits, '.', '_' and '-', and a "
            f"letter or digit first, got {value!r}"
        )


@frozen
class Identity:
    """Who a certificate names. Raises ValueError for a cluster or a name of other characters."""

    cluster: str = field(validator=_is_a_name)
    kind: Kind
    name: str = field(validator=_is_a_name)
    """Of a host: that of the configuration, with which the ids of its workers begin."""

    def __str__(self) -> str:
        return f"{_SCHEME}{self.cluster}/{self.kind}/{self.name}"

    @classmethod
    def parse(cls, uri: str) -> Identity:
        """The inverse of ``str``. Raises ValueError for any other text."""
        cluster, kind, name = uri.removeprefix(_SCHEME).split("/")
        if not uri.startswith(_SCHEME):
            raise ValueError(f"not an identity: {uri!r}")
        return cls(cluster, Kind(kind), name)

    def may(self, right: Right) -> bool:
        """Whether its processes have a right, somewhere in its cluster."""
        return right in self.kind.rights


def identity_in(uris: Iterable[str]) -> Identity | None:
    """The identity in the URIs of a certificate; None when there is none, or more than one."""
    found = []
    for uri in uris:
        try:
            found.append(Identity.parse(uri))
        except ValueError:
            continue
    return found[0] if len(found) == 1 else None
