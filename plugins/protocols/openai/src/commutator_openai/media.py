"""Which addresses a client may make an engine fetch: pictures, sounds, videos, files, tool servers.

An engine fetches them from inside the deployment's network, where a client may reach nothing. So
only hosts that the configuration names are allowed, and what the request carries itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any
from urllib.parse import urlsplit

from commutator.errors import RequestError

_SCHEMES = {"http", "https"}
_SHOWN = 80


def check_media(body: Any, hosts: Collection[str]) -> None:
    """Raise RequestError if ``body`` names an address that is not at one of ``hosts``.

    Whatever stands under a key that ends in ``_url``, or under ``url``, is an address. ``data:``
    URLs hold their content and are always allowed.
    """
    for key, address in _addresses(body):
        if not _is_allowed(address, hosts):
            raise RequestError(
                f"{key}: {address[:_SHOWN]!r} would be fetched from inside the server's network, "
                "which is not allowed; send the content as a data: URL, or ask the operator to add "
                "the host to media_hosts of the protocol openai",
                key,
                "media_url_not_allowed",
            )


def _addresses(body: Any) -> Iterator[tuple[str, str]]:
    """Each key and address, without recursion, as clients choose how deep bodies are."""
    left = [body]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            for key, value in one.items():
                if isinstance(value, dict | list):
                    left.append(value)
                    if isinstance(value, list) and _is_url_key(key):
                        yield from ((key, item) for item in value if isinstance(item, str))
                elif isinstance(value, str) and _is_url_key(key):
                    yield key, value
        elif isinstance(one, list):
            left += (item for item in one if isinstance(item, dict | list))


def _is_url_key(key: str) -> bool:
    name = key.lower()
    return name.endswith(("_url", "_urls")) or name in {"url", "urls"}


def _is_allowed(address: str, hosts: Collection[str]) -> bool:
    if address[:5].lower() == "data:":
        return True
    # Parsers disagree about control characters, backslashes and user names; engines use others.
    if not address.isprintable() or any(mark in address for mark in " \\@"):
        return False
    try:
        parts = urlsplit(address)
        host = parts.hostname
    except ValueError:
        return False
    return parts.scheme in _SCHEMES and host is not None and host in hosts
