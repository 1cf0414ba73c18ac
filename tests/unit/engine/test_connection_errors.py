"""Every HTTP client reports in plain words that a server cannot be reached."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from unittest.mock import Mock

import aiohttp
import pytest

from commutator.contract.engine import EngineClient
from commutator.errors import EngineUnavailableError
from commutator_engine_kit.http import connection_error
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
            aiohttp.ClientConnectorError(
                Mock(), OSError(errno.EHOSTUNREACH, "Connect call failed")
            ),
            "X cannot be reached: No route to host",
        ),
        (
            aiohttp.ClientConnectorDNSError(Mock(), socket.gaierror(-2, "Name not known")),
            "X cannot be reached: Name not known",
        ),
        (
            aiohttp.ClientConnectorError(Mock(), OSError("Multiple exceptions: a, b")),
            "X cannot be reached: Multiple exceptions: a, b",
        ),
        (TimeoutError(), "X: no answer"),
        (aiohttp.ServerDisconnectedError(), "X: connection lost (Server disconnected)"),
        (aiohttp.ClientPayloadError(), "X: connection lost (ClientPayloadError)"),
    ],
)
def test_what_became_of_a_connection(error: aiohttp.ClientError | OSError, told: str) -> None:
    assert str(connection_error("X", error)) == told
