"""The front door that a command talks to: its options, and its HTTP answers."""

from __future__ import annotations

import json
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from email.message import Message
from functools import wraps
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import Any, Literal

import click
from attrs import frozen

from commutator.errors import CommutatorError

__all__ = ["FrontDoor", "LostError", "front_door_options", "prompt_options", "start_text"]

_LIVE = "/admin/live"
_SILENT_S = 10.0
"""A live view comes every second."""


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
        url = (self.admin_url if path == "/health" and self.admin_url else self.url) + path
        headers = self._headers()
        if explain:
            headers["X-Commutator-Explain"] = "1"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, headers)
        return self._answer(request, path)

    def _headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Content-Type": "application/json", **key}

    def _answer(
        self, request: urllib.request.Request, path: str, timeout_s: float = 60.0
    ) -> tuple[Message, Any]:
        url = request.full_url
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return answer.headers, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            text = _refusal(url, error.code, error.read(), error.reason)
            hint = self._hint(path, error.code)
            raise CommutatorError(f"{text}\n  {hint}" if hint else text) from error
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            reason = getattr(reason, "strerror", None) or reason
            raise CommutatorError(f"{url}: {reason}; is `commutator serve` running?") from error
        except ValueError as error:
            raise CommutatorError(
                f"{url} is not a front door: its answer is not JSON: {error}"
            ) from error

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
        data = json.dumps(body or {}).encode() if method == "POST" else None
        if self.api_key:
            url = (self.admin_url or self.url) + path
            request = urllib.request.Request(url, data, self._headers(), method=method)
            return self._answer(request, path, timeout_s)[1]
        path_of_socket = self.health().get("socket")
        if path_of_socket is None:
            raise CommutatorError(f"{self.url} has no Unix socket; set COMMUTATOR_API_KEY")
        connection = _LocalConnection(path_of_socket, timeout_s)
        try:
            connection.request(method, path, data, self._headers())
            answer = connection.getresponse()
            text = answer.read()
        except (FileNotFoundError, PermissionError) as error:
            raise CommutatorError(
                f"{path_of_socket}: {error.strerror}\n  run this on the deployment's machine as "
                "the user who started it, or set COMMUTATOR_API_KEY to a key with the permission "
                '"admin"'
            ) from error
        except (OSError, HTTPException) as error:
            raise CommutatorError(
                f"{path_of_socket}: {error}; is `commutator serve` running?"
            ) from error
        finally:
            connection.close()
        if answer.status != HTTPStatus.OK:
            raise CommutatorError(_refusal(path, answer.status, text, answer.reason))
        return json.loads(text)

    def live(self) -> Iterator[dict[str, Any]]:
        """Snapshots of the live view, until the front door ends the stream.

        Raises LostError when it goes away. Without a key the Unix socket is asked, as by
        ``administer``; where it is not to be reached, the address, which serves its own machine.
        """
        local = None if self.api_key else self._local_connection()
        if local is not None:
            with closing(local):
                yield from self._live_locally(local)
            return
        url = (self.admin_url or self.url) + _LIVE
        request = urllib.request.Request(url, None, self._headers())
        try:
            with urllib.request.urlopen(request, timeout=_SILENT_S) as answer:
                yield from _events(answer)
        except urllib.error.HTTPError as error:
            text = _refusal(url, error.code, error.read(), error.reason)
            hint = self._hint(_LIVE, error.code)
            raise CommutatorError(f"{text}\n  {hint}" if hint else text) from error
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise LostError(f"{self.url}: {reason}; is `commutator serve` running?") from error

    def _local_connection(self) -> _LocalConnection | None:
        """To the front door's Unix socket, if this user reaches it from here."""
        try:
            path = self.health().get("socket")
        except CommutatorError as error:
            if isinstance(error.__cause__, urllib.error.HTTPError):
                raise
            raise LostError(str(error)) from error
        if path is None or not os.access(path, os.R_OK | os.W_OK):
            return None
        return _LocalConnection(path, _SILENT_S)

    def _live_locally(self, connection: _LocalConnection) -> Iterator[dict[str, Any]]:
        try:
            connection.request("GET", _LIVE, None, self._headers())
            answer = connection.getresponse()
            if answer.status != HTTPStatus.OK:
                text = _refusal(_LIVE, answer.status, answer.read(), answer.reason)
                raise CommutatorError(text)
            yield from _events(answer)
        except (OSError, HTTPException) as error:
            raise LostError(f"{self.url}: {error}") from error

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

    def prompt(self, text: str, model: str | None, *, chat: bool) -> dict[str, Any]:
        """The body of a request for a prompt or a user's message; by default to the only model."""
        if model is None:
            names = [one["id"] for one in self.call("/v1/models")[1]["data"]]
            if len(names) != 1:
                known = ", ".join(names)
                raise CommutatorError(
                    f"{self.url} serves several models; add --model, one of: {known}"
                )
            model = names[0]
        content = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        return {"model": model, **content}


class _LocalConnection(HTTPConnection):
    """To a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _events(answer: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The data of server-sent events that are snapshots; ``answer`` is lines."""
    event = b""
    for line in answer:
        if line.startswith(b"event: "):
            event = line[7:].strip()
        elif line.startswith(b"data: ") and event == b"snapshot":
            yield json.loads(line[6:])


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


def prompt_options(command: Callable[..., None]) -> Callable[..., None]:
    """The argument PROMPT with ``--model`` and ``--chat``."""
    model = click.option("--model", help="The model; optional when only one is served.")
    chat = click.option(
        "--chat", is_flag=True, help="Send PROMPT as a user's message, through the chat template."
    )
    return click.argument("prompt")(model(chat(command)))


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
        text += f": {one['cause']}"
    if one["next_start_unix_s"] is not None:
        text += f"; starts again in {max(0.0, one['next_start_unix_s'] - now_unix_s):.0f} s"
    return text
