"""Converts entries with a `kind` to the configuration class that the kind's plugin registered."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import attrs
import cattrs
from cattrs.errors import AttributeValidationNote, ClassValidationError

from commutator.config.model import Config
from commutator.contract.door import DoorConfig, FrontendConfig
from commutator.contract.engine import EngineConfig
from commutator.contract.registration import Catalog
from commutator.contract.routing import Filter, Picker, RouteStage, Scorer
from commutator.contract.settings import Secret
from commutator.contract.tier import TierConfig
from commutator.errors import packages
from commutator.plugins import SEAMS, PluginHost
from commutator.schema import Mismatch, build_converter, json_schema, mismatch, nearest

DEFAULT_KINDS = {"router": "round_robin", "registry": "memory", "launcher": "process"}
"""The kind of each section of ``Config`` that may leave it out."""


def default_limiter(host: PluginHost) -> str:
    """The kind of the section `limiter` that leaves it out."""
    return "ledger" if "ledger" in host.limiters.kinds else "unlimited"


def config_converter(
    host: PluginHost | Callable[[], PluginHost], *, only_routes: bool = False
) -> cattrs.Converter:
    """A strict converter for ``Config`` that knows the kinds of ``host``.

    A function is called when data first names a kind, so that plugins are loaded only if needed.
    ``only_routes``: workers run elsewhere, so of an engine or tier whose kind is not installed
    here, only the options that every kind has are read.
    """
    load_host = (lambda: host) if isinstance(host, PluginHost) else host
    converter = build_converter(extensions=True)
    for base in _CATALOGS:
        elsewhere = only_routes and base in {EngineConfig, TierConfig}
        _structure_by_kind(converter, base, load_host, elsewhere=elsewhere)
    converter.register_structure_hook_func(lambda cls: cls is Secret, _secret_hook(converter))
    return converter


_CATALOGS: Mapping[type[Any], str] = {
    **{base: catalog for _, catalog, base, _ in SEAMS if base is not RouteStage},
    **dict.fromkeys((Filter, Scorer, Picker), "stages"),
}
"""The base class of each section with kinds, and the catalog of ``PluginHost`` with its kinds."""


def _catalog(base: type[Any], host: PluginHost) -> Catalog[Any]:
    found: Catalog[Any] = getattr(host, _CATALOGS[base])
    return found


def unknown_kind(kind: str, catalog: Catalog[Any], host: PluginHost) -> str:
    """The error message for a kind that no plugin offers."""
    known = sorted(catalog.kinds)
    text = f'no installed plugin offers the {catalog.seam} "{kind}"'
    if known:
        text += f"; {nearest(kind, known).replace('known keys', 'known kinds')}"
    lost = [one for one in host.installed if one.problem]
    if lost:
        told = (f"{one.name} ({one.distribution}): {one.problem}" for one in lost)
        text += f"; not loaded: {'; '.join(told)}"
    lacks_parsers = catalog is host.parsers and "auto" not in known
    wanted = "parser auto" if lacks_parsers else f"{catalog.seam} {kind}"
    brings = packages("kinds").get(wanted)
    if brings is not None and brings not in {one.distribution for one in lost}:
        text += f"; pip install {brings}"
        if catalog is host.tiers:
            text += ", in a checkout `make tiers`"
    elif catalog is host.doors and kind in host.protocols.kinds:
        text += f"; {kind} is a protocol: write protocols: [{{kind: {kind}}}] instead"
    elif catalog in (host.doors, host.protocols, host.operations):
        text += f"; install its package, such as commutator-{kind}"
    return text


def _structure_by_kind(
    converter: cattrs.Converter,
    base: type[Any],
    load_host: Callable[[], PluginHost],
    *,
    elsewhere: bool,
) -> None:
    ordinary = converter.get_structure_hook(base)
    default = _default_kind(base)

    def hook(value: Any, _: Any) -> Any:
        if isinstance(value, base):
            return value
        if not isinstance(value, Mapping):
            example = value if isinstance(value, str) and value.isidentifier() else "NAME"
            raise Mismatch(f"a mapping such as {{kind: {example}}}", value)
        host = load_host()
        catalog, kind = _catalog(base, host), value.get("kind", default)
        if kind is None:
            raise _at_kind(_missing_kind(value, catalog), base)
        if not isinstance(kind, str):
            raise _at_kind(Mismatch("a string", kind), base)
        if kind not in catalog.kinds and elsewhere:
            common = attrs.fields_dict(base).keys() & value.keys()
            return ordinary({name: value[name] for name in common}, base)
        if kind not in catalog.kinds:
            raise _at_kind(ValueError(unknown_kind(kind, catalog, host)), base)
        config_class = catalog.kinds[kind].config_class
        if not issubclass(config_class, base):
            raise _at_kind(ValueError(f'"{kind}" is not a {base.__name__.lower()}'), base)
        if config_class is base:  # a kind without options
            return ordinary(value, base)
        return converter.structure(value, config_class)

    converter.register_structure_hook_func(lambda cls: cls is base, hook)


def _default_kind(base: type[Any]) -> Any:
    """The kind of a section that leaves it out; None where it must not."""
    own = attrs.fields_dict(base).get("kind")
    return None if own is None or own.default is attrs.NOTHING else own.default


def _missing_kind(value: Mapping[str, Any], catalog: Catalog[Any]) -> ValueError:
    for key, name in value.items():
        if isinstance(name, str) and name in catalog.kinds:
            return ValueError(
                f'required, but missing; did you mean "kind: {name}" instead of "{key}: {name}"?'
            )
    return ValueError("required, but missing")


def _at_kind(error: Exception, base: type[Any]) -> ClassValidationError:
    error.add_note(AttributeValidationNote("", "kind", str))
    return ClassValidationError("wrong kind", [error], base)


def _secret_hook(converter: cattrs.Converter) -> Any:
    ordinary = converter.get_structure_hook(Secret)

    def hook(value: Any, _: Any) -> Secret:
        if not isinstance(value, Mapping):
            raise mismatch(Secret, value)
        result: Secret = ordinary(value, Secret)
        return result

    return hook


def file_schema(host: PluginHost) -> dict[str, Any]:
    """The JSON Schema of a configuration file, for editors to complete and check it.

    Values from other files, the environment and options are outside its scope.
    """
    attrs.resolve_types(Config, include_extras=True)
    schema = json_schema(Config, partial(_option_schema, Config, host))
    for section in ("models", "engines"):
        schema["properties"][section]["minItems"] = 1
    schema["properties"]["frontend"] |= _frontend_schema(host)
    schema["properties"]["frontend"].pop("type")
    for key in ("properties", "additionalProperties"):
        schema["properties"]["frontend"].pop(key)
    if _DEFAULT_DOOR not in host.doors.kinds:
        schema["required"].append("frontend")
    for section, default in {**DEFAULT_KINDS, "limiter": default_limiter(host)}.items():
        base: Any = attrs.fields_dict(Config)[section].type
        schema["properties"][section] |= _one_of_kinds(base, host, default)
        if default not in _catalog(base, host).kinds:
            schema["required"].append(section)
    for section in schema["properties"].values():
        _say_effect(section, section["x-takes-effect"])
    _allow_extensions(schema)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Commutator configuration",
    } | schema


def _say_effect(schema: Any, takes_effect: str) -> None:
    """Write down when each option takes effect that says nothing else than what it is in."""
    if isinstance(schema, list):
        for one in schema:
            _say_effect(one, takes_effect)
    elif isinstance(schema, dict):
        for name, inner in schema.items():
            if name == "properties":
                for option in inner.values():
                    _say_effect(option, option.setdefault("x-takes-effect", takes_effect))
            elif name in {"items", "anyOf", "oneOf", "additionalProperties"}:
                _say_effect(inner, takes_effect)


def with_place(path: str, problem: str, host: PluginHost) -> str:
    """``problem``, and if ``path`` is an unknown key that is known elsewhere, where that is."""
    if not problem.startswith("unknown key; known keys:"):
        return problem
    owner, _, key = re.sub(r"\[\d+\]", "[]", path).rpartition(".")
    options = set(_options(file_schema(host), "", ""))
    kinds = sorted({kind for place, kind, name in options if (place, name) == (owner, key)} - {""})
    places = {place for place, _, name in options if name == key} - {owner}
    inside = {one for one in places if one.startswith(owner)}
    places = {one for one in places if owner.startswith(one)} or {
        one for one in inside if not any(one.startswith(f"{shorter}.") for shorter in inside)
    }
    if kinds:
        return f"unknown key; it is an option of the kind {' and '.join(kinds)}"
    if 0 < len(places) <= _FEW:
        where = " or ".join(f"`{place}`" for place in sorted(places)).replace("``", "the top level")
        return f"unknown key; it belongs to {where}"
    servers = sorted({kind for place, kind, name in options if (place, name) == (owner, "args")})
    if servers and owner == "engines[]":
        problem += f"; an argument of an engine's server belongs to `args` of {', '.join(servers)}"
    return problem


_FEW = 2


def _options(schema: Any, place: str, kind: str) -> Iterator[tuple[str, str, str]]:
    """Place, kind ("" where there are none) and name of each option in a JSON Schema."""
    if isinstance(schema, list):
        for one in schema:
            yield from _options(one, place, kind)
    elif isinstance(schema, dict):
        properties = schema.get("properties", {})
        kind = properties.get("kind", {}).get("const", "")
        for name, inner in properties.items():
            yield place, kind, name
            yield from _options(inner, f"{place}.{name}" if place else name, "")
        for form in ("oneOf", "anyOf"):
            yield from _options(schema.get(form), place, kind)
        yield from _options(schema.get("items"), f"{place}[]", "")


def _allow_extensions(schema: Any) -> None:
    """Objects may have keys of the author's own, such as anchors for YAML."""
    for inner in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(inner, dict | list):
            _allow_extensions(inner)
    if isinstance(schema, dict) and schema.get("additionalProperties") is False:
        schema["patternProperties"] = {"^x-": {}}


