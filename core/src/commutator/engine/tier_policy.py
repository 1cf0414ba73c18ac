"""What decides in a tier, made from its options: for storage tiers and for modelled ones."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import cattrs

from commutator.config.model import AdmissionConfig, EvictionConfig
from commutator.errors import ConfigError
from commutator.kv.admission import AdmissionRule, MinimumHits, NotLongerThan, PromptOnly
from commutator.kv.eviction import EvictionPolicy

if TYPE_CHECKING:
    from commutator.plugins import PluginHost

__all__ = ["admission_rules", "eviction_policy", "structure_evictions"]


def eviction_policy(config: EvictionConfig, capacity_blocks: int) -> EvictionPolicy:
    """A fresh policy for one tier, from an installed plugin.

    Raises ConfigError when none offers it.
    """
    kinds = _host().evictions.kinds
    if config.kind not in kinds:
        from commutator.config.kinds import unknown_kind  # noqa: PLC0415 - see ``_host``

        host = _host()
        raise ConfigError([f"eviction: {unknown_kind(config.kind, host.evictions, host)}"], "tiers")
    policy: EvictionPolicy = kinds[config.kind].thing(config, capacity_blocks)
    return policy


def admission_rules(config: AdmissionConfig) -> tuple[AdmissionRule, ...]:
    """The rules that are switched on."""
    rules: list[AdmissionRule] = []
    if config.prompt_only:
        rules.append(PromptOnly())
    if config.max_blocks is not None:
        rules.append(NotLongerThan(config.max_blocks))
    if config.min_hits > 1:
        rules.append(MinimumHits(config.min_hits))
    return tuple(rules)


def structure_evictions(converter: cattrs.Converter) -> None:
    """Let ``converter`` know the options of eviction policies. Plugins load when it meets one."""

    def hook(value: Any, _: Any) -> Any:
        from commutator.config.kinds import config_converter  # noqa: PLC0415 - see ``_host``

        return config_converter(_host()).structure(value, EvictionConfig)

    converter.register_structure_hook_func(lambda cls: cls is EvictionConfig, hook)


@cache
def _host() -> PluginHost:
    """Loaded once; not at import, for it knows every plugin, and plugins know this package."""
    from commutator.plugins import load_plugins  # noqa: PLC0415

    return load_plugins()
