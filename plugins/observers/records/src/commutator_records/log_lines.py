"""The JSON form of logs: one object a line, of every process, with typed fields.

Names are those of OpenTelemetry where it has some. What other programs print, such as servers of
vLLM, has the fields that can be read from it: its severity and its text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

FIELDS: Mapping[str, tuple[str, str]] = {
    "timestamp": ("string", "When the supervisor read the line: RFC 3339, in milliseconds."),
    "severity_text": ("string", "DEBUG, INFO, WARNING, ERROR or CRITICAL."),
    "severity_number": ("integer", "The same by OpenTelemetry: 5, 9, 13, 17 or 21."),
    "level": ("string", "The same in lower case, for stores that look for it."),
    "process": (
        "string",
        "The process that wrote it, such as supervisor, frontend-0.",
    ),
    "stream": ("string", "stdout, stderr, or log for the supervisor's own."),
    "logger": ("string", "The logger, where it is known."),
    "body": ("string", "The text."),
    "http.route": ("string", 'Of an answered request: its endpoint; "other" where there is none.'),
    "http.response.status_code": ("integer", "Its status."),
    "request_id": ("string", "Its id, as in X-Request-Id."),
    "duration_s": ("number", "Seconds from its arrival to the end of its answer."),
    "url.path": ("string", "The path, where nothing is served at it."),
    "error.type": ("string", "Why it was refused or failed: the error's code."),
    "param": ("string", "The field of the request that it was refused for."),
    "gen_ai.request.model": ("string", "The model."),
    "workers": ("array", "The workers that served it."),
    "gen_ai.usage.input_tokens": ("integer", "Tokens of its prompt."),
    "gen_ai.usage.output_tokens": ("integer", "Tokens generated."),
    "cached_tokens": ("integer", "Tokens of its prompt that were cached."),
    "ttft_s": ("number", "Seconds to the first token."),
    "principal": ("string", "The principal that sent it."),
    "user.id": ("string", "The user that the request named."),
}
"""Type and meaning of each field, in this order; those without a value are left out."""

_SEVERITIES = {"DEBUG": 5, "INFO": 9, "WARNING": 13, "ERROR": 17, "CRITICAL": 21}
_OTHERS = {"WARN": "WARNING", "FATAL": "CRITICAL"}
_LEVEL = re.compile(
    r"(?:\[[^\]]*\] )?(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b:?\s*"
    r"(?:([a-z_]\w*(?:\.\w+)+): )?"
)
"""The beginning of our lines, of vLLM's, SGLang's and uvicorn's."""
_REQUESTS = "commutator.frontend.request.call"
_TEXT = r'"(?:[^"\\]|\\.)*"'
_REQUEST = re.compile(
    r"(?P<route>\S+) (?P<status>\d{3}) id=(?P<id>\S+) took=(?P<took>[\d.]+)s"
    rf"(?: path=(?P<path>{_TEXT}))?(?: reason=(?P<reason>\S+))?(?: param=(?P<param>{_TEXT}))?"
    r"(?: model=(?P<model>.+?))?"
    r"(?: worker=(?P<workers>\S+) tokens=(?P<input>\d+)\+(?P<output>\d+) cached=(?P<cached>\d+))?"
    rf"(?: ttft=(?P<ttft>[\d.]+)s)?(?: principal=(?P<principal>\S+))?(?: user=(?P<user>{_TEXT}))?"
)


class JsonLines:
    """Makes the lines of one run. A line without a severity has that of the one before it."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], str] = {}

    def __call__(self, process: str, stream: str, line: str) -> str:
        """The object for a line that ``process`` wrote, without the end of the line."""
        severity, logger, body = self._parted(process, stream, line)
        stamp = datetime.now().astimezone().isoformat(timespec="milliseconds")
        fields: dict[str, Any] = {
            "timestamp": stamp,
            "severity_text": severity,
            "severity_number": _SEVERITIES[severity],
            "level": severity.lower(),
            "process": process,
            "stream": stream,
        }
        if logger is not None:
            fields["logger"] = logger
        fields["body"] = body
        if logger == _REQUESTS and (found := _REQUEST.fullmatch(body)) is not None:
            fields |= _of_request(found)
        return json.dumps(fields, ensure_ascii=False)

    def _parted(self, process: str, stream: str, line: str) -> tuple[str, str | None, str]:
        """Severity, logger and text."""
        found = _LEVEL.match(line)
        if found is None:
            return self._last.get((process, stream), "INFO"), None, line
        severity = self._last[process, stream] = _OTHERS.get(found[1], found[1])
        logger = found[2]
        if process == "supervisor" and logger is None:
            logger = "commutator.supervisor"
        return severity, logger, line[found.end() :]


def _of_request(found: re.Match[str]) -> dict[str, Any]:
    """The fields of an answered request."""
    workers, path, param, user = (found[name] for name in ("workers", "path", "param", "user"))
    fields = {
        "http.route": found["route"],
        "http.response.status_code": int(found["status"]),
        "request_id": found["id"],
        "duration_s": float(found["took"]),
        "url.path": None if path is None else json.loads(path),
        "error.type": found["reason"],
        "param": None if param is None else json.loads(param),
        "gen_ai.request.model": found["model"],
        "workers": None if workers is None else workers.split(","),
        "gen_ai.usage.input_tokens": _whole(found["input"]),
        "gen_ai.usage.output_tokens": _whole(found["output"]),
        "cached_tokens": _whole(found["cached"]),
        "ttft_s": None if found["ttft"] is None else float(found["ttft"]),
        "principal": found["principal"],
        "user.id": None if user is None else json.loads(user),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _whole(text: str | None) -> int | None:
    return None if text is None else int(text)
