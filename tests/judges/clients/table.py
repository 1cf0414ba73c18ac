"""What was asked of each client, and what came of it: docs/reference/clients.json."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attrs import define, field

__all__ = ["Table"]


@define
class Table:
    """Rows by client, of those whose tests have passed so far."""

    rows: dict[str, dict[str, Any]] = field(factory=dict)

    def add(self, client: str, versions: dict[str, str], asked: dict[str, str]) -> None:
        """``asked``: by what was asked, ``yes`` or what else is to be said of it."""
        row = self.rows.setdefault(client, {"versions": {}, "asked": {}})
        row["versions"] |= versions
        row["asked"] |= asked
        row["date"] = datetime.now(UTC).date().isoformat()

    def write(self, path: Path) -> None:
        """The rows of clients that did not run are left as they are."""
        written = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        rows = dict(sorted((written | self.rows).items()))
        path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
