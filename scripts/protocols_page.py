"""Writes ``docs/reference/protocols.md`` from ``protocols.toml``: what is served, and what shows it."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import engines_page

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "protocols.md"
CELLS = PAGE.with_suffix(".toml")
ENGINES = {"reference": "reference", "encoder": "encoder", "sim": "sim"} | engines_page.ENGINES
HEAD = """# What each protocol serves, with which engine

Generated from `protocols.toml` (`make docs`): each number leads to the test that shows it, whose name stands below. An empty
place means that no test does. Tests of TensorRT-LLM run against a program of ours that offers its published interfaces. See
[the engines](engines.md) for what does not depend on the protocol.
"""


class Cell(NamedTuple):
    """One operation of a protocol with one engine."""

    protocol: str
    operation: str
    engine: str
    test: str
    """PATH::NAME."""

    @property
    def path(self) -> str:
        return self.test.partition("::")[0]


def cells() -> list[Cell]:
    """All of them, in the file's order. Raises ValueError for an unknown engine."""
    found = []
    data = tomllib.loads(CELLS.read_text())
    served = data.pop("served")
    for protocol, operations in data.items():
        for operation, engines in operations.items():
            for engine, test in engines.items():
                if engine not in ENGINES:
                    raise ValueError(f"{CELLS.name}: {engine!r} is none of {', '.join(ENGINES)}")
                shown = served if test == "served" else test
                found.append(Cell(protocol, operation, engine, shown))
    return found


def missing(found: list[Cell]) -> list[str]:
    """Each named test that is not there."""
    return sorted({cell.test for cell in found if not _exists(cell.test)})


def _exists(test: str) -> bool:
    path, _, name = test.partition("::")
    file = ROOT / path
    if not file.is_file():
        return False
    nodes = ast.walk(ast.parse(file.read_text()))
    tests = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return name.startswith("test_") and name in {node.name for node in tests}


def page() -> str:
    found = cells()
    tests = list(dict.fromkeys(cell.test for cell in found))
    return "\n".join([HEAD, *_table(found, tests), "", *_list(tests), ""])


def _table(found: list[Cell], tests: list[str]) -> Iterator[str]:
    yield f"| protocol | operation | {' | '.join(ENGINES.values())} |"
    yield "|---" * (len(ENGINES) + 2) + "|"
    before = ""
    for protocol, operation in dict.fromkeys((cell.protocol, cell.operation) for cell in found):
        shown = {
            cell.engine: f"[{tests.index(cell.test) + 1}](../../{cell.path})"
            for cell in found
            if (cell.protocol, cell.operation) == (protocol, operation)
        }
        first = f"`{protocol}`" if protocol != before else ""
        before = protocol
        yield f"| {first} | {operation} | {' | '.join(shown.get(one, '') for one in ENGINES)} |"


def _list(tests: list[str]) -> Iterator[str]:
    for number, test in enumerate(tests, 1):
        yield f"{number}. `{test}`"


def write() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    write()
