"""A pytest plugin: a failing test of a suite says which promise was broken and where it stands.

pytest finds it by the entry point that this distribution has in the group ``pytest11``.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator
from typing import Any

import pytest


def promise(suite_class: type, test: str) -> str | None:
    """The promise that ``test`` holds a plugin to, in words; None for tests of a plugin's own.

    The name of a suite's test is a sentence. Its docstring, if any, says more; the attribute
    ``documented_in`` of the suite names what to read.
    """
    suite = next((base for base in suite_class.__mro__ if test in vars(base)), None)
    if suite is None or not suite.__module__.startswith("commutator_testing."):
        return None
    sentence = test.removeprefix("test_").replace("_", " ")
    lines = [f"{suite.__name__}: {sentence}."]
    if text := inspect.getdoc(vars(suite)[test]):
        lines.append(text)
    lines.append(f"Documented in: {getattr(suite_class, 'documented_in', 'docs/reference/')}")
    return "\n".join(lines)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the promise to the report of a failure."""
    report = yield
    if report.failed and call.when == "call" and isinstance(item, pytest.Function):
        text = None if item.cls is None else promise(item.cls, item.originalname)
        add_section = getattr(report.longrepr, "addsection", None)
        if text is not None and add_section is not None:
            add_section("broken promise", text)
    return report
