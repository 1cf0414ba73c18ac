"""A pytest plugin for vLLM's tests: keeps those of a server, and writes down how each ended."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_FIXTURES = {"client", "server", "server_fixture"}
_LEFT_OUT = {line for line in os.environ["SUITE_LEFT_OUT"].split("\n") if line}
_RESULTS = Path(os.environ["SUITE_RESULTS"])


def name_of(item: Any) -> str:
    """Its file below tests/entrypoints, and its name there, without the model's."""
    path = item.path.as_posix().partition("/tests/entrypoints/")[2]
    name = item.name.replace(os.environ["SUITE_MODEL"], "MODEL")
    return f"{path}::{name}"


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    kept: list[Any] = []
    others: list[Any] = []
    for item in items:
        asks = _FIXTURES & set(item.fixturenames) or _launches(item)
        name = name_of(item)
        left_out = any(name.startswith(one) for one in _LEFT_OUT) or "lora" in name
        (kept if asks and not left_out else others).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=others)


def _launches(item: Any) -> bool:
    """Whether the test starts a server itself."""
    code = getattr(item.function, "__code__", None)
    return code is not None and "RemoteOpenAIServer" in code.co_names


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any) -> Iterator[None]:
    outcome: Any = yield
    report = outcome.get_result()
    if report.when == "call" or (report.when == "setup" and not report.passed):
        why = "" if report.passed else str(report.longrepr)[-400:]
        line = {"name": name_of(item), "passed": report.passed, "why": why}
        with _RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")
