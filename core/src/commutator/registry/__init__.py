"""Who is alive: the registry in memory, its server and client, and what every kind needs."""

from commutator.registry.changes import Watchers, description, difference, seal, succession, unseal
from commutator.trust import is_loopback

__all__ = ["Watchers", "description", "difference", "is_loopback", "seal", "succession", "unseal"]
