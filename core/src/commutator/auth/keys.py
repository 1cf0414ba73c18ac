"""The authenticator of kind `keys`: principals of API keys, which are known by their hashes.

A key is 256 random bits that we make. Nobody can find such a key by trying, so one round of SHA-256
keeps it: the slow hashes for passwords would only cost time in each request. The digest of what a
client sent is looked up in a table. How long that takes tells something about the digest, which
the client knows already, and nothing about the digests in the table: the next guess has an
unrelated one. A key that was found and does not expire is remembered as it is, in memory only and
until the table changes, because hashing it takes longer than the rest.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from attrs import Attribute, field, frozen

from commutator.config.tree import plain
from commutator.config.yaml_file import read_file
from commutator.contract.principal import (
    Authenticator,
    AuthenticatorConfig,
    Credentials,
    Principal,
    PrincipalConfig,
    check_principal_name,
)
from commutator.contract.settings import PositiveSeconds, setting
from commutator.errors import AuthenticationError, ConfigError
from commutator.schema import StructureError, build_converter, structure

log = logging.getLogger(__name__)

_PREFIX = "cmt-"
"""By it, searches for leaked secrets find our keys."""
_KEY_BYTES = 32
_KEY = re.compile(re.escape(_PREFIX) + r"[A-Za-z0-9_-]{43}")
_HASH = re.compile(r"[0-9a-f]{64}")


def new_key() -> str:
    """A key that nobody can guess: 256 random bits in 47 characters."""
    return _PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def hash_of(key: str) -> str:
    """What the configuration holds in place of ``key``: 64 hexadecimal digits."""
    return hashlib.sha256(key.encode()).hexdigest()


def expiry_unix_s(text: str) -> float:
    """The moment of a date such as 2027-01-31, which is its first in UTC, or of a date and time.

    Raises ValueError.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f'expected a date such as "2027-01-31" or "2027-01-31T18:00:00Z", got {text[:40]!r}'
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _is_hash(_: object, _field: Attribute[Any], value: str) -> None:
    if not _HASH.fullmatch(value):
        raise ValueError(
            "expected 64 hexadecimal digits in lower case; `commutator key NAME` makes a key and "
            "prints its hash"
        )


def _is_moment(_: object, _field: Attribute[Any], value: str | None) -> None:
    if value is not None:
        expiry_unix_s(value)


def _is_name(_: object, _field: Attribute[Any], value: str) -> None:
    check_principal_name(value)


def _have_different_names(
    _: object, _field: Attribute[Any], value: tuple[KeyPrincipalConfig, ...]
) -> None:
    KeyTable.of(value)


@frozen(kw_only=True)
class KeyConfig:
    """One key of a principal."""

    WRITTEN_AS: ClassVar[str] = "{sha256: HASH} as `commutator key NAME` prints it"
    """Its form in a file; messages about another form, perhaps the key itself, do not repeat it."""
    sha256: str = setting("The hash that `commutator key NAME` prints.", validator=_is_hash)
    expires: str | None = setting(
        'The key is refused from then on: "2027-01-31" (its first moment in UTC) or '
        '"2027-01-31T18:00:00Z". By default never.',
        None,
        validator=_is_moment,
    )


@frozen(kw_only=True)
class KeyPrincipalConfig(PrincipalConfig):
    """A principal and its keys."""

    name: str = setting(
        "Its name in logs, metrics and usage: 1 to 64 letters, digits, '.', '_', '-' and '@'.",
        validator=_is_name,
    )
    keys: tuple[KeyConfig, ...] = setting(
        "Its keys; several while one replaces the other. None: it cannot send requests.", ()
    )


@frozen(kw_only=True)
class KeysConfig(AuthenticatorConfig):
    """Principals by API keys that `commutator key` made."""

    principals: tuple[KeyPrincipalConfig, ...] = setting(
        "The principals.", (), validator=_have_different_names
    )
    file: str | None = setting(
        "A YAML file with more `principals`. It is read again when it changes; while it is wrong, "
        "the principals from before apply.",
        None,
    )
    poll_s: PositiveSeconds = setting("How often the file is looked at.", 1.0)


@frozen
class _Known:
    """A key of the table."""

    principal: Principal
    expires: str | None
    expires_unix_s: float | None


