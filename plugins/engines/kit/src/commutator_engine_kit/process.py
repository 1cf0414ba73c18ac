"""The process of an engine that serves the token API: its command and its main function."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import attrs
import msgspec

from commutator.config.kinds import config_converter
from commutator.contract.engine import EngineConfig, LaunchContext, ModelConfig
from commutator.contract.launcher import LaunchPlan
from commutator.errors import CommutatorError, ConfigError
from commutator.launcher.child import (
    StartFailure,
    calm_garbage_collector,
    log_to_stderr,
    report_start_failure,
    run_with_fast_loop,
    told_to_stop,
)
from commutator.plugins import installed_plugins
from commutator.schema import structure
from commutator_engine_kit.kv.tiers.setup import TierSetup, make_tiers
from commutator_engine_kit.server import TokenApiServer, TokenEngine

log = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT", bound=EngineConfig)

_VARIABLE = "COMMUTATOR_ENGINE_PROCESS"
"""The environment variable by which the supervisor passes a ``_Start``, as JSON."""


@attrs.frozen
class _Start:
    """The value of the environment variable, as JSON."""

    config: dict[str, Any]
    context: LaunchContext


@attrs.frozen
class EngineStart:
    """What an engine is built from, in addition to its configuration."""

    model: ModelConfig
    worker_id: str
    tiers: tuple[TierSetup, ...] = ()
    """Fastest first; not opened yet."""
    host: str = "127.0.0.1"
    """Where the engine listens for other workers."""


def engine_command(module: str, config: EngineConfig, context: LaunchContext) -> LaunchPlan:
    """The launch plan that runs ``python -m module``, which calls ``run_engine_process``."""
    described = {**attrs.asdict(context), "state_dir": str(context.state_dir)}
    start = {"config": attrs.asdict(config), "context": described}
    return LaunchPlan(
        argv=(sys.executable, "-m", module),
        address=f"{context.advertise}:{context.port}",
        env={_VARIABLE: msgspec.json.encode(start).decode()},
    )


def run_engine_process(
    config_class: type[ConfigT], build: Callable[[ConfigT, EngineStart], TokenEngine]
) -> None:
    """Serve one engine until SIGTERM or SIGINT. Call it in the ``__main__`` of an engine plugin.

    ``build`` raises ConfigError when the engine can never start as configured, which ends the
    deployment if it happens at the first start; after other errors it is started again.
    """
    log_to_stderr()
    raw = os.environ.get(_VARIABLE)
    if raw is None:
        sys.exit(f"{_VARIABLE} is not set: start this process with `commutator serve`")
    converter = config_converter(installed_plugins)
    start = structure(converter, msgspec.json.decode(raw), _Start)
    context = start.context
    config = structure(converter, start.config, config_class)
    try:
        name, tiers = context.worker_id, tuple[TierSetup, ...]()
        if context.tiers:
            tiers = make_tiers(context.tiers, installed_plugins(), name)
        engine = build(config, EngineStart(context.model, name, tiers, context.kv_host))
    except (CommutatorError, OSError) as error:
        _give_up(error, context.state_dir)
    calm_garbage_collector()
    run_with_fast_loop(_serve(engine, context.host, context.port))


def _give_up(error: CommutatorError | OSError, folder: Path) -> NoReturn:
    """End the process; its supervisor logs why, and ends the deployment if no try can succeed."""
    if isinstance(error, ConfigError):
        failure = StartFailure(problems=error.problems, is_permanent=True)
    else:
        text = " ".join(str(error).split())
        name = "" if isinstance(error, CommutatorError) else f"{type(error).__name__}: "
        failure = StartFailure(problems=[f"{name}{text}"], is_permanent=False)
    try:
        report_start_failure(folder, failure)
    except OSError:  # the supervisor is on another machine
        log.error("cannot start: %s", "; ".join(failure.problems))  # noqa: TRY400
    sys.exit(os.EX_CONFIG if failure.is_permanent else 1)


async def _serve(engine: TokenEngine, host: str, port: int) -> None:
    stopped = told_to_stop()
    server = TokenApiServer(engine)
    bound = await server.start(host, port)
    log.info("token API on %s:%d", host, bound)
    with contextlib.suppress(asyncio.CancelledError):
        await stopped.wait()
    await server.stop()
