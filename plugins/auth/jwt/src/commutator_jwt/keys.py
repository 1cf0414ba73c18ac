"""The issuer's public keys: where they come from, and when they are fetched again."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import jwt
from cryptography.hazmat.primitives.serialization import load_pem_public_key

from commutator.errors import AuthenticationError, ConfigError
from commutator_jwt.config import JwtConfig

log = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
_MAX_BYTES = 1 << 20
_LOCAL = {"127.0.0.1", "localhost", "::1"}


class KeySet:
    """The keys of a JWKS by their ids, with the algorithms that each may be used for."""

    def __init__(self, keys: Mapping[str | None, Sequence[jwt.PyJWK]]) -> None:
        self._keys = keys

    @classmethod
    def of(cls, document: Any) -> KeySet:
        """Raises ValueError for what is no JWKS. Keys that we cannot use are left out."""
        entries = document.get("keys") if isinstance(document, dict) else None
        if not isinstance(entries, list):
            raise ValueError("no JWKS: a JSON object with a list `keys` is expected")  # noqa: TRY004
        keys: dict[str | None, list[jwt.PyJWK]] = {}
        for entry in entries:
            if not isinstance(entry, dict) or entry.get("use", "sig") != "sig":
                continue
            if entry.get("kty") == "oct":  # a secret: nothing that an issuer publishes
                continue
            try:
                key = jwt.PyJWK(entry)
            except (jwt.PyJWTError, ValueError, TypeError) as error:
                log.debug("a key of the issuer cannot be used: %s", error)
                continue
            keys.setdefault(key.key_id, []).append(key)
        if not keys:
            raise ValueError("the JWKS has no key that can be used")
        return cls(keys)

    def find(self, key_id: str | None, algorithm: str) -> jwt.PyJWK | None:
        """The key by which a token of these headers is checked; without an id, the only one."""
        if key_id is None:
            named = [key for keys in self._keys.values() for key in keys]
        else:
            named = list(self._keys.get(key_id, ()))
        fitting = [key for key in named if _fits(key, algorithm)]
        return fitting[0] if len(fitting) == 1 else None


def _fits(key: jwt.PyJWK, algorithm: str) -> bool:
    """Whether the key is of the algorithm's family, so that none passes for one of another."""
    families = {"RS": "RSA", "PS": "RSA", "ES": "EC", "Ed": "OKP"}
    return key.key_type == families[algorithm[:2]]


def keys_of_file(path: str) -> KeySet:
    """The keys of a PEM or JWKS file. Raises ConfigError."""
    try:
        data = Path(path).expanduser().read_bytes()
        if data.lstrip().startswith(b"{"):
            return KeySet.of(json.loads(data))
        public = load_pem_public_key(data)
        for algorithm in ("RS256", "ES256", "EdDSA"):
            try:
                entry = jwt.get_algorithm_by_name(algorithm).to_jwk(public, as_dict=True)
            except (TypeError, jwt.PyJWTError, AttributeError):
                continue
            return KeySet.of({"keys": [entry]})
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError([f"{path}: {reason}"], "auth") from error
    raise ConfigError([f"{path}: this kind of key cannot be used"], "auth")


class KeySource:
    """Fetches the keys of an issuer, in a task of its own; requests never fetch."""

    def __init__(self, config: JwtConfig, clock: Callable[[], float]) -> None:
        """``clock`` gives seconds, and never goes back."""
        self._config = config
        self._clock = clock
        self._wanted = asyncio.Event()
        self._fetched_s = float("-inf")
        self.keys: KeySet | None = None
        self.fetches = 0
        """How often the keys were asked for."""

    def want_newer(self) -> None:
        """Somebody names a key that is not known: the issuer may have a new one."""
        self._wanted.set()

    async def fetch(self) -> None:
        """Raises AuthenticationError when the issuer gives no keys."""
        self._fetched_s = self._clock()
        self.fetches += 1
        config = self._config
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session:
                url = config.jwks_url
                if url is None:
                    root = config.issuer.rstrip("/")
                    found = await _json(session, f"{root}/.well-known/openid-configuration")
                    url = found.get("jwks_uri") if isinstance(found, dict) else None
                    if not isinstance(url, str) or found.get("issuer") != config.issuer:
                        raise ValueError("the discovery document is not that of the issuer")  # noqa: TRY301
                self.keys = KeySet.of(await _json(session, url))
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise AuthenticationError(f"no keys of {config.issuer}: {reason}") from error

    async def run(self) -> None:
        """Fetch the keys again, regularly and when somebody wants newer ones, but not often."""
        while True:
            try:
                async with asyncio.timeout(self._config.refresh_s):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            await asyncio.sleep(self._fetched_s + self._config.refetch_s - self._clock())
            self._wanted.clear()
            try:
                await self.fetch()
            except AuthenticationError as error:
                log.warning("%s; the keys from before still apply", error)


async def _json(session: aiohttp.ClientSession, url: str) -> Any:
    """Raises ValueError for an address where anyone could answer, and for what is not JSON."""
    parts = urlsplit(url)
    if parts.scheme != "https" and parts.hostname not in _LOCAL:
        raise ValueError(f"{url}: keys come by https only")
    async with session.get(url, allow_redirects=False) as answer:
        if answer.status != HTTPStatus.OK:
            raise ValueError(f"{url} answered {answer.status}")
        data = await answer.content.read(_MAX_BYTES + 1)
        while len(data) <= _MAX_BYTES and (more := await answer.content.read(_MAX_BYTES)):
            data += more
        if len(data) > _MAX_BYTES:
            raise ValueError(f"{url}: the answer is too large")
        return json.loads(data)
