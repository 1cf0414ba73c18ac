"""What each worker of a configuration is started from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
from attrs import evolve, frozen

from commutator.config.load import Loaded
from commutator.contract.engine import EngineConfig, EngineConnector, ModelConfig, NodeGroup
from commutator.contract.tier import TierConfig
from commutator.supervisor.hosts import kv_host
from commutator.trust import Network

_NOT_OF_WORKERS = ("live", "new requests", "doors")
"""When options take effect that change no worker."""


@frozen
class WorkerSpec:
    """One replica of one `engines` entry."""

    worker_id: str
    config: EngineConfig
    model: ModelConfig
    connector: EngineConnector[Any]
    tiers: tuple[TierConfig, ...] = ()
    host: str = ""
    """As ``WorkerRecord.host``."""
    labels: Mapping[str, str] = MappingProxyType({})
    generation: str = ""
    advertise: str = "127.0.0.1"
    """The address at which other hosts reach this one."""
    kv_host: str = "127.0.0.1"
    """As ``LaunchContext.kv_host``."""
    group: NodeGroup | None = None
    """As ``LaunchContext.group``, of rank 0."""
    device_sets: tuple[tuple[int, ...], ...] = ()
    """One for each worker of the engine at a time; empty: they own no devices."""
    devices: tuple[int, ...] = ()
    """Its own set of them."""


def worker_specs(
    loaded: Loaded, network: Network | None = None, name: str | None = None
) -> list[WorkerSpec]:
    """The workers of the engine ``name`` or of all, named ENGINE-0, ENGINE-1, ...

    ``network`` is that of this host, whose name comes before theirs, as HOST-.
    """
    config = loaded.config
    host = (config.cluster.host.name or "") if network is None else network.host
    return [
        worker_spec(loaded, engine, replica, network, host)
        for engine in config.engines
        if name in (None, engine.name)
        for replica in range(engine.replicas)
    ]


def worker_spec(
    loaded: Loaded, engine: EngineConfig, number: int, network: Network | None, host: str
) -> WorkerSpec:
    """The worker of a number; its id begins with the name of the ``host``, if that has one."""
    config = loaded.config
    model = next(one for one in config.models if one.name == engine.model)
    name = f"{engine.name}-{number}"
    connector = loaded.host.engines.kinds[engine.kind].thing
    sets = _parts(connector.devices(engine), engine.replicas)
    return WorkerSpec(
        worker_id=f"{host}-{name}" if host else name,
        config=engine,
        model=model,
        connector=connector,
        tiers=config.tiers,
        host=host,
        labels=config.cluster.host.labels,
        generation=generation_of(engine, model, config.tiers, len(sets[0]) if sets else 0),
        advertise="127.0.0.1" if network is None else network.advertise,
        kv_host=kv_host(config, network),
        device_sets=sets,
        devices=sets[number] if number < len(sets) else (),
    )


def with_capacity(spec: WorkerSpec, workers: int) -> WorkerSpec:
    """``spec`` of an engine that may have up to ``workers`` at a time."""
    config = evolve(spec.config, replicas=max(spec.config.replicas, workers))
    sets = _parts(spec.connector.devices(config), config.replicas)
    number = int(spec.worker_id.rpartition("-")[2])
    devices = sets[number] if number < len(sets) else ()
    return evolve(spec, config=config, device_sets=sets, devices=devices)


def _parts(devices: Sequence[int], workers: int) -> tuple[tuple[int, ...], ...]:
    each = len(devices) // workers
    return tuple(
        tuple(devices[begin : begin + each]) for begin in range(0, each * workers, each or 1)
    )


def generation_of(
    engine: EngineConfig, model: ModelConfig, tiers: Sequence[TierConfig], devices: int = 0
) -> str:
    """12 hexadecimal digits, the same for workers of the same options; secrets are not read.

    Nor is what differs from host to host (``setting``'s ``of_host``), or needs no other worker.
    ``devices``: how many each owns, which follows from `replicas`.
    """
    parts: list[Any] = [_shared(engine), _shared(model), [_shared(tier) for tier in tiers]]
    parts += [devices] if devices else []
    text = json.dumps(parts, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _shared(options: attrs.AttrsInstance) -> dict[str, Any]:
    def is_read(field: attrs.Attribute[Any], _: Any) -> bool:
        of_worker = field.metadata.get("takes_effect") not in _NOT_OF_WORKERS
        return of_worker and not field.metadata.get("of_host")

    return attrs.asdict(options, filter=is_read)
