"""``commutator down``: stops the workers that a launcher such as Ray's has placed."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from commutator.cli.options import Sources, configuration_options

if TYPE_CHECKING:
    from commutator.config.load import Loaded
    from commutator.contract.launcher import AgentLauncher, AgentLauncherConfig
    from commutator.contract.registry import Registry


_EXIT_S = 20.0
_ANSWER_S = 10.0


@click.command(epilog="Example: commutator down cluster.yaml")
@configuration_options
def down(sources: Sources) -> None:
    """Stop every worker that the launcher of FILE has placed, on all hosts.

    Needed with launchers whose workers outlive `commutator serve`, such as ray. Requests that run
    may finish within `runtime.drain_timeout_s`. Stop `commutator serve` first: it would place the
    workers anew.
    """
    from commutator.errors import ConfigError
    from commutator.supervisor.placed_fleet import of_agents
    from commutator_rollout.member import as_member

    loaded = sources.load()
    config = loaded.config
    options = of_agents(config)
    if options is None:
        problem = (
            f'launcher: the workers of the launcher "{config.launcher.kind}" end with their '
            "`commutator serve`; stop that"
        )
        raise ConfigError([problem], "this command")
    with as_member(config):
        names = asyncio.run(_down(loaded, options))
    for name in names:
        click.echo(f"{name} is stopped")
    if not names:
        click.echo("no worker runs")


async def _down(loaded: Loaded, options: AgentLauncherConfig) -> list[str]:
    from commutator.contract.launcher import AgentLauncher, LauncherContext

    await _must_not_be_launching(loaded)
    context = LauncherContext(
        folder=Path(tempfile.gettempdir()), env=os.environ, on_line=lambda *_: None
    )
    launcher = loaded.host.launchers.kinds[options.kind].thing(options, context)
    assert isinstance(launcher, AgentLauncher)
    grace_s = loaded.config.runtime.drain_timeout_s + _EXIT_S
    await launcher.open()
    try:
        return await _remove_all(launcher, grace_s)
    finally:
        await launcher.close()


async def _remove_all(launcher: AgentLauncher, grace_s: float) -> list[str]:
    names = sorted({agent.name for agent in await launcher.agents()})
    await asyncio.gather(*(launcher.remove(name, grace_s) for name in names))
    return names


async def _must_not_be_launching(loaded: Loaded) -> None:
    """Raises CommutatorError while a `commutator serve` would place the workers anew."""
    from commutator.errors import CommutatorError, RegistryError
    from commutator.registry.client import RegistryClient
    from commutator.registry.memory import MemoryConfig

    config = loaded.config.registry
    if isinstance(config, MemoryConfig):
        # `commutator serve` is the registry: the process that answers there launches.
        assert config.address is not None
        client = RegistryClient(config.address)
        try:
            await client.run_state()
        except RegistryError:
            return
        finally:
            await client.close()
        where = config.address
    else:
        registry = loaded.host.registries.kinds[config.kind].thing(config)
        try:
            holder = await _holder(registry)
        finally:
            await registry.close()
        if holder is None:
            return
        where = holder or "this machine"
    raise CommutatorError(
        f"`commutator serve` runs on {where} and would place the workers anew; stop it first"
    )


async def _holder(registry: Registry) -> str | None:
    """The host of the process that launches; None when there is none."""
    from commutator.contract.registry import WorkerUp
    from commutator.errors import CommutatorError
    from commutator.registry.claims import LAUNCHER, is_claim

    try:
        async with asyncio.timeout(_ANSWER_S):
            batch = await anext(registry.watch())
    except TimeoutError:
        problem = (
            f"the registry did not answer within {_ANSWER_S:g} s, so nobody knows whether "
            "`commutator serve` still runs; start the registry, or check `registry`"
        )
        raise CommutatorError(problem) from None
    for change in batch:
        if not isinstance(change, WorkerUp):
            continue
        record = change.record
        if is_claim(record) and record.worker_id == LAUNCHER:
            return record.host
    return None
