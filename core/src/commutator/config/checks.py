"""Checks between parts of a configuration, on plain data of any shape."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import ip_address
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

import attrs

from commutator.config.doors import door_problems, with_doors
from commutator.config.kinds import unknown_kind
from commutator.config.model import Config, parts_of
from commutator.config.tree import DEFAULT, Node, from_plain, plain, put
from commutator.contract.engine import EngineConnector
from commutator.contract.launcher import AgentLauncherConfig
from commutator.contract.parser import ParserConfig, ParserModel
from commutator.contract.principal import PrincipalConfig
from commutator.contract.registration import Catalog
from commutator.contract.tier import Memory, TierConfig
from commutator.plugins import PluginHost
from commutator.schema import nearest, show

_WORKER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


_PREFILLS_AT_ONCE = 4
"""Enough to keep a prefill worker busy; more requests wait in the queue, by priority."""


def fill_in(tree: Node) -> Node:
    """``tree``, of any shape, with the defaults that depend on other values.

    An engine's name defaults to its kind, its model to the only one. The router of prefill workers
    defaults to the section `router`, less its busy limits.
    """
    tree = with_doors(tree)
    data = plain(tree)
    models = [model.get("name") for _, model in _entries(data, "models")]
    for index, engine in _entries(data, "engines"):
        if engine.get("name") is None and isinstance(engine.get("kind"), str):
            tree = _put(tree, ("engines", str(index), "name"), engine["kind"])
        if engine.get("model") is None and len(models) == 1 and isinstance(models[0], str):
            tree = _put(tree, ("engines", str(index), "model"), models[0])
    section = data.get("disaggregation")
    if isinstance(section, Mapping):
        router, common = section.get("router"), data.get("router")
        if router is None and isinstance(common, Mapping):
            router = {key: value for key, value in common.items() if key != "busy"}
            tree = _put(tree, ("disaggregation", "router"), router)
        if isinstance(router, Mapping) and router.get("busy") is None:
            busy = {"max_active_requests": _PREFILLS_AT_ONCE}
            tree = _put(tree, ("disaggregation", "router", "busy"), busy)
    return tree


def fill_in_cluster(tree: Node, host: PluginHost) -> Node:
    """``tree`` with what a registry or a launcher leaves out and the section `cluster` says.

    If they have options `cluster`, `tls` or `insecure`, they get the cluster's name, its
    certificates (for endpoints that begin with https), and whether plain text is allowed.
    """
    data = plain(tree)
    cluster = data.get("cluster")
    if not isinstance(cluster, Mapping):
        return tree
    catalogs: Mapping[str, Catalog[Any]] = {"registry": host.registries, "launcher": host.launchers}
    for section, catalog in catalogs.items():
        entry = data.get(section)
        if not isinstance(entry, Mapping):
            continue
        kind = catalog.kinds.get(_text(entry, "kind"))
        options = {field.name for field in attrs.fields(kind.config_class)} if kind else set()
        given = {"cluster": cluster.get("name"), "insecure": cluster.get("insecure")}
        if any(str(url).startswith("https:") for url in _list(entry, "endpoints")):
            given["tls"] = cluster.get("tls")
        for name, value in given.items():
            if name in options and value is not None and name not in entry:
                tree = _put(tree, (section, name), value)
    return tree


def _list(entry: Mapping[str, Any], key: str) -> list[Any]:
    value = entry.get(key)
    return value if isinstance(value, list) else []


def _text(entry: Mapping[str, Any], key: str, default: str = "") -> str:
    """A text of an entry; the default for any other value, which other checks report."""
    value = entry.get(key, default)
    return value if isinstance(value, str) else default


def _put(tree: Node, steps: Sequence[str], value: Any) -> Node:
    return put(tree, steps, from_plain(value, DEFAULT))


def cross_problems(data: Mapping[str, Any], host: PluginHost) -> Iterator[tuple[str, str]]:
    """(path, message) for each contradiction. ``data`` is filled in but not yet validated.

    Other checks report unknown kinds.
    """
    yield from _duplicates(data, "models")
    yield from _duplicates(data, "engines")
    for section in ("models", "engines"):
        if data.get(section) == []:
            yield section, "expected at least one entry"
    section = "models"
    if section not in data:  # a misspelt key must not hide mistakes in `engines`
        section = next(iter(difflib.get_close_matches(section, data, n=1, cutoff=0.8)), section)
    models = [model.get("name") for _, model in _entries(data, section)]
    engines = _entries(data, "engines")
    for index, engine in engines:
        yield from _engine_problems(f"engines[{index}]", engine, models)
    if tiers := _entries(data, "tiers"):
        yield from _tier_problems(tiers, [engine for _, engine in engines], host)
    for index, model in _entries(data, "models"):
        yield from _parser_problems(f"models[{index}]", model, host)
    yield from _role_problems(data, engines, host)
    yield from door_problems(_section(data, "frontend"))
    yield from _cluster_problems(data, engines, tiers, host)
    yield from _agent_problems(data, engines, host)
    yield from _group_problems(data, engines, tiers, host)


def _parser_problems(
    path: str, model: Mapping[str, Any], host: PluginHost
) -> Iterator[tuple[str, str]]:
    name, reasoning = _text(model, "tool_parser", "auto"), _text(model, "reasoning_parser", "auto")
    kind = host.parsers.kinds.get(name)
    if kind is not None:
        seen = ParserModel(name="", chat_template=None, special_tokens={}, reasoning=reasoning)
        try:
            kind.thing(ParserConfig(kind=name), seen)
        except ValueError as error:
            yield f"{path}.reasoning_parser", str(error)
    elif name not in {"auto", "none"}:
        yield f"{path}.tool_parser", unknown_kind(name, host.parsers, host)
    elif reasoning not in {"auto", "none"}:
        yield (
            f"{path}.reasoning_parser",
            f'no installed plugin offers the parser "{name}"; pip install commutator-parsers',
        )


_MOVED = {
    "": {
        "recording": "moved; write observers: [{kind: recording, prompts: true, ...}] with the "
        "same options, and pip install commutator-records",
    },
    "frontend.doors": {
        "strict": "belongs to the protocol: write protocols: [{kind: openai, strict: ...}]",
        "media_hosts": "belongs to the protocol: write protocols: [{kind: openai, media_hosts: "
        "[...]}]",
    },
}
"""Keys of former versions, by where they stood, and what to write now."""


def moved_problems(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(path, message) for each key of former versions, taken out of ``data``."""
    doors = _entries(_section(data, "frontend"), "doors")
    places = [("", "", data)]
    places += [("frontend.doors", f"frontend.doors[{i}].", door) for i, door in doors]
    for place, path, options in places:
        for key, message in _MOVED[place].items():
            if options.pop(key, None) is not None:
                yield path + key, message


