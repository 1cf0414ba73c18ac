"""The options of a `sim` engine entry."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from attrs import Attribute, frozen

from commutator import EngineConfig, TierPolicyConfig, setting
from commutator.engine import admission_rules
from commutator.schema import Bounds, NonNegativeInt, PositiveInt, PositiveSeconds, Seconds
from commutator_sim.parameters import SimParameters, TierParameters

__all__ = ["SimConfig", "SimTier"]

PositiveNumber = Annotated[float, Bounds(above=0)]
NonNegativeNumber = Annotated[float, Bounds(minimum=0)]


@frozen(kw_only=True)
class SimTier(TierPolicyConfig):
    """Memory behind the device, with the policies of a real tier."""

    kind: Literal["host", "disk", "object"] = setting("What it stands for; named in KV events.")
    capacity_blocks: PositiveInt = setting("Blocks that it holds.")
    bandwidth_bytes_per_s: PositiveNumber = setting("How fast blocks come back from it.")
    latency_s: Seconds = setting("What a load takes beside its bytes.", 0.0)


def _different_kinds(_config: Any, _field: Attribute[Any], tiers: tuple[SimTier, ...]) -> None:
    kinds = [tier.kind for tier in tiers]
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"tiers: each kind may stand here once, got {', '.join(kinds)}")


def _room_for_the_batch(config: SimConfig, _field: Attribute[Any], tokens: int) -> None:
    if tokens < config.max_running_requests:
        raise ValueError(
            f"max_tokens_per_step: expected at least max_running_requests "
            f"({config.max_running_requests}), got {tokens}"
        )


@frozen(kw_only=True)
class SimConfig(EngineConfig):
    """Workers that model an engine's time and memory, and compute nothing."""

    speedup: NonNegativeNumber | Literal["unlimited"] = setting(
        'How many times faster than real time; "unlimited" or 0: as fast as possible.', 1.0
    )
    prefill_tokens_per_s: PositiveNumber = setting("Prompt tokens computed a second.", 8000.0)
    decode_base_s: PositiveSeconds = setting(
        "Inter-token latency is this plus `decode_per_request_s` for each decoding request.", 0.006
    )
    decode_per_request_s: Seconds = setting("See `decode_base_s`.", 0.00035)
    max_running_requests: PositiveInt = setting("Requests in one batch.", 256)
    max_tokens_per_step: PositiveInt = setting(
        "Tokens computed in one step, decodes and prefill chunks together; at least "
        "`max_running_requests`.",
        2048,
        validator=_room_for_the_batch,
    )
    max_queued_requests: NonNegativeInt = setting(
        "Requests that may wait in the worker; one more is answered as overload.", 1024
    )
    block_size: PositiveInt = setting("Tokens in one KV block.", 16)
    kv_capacity_blocks: PositiveInt = setting("KV blocks on the device.", 16_384)
    prefix_caching: bool = setting("Reuse the KV blocks of equal prefixes.", True)
    kv_events: bool = setting("Publish KV events over ZMQ.", True)
    kv_events_kept: PositiveInt = setting(
        "Messages of KV events that a front door that missed them can have again.", 10_000
    )
    kv_bytes_per_token: PositiveInt = setting(
        "KV size of one token, for transfers from `tiers` and other workers; by default that of an "
        "8B Llama (2 x 32 layers x 8 heads x 128 x 2 bytes).",
        131_072,
    )
    handover_bandwidth_bytes_per_s: PositiveNumber = setting(
        "How fast blocks come from a prefill worker, one hand-over after the other.", 1e10
    )
    handover_latency_s: Seconds = setting("What a hand-over takes beside its bytes.", 0.002)
    tiers: tuple[SimTier, ...] = setting(
        "Where KV blocks are kept beside the device, fastest first.",
        (),
        validator=_different_kinds,
    )
    answer_tokens: PositiveInt = setting(
        "An answer ends by itself after so many tokens, unless the request sets `ignore_eos`.", 512
    )
    burst_tokens: PositiveInt = setting(
        "At unlimited speed: engine steps made before their tokens are sent, so that a request's "
        "tokens come in bursts of at most so many.",
        16,
    )

    @property
    def time_factor(self) -> float:
        """Virtual seconds in a real one; 0 means unlimited."""
        return 0.0 if self.speedup == "unlimited" else float(self.speedup)

    def parameters(self) -> SimParameters:
        """The same for the model."""
        block_bytes = self.block_size * self.kv_bytes_per_token
        return SimParameters(
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            decode_base_ns=max(1, round(self.decode_base_s * 1e9)),
            decode_request_ns=round(self.decode_per_request_s * 1e9),
            max_running_requests=self.max_running_requests,
            max_tokens_per_step=self.max_tokens_per_step,
            block_size=self.block_size,
            kv_capacity_blocks=self.kv_capacity_blocks,
            handover_latency_ns=round(self.handover_latency_s * 1e9),
            handover_block_ns=_time_ns(block_bytes, self.handover_bandwidth_bytes_per_s),
            tiers=tuple(
                TierParameters(
                    name=tier.kind,
                    capacity_blocks=tier.capacity_blocks,
                    load_block_ns=_time_ns(block_bytes, tier.bandwidth_bytes_per_s),
                    latency_ns=round(tier.latency_s * 1e9),
                    write=tier.write,
                    eviction=tier.eviction,
                    admission=admission_rules(tier.admission),
                    tenant_share=tier.tenant_share,
                    tenant_shares=tier.tenant_shares,
                )
                for tier in self.tiers
            ),
        )


def _time_ns(size_bytes: int, bytes_per_s: float) -> int:
    return max(1, round(size_bytes / bytes_per_s * 1e9))
