"""The front door that a command talks to: its options, and its HTTP answers."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from email.message import Message
from functools import wraps
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any, Literal

import click
from attrs import frozen

from commutator.errors import CommutatorError


class LostError(CommutatorError):
    """The front door cannot be reached, or went away; it may come back."""


@frozen
class FrontDoor:
    """A running front door. Every method raises CommutatorError when it gives no good answer."""

    url: str
    """Without a slash at the end."""
    api_key: str | None = None
    admin_url: str | None = None
    """Where /health and /admin are; None: at ``url``. Without a slash at the end."""

    def call(
        self, path: str, body: dict[str, Any] | None = None, *, explain: bool = False
    ) -> tuple[Message, dict[str, Any]]:
        """Headers and body of a JSON answer; GET without a body, POST with one.

        ``explain`` asks why the worker was chosen.
        """
        more = {"X-Commutator-Explain": "1"} if explain else {}
        with self.ask(path, body, at_admin=path == "/health", headers=more) as answer:
            return answer.headers, _json(answer)

    def health(self) -> dict[str, Any]:
        """The answer of /health."""
        return self.call("/health")[1]

    def administer(
        self,
        method: Literal["GET", "POST"],
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout_s: float = 60.0,
    ) -> Any:
        """The JSON answer of a path below /admin: with the key if there is one.

        Without a key the front door is asked on its Unix socket, which only the user reaches who
        started the deployment.
        """
        local = None if self.api_key else self.health().get("socket")
        if local is None and not self.api_key:
            raise CommutatorError(f"{self.url} has no Unix socket; set COMMUTATOR_API_KEY")
        given = (body or {}) if method == "POST" else None
        with self.ask(path, given, at_admin=True, local=local, timeout_s=timeout_s) as answer:
            return _json(answer)

    @contextmanager
    def ask(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        at_admin: bool = False,
        local: str | None = None,
        timeout_s: float = 60.0,
        headers: Mapping[str, str] = {},
    ) -> Iterator[HTTPResponse]:
        """The answer, as it comes; GET without a body, POST with one.

        ``at_admin``: where operators ask. ``local``: on this Unix socket instead. ``timeout_s``
        bounds each wait for bytes. Raises LostError when nobody answers, or stops to.
        """
        base = (self.admin_url if at_admin else None) or self.url
        url = ("http://localhost" if local else base) + path
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        request = urllib.request.Request(
            url,
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json", **key, **headers},
        )
        opener = urllib.request.build_opener()
        if local is not None:
            no_proxy = urllib.request.ProxyHandler({})
            opener = urllib.request.build_opener(no_proxy, _LocalHandler(local))
        try:
            with opener.open(request, timeout=timeout_s) as answer:
                yield answer
        except urllib.error.HTTPError as error:
            text = _refusal(path if local else url, error.code, error.read(), error.reason)
            hint = None if local else self._hint(path, error.code)
            raise CommutatorError(f"{text}\n  {hint}" if hint else text) from error
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            why = getattr(reason, "strerror", None) or reason
            if local and isinstance(reason, FileNotFoundError | PermissionError):
                raise CommutatorError(
                    f"{local}: {why}\n  run this on the deployment's machine as the user who "
                    "started it, or set COMMUTATOR_API_KEY to a key with the permission "
                    '"admin"'
                ) from error
            raise LostError(f"{local or url}: {why}; is `commutator serve` running?") from error

    def _hint(self, path: str, status: int) -> str | None:
        """What a person can do about an error."""
        if status == HTTPStatus.UNAUTHORIZED and self.api_key:
            return "the key is not one of this front door's: set COMMUTATOR_API_KEY to another"
        if status == HTTPStatus.UNAUTHORIZED:
            return "set COMMUTATOR_API_KEY, or --api-key, to a key of this front door"
        if status == HTTPStatus.FORBIDDEN:
            return (
                "use the key of a principal that has the permission, or give it to this one under "
                "`permissions` in the section `auth`"
            )
        if status == HTTPStatus.NOT_FOUND and path.startswith(("/health", "/admin/")):
            return (
                "if the deployment has `frontend.admin`, set COMMUTATOR_ADMIN_URL, or --admin-url, "
                "to that address"
            )
        return None

    def workers(self, worker_id: str | None = None) -> list[dict[str, Any]]:
        """The workers, or only ``worker_id``, as /health shows them."""
        known: list[dict[str, Any]] = self.health()["workers"]
        found = [one for one in known if worker_id in (None, one["worker_id"])]
        if worker_id is not None and not found:
            names = ", ".join(one["worker_id"] for one in known)
            raise CommutatorError(
                f"{self.url} has no worker {worker_id!r}; it has: {names or 'none'}"
            )
        return found


class _LocalHandler(urllib.request.HTTPHandler):
    """Sends requests to a Unix socket, whatever their URL."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def http_open(self, req: urllib.request.Request) -> HTTPResponse:
        def connection(host: str, /, **options: Any) -> HTTPConnection:
            return _LocalConnection(host, self._path, **options)

        return self.do_open(connection, req)


