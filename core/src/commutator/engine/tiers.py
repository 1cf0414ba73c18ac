"""Makes the configured storage tiers, in the process of the engine that will use them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs

from commutator.config.model import TierConfig
from commutator.engine.tier_policy import admission_rules
from commutator.errors import TierError
from commutator.kv.codec import AesGcm, Codec, Lz4, Zstd
from commutator.kv.guards import Breaker
from commutator.kv.tier_setup import TierSetup
from commutator.plugins import PluginHost

__all__ = ["make_tiers"]

_WORKER = "{worker}"


def make_tiers(
    configs: Sequence[TierConfig], host: PluginHost, worker_id: str
) -> tuple[TierSetup, ...]:
    """One setup for each entry of ``tiers``, in its order. Nothing is opened yet.

    ``{worker}`` in any text option stands for the worker's id. Raises TierError when a codec's
    package or key is missing, and whatever a tier's factory raises.
    """
    seen = Counter[str]()
    setups = []
    for config in configs:
        seen[config.kind] += 1
        number = seen[config.kind]
        name = config.kind if number == 1 else f"{config.kind}-{number}"
        mine = _for_worker(config, worker_id)
        setups.append(
            TierSetup(
                name=name,
                tier=host.tiers.kinds[config.kind].thing(mine),
                eviction=partial(host.evictions.kinds[config.eviction.kind].thing, config.eviction),
                admission=admission_rules(config.admission),
                write_through=config.write == "through",
                prefetch=config.prefetch,
                tenant_share=config.tenant_share,
                tenant_shares=config.tenant_shares,
                codecs=_codecs(config),
                load_timeout_s=config.load_timeout_s,
                store_timeout_s=config.store_timeout_s,
                max_attempts=config.max_attempts,
                max_bytes_per_s=config.max_bytes_per_s,
                breaker=Breaker(max_failures=config.max_failures),
            )
        )
    return tuple(setups)


def _for_worker(config: TierConfig, worker_id: str) -> TierConfig:
    changes: dict[str, Any] = {}
    for field in attrs.fields(type(config)):
        value = getattr(config, field.name)
        if isinstance(value, str) and _WORKER in value:
            changes[field.name] = value.replace(_WORKER, worker_id)
    return attrs.evolve(config, **changes)


def _codecs(config: TierConfig) -> tuple[Codec, ...]:
    codecs: list[Codec] = []
    if config.compression != "none":
        codecs.append(Zstd() if config.compression == "zstd" else Lz4())
    if config.encryption_key is not None:
        try:
            secret = bytes.fromhex(config.encryption_key.reveal())
        except ValueError:
            raise TierError(
                f"{config.kind}: encryption_key: expected 32, 48 or 64 hex digits"
            ) from None
        codecs.append(AesGcm(secret))
    return tuple(codecs)
