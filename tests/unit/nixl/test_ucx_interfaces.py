"""UCX listens on the loopback interface, unless the environment names others."""

from __future__ import annotations

import os

import psutil
import pytest

from commutator_engine_kit.nixl.library import create_backend, make_agent

pytestmark = pytest.mark.security


@pytest.mark.parametrize("parameters", [{}, {"engine_config": "RNDV_THRESH=8192"}], ids=str)
def test_ucx_stays_on_the_loopback_interface(
    parameters: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    known = listeners()
    agent = make_agent("listens")
    create_backend(agent, "UCX", parameters)
    found = listeners() - known
    assert found
    assert {host for host, _ in found} == {"127.0.0.1"}


def listeners() -> set[tuple[str, int]]:
    connections = psutil.Process(os.getpid()).net_connections(kind="inet")
    return {
        (one.laddr.ip, one.laddr.port) for one in connections if one.status == psutil.CONN_LISTEN
    }
