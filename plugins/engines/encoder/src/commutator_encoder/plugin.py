"""Registers the `encoder` engine. Modules with heavy imports are loaded when they are used."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from commutator import (
    EngineClient,
    EngineConnector,
    EngineRegister,
    LaunchContext,
    LaunchPlan,
    ModelConfig,
    TierConfig,
    hookimpl,
)
from commutator.engine import TokenApiClient
from commutator.errors import ConfigError
from commutator_encoder.config import EncoderConfig
from commutator_encoder.facts import read_facts
from commutator_engine_kit import engine_command


class EncoderConnector(EngineConnector[EncoderConfig]):
    """Starts `python -m commutator_encoder` and speaks the token API to it."""

    secures_connections = True

    def problems(
        self, config: EncoderConfig, model: ModelConfig, tiers: Sequence[TierConfig]
    ) -> Iterable[str]:
        if config.role != "both":
            yield f"role: {config.role} is for engines that generate; leave it out"
        from commutator.tokenizer import locate_model

        try:
            path = locate_model(model.source)
        except ConfigError:
            return  # other checks report it
        try:
            read_facts(path, config.matryoshka_dimensions)
        except ConfigError as error:
            yield from (f"model: {problem}" for problem in error.problems)

    def launch_plan(self, config: EncoderConfig, context: LaunchContext) -> LaunchPlan:
        return engine_command("commutator_encoder", config, context)

    def connect(self, config: EncoderConfig, address: str) -> EngineClient:
        return TokenApiClient(address)


@hookimpl
def engine_register(register: EngineRegister) -> None:
    """Kind `encoder`: embeddings, scores and classes."""
    register("encoder", EncoderConfig, EncoderConnector())
