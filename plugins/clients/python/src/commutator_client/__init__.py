"""A client of Commutator, async and sync, on top of OpenAI's.

OpenAI's package is imported by the first request, so that importing this module is quick.
"""

from commutator_client.aio import AsyncClient
from commutator_client.config import ClientConfig
from commutator_client.errors import (
    ApiError,
    ClientConnectionError,
    ClientError,
    ClientTimeoutError,
    OverloadedError,
    UnavailableError,
)
from commutator_client.results import Classification, Conversation, Embeddings, Ranked
from commutator_client.sync import Client
from commutator_client.tools import Tool

__all__ = [
    "ApiError",
    "AsyncClient",
    "Classification",
    "Client",
    "ClientConfig",
    "ClientConnectionError",
    "ClientError",
    "ClientTimeoutError",
    "Conversation",
    "DynamoAPIError",
    "DynamoClient",
    "DynamoConfig",
    "DynamoConnectionError",
    "DynamoError",
    "Embeddings",
    "OverloadedError",
    "Ranked",
    "Tool",
    "UnavailableError",
]

DynamoClient = AsyncClient
DynamoConfig = ClientConfig
DynamoError = ClientError
DynamoAPIError = ApiError
DynamoConnectionError = ClientConnectionError
