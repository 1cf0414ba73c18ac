"""One vLLM server for all tests that leave it as they found it: a start takes half a minute."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.vllm_server import running_vllm


@pytest.fixture(scope="session")
def vllm_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_vllm(tmp_path_factory.mktemp("vllm")) as url:
        yield url