def _frontend_schema(host: PluginHost) -> dict[str, Any]:
    """With a list of doors, or with the options of the only one, and `admin`, in their place."""
    schema = json_schema(FrontendConfig, partial(_option_schema, FrontendConfig, host))
    of_process = {name: given for name, given in schema["properties"].items() if name != "doors"}
    admin = json_schema(DoorConfig)
    admin = {
        "type": ["object", "null"],
        "properties": {name: admin["properties"][name] for name in ("host", "port")},
        "required": ["port"],
        "additionalProperties": False,
    }
    forms = [schema | {"required": ["doors"]}]
    for one in _one_of_kinds(DoorConfig, host, _DEFAULT_DOOR).get("oneOf", ()):
        options = of_process | one["properties"] | {"admin": admin}
        forms.append(one | {"properties": options})
    return {"anyOf": forms}


_DEFAULT_DOOR = attrs.fields(DoorConfig).kind.default


def _option_schema(owner: Any, host: PluginHost, cls: Any) -> dict[str, Any] | None:
    """The schema of an option of ``owner`` that plugins extend, or that takes one of two forms."""
    if cls is Secret:
        return _secret_schema()
    # A kind without options has the base class itself.
    if cls not in _CATALOGS or cls is owner:
        return None
    return _one_of_kinds(cls, host, _default_kind(cls))


def _one_of_kinds(base: Any, host: PluginHost, default: str | None = None) -> dict[str, Any]:
    """One alternative for each kind; only that of the kind ``default`` may leave `kind` out."""
    alternatives = []
    for name, kind in sorted(_catalog(base, host).kinds.items()):
        cls = kind.config_class
        if not issubclass(cls, base):  # filters, scorers and pickers share one catalog
            continue
        schema = json_schema(cls, partial(_option_schema, cls, host))
        schema["properties"]["kind"] |= {"const": name}
        schema["properties"]["kind"].pop("type", None)
        schema["properties"]["kind"].pop("default", None)
        required = {*schema.get("required", ()), "kind"} - {"kind" if name == default else ""}
        alternatives.append(schema | {"required": sorted(required)})
    return {"oneOf": alternatives} if alternatives else {"not": {}}


def _secret_schema() -> dict[str, Any]:
    text, null = {"type": "string"}, {"type": "null"}
    forms = (
        {"properties": {given: text, other: null}, "required": [given]}
        for given, other in (("env", "file"), ("file", "env"))
    )
    return json_schema(Secret) | {"oneOf": list(forms)}
