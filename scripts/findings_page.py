"""Writes ``docs/reference/findings.md``: every check of `commutator doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from commutator_doctor.deployment import DEPLOYMENT
from commutator_doctor.findings import Checks
from commutator_doctor.hit_rate import HIT_RATE
from commutator_doctor.machine import MACHINE

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "findings.md"
HEAD = """# Findings of the doctor

Generated (`make docs`) from the checks of [`commutator doctor`](../how-to/doctor.md). An *error* does not work, a *warning* works less well
than it could, a *note* is no fault. Each has a test with the fault planted into facts; faults of GPUs, RDMA devices and other hosts are
stand-ins there.
"""


def page() -> str:
    return HEAD + "".join(f"{line}\n" for all_ in _ALL for line in _section(all_))


_ALL: tuple[Checks[Any], ...] = (MACHINE, DEPLOYMENT, HIT_RATE)


def _section(checks: Checks[Any]) -> Iterator[str]:
    yield f"\n## {checks.title}\n"
    yield "| finding | area | severity | what it means | what to do |"
    yield "|---|---|---|---|---|"
    for one in checks.checks:
        cells = (f"`{one.code}`", one.area, one.severity, one.means, one.remedy)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def write() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    write()
