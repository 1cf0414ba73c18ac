"""One SGLang server for all tests that leave it as they found it: a start takes half a minute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.sglang_server import SglangServer, running_sglang


@pytest.fixture(scope="session")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    with running_sglang(tmp_path_factory.mktemp("sglang")) as server:
        yield server
