"""Registers the protocol of kind `openai`."""

from commutator import ProtocolRegister, hookimpl
from commutator_openai.protocol import OpenAi, OpenAiConfig


@hookimpl
def protocol_register(register: ProtocolRegister) -> None:
    """Kind `openai`: OpenAI's API."""
    register("openai", OpenAiConfig, OpenAi(), "beta")
