"""Writes ``docs/reference/clients.md`` from what `make test-agents test-clients` found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference"
PAGE = FOLDER / "clients.md"
RESULTS = FOLDER / "clients.json"
HEAD = """# Clients

Generated from `clients.json`, which `make test-agents` and `make test-clients` write where all passed. They run each program as it was published, offline, against a
deployment of `sim` with scripted answers, but where another engine is named. *Yes*: what the client gave back is what the script says, and no
request failed. How to set some of them up: [agents and clients](../how-to/clients.md).

| client | version | what was asked | result | when |
|---|---|---|---|---|
"""


def page() -> str:
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in _rows())


def _rows() -> Iterator[tuple[str, ...]]:
    for client, found in json.loads(RESULTS.read_text(encoding="utf-8")).items():
        versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        plain = [ask for ask, result in found["asked"].items() if result == "yes"]
        rows = [("; ".join(plain), "yes")] if plain else []
        rows += [(ask, result) for ask, result in found["asked"].items() if result != "yes"]
        for number, row in enumerate(rows):
            shown = (client, versions) if number == 0 else ("", "")
            yield *shown, *row, found["date"]


def write() -> None:
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    write()
