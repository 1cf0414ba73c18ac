"""The public implementations that properties are compared with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

if TYPE_CHECKING:
    from bench.peers import DynamoPeer


@pytest.fixture(scope="session")
def dynamo() -> Iterator[DynamoPeer]:
    """Dynamo's hashes and radix tree; fails, not skips, where `make peers` was not run."""
    from bench.peers import DynamoPeer

    with DynamoPeer() as peer:
        yield peer
