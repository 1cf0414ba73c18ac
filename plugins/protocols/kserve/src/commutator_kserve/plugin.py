"""Registers the protocol of kind `kserve`."""

from commutator import ProtocolRegister, hookimpl
from commutator_kserve.protocol import Kserve, KserveConfig


@hookimpl
def protocol_register(register: ProtocolRegister) -> None:
    """Kind `kserve`: KServe's v2 protocol."""
    register("kserve", KserveConfig, Kserve(), "alpha")
