"""Registers the protocol of kind `pooling`."""

from commutator import ProtocolRegister, hookimpl
from commutator_pooling.protocol import PoolingConfig, PoolingProtocol


@hookimpl
def protocol_register(register: ProtocolRegister) -> None:
    """Kind `pooling`: rerank, score, classify and pool."""
    register("pooling", PoolingConfig, PoolingProtocol())
