"""A file for a bug report: what was found, and what it was found in, without secrets."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

HIDDEN = "<hidden>"
_SHORTEST = 6
"""Characters of a secret that is looked for; shorter ones would hide words."""
_LOG_LINES = 2000
_PATTERNS = (
    re.compile(r"(?i)(\bbearer\s+)[^\s\"',;]+"),
    re.compile(r"()\b(?:sk|pk|rk)-[A-Za-z0-9_-]{8,}"),
    re.compile(r"()\bhf_[A-Za-z0-9]{8,}"),
    re.compile(r"()\b(?:AKIA|ASIA)[A-Z0-9]{12,}"),
    re.compile(r"()\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"),
    re.compile(
        r"(?i)((?:api[_-]?key|token|secret|password|passwd|passphrase|authorization)"
        r"[\"']?\s*[:=]\s*[\"']?)(?!bearer\b)(?!\{)[^\s\"',;{}]{4,}"
    ),
    re.compile(r"(://[^/\s:@]*:)[^/\s@]+(?=@)"),
    re.compile(
        r"()-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL
    ),
)


def scrubbed(text: str, secrets: Iterable[str]) -> str:
    """``text`` without the known secrets, and without what has the form of one."""
    for secret in sorted(set(secrets), key=len, reverse=True):
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, HIDDEN)
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return text


def last_lines(path: Path) -> str:
    """The end of a log."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return "".join(lines[-_LOG_LINES:])


def write_bundle(path: Path, parts: Mapping[str, str], secrets: Iterable[str]) -> None:
    """A zip file that only its owner may read. Raises OSError."""
    known = list(secrets)
    path.touch(mode=0o600)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, text in parts.items():
            if text:
                file.writestr(name, scrubbed(text, known))
