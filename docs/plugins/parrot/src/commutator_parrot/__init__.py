"""An engine that repeats its prompt: the least that an engine plugin needs."""

from __future__ import annotations

from attrs import frozen

from commutator import (
    EngineClient,
    EngineConfig,
    EngineConnector,
    EngineRegister,
    LaunchContext,
    LaunchPlan,
    hookimpl,
    setting,
)
from commutator.engine import TokenApiClient
from commutator_engine_kit import engine_command


@frozen(kw_only=True)
class ParrotConfig(EngineConfig):
    """Options of the engine; they stand in the YAML file beside `kind`."""

    tokens_per_second: float = setting("How quickly it speaks.", 200.0)


class ParrotConnector(EngineConnector[ParrotConfig]):
    """Starts `python -m commutator_parrot` and speaks the token API to it."""

    def launch_plan(self, config: ParrotConfig, context: LaunchContext) -> LaunchPlan:
        return engine_command("commutator_parrot", config, context)

    def connect(self, config: ParrotConfig, address: str) -> EngineClient:
        return TokenApiClient(address)


@hookimpl
def engine_register(register: EngineRegister) -> None:
    register("parrot", ParrotConfig, ParrotConnector(), stability="alpha")
