"""What a registry plugin implements, and the values that a registry carries."""

from commutator.contract.registration import RegistryRegister
from commutator.contract.registry import (
    LAPSED,
    Change,
    Registry,
    RegistryConfig,
    WorkerDown,
    WorkerUp,
)
from commutator.contract.worker import Role, WorkerRecord

__all__ = [
    "LAPSED",
    "Change",
    "Registry",
    "RegistryConfig",
    "RegistryRegister",
    "Role",
    "WorkerDown",
    "WorkerRecord",
    "WorkerUp",
]
