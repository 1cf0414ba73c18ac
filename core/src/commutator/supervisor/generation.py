"""The generation of a worker: a digest of everything that it is started from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import attrs

from commutator.contract.engine import EngineConfig, ModelConfig
from commutator.contract.tier import TierConfig

__all__ = ["generation_of"]

_HOW_MANY = {"replicas"}
"""Options of an engine that change no worker."""


def generation_of(engine: EngineConfig, model: ModelConfig, tiers: Sequence[TierConfig]) -> str:
    """12 hexadecimal digits, the same for workers of the same options; secrets are not read.

    Nor is what differs from host to host (``setting``'s ``of_host``).
    """
    options = {key: value for key, value in _shared(engine).items() if key not in _HOW_MANY}
    parts = [options, _shared(model), [_shared(tier) for tier in tiers]]
    text = json.dumps(parts, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _shared(options: attrs.AttrsInstance) -> dict[str, Any]:
    return attrs.asdict(options, filter=lambda field, _: not field.metadata.get("of_host"))