def config_problems(config: Config) -> Iterator[tuple[str, str]]:
    """(path, message) for limits that nothing counts, and traffic that does not fit the models."""
    limited = [
        f"{path}.limits"
        for number, entry in enumerate(config.auth)
        for path, principal in parts_of(entry, PrincipalConfig, f"auth[{number}]")
        if principal.limits.are_counted
    ]
    if limited and config.limiter.kind == "unlimited":
        others = f", nor those of {len(limited) - 1} more" if len(limited) > 1 else ""
        problem = (
            f'the limiter "unlimited" does not count these limits{others}; pip install '
            "commutator-limits, or remove them"
        )
        yield limited[0], problem
    if config.traffic is not None:
        for path, problem in config.traffic.problems(config):
            yield f"traffic.{path}", problem


def _engine_problems(
    path: str, engine: Mapping[str, Any], models: list[Any]
) -> Iterator[tuple[str, str]]:
    name, model = engine.get("name"), engine.get("model")
    if isinstance(name, str) and not _WORKER_NAME.fullmatch(name):
        yield f"{path}.name", f"expected letters, digits, '.', '_' and '-', got {show(name)}"
    replicas = engine.get("replicas", 1)
    if engine.get("url") is not None and isinstance(replicas, int) and replicas > 1:
        yield (
            f"{path}.replicas",
            "a server at a `url` is one worker; write an entry for each server",
        )
    if model is None and len(models) > 1:
        yield f"{path}.model", f"required, because there are {len(models)} models"
    if isinstance(model, str) and models and model not in models:
        known = nearest(model, sorted({str(name) for name in models})).replace(
            "known keys", "known models"
        )
        yield f"{path}.model", f'no model is named "{model}"; {known}'


