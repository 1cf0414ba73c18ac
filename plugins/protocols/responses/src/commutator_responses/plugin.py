"""Registers the protocol of kind `responses`."""

from commutator import ProtocolRegister, hookimpl
from commutator_responses.protocol import Responses, ResponsesConfig


@hookimpl
def protocol_register(register: ProtocolRegister) -> None:
    """Kind `responses`: OpenAI's Responses API."""
    register("responses", ResponsesConfig, Responses())
