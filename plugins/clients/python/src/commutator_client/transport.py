"""OpenAI's clients over connections that send a request again when that is right.

Imported by the first request: OpenAI's package takes a good part of a second.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import anyio
import httpx2
import openai

from commutator_client.config import ClientConfig
from commutator_client.errors import (
    ApiError,
    ClientConnectionError,
    ClientError,
    ClientTimeoutError,
    OverloadedError,
    UnavailableError,
)
from commutator_client.retries import Retries, retry_after_s

_NO_KEY = "unused"
"""OpenAI's clients take a key from the environment where none is given: not for this server."""
_ATTEMPTS = "commutator_attempts"
"""In a request's extensions: how often it was sent."""
_BODY_SHOWN = 2_000
_PROBES = ("/health", "/ready")
"""They say what is now: asking again until it is otherwise would hide it."""
_CLASSES: Mapping[int, type[ApiError]] = {429: OverloadedError, 503: UnavailableError}


class _Sending:
    """What both kinds of connections decide."""

    def __init__(self, retries: Retries) -> None:
        self._retries = retries

    def begin(self, request: httpx2.Request) -> None:
        """Count an attempt."""
        request.extensions[_ATTEMPTS] = request.extensions.get(_ATTEMPTS, 0) + 1

    def wait_s(
        self, request: httpx2.Request, found: httpx2.Response | httpx2.TransportError
    ) -> float | None:
        """Before the next attempt; None: ``found`` stands."""
        status, headers = None, dict[str, str]()
        if isinstance(found, httpx2.Response):
            if found.is_success:
                return None
            status, headers = found.status_code, dict(found.headers)
        elif isinstance(found, httpx2.ReadTimeout | httpx2.UnsupportedProtocol):
            return None  # the server may compute still, and a second request would double its work
        if not isinstance(request.stream, httpx2.ByteStream):
            return None  # its body is read already
        if request.url.path.endswith(_PROBES):
            return None
        return self._retries.wait_s(
            request.extensions[_ATTEMPTS],
            status,
            headers,
            now_unix_s=time.time(),
            chance=random.random(),  # noqa: S311 - no secret
        )


class AsyncConnections(openai.DefaultAsyncHttpxClient):
    """Sends requests again as ``Retries`` says."""

    def __init__(
        self,
        retries: Retries,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._sending = _Sending(retries)
        self._sleep = sleep

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """As of the base class; with the answer of the last attempt."""
        while True:
            self._sending.begin(request)
            try:
                response = await super().send(request, **options)
            except httpx2.TransportError as error:
                wait_s = self._sending.wait_s(request, error)
                if wait_s is None:
                    raise
            else:
                wait_s = self._sending.wait_s(request, response)
                if wait_s is None:
                    return response
                await response.aclose()
            await self._sleep(wait_s)


class Connections(openai.DefaultHttpxClient):
    """Sends requests again as ``Retries`` says."""

    def __init__(
        self, retries: Retries, sleep: Callable[[float], None] = time.sleep, **options: Any
    ) -> None:
        super().__init__(**options)
        self._sending = _Sending(retries)
        self._sleep = sleep

    def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """As of the base class; with the answer of the last attempt."""
        while True:
            self._sending.begin(request)
            try:
                response = super().send(request, **options)
            except httpx2.TransportError as error:
                wait_s = self._sending.wait_s(request, error)
                if wait_s is None:
                    raise
            else:
                wait_s = self._sending.wait_s(request, response)
                if wait_s is None:
                    return response
                response.close()
            self._sleep(wait_s)


def async_openai(config: ClientConfig, **options: Any) -> openai.AsyncOpenAI:
    """A client of the deployment; ``options`` are those of ``AsyncConnections``."""
    return openai.AsyncOpenAI(
        http_client=AsyncConnections(_retries(config), **options), **_options(config)
    )


def sync_openai(config: ClientConfig, **options: Any) -> openai.OpenAI:
    """A client of the deployment; ``options`` are those of ``Connections``."""
    return openai.OpenAI(http_client=Connections(_retries(config), **options), **_options(config))


def _retries(config: ClientConfig) -> Retries:
    return Retries(config.max_retries, config.retry_delay, config.max_retry_wait)


def _options(config: ClientConfig) -> dict[str, Any]:
    return {
        "base_url": f"{config.root_url}/v1",
        "api_key": config.api_key or _NO_KEY,
        "timeout": config.timeout,
        "max_retries": 0,  # ours are counted, and wait as long as the server asks
    }


def until_whole(config: ClientConfig) -> httpx2.Timeout:
    """Patience for an answer that comes whole."""
    return httpx2.Timeout(config.timeout, read=config.answer_timeout)


@contextmanager
def translated(config: ClientConfig, *, begun: bool = False) -> Iterator[None]:
    """Raises what OpenAI's client raises as a ``ClientError``; ``begun``: a stream has begun."""
    try:
        yield
    except openai.APIStatusError as error:
        raise _refused(error) from error
    except openai.APIConnectionError as error:
        made = _broken_off if begun else _not_reached
        raise made(error, config) from error
    except openai.APIError as error:  # within a stream
        body = error.body if isinstance(error.body, str) else json.dumps(error.body)
        attempts = attempts_of(error.request)
        raise ApiError(
            200, body, error.message, attempts=attempts, code=error.code, param=error.param
        ) from error


def _refused(error: openai.APIStatusError) -> ApiError:
    response = error.response
    body = response.text
    return _CLASSES.get(error.status_code, ApiError)(
        error.status_code,
        body,
        _message(error.body) or body[:_BODY_SHOWN],
        attempts=attempts_of(response.request),
        code=error.code,
        param=error.param,
        request_id=response.headers.get("x-request-id"),
        retry_after_s=retry_after_s(dict(response.headers), time.time()),
    )


def _message(body: object) -> str:
    said = body.get("message") if isinstance(body, dict) else None
    return said if isinstance(said, str) else ""


def _not_reached(error: openai.APIConnectionError, config: ClientConfig) -> ClientError:
    """No answer came, or none in time."""
    attempts, cause = attempts_of(error.request), error.__cause__
    times = "once" if attempts == 1 else f"{attempts} times"
    if isinstance(cause, httpx2.ReadTimeout):
        waited_s = error.request.extensions.get("timeout", {}).get("read")
        setting = "answer_timeout" if waited_s == config.answer_timeout else "timeout"
        return ClientTimeoutError(
            f"{config.root_url} was silent for {waited_s:g} s ({setting}): stream the answer, "
            f"or allow more",
            attempts,
        )
    kind = ClientTimeoutError if isinstance(cause, httpx2.TimeoutException) else None
    return (kind or ClientConnectionError)(
        f"{config.root_url} cannot be reached, tried {times}: {cause or error}", attempts
    )


def _broken_off(error: openai.APIConnectionError, config: ClientConfig) -> ClientError:
    attempts, cause = attempts_of(error.request), error.__cause__
    if isinstance(cause, httpx2.TimeoutException):
        return ClientTimeoutError(
            f"the answer broke off: {config.root_url} was silent for {config.timeout:g} s "
            "(timeout)",
            attempts,
        )
    return ClientConnectionError(f"the answer broke off before its end: {cause}", attempts)


def attempts_of(request: httpx2.Request) -> int:
    """How often it was sent."""
    attempts: int = request.extensions.get(_ATTEMPTS, 1)
    return attempts
