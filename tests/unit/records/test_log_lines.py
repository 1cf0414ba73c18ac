"""The JSON form of logs: every field typed, of our processes and of others."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest

from commutator.launcher.output import Printer
from commutator_records.log_lines import FIELDS, JsonLines

TYPES = {"string": str, "integer": int, "number": float, "array": list}
CALL = "INFO commutator.frontend.request.call: "


def fields(line: str, process: str = "frontend-0") -> dict[str, Any]:
    made: dict[str, Any] = json.loads(JsonLines()(process, "stderr", line))
    assert made.keys() <= FIELDS.keys()
    assert [name for name in FIELDS if name in made] == list(made), "in the order of the table"
    for name, value in made.items():
        assert type(value) is TYPES[FIELDS[name][0]], name
    return made


def test_an_answered_request_is_fields() -> None:
    line = (
        f"{CALL}/v1/chat/completions 200 id=a-1 took=0.155s model=chat 🙂 x=y worker=s-0,s-1 "
        'tokens=20+7 cached=16 ttft=0.050s principal=team-a user="b \\" c=d"'
    )
    made = fields(line)
    stamp = made.pop("timestamp")
    assert stamp.startswith("20")
    assert made.pop("body").startswith("/v1/chat/completions 200 id=a-1")
    assert made == {
        "severity_text": "INFO",
        "severity_number": 9,
        "level": "info",
        "process": "frontend-0",
        "stream": "stderr",
        "logger": "commutator.frontend.request.call",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "request_id": "a-1",
        "duration_s": 0.155,
        "gen_ai.request.model": "chat 🙂 x=y",
        "workers": ["s-0", "s-1"],
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 7,
        "cached_tokens": 16,
        "ttft_s": 0.05,
        "principal": "team-a",
        "user.id": 'b " c=d',
    }


def test_a_refused_request_says_why() -> None:
    made = fields(f'{CALL}other 404 id=b took=0.000s path="/v1/\\"x" reason=not_found')
    assert (made["url.path"], made["error.type"]) == ('/v1/"x', "not_found")
    made = fields(f'{CALL}/v1/completions 400 id=b took=0.001s reason=bad param="stop[0]" model=m')
    assert (made["param"], made["gen_ai.request.model"]) == ("stop[0]", "m")


@pytest.mark.parametrize(
    ("process", "line", "severity", "logger", "body"),
    [
        ("supervisor", "INFO s-0 is ready", "INFO", "commutator.supervisor", "s-0 is ready"),
        ("s-0", "WARNING commutator_sim.x: slow", "WARNING", "commutator_sim.x", "slow"),
        ("v-0", "INFO 11-28 10:00:00 [a.py:1] up", "INFO", None, "11-28 10:00:00 [a.py:1] up"),
        ("g-0", "[2026-11-28 10:00:00] ERROR: no", "ERROR", None, "no"),
        ("v-0", "INFO:     Started", "INFO", None, "Started"),
        ("v-0", "FATAL out of memory", "CRITICAL", None, "out of memory"),
        ("v-0", "INFORMATION", "INFO", None, "INFORMATION"),
        ("v-0", "Loading 3%", "INFO", None, "Loading 3%"),
    ],
)
def test_lines_of_others_have_what_can_be_read(
    process: str, line: str, severity: str, logger: str | None, body: str
) -> None:
    made = fields(line, process)
    assert (made["severity_text"], made.get("logger"), made["body"]) == (severity, logger, body)


def test_a_traceback_is_as_severe_as_what_it_follows() -> None:
    lines = JsonLines()
    lines("s-0", "stderr", "ERROR a.b: failed")
    for line in ("Traceback (most recent call last):", '  File "x"', "ValueError: no"):
        assert json.loads(lines("s-0", "stderr", line))["level"] == "error"
    assert json.loads(lines("s-1", "stderr", "Traceback"))["level"] == "info"


def test_a_tool_of_others_reads_the_log_of_ten_thousand_requests(tmp_path: Path) -> None:
    rng, file = random.Random(3), io.StringIO()
    printer = Printer("json", log=file)
    tokens = 0
    for number in range(10_000):
        given = rng.randrange(1, 500)
        tokens += given
        printer.line(
            "frontend-0",
            "stderr",
            f"{CALL}/v1/completions {rng.choice((200, 429))} id=r{number} took={rng.random():.3f}s "
            f"model=m worker=s-{number % 4} tokens={given}+1 cached=0 ttft=0.010s",
        )
        if number % 1000 == 0:
            printer.close(10.0)
            printer = Printer("json", log=file)  # its queue is bounded
    printer.close(10.0)
    log = tmp_path / "log.jsonl"
    log.write_text(file.getvalue())
    duckdb = pytest.importorskip("duckdb")
    read = duckdb.sql(f"SELECT * FROM read_json('{log}')")
    types = dict(zip(read.columns, map(str, read.types), strict=True))
    assert types["timestamp"].startswith("TIMESTAMP")
    assert types["http.response.status_code"] == types["gen_ai.usage.input_tokens"] == "BIGINT"
    assert types["duration_s"] == types["ttft_s"] == "DOUBLE"
    assert types["workers"] == "VARCHAR[]"
    wanted = 'count(*), count(DISTINCT request_id), sum("gen_ai.usage.input_tokens")'
    counted = read.aggregate(wanted)
    assert counted.fetchall() == [(10_000, 10_000, tokens)]
