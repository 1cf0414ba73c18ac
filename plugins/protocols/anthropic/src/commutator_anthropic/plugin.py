"""Registers the protocol of kind `anthropic`."""

from commutator import ProtocolRegister, hookimpl
from commutator_anthropic.protocol import Anthropic, AnthropicConfig


@hookimpl
def protocol_register(register: ProtocolRegister) -> None:
    """Kind `anthropic`: Anthropic's Messages API."""
    register("anthropic", AnthropicConfig, Anthropic())
