"""The client by the names that programs for `dynamo_client` import."""

from commutator_client import (
    DynamoAPIError,
    DynamoClient,
    DynamoConfig,
    DynamoConnectionError,
    DynamoError,
)

__all__ = [
    "DynamoAPIError",
    "DynamoClient",
    "DynamoConfig",
    "DynamoConnectionError",
    "DynamoError",
]
