"""Ports: free ones for workers; one for our front doors alone."""

from __future__ import annotations

import itertools
import socket

import pytest

from commutator.errors import ConfigError
from commutator.launcher import ports
from commutator.launcher.ports import PortPicker, reserved_port


def shared_listener(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port), reuse_port=True)


def test_picked_ports_are_free_and_never_the_same() -> None:
    picker = PortPicker()
    picked = {picker.pick("127.0.0.1") for _ in range(50)}
    assert len(picked) == 50
    for port in picked:
        socket.create_server(("127.0.0.1", port)).close()


def test_a_port_is_picked_again_only_after_many_others(monkeypatch: pytest.MonkeyPatch) -> None:
    few = itertools.cycle(range(600))
    monkeypatch.setattr(ports, "free_ports", lambda _: [next(few) // 2])
    picker = PortPicker(remembered=200)
    picked = [picker.pick("127.0.0.1") for _ in range(5_000)]
    for number, port in enumerate(picked):
        assert port not in picked[max(0, number - 200) : number]


def test_a_reserved_port_is_for_our_front_doors_only() -> None:
    with reserved_port("127.0.0.1", 0) as port:
        assert port > 0
        with pytest.raises(ConfigError, match="--port"), reserved_port("127.0.0.1", port):
            pass
        with shared_listener(port), shared_listener(port):
            with pytest.raises(ConfigError, match="Address already in use"):
                reserved_port("127.0.0.1", port).__enter__()
            with socket.create_connection(("127.0.0.1", port)):
                pass  # the reservation itself must not take connections
    with reserved_port("127.0.0.1", port) as again:
        assert again == port


def test_an_address_of_another_machine_is_an_error() -> None:
    with (
        pytest.raises(ConfigError, match=r"frontend\.host: cannot"),
        reserved_port("192.0.2.1", 0),
    ):
        pass