def _duplicates(data: Mapping[str, Any], section: str) -> Iterator[tuple[str, str]]:
    first: dict[str, int] = {}
    for index, entry in _entries(data, section):
        name = entry.get("name")
        if isinstance(name, str):
            if name in first:
                yield (
                    f"{section}[{index}].name",
                    f'"{name}" is already the name of {section}[{first[name]}]; choose another',
                )
            first.setdefault(name, index)


Entries = list[tuple[int, dict[str, Any]]]


def _entries(data: Mapping[str, Any], section: str) -> Entries:
    """The entries of a list section that are mappings, with their indices."""
    return [(i, entry) for i, entry in enumerate(_list(data, section)) if isinstance(entry, dict)]


def _role_problems(
    data: Mapping[str, Any], engines: Entries, host: PluginHost
) -> Iterator[tuple[str, str]]:
    for index, engine in engines:
        role, path = _text(engine, "role", "both"), f"engines[{index}].role"
        kind = host.engines.kinds.get(_text(engine, "kind"))
        if role == "prefill" and not data.get("disaggregation"):
            problem = (
                "a prefill worker gets no requests without the section `disaggregation`; "
                "add it, such as disaggregation: {kind: conditional}"
            )
            yield path, problem
        if role in {"prefill", "decode"} and kind is not None:
            style = type(kind.thing).handover_style
            if style is EngineConnector.handover_style:
                yield path, f'engine "{kind.name}" cannot hand KV over, so its role must be both'
    for model in {_text(engine, "model") for _, engine in engines}:
        serving = [(i, engine) for i, engine in engines if _text(engine, "model") == model]
        if all(engine.get("role") == "prefill" for _, engine in serving):
            yield (
                f"engines[{serving[0][0]}].role",
                f'model "{model}" has only prefill workers; at least one must be both or decode',
            )


def _cluster_problems(
    data: Mapping[str, Any], engines: Entries, tiers: Entries, host: PluginHost
) -> Iterator[tuple[str, str]]:
    """What does not fit a deployment that other hosts reach."""
    cluster = _section(data, "cluster")
    place = _section(cluster, "host")
    registry = _section(data, "registry")
    kept_here = registry.get("kind") == "memory" and registry.get("address") is None
    alone = is_loopback(_text(place, "listen", "127.0.0.1"))
    if data.get("planner") and not (alone and cluster.get("tls") is None):
        problem = (
            "it starts and stops the workers of one machine only, so it does not work in a "
            "cluster of several hosts yet; remove it, or cluster.host.listen and cluster.tls"
        )
        yield "planner", problem
    if alone:
        if registry.get("address") is not None and cluster.get("tls") is None:
            problem = (
                "it is for a cluster of several hosts; set cluster.host.listen to an address that "
                "other hosts reach (localhost and 127.x are none), or remove it; a host without "
                "workers sets cluster.tls instead"
            )
            yield "registry.address", problem
        return
    if kept_here:
        problem = (
            "required, because the registry in this supervisor's memory is not known to other "
            "hosts; set HOST:PORT of the host that serves it, or use the kind etcd"
        )
        yield "registry.address", problem
    yield from _open_engines(cluster, engines, host)
    if cluster.get("kv_network") != "isolated":
        yield from _kv_between_hosts(data, engines, tiers, host)


