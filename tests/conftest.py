"""What every test may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from commutator.trust import secret_of_this_process

pytest_plugins = [
    "tests.support.seaweed",
    "tests.support.etcd",
    "tests.support.nats",
    "tests.support.real_kubernetes",
]

# The machine may be busy with other tests: how long an example takes says nothing.
settings.register_profile("any-speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-speed")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture(autouse=True, scope="module")
def of_no_run() -> Iterator[None]:
    """Modules run in any order in one process: none may leave it in the run of its cluster."""
    assert secret_of_this_process() is None
    yield
    assert secret_of_this_process() is None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The quick tests first; otherwise in pytest's own order."""
    items.sort(key=_duration_class)


def _duration_class(item: pytest.Item) -> int:
    if item.get_closest_marker("long") is not None:
        return 2
    return 1 if item.get_closest_marker("slow") is not None else 0
