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