def _agent_problems(
    data: Mapping[str, Any], engines: Entries, host: PluginHost
) -> Iterator[tuple[str, str]]:
    """What does not fit a launcher that places workers on other hosts."""
    launcher, registry = _section(data, "launcher"), _section(data, "registry")
    name = _text(launcher, "kind")
    kind = host.launchers.kinds.get(name)
    if kind is None or not issubclass(kind.config_class, AgentLauncherConfig):
        return
    if data.get("planner"):
        problem = (
            "it starts and stops the workers of one machine only, so it does not work with "
            f'the launcher "{name}" yet; remove it, or use the launcher process'
        )
        yield "planner", problem
    if registry.get("kind") == "memory" and registry.get("address") is None:
        problem = (
            f'the launcher "{name}" runs workers elsewhere, which cannot announce themselves '
            "in this supervisor's memory; use the kind etcd, or set registry.address"
        )
        yield "registry", problem
    if _section(data, "runtime").get("secret") is None:
        problem = (
            f'required with the launcher "{name}", the same on each host: processes prove to '
            "each other that they know it; such as {file: /etc/commutator/secret}"
        )
        yield "runtime.secret", problem
    known = sorted({_text(engine, "name") for _, engine in engines} - {""})
    for engine_name in _section(launcher, "resources"):
        if known and engine_name not in known:
            yield (
                f"launcher.resources.{engine_name}",
                f'no engine is named "{engine_name}"; there are: {", ".join(known)}',
            )


def _group_problems(
    data: Mapping[str, Any], engines: Entries, tiers: Entries, host: PluginHost
) -> Iterator[tuple[str, str]]:
    """What does not fit a worker that runs over several nodes."""
    launcher = host.launchers.kinds.get(_text(_section(data, "launcher"), "kind", "process"))
    groups = launcher is not None and getattr(launcher.config_class, "places_groups", False)
    isolated = _section(data, "cluster").get("kv_network") == "isolated"
    for index, engine in engines:
        nodes, path = engine.get("nodes"), f"engines[{index}].nodes"
        if not isinstance(nodes, int) or nodes <= 1:
            continue
        kind = host.engines.kinds.get(_text(engine, "kind"))
        if launcher is not None and not groups:
            problem = (
                f'the launcher "{launcher.name}" runs a worker on one machine; use the launcher ray'
            )
            yield path, problem
        if kind is not None and not kind.thing.spans_nodes:
            able = sorted(name for name, one in host.engines.kinds.items() if one.thing.spans_nodes)
            names = ", ".join(able) or "none is installed"
            yield path, f'engine "{kind.name}" runs on one node only; engines that can: {names}'
        if engine.get("url") is not None:
            yield path, "without effect with `url`: that server is already running"
        if _text(engine, "role", "both") != "both":
            yield path, "a worker over several nodes cannot hand KV over yet; use role: both"
        if tiers:
            yield path, "a worker over several nodes has no storage tiers yet; remove `tiers`"
        if not isolated:
            yield path, _ISOLATE_RANKS


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = data.get(name)
    return section if isinstance(section, Mapping) else {}


def is_loopback(text: str) -> bool:
    """Whether it is one; False for anything that is no address, which other checks report."""
    try:
        return text == "localhost" or ip_address(text).is_loopback
    except ValueError:
        return False


def _open_engines(
    cluster: Mapping[str, Any], engines: Entries, host: PluginHost
) -> Iterator[tuple[str, str]]:
    """Engines that would serve everyone on the network, in plain text."""
    if cluster.get("insecure"):
        return
    for index, engine in engines:
        kind = host.engines.kinds.get(_text(engine, "kind"))
        if kind is not None and not kind.thing.secures_connections:
            problem = (
                f'engine "{kind.name}" neither encrypts nor knows who asks, so it must not be '
                "reached from other hosts; keep cluster.host.listen at 127.0.0.1, or allow plain "
                "text by cluster.insecure: true"
            )
            yield f"engines[{index}].kind", problem
        url = urlsplit(_text(engine, "url"))
        if url.scheme == "http" and not is_loopback(url.hostname or ""):
            problem = (
                f"{url.geturl()} is on another machine, and prompts would go there in plain text; "
                "use https, run it on a host of the cluster, whose relay encrypts, or allow plain "
                "text by cluster.insecure: true"
            )
            yield f"engines[{index}].url", problem


