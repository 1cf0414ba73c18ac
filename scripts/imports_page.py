"""Writes ``docs/reference/imports.md``: what `commutator import` carries of public examples."""

from __future__ import annotations

import re
from pathlib import Path

from commutator_kubernetes_tools.import_cli import converted, sources
from commutator_kubernetes_tools.readers import READERS

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "imports.md"
EXAMPLES = sorted((ROOT / "tests" / "unit" / "kubernetes" / "peers").glob("*.yaml"))
HEAD = """# Imports

Generated (`make docs`) by [`commutator import`](../how-to/coming-from.md#convert-a-file) from public examples, which lie in `tests/unit/kubernetes/peers`
with where they come from; all are under Apache-2.0. A field is a value of the file, an argument or a variable of a container. It counts as
carried if the configuration says it, not if a comment names it. Most of the others (images, CPU and memory, volumes, probes, selectors) are
of pods: [`commutator kubernetes render`](../how-to/kubernetes-pods.md) has options for them, or writes its own.

| example | of | fields | carried | share |
|---|---|---|---|---|
"""


def server_of(file: Path) -> str:
    """The server whose example a file is."""
    return max((one for one in READERS if file.name.startswith(one)), key=len)


def page() -> str:
    """The whole page."""
    return HEAD + "".join(f"{_row(file)}\n" for file in EXAMPLES)


def _row(file: Path) -> str:
    server = server_of(file)
    (source,) = sources(file, server)
    converted(source, server)
    total, carried = len(source.fields()), source.carried()
    origin = re.search(r"^# From (\S+) at (\w{12})\w*, ([^,\n]+)", file.read_text(), re.MULTILINE)
    assert origin is not None
    where = f"`{origin[3]}` of {origin[1]} at {origin[2]}"
    return f"| {where} | {server} | {total} | {carried} | {carried / total:.0%} |"


def write() -> None:
    """Write the page."""
    PAGE.write_text(page())
