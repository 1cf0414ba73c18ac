"""Whether a request's prefill is worth a worker of its own: always, never, conditional, cost."""

from commutator import DisaggRegister, hookimpl
from commutator_disagg.policies import (
    Always,
    Conditional,
    ConditionalConfig,
    Cost,
    CostConfig,
    FixedConfig,
    Never,
)

__all__ = [
    "Always",
    "Conditional",
    "ConditionalConfig",
    "Cost",
    "CostConfig",
    "FixedConfig",
    "Never",
    "disagg_register",
]


@hookimpl
def disagg_register(register: DisaggRegister) -> None:
    register("always", FixedConfig, Always, stability="beta")
    register("never", FixedConfig, Never, stability="beta")
    register("conditional", ConditionalConfig, Conditional, stability="beta")
    register("cost", CostConfig, Cost)