@frozen
class KeyTable:
    """Every key by the digest of it."""

    keys: Mapping[bytes, _Known] = field(factory=dict)

    @classmethod
    def of(cls, principals: Iterable[KeyPrincipalConfig]) -> KeyTable:
        """Raises ValueError when two principals have the same name, or the same key."""
        keys: dict[bytes, _Known] = {}
        names: set[str] = set()
        for config in principals:
            if config.name in names:
                raise ValueError(f'two principals have the name "{config.name}"')
            names.add(config.name)
            principal = config.principal(config.name)
            for key in config.keys:
                digest = bytes.fromhex(key.sha256)
                if digest in keys:
                    raise ValueError(
                        f'the key {key.sha256[:8]}... of "{config.name}" is also one of '
                        f'"{keys[digest].principal.name}"'
                    )
                expires_unix_s = None if key.expires is None else expiry_unix_s(key.expires)
                keys[digest] = _Known(principal, key.expires, expires_unix_s)
        return cls(keys)

    def find(self, key: str) -> _Known | None:
        """What is known of ``key``; None: nobody's."""
        if not _KEY.fullmatch(key):
            return None  # not one of ours, so perhaps not random enough: its hash is not enough
        return self.keys.get(hashlib.sha256(key.encode()).digest())


@frozen(kw_only=True)
class _KeysFile:
    """What the file of principals holds."""

    principals: tuple[KeyPrincipalConfig, ...] = setting("The principals.")


def read_principals(path: Path) -> tuple[KeyPrincipalConfig, ...]:
    """The principals of a file. Raises ConfigError with every mistake."""
    tree = read_file(path)
    try:
        return structure(build_converter(), plain(tree), _KeysFile).principals
    except StructureError as error:
        raise ConfigError(
            [f"{where}: {what}" for where, what in error.problems], str(path)
        ) from None


class KeyAuthenticator(Authenticator):
    """Finds the principal of a bearer token among those of the configuration and of its file."""

    def __init__(self, config: KeysConfig, clock: Callable[[], float] = time.time) -> None:
        """``clock`` gives seconds since 1970, against which keys expire."""
        self._config = config
        self._clock = clock
        self.known: dict[str, Principal] = {}
        self._table = KeyTable.of(config.principals)
        self._file = None if config.file is None else Path(config.file).expanduser()
        self._seen: object = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises ConfigError when the file cannot be used."""
        if self._file is not None:
            self._seen = _version(self._file)
            self._table = await asyncio.to_thread(self._read, self._file)
            self._watching = asyncio.create_task(self._watch(self._file))

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)

    async def authenticate(self, credentials: Credentials) -> Principal | None:
        bearer = credentials.bearer
        found = None if bearer is None else self._table.find(bearer)
        if found is None:
            return None
        if found.expires_unix_s is None:
            self.known[f"Bearer {bearer}"] = found.principal
        elif self._clock() >= found.expires_unix_s:
            raise AuthenticationError(
                f"this API key expired on {found.expires}; ask its operator for another"
            )
        return found.principal

    async def look_at_file(self) -> bool:
        """Read the file if it changed since the last time; returns whether its keys now apply."""
        assert self._file is not None
        version = await asyncio.to_thread(_version, self._file)
        if version == self._seen:
            return False
        self._seen = version
        try:
            table = await asyncio.to_thread(self._read, self._file)
        except ConfigError as error:
            log.error("%s; the keys from before still apply", error)  # noqa: TRY400 - not a bug
            return False
        self._table = table
        self.known.clear()
        log.info("%s was read again: %d keys", self._file, len(table.keys))
        return True

    async def _watch(self, path: Path) -> None:
        while True:
            await asyncio.sleep(self._config.poll_s)
            try:
                await self.look_at_file()
            except Exception:
                log.exception("%s could not be read again; the keys from before still apply", path)

    def _read(self, path: Path) -> KeyTable:
        try:
            return KeyTable.of((*self._config.principals, *read_principals(path)))
        except ValueError as error:
            raise ConfigError([str(error)], str(path)) from None


def _version(path: Path) -> object:
    """What differs once somebody changed or replaced the file; None while there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
