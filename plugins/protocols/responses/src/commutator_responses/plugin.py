"""Registers the protocol of kind `responses`, and response stores that need nothing else."""

from commutator import ProtocolRegister, hookimpl
from commutator.contract.registration import ResponseStoreRegister
from commutator.contract.response_store import ResponseStoreConfig
from commutator_responses.protocol import Responses, ResponsesConfig
from commutator_responses.stores import MemoryConfig, SqliteConfig, in_memory, in_sqlite


@hookimpl
def protocol_register(register: ProtocolRegister) -> None:
    """Kind `responses`: OpenAI's Responses API."""
    register("responses", ResponsesConfig, Responses())


@hookimpl
def response_store_register(register: ResponseStoreRegister) -> None:
    """Kinds `memory`, `sqlite` and `none`, which keeps nothing."""
    register("memory", MemoryConfig, in_memory)
    register("sqlite", SqliteConfig, in_sqlite)
    register("none", ResponseStoreConfig, lambda _: None)
