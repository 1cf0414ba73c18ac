"""The shipped suite for event buses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from commutator.contract.event_bus import EventBus
from commutator_folder_bus import FolderBus, FolderConfig
from commutator_testing import EventBusContract


class TestFolderBus(EventBusContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.config = FolderConfig(kind="folder", path=str(tmp_path))

    @asynccontextmanager
    async def open_bus(self) -> AsyncIterator[EventBus]:
        yield FolderBus(self.config)
