"""Structures entries by their `kind` into the class that the kind's plugin brought."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cattrs
from cattrs.errors import AttributeValidationNote, ClassValidationError

from commutator.config.model import (
    DisaggregationConfig,
    EngineConfig,
    EvictionConfig,
    RouterConfig,
    TierConfig,
)
from commutator.config.secret import Secret
from commutator.plugins import PluginHost, Register
from commutator.routing.stages import Filter, Picker, Scorer
from commutator.schema import Mismatch, build_converter
from commutator.schema.structure import nearest

__all__ = ["config_converter", "unknown_kind"]


def config_converter(host: PluginHost) -> cattrs.Converter:
    """A strict converter for ``Config`` that knows the kinds of ``host``."""
    converter = build_converter()
    bases: tuple[tuple[type[Any], Register[Any]], ...] = (
        (EngineConfig, host.engines),
        (RouterConfig, host.routers),
        (DisaggregationConfig, host.disaggs),
        (TierConfig, host.tiers),
        (EvictionConfig, host.evictions),
        (Filter, host.stages),
        (Scorer, host.stages),
        (Picker, host.stages),
    )
    for base, register in bases:
        _structure_by_kind(converter, base, register, host)
    converter.register_structure_hook_func(lambda cls: cls is Secret, _secret_hook(converter))
    return converter


def unknown_kind(kind: str, register: Register[Any], host: PluginHost) -> str:
    """What to tell somebody who asked for a kind that no plugin offers."""
    known = sorted(register.kinds)
    text = f'no installed plugin offers the {register.seam} "{kind}"; '
    text += nearest(kind, known).replace("known keys", "known kinds") if known else "none are known"
    lost = [f"{p.name} ({p.distribution}): {p.problem}" for p in host.installed if p.problem]
    if lost:
        return f"{text}; not loaded: {'; '.join(lost)}"
    if register is host.tiers and not known:
        text += "; in a checkout, `make tiers` installs those that come along"
    return text


def _structure_by_kind(
    converter: cattrs.Converter, base: type[Any], register: Register[Any], host: PluginHost
) -> None:
    ordinary = converter.get_structure_hook(base)

    def hook(value: Any, _: Any) -> Any:
        if isinstance(value, base):
            return value
        if not isinstance(value, Mapping):
            raise Mismatch("a mapping", value)
        kind = value.get("kind")
        if kind is None:
            raise _at_kind(KeyError("kind"), base)
        if not isinstance(kind, str):
            raise _at_kind(Mismatch("a string", kind), base)
        if kind not in register.kinds:
            raise _at_kind(ValueError(unknown_kind(kind, register, host)), base)
        config_class = register.kinds[kind].config_class
        if not issubclass(config_class, base):
            raise _at_kind(ValueError(f'"{kind}" is not a {base.__name__.lower()}'), base)
        if config_class is base:  # a plugin without options of its own
            return ordinary(value, base)
        return converter.structure(value, config_class)

    converter.register_structure_hook_func(lambda cls: cls is base, hook)


def _at_kind(error: Exception, base: type[Any]) -> ClassValidationError:
    error.add_note(AttributeValidationNote("", "kind", str))
    return ClassValidationError("wrong kind", [error], base)


def _secret_hook(converter: cattrs.Converter) -> Any:
    ordinary = converter.get_structure_hook(Secret)

    def hook(value: Any, _: Any) -> Secret:
        if not isinstance(value, Mapping):
            # Not a Mismatch: that would repeat the value, which may be the secret itself.
            raise ValueError(  # noqa: TRY004 - collected as a finding
                "expected {env: NAME} or {file: PATH}; secrets do not stand in the configuration"
            )
        result: Secret = ordinary(value, Secret)
        return result

    return hook
