"""The process of an engine that speaks the token API: its command line, its life and its end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import msgspec

from commutator.config.model import EngineConfig, ModelConfig, TierConfig
from commutator.engine.contract import LaunchContext, LaunchPlan
from commutator.engine.server import TokenApiServer, TokenEngine
from commutator.engine.tier_policy import structure_evictions
from commutator.kv.tier_setup import TierSetup
from commutator.schema import build_converter, structure

__all__ = [
    "LOG_LEVEL",
    "EngineStart",
    "calm_garbage_collector",
    "engine_command",
    "run_engine_process",
]

log = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT", bound=EngineConfig)
_VARIABLE = "COMMUTATOR_ENGINE_PROCESS"
LOG_LEVEL = "COMMUTATOR_LOG_LEVEL"
"""The environment variable by which the supervisor passes on `log.level`."""
_NEW_OBJECTS = 20_000
"""A garbage collection is due after so many more objects."""


@attrs.frozen
class _Handed:
    """What the supervisor hands to the process, as JSON in one environment variable."""

    config: dict[str, Any]
    model: ModelConfig
    host: str
    port: int
    worker_id: str
    tiers: list[dict[str, Any]]


@attrs.frozen
class EngineStart:
    """What an engine is built from, beside its own configuration."""

    model: ModelConfig
    worker_id: str
    tiers: tuple[TierSetup, ...] = ()
    """Fastest first, not opened yet."""


def engine_command(module: str, config: EngineConfig, context: LaunchContext) -> LaunchPlan:
    """The launch plan that runs ``python -m module``, which calls ``run_engine_process``."""
    handed = {
        "config": attrs.asdict(config),
        "model": attrs.asdict(context.model),
        "host": context.host,
        "port": context.port,
        "worker_id": context.worker_id,
        "tiers": [attrs.asdict(tier) for tier in context.tiers],
    }
    return LaunchPlan(
        argv=(sys.executable, "-m", module),
        address=f"{context.host}:{context.port}",
        env={_VARIABLE: msgspec.json.encode(handed).decode()},
    )


def run_engine_process(
    config_class: type[ConfigT], build: Callable[[ConfigT, EngineStart], TokenEngine]
) -> None:
    """Serve one engine until SIGTERM or SIGINT. The whole ``__main__`` of an engine plugin."""
    level = os.environ.get(LOG_LEVEL, "INFO")
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    raw = os.environ.get(_VARIABLE)
    if raw is None:
        sys.exit(f"{_VARIABLE} is not set: this process is started by `commutator serve`")
    converter = build_converter()
    structure_evictions(converter)
    handed = structure(converter, msgspec.json.decode(raw), _Handed)
    config = structure(converter, handed.config, config_class)
    tiers = _tiers(handed) if handed.tiers else ()
    engine = build(config, EngineStart(handed.model, handed.worker_id, tiers))
    calm_garbage_collector()
    try:
        import uvloop  # noqa: PLC0415 - optional, and only for the process itself
    except ImportError:
        asyncio.run(_serve(engine, handed.host, handed.port))
    else:
        uvloop.run(_serve(engine, handed.host, handed.port))


def calm_garbage_collector() -> None:
    """Leave out what lives as long as the process, such as vocabularies, and look less often.

    A request makes hundreds of objects, nearly all of which go without the collector.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)


def _tiers(handed: _Handed) -> tuple[TierSetup, ...]:
    # These know every plugin, and plugins know this package.
    from commutator.config.kinds import config_converter  # noqa: PLC0415
    from commutator.engine.tiers import make_tiers  # noqa: PLC0415
    from commutator.plugins import load_plugins  # noqa: PLC0415

    host = load_plugins()
    converter = config_converter(host)
    configs = [structure(converter, tier, TierConfig) for tier in handed.tiers]
    return make_tiers(configs, host, handed.worker_id)


async def _serve(engine: TokenEngine, host: str, port: int) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    server = TokenApiServer(engine)
    bound = await server.start(host, port)
    log.info("token API on %s:%d", host, bound)
    with contextlib.suppress(asyncio.CancelledError):
        await stopped.wait()
    await server.stop()
