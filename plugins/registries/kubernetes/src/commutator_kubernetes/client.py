"""What is needed of the API server: every call has a deadline, and says what was answered."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Literal
from urllib.parse import quote

import aiohttp
from attrs import frozen

from commutator.errors import ConfigError, RegistryError
from commutator_kubernetes.access import Access

Json = dict[str, Any]

_CONNECT_S = 2.0
_PAGE = 500
_TOKEN_S = 60.0
"""How often the file of a token is read again."""
_LONGEST_EVENT = 16 << 20
"""Bytes of one event of a watch."""
_SHORTEST_WAIT_S = 0.05
_CLOSE_S = 0.05
"""Connections with TLS are not closed at once; the loop must turn some more."""
_MERGE, _APPLY = "application/merge-patch+json", "application/apply-patch+yaml"
_FIELD_MANAGER = "commutator"


class ApiError(RegistryError):
    """The API server could not be reached, or answered with an error."""

    def __init__(self, message: str, status: int = 0, *, is_missing: bool = False) -> None:
        """``status``: as in HTTP, 0 without an answer."""
        super().__init__(message)
        self.status = status
        self.is_missing = is_missing
        """There is no such object, though there is such a kind."""

    @property
    def is_conflict(self) -> bool:
        """The object is there already, or is another than it was."""
        return self.status == HTTPStatus.CONFLICT


@frozen(kw_only=True)
class Listing:
    """All objects of a resource that a selector chooses, as of one version."""

    version: str
    items: tuple[Json, ...]


@frozen(kw_only=True)
class Resource:
    """One kind of objects in one namespace."""

    path: str
    """What all paths begin with, such as /api/v1/namespaces/default/pods."""
    selector: str = ""
    """Labels that chosen objects have."""

    def at(self, name: str) -> str:
        """The path of one object."""
        return f"{self.path}/{quote(name, safe='')}"


def resource(group: str, version: str, plural: str, namespace: str, selector: str = "") -> Resource:
    """A ``Resource``; ``group`` is empty for the core's kinds."""
    base = f"/apis/{group}/{version}" if group else f"/api/{version}"
    return Resource(path=f"{base}/namespaces/{namespace}/{plural}", selector=selector)