_ISOLATE = (
    "KV would move between hosts by UCX, which asks nobody for a proof; declare a network that "
    "only this cluster reaches by cluster.kv_network: isolated"
)


_ISOLATE_RANKS = (
    "the processes of one worker talk between nodes in plain text, and ask nobody for a proof; "
    "declare a network that only this cluster reaches by cluster.kv_network: isolated"
)


def _kv_between_hosts(
    data: Mapping[str, Any], engines: Entries, tiers: Entries, host: PluginHost
) -> Iterator[tuple[str, str]]:
    if data.get("disaggregation"):
        yield "disaggregation", _ISOLATE
    for index, engine in engines:
        if _text(engine, "role", "both") != "both":
            yield f"engines[{index}].role", _ISOLATE
    for index, tier in tiers:
        kind = host.tiers.kinds.get(_text(tier, "kind"))
        if kind is not None and kind.config_class.asks_peers:
            yield f"tiers[{index}].kind", _ISOLATE
    interfaces = _list(_section(data, "runtime"), "kv_interfaces")
    if any(interface != "lo" for interface in interfaces):
        yield "runtime.kv_interfaces", _ISOLATE


_DEFAULT_EVICTION = TierConfig(kind="").eviction.kind
_ENCODING = ("compression", "encryption_key", "integrity_key")


def _tier_problems(
    tiers: Entries, engines: Sequence[Mapping[str, Any]], host: PluginHost
) -> Iterator[tuple[str, str]]:
    yield from _folder_problems(tiers, engines, host)
    kinds = {_text(engine, "kind") for engine in engines}
    known = [host.engines.kinds[kind].thing for kind in kinds if kind in host.engines.kinds]
    if known and not any(connector.uses_tiers for connector in known):
        able = sorted(name for name, kind in host.engines.kinds.items() if kind.thing.uses_tiers)
        names = ", ".join(able) or "none is installed"
        yield "tiers", f"no configured engine supports storage tiers; engines that do: {names}"
    yield from _encoding_problems(tiers, host)
    if _DEFAULT_EVICTION not in host.evictions.kinds:
        for index, tier in tiers:
            if "eviction" not in tier and _text(tier, "kind") in host.tiers.kinds:
                problem = (
                    f'no installed plugin offers the default, "{_DEFAULT_EVICTION}"; name another '
                    "policy, or: pip install commutator-eviction"
                )
                yield f"tiers[{index}].eviction", problem


def _encoding_problems(tiers: Entries, host: PluginHost) -> Iterator[tuple[str, str]]:
    """Peers read stored bytes unchanged, so the peer tier must encode as the lending tier."""
    lent: Mapping[str, Any] | None = None
    for number, tier in tiers:
        kind = host.tiers.kinds.get(_text(tier, "kind"))
        if kind is None:
            continue
        config_class = kind.config_class
        if config_class.asks_peers:
            for option in _ENCODING if lent is not None else ():
                if lent is not None and tier.get(option) != lent.get(option):
                    message = (
                        f"must be the same as in the tier {lent['kind']}, whose bytes peers read"
                    )
                    yield f"tiers[{number}].{option}", message
        elif lent is None and config_class.memory is Memory.DRAM:
            lent = tier


_WORKER = "{worker}"

_MAX_WORKERS = 256
"""Workers whose folders are compared."""


def _folder_problems(
    tiers: Entries, engines: Sequence[Mapping[str, Any]], host: PluginHost
) -> Iterator[tuple[str, str]]:
    """A problem for each `path` that two workers share, or two tiers of the same kind."""
    using = {name for name, kind in host.engines.kinds.items() if kind.thing.uses_tiers}
    users = [engine for engine in engines if _text(engine, "kind") in using]
    ids = list(islice(_worker_ids(users), _MAX_WORKERS))
    workers = [_WORKER, *ids]
    owners: dict[tuple[str, str, str], int] = {}
    for number, tier in tiers:
        kind, path = _text(tier, "kind"), _text(tier, "path")
        if not path.strip() or "\0" in path:  # other checks report it
            continue
        home = os.path.expanduser(path)  # noqa: PTH111 - Path's raises for a user without a home
        places = [
            (kind, worker, os.path.realpath(home.replace(_WORKER, worker))) for worker in workers
        ]
        taken = next((place for place in places if place in owners), None)
        if taken is not None:
            owner = f"the folder of tiers[{owners[taken]}]"
            where = "" if taken[1] == _WORKER else f" on worker {taken[1]}"
            yield f"tiers[{number}].path", f"{show(path)} is already {owner}{where}; choose another"
        elif _WORKER not in path and len(ids) > 1:
            problem = (
                f"{show(path)} would be the folder of {ids[0]} and of {ids[1]}, and no two workers "
                f'can share one; append "/{_WORKER}"'
            )
            yield f"tiers[{number}].path", problem
        for place in places:
            owners.setdefault(place, number)


