"""The client of the workers' own wire, the token API, which every engine plugin may return."""

from commutator.engine.client import TokenApiClient
from commutator.engine.protocol import DeltaStream

__all__ = ["DeltaStream", "TokenApiClient"]
