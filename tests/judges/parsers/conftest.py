"""The suite and the templates that `scripts/install_judges.py` installs, here if need be."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.judges import installed_judges


@pytest.fixture(scope="session")
def judges() -> Path:
    """The folder with the installed suite, which can be imported, and `templates`."""
    return installed_judges()
