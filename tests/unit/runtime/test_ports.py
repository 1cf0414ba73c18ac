"""Ports: free ones for workers; the front door's, shared with nobody else."""

from __future__ import annotations

import socket

import pytest

from commutator.errors import ConfigError
from commutator.runtime.ports import PortPicker, reserved_port


def shared_listener(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port), reuse_port=True)


def test_picked_ports_are_free_and_never_the_same() -> None:
    picker = PortPicker()
    ports = {picker.pick("127.0.0.1") for _ in range(50)}
    assert len(ports) == 50
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_picking_goes_on_for_ever() -> None:
    picker = PortPicker()
    for _ in range(40_000):  # more than there are ephemeral ports
        picker.pick("127.0.0.1")


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
    with pytest.raises(ConfigError, match=r"frontend\.host"), reserved_port("192.0.2.1", 0):
        pass
