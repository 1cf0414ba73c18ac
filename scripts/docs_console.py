"""Keeps the ``console`` blocks of the docs true: each ``$ command`` is run, its output compared.

``--write`` replaces what stands there by what the command prints now.
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(?<=^```console\n)(.*?)(?=^```$)", re.MULTILINE | re.DOTALL)
_TRACEBACK = "Traceback (most recent call last):"


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def run(command: str) -> str:
    """What ``command`` prints, run from the root, without colours, 100 columns wide.

    Raises RuntimeError for a traceback: no page shows one.
    """
    env = {
        **os.environ,
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "TERM": "dumb",
        "PATH": f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    if _TRACEBACK in done.stderr:
        raise RuntimeError(f"{command}\n{done.stderr}")
    lines = (done.stdout + done.stderr).replace(str(ROOT) + "/", "").splitlines()
    return "".join(line.rstrip() + "\n" for line in lines)


def refreshed(block: str) -> str:
    """The block with every command's output replaced by what it prints now."""
    commands = [line[2:] for line in block.splitlines() if line.startswith("$ ")]
    return "".join(f"$ {command}\n{run(command)}" for command in commands)


def check(page: Path, *, write: bool = False) -> str:
    """A diff of what stands in the page and what its commands print; empty when it is true."""
    text = page.read_text()
    now = BLOCK.sub(lambda match: refreshed(match.group(1)), text)
    if write and now != text:
        page.write_text(now)
    return "".join(
        difflib.unified_diff(text.splitlines(True), now.splitlines(True), str(page), "now")
    )


def main() -> int:
    write = "--write" in sys.argv
    stale = [diff for page in pages() if (diff := check(page, write=write))]
    print("\n".join(stale))
    return 0 if write or not stale else 1


if __name__ == "__main__":
    sys.exit(main())
