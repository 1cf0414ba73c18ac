"""The options of a `reference` engine entry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from attrs import frozen

from commutator import EngineConfig, NonNegativeInt, PositiveInt, PositiveSeconds, Size, setting


@frozen(kw_only=True)
class ReferenceConfig(EngineConfig):
    """Workers of the reference engine."""

    device: Literal["auto", "cpu", "cuda"] = setting(
        "Where the model runs; auto: a GPU if there is one, else the CPU.", "auto"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "Number format of weights and KV cache; auto is float32 on CPU, bfloat16 on GPU.", "auto"
    )
    threads: PositiveInt | None = setting(
        "CPU threads of one worker; by default the cores shared among the replicas.", None
    )
    block_size: PositiveInt = setting("Tokens in one KV block.", 16)
    kv_cache_bytes: Size = setting("Size of one worker's KV arena.", 1 << 30)
    max_running_requests: PositiveInt = setting("Requests in one batch.", 32)
    max_tokens_per_step: PositiveInt = setting(
        "Tokens computed in one step, decodes and prefill chunks together.", 512
    )
    max_queued_requests: NonNegativeInt = setting(
        "Requests that may wait in the worker; one more is answered as overload.", 1024
    )
    prefix_caching: bool = setting("Reuse the KV blocks of equal prompt prefixes.", True)
    adapter_places: PositiveInt = setting(
        "LoRA adapters in memory. One that is needed takes the place of the one that was needed "
        "longest ago; while requests use all of them, others are answered as overload.",
        8,
    )
    max_adapter_rank: PositiveInt = setting(
        "Largest rank of an adapter; larger ones are refused.", 64
    )
    handover_lease_s: PositiveSeconds = setting(
        "How long a prefilled prompt's KV is held for a decode worker that does not fetch it.",
        30.0,
    )
    ucx_parameters: Mapping[str, str] = setting(
        "Parameters of NIXL's UCX backend, which hands KV over.", factory=dict
    )
    kv_events: bool = setting("Publish KV events over ZMQ.", True)
    kv_events_kept: PositiveInt = setting(
        "Messages of KV events that are stored for front doors that missed them.", 10_000
    )
