"""What a registry plugin implements, the values that it carries, and what every kind needs."""

from commutator.contract.registration import RegistryRegister
from commutator.contract.registry import (
    CLAIM_TTLS,
    LAPSED,
    RETIRED,
    Change,
    Registry,
    RegistryConfig,
    WorkerDown,
    WorkerUp,
)
from commutator.contract.worker import Role, WorkerRecord
from commutator.registry.changes import Watchers, description, difference, succession
from commutator.registry.sealed import seal, unseal

__all__ = [
    "CLAIM_TTLS",
    "LAPSED",
    "RETIRED",
    "Change",
    "Registry",
    "RegistryConfig",
    "RegistryRegister",
    "Role",
    "Watchers",
    "WorkerDown",
    "WorkerRecord",
    "WorkerUp",
    "description",
    "difference",
    "seal",
    "succession",
    "unseal",
]
