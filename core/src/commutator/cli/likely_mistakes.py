"""Warnings of valid options that hardly do what their author means."""

from __future__ import annotations

import time
from collections.abc import Iterator

from commutator.auth.keys import KeysConfig, expiry_unix_s
from commutator.config.checks import is_loopback, tier_warnings
from commutator.config.doors import door_path
from commutator.config.kinds import default_limiter
from commutator.config.model import Config
from commutator.plugins import PluginHost


def warnings_of(config: Config, host: PluginHost, now_unix_s: float | None = None) -> Iterator[str]:
    """A line for each valid option that is probably a mistake, printed by `check` and `serve`."""
    yield from _plugin_warnings(config, host)
    yield from _principal_warnings(config, time.time() if now_unix_s is None else now_unix_s)
    yield from _limiter_warnings(config, host)
    yield from _prefill_warnings(config)
    yield from _unserved_warnings(config)
    yield from _open_warnings(config)
    yield from tier_warnings(config, host)


def _plugin_warnings(config: Config, host: PluginHost) -> Iterator[str]:
    known = sorted(plugin.name for plugin in host.installed)
    for number, name in enumerate(config.plugins.block):
        if name not in known:
            yield (
                f'plugins.block[{number}]: no plugin "{name}" is installed; installed: '
                f"{', '.join(known)}"
            )


def _principal_warnings(config: Config, now_unix_s: float) -> Iterator[str]:
    """Warns of principals that ask in vain."""
    models = sorted(model.name for model in config.models)
    for number, entry in enumerate(config.auth):
        if not isinstance(entry, KeysConfig):
            continue
        for index, principal in enumerate(entry.principals):
            path = f"auth[{number}].principals[{index}] ({principal.name})"
            for name in principal.models or ():
                if name not in models:
                    known = ", ".join(models)
                    yield f'{path}: models: no model is named "{name}"; known models: {known}'
            for key in principal.keys:
                if key.expires is not None and expiry_unix_s(key.expires) <= now_unix_s:
                    yield f"{path}: keys: {key.sha256[:8]}... expired on {key.expires}; remove it"


def _limiter_warnings(config: Config, host: PluginHost) -> Iterator[str]:
    """Warns of a limiter that somebody chose, and that nobody asks."""
    if config.limiter.kind not in {"unlimited", default_limiter(host)} and not config.auth:
        yield (
            "limiter: nobody is asked who they are (no section auth), so nothing is limited; add "
            "`auth`, or remove the limiter"
        )


def _unserved_warnings(config: Config) -> Iterator[str]:
    """Warns of models for which no worker is started, where no other host may have one."""
    if config.registry.kind != "memory" or getattr(config.registry, "address", None) is not None:
        return
    served = {engine.model for engine in config.engines}
    for number, model in enumerate(config.models):
        if model.name not in served:
            yield (
                f"models[{number}] ({model.name}): no entry of `engines` serves it, so its "
                "requests find no worker; add one, or remove the model"
            )


def _open_warnings(config: Config) -> Iterator[str]:
    """Warns of doors that other machines reach, and that ask nobody who they are."""
    for index, door in enumerate(config.frontend.doors):
        if config.auth or getattr(door, "api_keys", ()) or is_loopback(door.host):
            continue
        if getattr(getattr(door, "tls", None), "client_ca_file", None) is not None:
            continue
        path = door_path(config.frontend, index)
        yield (
            f"{path}.host: everyone who reaches {door.host} may send requests"
            f"{'' if door.operations == 'off' else ' and watch them'}, as no key is asked for; "
            f"add the section `auth`, or {path}.api_keys"
        )


def _prefill_warnings(config: Config) -> Iterator[str]:
    roles = {engine.role for engine in config.engines}
    if config.disaggregation is not None and config.planner is None and "prefill" not in roles:
        yield (
            "disaggregation: without effect, as no engine has the role prefill; set "
            "engines[].role, or change a running worker with `commutator worker role ID prefill`"
        )
