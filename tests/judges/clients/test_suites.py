"""LangChain's suites for chat models, against a scripted deployment: `make test-clients`."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.judges.clients.conftest import Program, Run
from tests.judges.clients.deployment import KNOWN, MODEL, Scripted, called, forced
from tests.judges.clients.table import Table

pytestmark = [pytest.mark.long, pytest.mark.clients]

CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "San Francisco": ("get_weather", {"location": "San Francisco, CA"}),
    "magic_function_no_args()": ("magic_function_no_args", {}),
    "magic_function(3)": ("magic_function", {"input": 3}),
    "你好啊集团": ("unicode_customer", {"customer_name": "你好啊集团", "description": "科技"}),
    "株式会社": (
        "unicode_customer",
        {"customer_name": "こんにちは株式会社", "description": "会社"},
    ),
}
"""What the suites ask for by a call, which a constraint alone does not give."""
ANSWERS = [
    ("It's sunny.", "It is sunny there."),
    *((asked, say(*call)) for asked, call in CALLS.items() for say in (called, forced)),
    ("joke", json.dumps({"setup": "Why?", "punchline": "Because."})),
    ("", "Hello."),
]
SKIPPED = {"TestOpenAI": 7, "TestAnthropic": 8}
"""Media, for which there is no model here, and recorded requests; of Anthropic also JSON mode."""
TESTS = 50


def test_langchain_suites(
    installed: Callable[[str], Program], run: Run, table: Table, tmp_path: Path
) -> None:
    program = installed("langchain")
    suites = Path(__file__).with_name("programs") / "langchain_suites.py"
    options = ["-o", "asyncio_mode=auto", "-o", "asyncio_default_test_loop_scope=session"]
    options += ["-c", "/dev/null", "--rootdir", str(tmp_path), "--noconftest", "-q"]
    report = tmp_path / "report.xml"
    with Scripted(tmp_path, ANSWERS, [MODEL, KNOWN]) as running:
        run(
            [program.path("pytest"), *options, f"--junitxml={report}", str(suites)],
            SUITE_URL=running.url,
            SUITE_MODEL=MODEL,
            SUITE_OTHER=KNOWN,
        )
        answered = running.answered()
    assert not [one for one in answered if one.status != 200]
    cases = list(ET.parse(report).getroot().iter("testcase"))
    said = {}
    for suite, skipped in SKIPPED.items():
        own = [case for case in cases if str(case.get("classname")).endswith(suite)]
        found = sum(case.find("skipped") is not None for case in own)
        assert (len(own), found) == (TESTS, skipped)
        passed = f"yes; {TESTS - found} of {TESTS} passed, {found} are of media or left out"
        said[f"ChatModelIntegrationTests, {suite.removeprefix('Test')}"] = passed
    table.add("langchain-tests", program.versions, said)
