"""A real NIXL agent for each test. Without NIXL these tests fail; none is skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.transfer import Buffer

from commutator_engine_kit.nixl.agent import TransferAgent

MIB = 1 << 20


@pytest.fixture
def agent() -> Iterator[TransferAgent]:
    made = TransferAgent("mine", {"UCX": {}, "POSIX": {}})
    yield made
    made.close()


@pytest.fixture
def memory(agent: TransferAgent) -> Buffer:
    """16 MiB, registered with both backends."""
    made = Buffer(16 * MIB)
    agent.register([made.region], "UCX")
    agent.register([made.region], "POSIX")
    return made
