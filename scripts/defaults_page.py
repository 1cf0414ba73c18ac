"""Writes ``docs/reference/defaults.md`` from ``defaults.toml``, with the defaults of the classes."""

from __future__ import annotations

import tomllib
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import attrs

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_name("defaults.toml")
PAGE = ROOT / "docs" / "reference" / "defaults.md"
HEAD = """# Defaults

Generated (`make docs`): the limits and times that a deployment may outgrow, what each follows, and what fits three of them: a laptop; a host with
8 GPUs and a model of 70 billion parameters, 4 GPUs a worker; 64 such hosts. Every other option is about what a deployment does, and does not
depend on its size; all are in the [reference of the configuration](configuration/index.md).

| option | default | follows | a laptop | 8 GPUs | 64 nodes |
|---|---|---|---|---|---|
"""


def page() -> str:
    """Raises ValueError for an option that is not there, or has no default that is a number."""
    rows = tomllib.loads(TABLE.read_text())["option"]
    return HEAD + "".join(f"| {' | '.join(_cells(row))} |\n" for row in rows)


def _cells(row: dict[str, str]) -> list[str]:
    path, default = row["path"], default_of(row)
    return [f"`{path}`", f"`{default:g}`" if isinstance(default, float) else f"`{default}`",
            row["follows"], *(_value(row[name]) for name in ("laptop", "gpus", "nodes"))]  # fmt: skip


def default_of(row: dict[str, str]) -> int | float:
    """The default of an option of the table."""
    name, cls = row["path"].rpartition(".")[2], resolve_name(row["class"])
    field: Any = attrs.fields_dict(cls).get(name)
    if field is None or not isinstance(field.default, int | float):
        raise ValueError(f"{row['path']}: {row['class']} has no such option with a number")
    return field.default


def _value(text: str) -> str:
    """A number that stands first is what to write."""
    number = text.split(maxsplit=1)[0].rstrip(",;:")
    return text.replace(number, f"`{number}`", 1) if number.replace(".", "").isdigit() else text


def write() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    write()