def _worker_ids(engines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The ids that the supervisor gives the workers."""
    for engine in engines:
        replicas = engine.get("replicas", 1)
        for replica in range(replicas if isinstance(replicas, int) else 1):
            yield f"{engine.get('name')}-{replica}"


_SLOWNESS: Mapping[Memory | None, int] = {Memory.DRAM: 0, Memory.FILE: 1, Memory.OBJ: 2}


def tier_warnings(config: Config, host: PluginHost) -> Iterator[str]:
    """A line for each valid tier that is probably a mistake, printed by `check` and `serve`."""
    yield from _order_warnings(config)
    yield from _lending_warnings(config)
    yield from _sizing_warnings(config, host)


def _order_warnings(config: Config) -> Iterator[str]:
    """Warns of a faster tier below a slower one. The speed of peers is unknown."""
    slowest, name = -1, ""
    for number, tier in enumerate(config.tiers):
        slowness = _SLOWNESS.get(tier.memory)
        if slowness is None or tier.asks_peers:
            continue
        this = f"tiers[{number}] ({tier.kind})"
        if slowness < slowest:
            yield (
                f"{this}: it is faster than {name}, which is listed before it, and a block is read "
                "from the first tier that has it; list the fastest first"
            )
        elif slowness > slowest:
            slowest, name = slowness, this


def _lending_warnings(config: Config) -> Iterator[str]:
    """Warns of lending without a DRAM tier; workers lend blocks of their own DRAM tier only."""
    lender: str | None = None
    for number, tier in enumerate(config.tiers):
        if tier.asks_peers:
            if lender is None and tier.lends:
                lender = f"tiers[{number}] ({tier.kind})"
        elif tier.memory is Memory.DRAM:
            return
    if lender is not None:
        yield (
            f"{lender}: workers have no blocks in host memory to lend to peers; add a tier of "
            "kind dram, or set listen: null so that they only borrow"
        )


def _sizing_warnings(config: Config, host: PluginHost) -> Iterator[str]:
    """Warns of a tier that is smaller than the engine's KV memory or a tier above it.

    Sizes are those of one worker. Tiers and engines without a size in bytes do not count.
    """
    above = [
        (f"engine {engine.name}'s KV memory", engine.kv_cache_bytes)
        for engine in config.engines
        if engine.kind in host.engines.kinds
        and host.engines.kinds[engine.kind].thing.uses_tiers
        and hasattr(engine, "kv_cache_bytes")
    ]
    for number, tier in enumerate(config.tiers):
        size = getattr(tier, "capacity", None)
        if size is None:
            continue
        name = f"tiers[{number}] ({tier.kind})"
        other, larger = max(above, key=lambda named: named[1], default=("", 0))
        if size < larger:
            yield (
                f"{name}: {_size(size)} is less than the {_size(larger)} of {other}, so "
                f"it will rarely help; set capacity above {_size(larger)}"
            )
        above = [*above, (name, size)]


def _size(size_bytes: int) -> str:
    """The size in the notation of options, such as "1.5MB", rounded up to three digits."""
    for factor, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size_bytes >= factor:
            step = 10 ** (len(str(size_bytes)) - 3)
            return f"{-(-size_bytes // step) * step / factor:.15g}{unit}"
    return f"{size_bytes}B"
