"""Every HTTP client reports in plain words that a server cannot be reached."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

import pytest

from commutator.contract.engine import EngineClient
from commutator.errors import EngineUnavailableError
from commutator_engine_kit.http import HttpServer
from commutator_sglang.client import SglangClient
from commutator_trtllm.client import TrtllmClient
from commutator_vllm.client import VllmClient


@pytest.mark.parametrize("client_of", [SglangClient, TrtllmClient, VllmClient])
async def test_nothing_listens(client_of: Callable[[str], EngineClient]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, so that no other process can listen there
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        client = client_of(url)
        with pytest.raises(EngineUnavailableError) as caught:
            await client.start()
        await client.close()
    assert url in str(caught.value)
    assert str(caught.value).endswith(" cannot be reached: Connection refused")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            OSError(errno.EHOSTUNREACH, "failed"),
            " cannot be reached: No route to host",
        ),
        (socket.gaierror(-2, "Name not known"), " cannot be reached: Name not known"),
        (OSError("Multiple exceptions: a, b"), " cannot be reached: Multiple exceptions: a, b"),
        (TimeoutError(), ": no answer"),
    ],
)
async def test_what_became_of_a_connection(
    error: OSError, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("commutator_engine_kit.http.start_connection", fail)
    with pytest.raises(EngineUnavailableError) as caught:
        await HttpServer("X", "http://127.0.0.1:9").ask("/health")
    assert str(caught.value) == f"X at http://127.0.0.1:9{told}"
