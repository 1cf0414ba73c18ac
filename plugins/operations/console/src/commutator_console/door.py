"""What commands ask of a front door beside the rest: its live view, and a body for a prompt."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import click

from commutator.errors import CommutatorError
from commutator_console.front_door import FrontDoor

_SILENT_S = 10.0
"""A live view comes every second."""


def live(door: FrontDoor) -> Iterator[dict[str, Any]]:
    """Snapshots of the live view, until the front door ends the stream.

    Raises LostError when it goes away. Without a key the Unix socket is asked, as by
    ``administer``; where it is not to be reached, the address, which serves its own machine.
    """
    with door.ask(
        "/admin/live", at_admin=True, local=own_socket(door), timeout_s=_SILENT_S
    ) as answer:
        event = b""
        for line in answer:
            if line.startswith(b"event: "):
                event = line[7:].strip()
            elif line.startswith(b"data: ") and event == b"snapshot":
                yield json.loads(line[6:])


def own_socket(door: FrontDoor) -> str | None:
    """The front door's Unix socket, if this user reaches it and has no key."""
    local = None if door.api_key else door.health().get("socket")
    return local if local is not None and os.access(local, os.R_OK | os.W_OK) else None


def prompt_body(door: FrontDoor, text: str, model: str | None, *, chat: bool) -> dict[str, Any]:
    """The body of a request for a prompt or a user's message; by default to the only model."""
    if model is None:
        names = [one["id"] for one in door.call("/v1/models")[1]["data"]]
        if len(names) != 1:
            known = ", ".join(names)
            raise CommutatorError(f"{door.url} serves several models; add --model, one of: {known}")
        model = names[0]
    content = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    return {"model": model, **content}


def prompt_options(command: Callable[..., None]) -> Callable[..., None]:
    """The argument PROMPT with ``--model`` and ``--chat``."""
    model = click.option("--model", help="The model; optional when only one is served.")
    chat = click.option(
        "--chat", is_flag=True, help="Send PROMPT as a user's message, through the chat template."
    )
    return click.argument("prompt")(model(chat(command)))
