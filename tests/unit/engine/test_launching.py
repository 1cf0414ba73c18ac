"""What connectors that start a server need: free ports, GPUs, another Python."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from commutator.errors import ConfigError
from commutator.launcher import ports
from commutator.launcher.ports import free_ports
from commutator_engine_kit.launching import python_at


def test_ports_are_free_different_and_not_for_outgoing_connections() -> None:
    picked = free_ports("127.0.0.1", 20)
    assert len(set(picked)) == 20
    for port in picked:
        socket.create_server(("127.0.0.1", port)).close()
    if ports._EPHEMERAL.exists():
        first, last = map(int, ports._EPHEMERAL.read_text().split())
        assert not any(first <= port <= last for port in picked)


@pytest.mark.parametrize("said", ["1024\t60999\n", "", "words"])
def test_where_the_system_leaves_no_others_it_chooses(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "range"
    file.write_text(said)
    monkeypatch.setattr(ports, "_EPHEMERAL", file)
    (port,) = free_ports("127.0.0.1")
    socket.create_server(("127.0.0.1", port)).close()


def test_a_taken_port_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, free = free_ports("127.0.0.1", 2)
    answers = iter([taken, taken, free])
    monkeypatch.setattr(ports._random, "randrange", lambda *_: next(answers))
    with socket.create_server(("127.0.0.1", taken)):
        assert free_ports("127.0.0.1") == [free]


def test_another_python_must_be_there(tmp_path: Path) -> None:
    assert python_at(sys.executable, "advice", "engine x") == str(Path(sys.executable).absolute())
    with pytest.raises(ConfigError, match=r"engine x[\s\S]*there is no .*; advice"):
        python_at(str(tmp_path / "none"), "advice", "engine x")