class _LocalConnection(HTTPConnection):
    """To a Unix socket."""

    def __init__(self, host: str, path: str, **options: Any) -> None:
        super().__init__(host, **options)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _json(answer: HTTPResponse) -> Any:
    try:
        return json.loads(answer.read())
    except ValueError as error:
        raise CommutatorError(
            f"{answer.url} is not a front door: its answer is not JSON: {error}"
        ) from error


def _refusal(where: str, status: int, text: bytes, reason: object) -> str:
    """Why a front door refused; a 400 explains itself, as it is about what the user asked for."""
    message = _message(text, reason)
    return message if status == HTTPStatus.BAD_REQUEST else f"{where} answered {status}: {message}"


def _message(text: bytes, reason: object) -> str:
    """The message of a front door's error; another server may answer in any format."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{reason}; is that a front door?"


def front_door_options(command: Callable[..., None]) -> Callable[..., None]:
    """``--url``, ``--admin-url`` and ``--api-key``; the command gets ``door``, a ``FrontDoor``."""

    @wraps(command)
    def with_door(
        *args: Any, url: str, admin_url: str | None, api_key: str | None, **more: Any
    ) -> None:
        command(*args, door=FrontDoor(url, api_key, admin_url), **more)

    url = click.option(
        "--url",
        envvar="COMMUTATOR_URL",
        show_envvar=True,
        default="http://127.0.0.1:8000",
        show_default=True,
        callback=_base_url,
        help="URL of the front door.",
    )
    admin = click.option(
        "--admin-url",
        envvar="COMMUTATOR_ADMIN_URL",
        show_envvar=True,
        callback=_base_url,
        help="URL of `frontend.admin`, if the deployment has it.",
    )
    key = click.option(
        "--api-key",
        envvar="COMMUTATOR_API_KEY",
        show_envvar=True,
        help="Bearer token, if the front door requires one.",
    )
    return url(admin(key(with_door)))


def _base_url(_context: click.Context, _option: click.Parameter, url: str | None) -> str | None:
    """The URL without a trailing slash or "/v1"."""
    if url is None:
        return None
    if not url.startswith(("http://", "https://")):
        raise click.BadParameter(f"expected http://HOST:PORT, got {url}")
    return url.rstrip("/").removesuffix("/v1")


def start_text(one: Mapping[str, Any], now_unix_s: float) -> str:
    """What is known of a worker that is not in the registry, for people."""
    since_s = max(0.0, now_unix_s - one["since_unix_s"])
    text = f"for {since_s:.0f} s"
    if one["cause"] is not None:
        text = f"{since_s:.0f} s ago: {one['cause'].removeprefix('was ')}"
    if one["next_start_unix_s"] is not None:
        text += f"; starts again in {max(0.0, one['next_start_unix_s'] - now_unix_s):.0f} s"
    return text