class ApiClient:
    """A client of one API server. Used from one event loop, in which it is made."""

    def __init__(
        self,
        access: Access,
        call_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError when a certificate cannot be used."""
        self._access = access
        self._timeout_s = call_timeout_s
        self._clock = clock
        self._token: str | None = None
        self._token_until_s = 0.0
        try:
            context = access.ssl_context()
        except (OSError, ValueError) as error:
            raise ConfigError([f"certificates: {error}"], "Kubernetes") from error
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=True if context is None else context),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=min(_CONNECT_S, call_timeout_s)),
        )

    async def get(self, resource: Resource, name: str) -> Json | None:
        """An object; None: there is none. Raises ApiError, as all do."""
        try:
            return await self._ask("GET", resource.at(name))
        except ApiError as error:
            if error.is_missing:
                return None
            raise

    async def list(self, resource: Resource) -> Listing:
        """All objects, not older than this call."""
        items: list[Json] = []
        query = {"limit": str(_PAGE), "labelSelector": resource.selector}
        while True:
            page = await self._ask("GET", resource.path, query=query)
            items += page.get("items") or []
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                return Listing(version=str(metadata.get("resourceVersion")), items=tuple(items))
            query["continue"] = metadata["continue"]

    async def create(self, resource: Resource, body: Json) -> Json:
        """Create an object; a conflict: there is one of its name."""
        return await self._ask("POST", resource.path, body)

    async def replace(self, resource: Resource, body: Json) -> Json:
        """Put an object in the place of one that has its ``resourceVersion``; else a conflict."""
        return await self._ask("PUT", resource.at(body["metadata"]["name"]), body)

    async def merge(self, resource: Resource, name: str, body: Json) -> Json:
        """Change some fields of an object."""
        return await self._ask("PATCH", resource.at(name), body, content_type=_MERGE)

    async def apply(self, resource: Resource, body: Json) -> Json:
        """Create an object, or set these of its fields (server-side apply)."""
        query = {"fieldManager": _FIELD_MANAGER, "force": "true"}
        path = resource.at(body["metadata"]["name"])
        return await self._ask("PATCH", path, body, query=query, content_type=_APPLY)

    async def delete(
        self,
        resource: Resource,
        name: str,
        *,
        uid: str | None = None,
        version: str | None = None,
        grace_s: int | None = None,
    ) -> bool:
        """Delete an object, if it is that of ``uid`` and ``version``. False: it is not there."""
        body: Json = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {}}
        if uid is not None:
            body["preconditions"]["uid"] = uid
        if version is not None:
            body["preconditions"]["resourceVersion"] = version
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        try:
            await self._ask("DELETE", resource.at(name), body)
        except ApiError as error:
            if error.is_missing:
                return False
            raise
        return True

    @asynccontextmanager
    async def watch(
        self, resource: Resource, version: str, timeout_s: float
    ) -> AsyncIterator[AsyncIterator[Json]]:
        """The events after ``version``; the stream ends by itself after ``timeout_s``."""
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(max(1, round(timeout_s))),
            "labelSelector": resource.selector,
        }
        events = None
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._session.get(
                    self._access.server + resource.path, params=query, headers=self._headers()
                )
            async with answer:
                if answer.status != HTTPStatus.OK:
                    raise _error_of(answer.status, await _body(answer), resource.path)
                events = _events(answer)
                yield events
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ApiError(f"{self._access.server}{resource.path}: {_words(error)}") from error
        finally:
            if events is not None:
                await events.aclose()

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        await self._session.close()
        await asyncio.sleep(_CLOSE_S)

    async def _ask(
        self,
        method: Literal["GET", "POST", "PUT", "PATCH", "DELETE"],
        path: str,
        body: Json | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Json:
        """The answer. Asked again within the deadline where the server says that it is too busy.

        Reading is also asked again once after a connection was lost.
        """
        url, ends_s = self._access.server + path, self._clock() + self._timeout_s
        data = None if body is None else json.dumps(body).encode()
        failed = fresh = False
        while True:
            remaining_s = max(_SHORTEST_WAIT_S, ends_s - self._clock())
            try:
                async with (
                    asyncio.timeout(remaining_s),
                    self._session.request(
                        method,
                        url,
                        params=query,
                        data=data,
                        headers={**self._headers(fresh), "Content-Type": content_type},
                    ) as answer,
                ):
                    status, said = answer.status, await _body(answer)
                    retry_s = _seconds(answer.headers.get("Retry-After"))
            except (aiohttp.ClientError, OSError) as error:  # TimeoutError is one
                if method != "GET" or failed or isinstance(error, TimeoutError):
                    raise ApiError(f"{url}: {_words(error)}") from error
                failed = True
                continue
            if status < HTTPStatus.MULTIPLE_CHOICES:
                return said
            if status == HTTPStatus.UNAUTHORIZED and not fresh:
                fresh = True
                continue
            wait_s = retry_s if status == HTTPStatus.TOO_MANY_REQUESTS else None
            if wait_s is None or self._clock() + wait_s >= ends_s:
                raise _error_of(status, said, path)
            await asyncio.sleep(wait_s * random.uniform(1.0, 1.1))  # noqa: S311

    def _headers(self, fresh: bool = False) -> dict[str, str]:
        """``fresh``: with a token that is read again now."""
        now_s = self._clock()
        if fresh or now_s >= self._token_until_s:
            try:
                self._token = self._access.read_token()
            except OSError as error:
                raise ApiError(f"the token of the service account: {error}") from error
            self._token_until_s = now_s + _TOKEN_S
        given = {"Accept": "application/json", "User-Agent": "commutator"}
        return given if self._token is None else {**given, "Authorization": f"Bearer {self._token}"}


async def _events(answer: aiohttp.ClientResponse) -> AsyncGenerator[Json, None]:
    """One JSON object a line, however long. Raises ValueError for what is none."""
    buffer = bytearray()
    async for piece in answer.content.iter_any():
        buffer += piece
        if len(buffer) > _LONGEST_EVENT:
            raise ValueError(f"an event of more than {_LONGEST_EVENT} bytes")
        *lines, rest = bytes(buffer).split(b"\n")
        buffer = bytearray(rest)
        for line in filter(None, lines):
            event = json.loads(line)
            if not isinstance(event, dict):
                raise ValueError("an event that is no object")  # noqa: TRY004 - it was received
            yield event


async def _body(answer: aiohttp.ClientResponse) -> Json:
    try:
        said = json.loads(await answer.read())
    except ValueError:
        said = None
    return said if isinstance(said, dict) else {}


def _seconds(text: str | None) -> float:
    """What a server asks to wait; a second where it does not say."""
    try:
        return max(0.0, float(text or 1.0))
    except ValueError:
        return 1.0


def _words(error: Exception) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else str(error) or repr(error)


def _error_of(status: int, said: Json, path: str) -> ApiError:
    message = str(said.get("message") or said.get("reason") or "")
    details = said.get("details")
    is_missing = status == HTTPStatus.NOT_FOUND and isinstance(details, dict) and "name" in details
    hint = ""
    if status == HTTPStatus.NOT_FOUND and not is_missing:
        hint = "; are the custom resources installed (docs/how-to/kubernetes.md)?"
    elif status == HTTPStatus.FORBIDDEN and " cannot " in message:
        hint = "; the account needs this right (RBAC)"
    return ApiError(f"{path}: {status} {message}{hint}", status, is_missing=is_missing)
