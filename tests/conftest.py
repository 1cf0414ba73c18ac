"""What every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["tests.support.seaweed"]

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The quick tests first; otherwise in pytest's own order."""
    items.sort(key=_duration_class)


def _duration_class(item: pytest.Item) -> int:
    if item.get_closest_marker("long") is not None:
        return 2
    return 1 if item.get_closest_marker("slow") is not None else 0
