"""What the modelled engine can do: its speed, its batch and its KV memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from attrs import Factory, frozen

from commutator import EvictionConfig
from commutator.kv import AdmissionRule

__all__ = ["SimParameters", "TierParameters"]


@frozen(kw_only=True)
class TierParameters:
    """KV memory behind the device."""

    name: str
    capacity_blocks: int
    load_block_ns: int
    """Time that one block occupies the link to the device."""
    latency_ns: int = 0
    """What a load takes beside its bytes."""
    write: Literal["through", "on_evict"] = "through"
    """When blocks go there: once they are computed, or when the tier above gives them up."""
    eviction: EvictionConfig = EvictionConfig(kind="lru")
    """Names an installed policy."""
    admission: tuple[AdmissionRule, ...] = ()
    tenant_share: float | None = None
    """Largest part of the capacity that one tenant may fill; None: all of it."""
    tenant_shares: Mapping[str, float] = Factory(dict)
    """Tenants for which another share holds."""

    def __attrs_post_init__(self) -> None:
        if self.capacity_blocks < 1 or self.load_block_ns < 1 or self.latency_ns < 0:
            raise ValueError(
                f"tier {self.name}: capacity and load time must be at least 1, latency at least 0"
            )


@frozen(kw_only=True)
class SimParameters:
    """Defaults are the published ones: 8000 prefill tokens/s, 6 ms + 0.35 ms x batch a step."""

    prefill_tokens_per_s: float = 8000.0
    decode_base_ns: int = 6_000_000
    decode_request_ns: int = 350_000
    """Added to a step for each request that decodes in it."""
    max_running_requests: int = 256
    max_tokens_per_step: int = 2048
    """Budget of one step: one for each decoding request, the rest for prefill chunks."""
    block_size: int = 16
    """Tokens in one KV block."""
    kv_capacity_blocks: int = 16_384
    tiers: tuple[TierParameters, ...] = ()
    """Fastest first."""
    handover_latency_ns: int = 2_000_000
    """Before blocks of another worker are there, beside the time that their bytes take."""
    handover_block_ns: int = 209_715
    """Time that one such block occupies the worker's link."""

    def __attrs_post_init__(self) -> None:
        if self.prefill_tokens_per_s <= 0 or self.decode_base_ns < 1 or self.decode_request_ns < 0:
            raise ValueError("a step must take time: rates above 0, no negative times")
        if min(self.max_running_requests, self.block_size, self.kv_capacity_blocks) < 1:
            raise ValueError("batch, block size and KV capacity must be at least 1")
        if self.max_tokens_per_step < self.max_running_requests:
            raise ValueError(
                f"max_tokens_per_step ({self.max_tokens_per_step}) must be at least "
                f"max_running_requests ({self.max_running_requests}), or prefill may starve"
            )
        if self.handover_latency_ns < 0 or self.handover_block_ns < 1:
            raise ValueError("a hand-over takes time: at least 1 ns a block, no negative latency")
        names = [tier.name for tier in self.tiers]
        if len(set(names)) < len(names) or "device" in names:
            raise ValueError(f"tiers need names of their own, other than device: {names}")

    def step_ns(self, decoding: int, prefill_tokens: int) -> int:
        """How long one engine step takes; decode and prefill work add up."""
        decode_ns = self.decode_base_ns + self.decode_request_ns * decoding if decoding else 0
        if decode_ns and not prefill_tokens:
            return decode_ns
        return decode_ns + max(1, round(prefill_tokens * 1e9 / self.prefill_tokens_per_s))

    def blocks(self, tokens: int) -> int:
        """KV blocks that ``tokens`` fill or begin."""
        return -(-tokens // self.block_size)
