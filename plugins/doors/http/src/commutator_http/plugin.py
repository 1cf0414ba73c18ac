"""Registers the door of kind `http`."""

from commutator import DoorRegister, hookimpl
from commutator_http.config import HttpConfig
from commutator_http.door import HttpDoor


@hookimpl
def door_register(register: DoorRegister) -> None:
    """Kind `http`: HTTP/1.1."""
    register("http", HttpConfig, HttpDoor(), "beta")
