"""What the checks of traffic read of a configuration."""

from __future__ import annotations

from collections.abc import Sequence

from commutator.config.model import Config
from commutator.contract.engine import EngineConfig, ModelConfig
from commutator.contract.operations import OperationsConfig

__all__ = ["deployment_of"]


def deployment_of(*models: str, operations: Sequence[str] | None = None) -> Config:
    """A configuration with these models and operations."""
    return Config(
        models=tuple(ModelConfig(name=name, source=name) for name in models),
        engines=tuple(EngineConfig(kind="sim", name=name, model=name) for name in models),
        operations=None
        if operations is None
        else tuple(OperationsConfig(kind=one) for one in operations),
    )
