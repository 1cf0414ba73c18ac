"""The public implementations that properties are compared with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from bench.peers import DynamoPeer


@pytest.fixture(scope="session")
def dynamo() -> Iterator[DynamoPeer]:
    """Dynamo's hashes and radix tree; fails, not skips, where `make peers` was not run."""
    with DynamoPeer() as peer:
        yield peer
