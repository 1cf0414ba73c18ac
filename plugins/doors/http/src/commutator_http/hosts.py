"""By which names a door that asks for no key may be called.

The page of another site can reach such a door under its own name, which its owner lets point to the
door's address once the page is loaded (DNS rebinding); for the browser both are one site. The name
then stands in ``Host``. A page cannot have an address, nor a name that nobody can register.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address

from commutator.contract.answer import Failure

_NOBODYS = (".local", ".localhost", ".internal")
"""Ends of names that are not given out."""
_KEPT = 256


class Hosts:
    """The names of one door."""

    def __init__(self, allowed: Iterable[str]) -> None:
        """``allowed``: names in lower case, without a port; "*" is every one."""
        self._allowed = frozenset(allowed)
        self._right: set[str] = set()
        """Values of the header that were found right."""

    @property
    def all(self) -> bool:
        """Whether every name is allowed."""
        return "*" in self._allowed

    def check(self, host: str | None) -> None:
        """Raise Failure (403) for a value of ``Host`` that names a stranger's site.

        None, as of clients that send none, is right: browsers always send one.
        """
        if host is None or host in self._right:
            return
        if not self.allows(host):
            raise Failure(
                403,
                f"this door asks for no key, and answers to no host {host[:100]!r}; call it by "
                "its address, or add the name to the door's allowed_hosts",
                "host_not_allowed",
            )
        if len(self._right) < _KEPT:
            self._right.add(host)

    def allows(self, host: str) -> bool:
        """Whether a client may call the door by ``host``, with or without a port."""
        name = _without_port(host).lower().rstrip(".")
        if name in self._allowed or name.endswith(_NOBODYS):
            return True
        return _is_address(name) or "." not in name


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _is_address(name: str) -> bool:
    try:
        ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
