"""The short form of `frontend`: one door's options in the section itself, and `admin`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import Any

import attrs

from commutator.config.tree import DEFAULT, Node, find, from_plain
from commutator.contract.door import DoorConfig, FrontendConfig

_OF_PROCESS = frozenset(field.name for field in attrs.fields(FrontendConfig))
_OPERATORS = 64
"""Connections of operators and their tools, on the door that `admin` describes."""


def with_doors(tree: Node) -> Node:
    """``tree``, of any shape, with `frontend.doors` in place of the short form.

    Each value keeps its origin. A door without `protocols` speaks `openai`.
    """
    section = find(tree, ("frontend",))
    given = {} if section is None else section.value
    if not isinstance(given, dict) or not isinstance(tree.value, dict):
        return tree  # other checks report it
    origin = DEFAULT if section is None else section.origin
    doors = given.get("doors")
    if doors is None:
        of_process = {key: node for key, node in given.items() if _is_of_process(key)}
        client = {key: node for key, node in given.items() if key not in of_process}
        given = of_process | {"doors": _short_form(client, origin)}
    elif isinstance(doors.value, list):
        given = given | {"doors": Node([_speaking(door) for door in doors.value], doors.origin)}
    return Node(tree.value | {"frontend": Node(given, origin)}, tree.origin)


def _is_of_process(key: str) -> bool:
    """Also a misspelt option of the process, so that the error suggests it."""
    of_door = {field.name for field in attrs.fields(DoorConfig)}
    close = difflib.get_close_matches(key, _OF_PROCESS | of_door, n=1, cutoff=0.85)
    return key in _OF_PROCESS or (bool(close) and close[0] in _OF_PROCESS)


def _short_form(client: dict[str, Node], origin: str) -> Node:
    admin = client.pop("admin", None)
    if admin is None or admin.value is None:
        return Node([_speaking(Node(client, origin))], origin)
    client.setdefault("operations", from_plain("off", DEFAULT))
    operators = admin
    if isinstance(admin.value, dict):
        fixed = {"protocols": [], "operations": "open", "max_connections": _OPERATORS}
        operators = Node(
            {key: from_plain(value, DEFAULT) for key, value in fixed.items()} | admin.value,
            admin.origin,
        )
    return Node([_speaking(Node(client, origin)), operators], origin)


def _speaking(door: Node) -> Node:
    if not isinstance(door.value, dict) or "protocols" in door.value:
        return door
    return Node(door.value | {"protocols": from_plain([{"kind": "openai"}], DEFAULT)}, door.origin)


def short_path(path: str, written: Node) -> str:
    """``path`` as somebody who used the short form in ``written`` wrote it."""
    if find(written, ("frontend", "doors")) is not None:
        return path
    for door, short in (("frontend.doors[0]", "frontend"), ("frontend.doors[1]", "frontend.admin")):
        if path == door or path.startswith(f"{door}."):
            return short + path.removeprefix(door)
    return path


def door_path(frontend: FrontendConfig, index: int) -> str:
    """Where the options of a door stand in the short form, if that may have been used."""
    doors = frontend.doors
    of_operators = [door.operations == "open" and not door.protocols for door in doors]
    if len(doors) == 1:
        return "frontend"
    if of_operators == [False, True] and doors[0].operations == "off":
        return ("frontend", "frontend.admin")[index]
    return f"frontend.doors[{index}]"


def port_steps(tree: Node) -> tuple[str, ...]:
    """Where the port of the first door stands."""
    if find(tree, ("frontend", "doors")) is None:
        return ("frontend", "port")
    return ("frontend", "doors", "0", "port")


def door_problems(frontend: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What contradicts itself in `frontend`, after ``with_doors``; paths begin at `frontend`."""
    doors = frontend.get("doors")
    given = [
        (index, door)
        for index, door in enumerate(doors if isinstance(doors, list) else [])
        if isinstance(door, Mapping)
    ]
    if isinstance(doors, list) and not doors:
        yield "frontend.doors", "expected at least one door"
    for key in sorted(frontend.keys() - _OF_PROCESS):
        if key in {field.name for field in attrs.fields(DoorConfig)} | {"admin", "tls", "api_keys"}:
            yield f"frontend.{key}", "belongs to a door: write it in an entry of `doors`"
    for index, door in given:
        for other, before in given[:index]:
            if door.get("port", 0) and _port(door) == _port(before) and _meet(door, before):
                text = f"{_port(door)} is the port of frontend.doors[{other}], at {_host(before)}; "
                text += "choose another, as two sockets at one address share its connections"
                yield f"frontend.doors[{index}].port", text
        if index and _port(door) == 0:
            yield (
                f"frontend.doors[{index}].port",
                "only the first door may have a port that the system chooses",
            )


def _port(door: Mapping[str, Any]) -> object:
    return door.get("port", attrs.fields(DoorConfig).port.default)


def _host(door: Mapping[str, Any]) -> str:
    return str(door.get("host", attrs.fields(DoorConfig).host.default))


def _meet(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    hosts = _host(one), _host(other)
    return hosts[0] == hosts[1] or any(map(_is_unspecified, hosts))


def _is_unspecified(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False
