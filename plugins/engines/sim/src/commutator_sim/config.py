"""The options of a `sim` engine entry, and what the model gets of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from attrs import Attribute, Factory, frozen

from commutator import (
    Bounds,
    EngineConfig,
    EvictionConfig,
    NonNegativeInt,
    PositiveInt,
    PositiveSeconds,
    Seconds,
    setting,
)
from commutator.contract.planner import EnginePerformance
from commutator.contract.tier import AdmissionConfig, TierPolicyConfig

__all__ = ["ScriptedAnswer", "SimConfig", "SimParameters", "SimTier", "TierParameters"]


@frozen(kw_only=True)
class TierParameters:
    """KV memory behind the device."""

    name: str
    capacity_blocks: int
    load_block_ns: int
    """Time that one block occupies the link to the device."""
    latency_ns: int = 0
    """Time of a load in addition to that of its blocks."""
    write: Literal["through", "on_evict"] = "through"
    """When blocks are stored there: once computed, or when the tier above evicts them."""
    eviction: EvictionConfig = EvictionConfig(kind="lru")
    """The options of an installed policy."""
    admission: AdmissionConfig = AdmissionConfig()
    tenant_share: float | None = None
    """Largest part of the capacity that one tenant may fill; None: all of it."""
    tenant_shares: Mapping[str, float] = Factory(dict)
    """Other shares for single tenants."""


@frozen(kw_only=True)
class SimParameters:
    """Defaults are the published ones: 8000 prefill tokens/s, 6 ms + 0.35 ms x batch a step."""

    prefill_tokens_per_s: float = 8000.0
    decode_base_ns: int = 6_000_000
    decode_request_ns: int = 350_000
    """Added to a step for each decoding request."""
    max_running_requests: int = 256
    max_tokens_per_step: int = 2048
    """Budget of one step: one for each decoding request, the rest for prefill chunks."""
    block_size: int = 16
    """Tokens in one KV block."""
    kv_capacity_blocks: int = 16_384
    tiers: tuple[TierParameters, ...] = ()
    """Fastest first."""
    handover_latency_ns: int = 2_000_000
    """Time of a hand-over in addition to that of its blocks."""
    handover_block_ns: int = 209_715
    """Time that one pulled block occupies the worker's link."""

    def step_ns(self, decoding: int, prefill_tokens: int) -> int:
        """How long one engine step takes; decode and prefill work add up."""
        decode_ns = self.decode_base_ns + self.decode_request_ns * decoding if decoding else 0
        if decode_ns and not prefill_tokens:
            return decode_ns
        return decode_ns + max(1, round(prefill_tokens * 1e9 / self.prefill_tokens_per_s))

    def blocks(self, tokens: int) -> int:
        """Number of KV blocks that ``tokens`` fill or begin."""
        return -(-tokens // self.block_size)

    def performance(self, speedup: float = 1.0) -> EnginePerformance:
        """The same for planners, ``speedup`` times as fast as real time."""
        return EnginePerformance(
            prefill_tokens_per_s=self.prefill_tokens_per_s * speedup,
            step_s=self.decode_base_ns / 1e9 / speedup,
            step_request_s=self.decode_request_ns / 1e9 / speedup,
            max_running=self.max_running_requests,
            max_step_tokens=self.max_tokens_per_step,
            kv_tokens=self.kv_capacity_blocks * self.block_size,
        )


PositiveNumber = Annotated[float, Bounds(above=0)]
NonNegativeNumber = Annotated[float, Bounds(minimum=0)]


@frozen(kw_only=True)
class SimTier(TierPolicyConfig):
    """Memory behind the device, with the policies of a real tier."""

    kind: Literal["host", "disk", "object"] = setting("What it models; named in KV events.")
    capacity_blocks: PositiveInt = setting("Capacity in blocks.")
    bandwidth_bytes_per_s: PositiveNumber = setting("How fast blocks are loaded from it.")
    latency_s: Seconds = setting("Time of a load beside that of its bytes.", 0.0)


def _different_kinds(_config: Any, _field: Attribute[Any], tiers: tuple[SimTier, ...]) -> None:
    kinds = [tier.kind for tier in tiers]
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"tiers: each kind may be listed once, got {', '.join(kinds)}")


def _room_for_the_batch(config: SimConfig, _field: Attribute[Any], tokens: int) -> None:
    if tokens < config.max_running_requests:
        raise ValueError(
            f"max_tokens_per_step: expected at least max_running_requests "
            f"({config.max_running_requests}), got {tokens}"
        )


@frozen(kw_only=True)
class ScriptedAnswer:
    """What the model says to some prompts."""

    say: str = setting("The answer; special tokens of the vocabulary are written as their text.")
    when: str = setting("What the prompt, as text, must hold; by default anything does.", "")


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
        "Messages of KV events that are stored for front doors that missed them.", 10_000
    )
    kv_bytes_per_token: PositiveInt = setting(
        "KV size of one token, for transfers from `tiers` and other workers; by default that of an "
        "8B Llama (2 x 32 layers x 8 heads x 128 x 2 bytes).",
        131_072,
    )
    handover_bandwidth_bytes_per_s: PositiveNumber = setting(
        "How fast blocks arrive from a prefill worker, one hand-over after the other.", 1e10
    )
    handover_latency_s: Seconds = setting("Time of a hand-over beside that of its bytes.", 0.002)
    tiers: tuple[SimTier, ...] = setting(
        "Where KV blocks are stored in addition to the device, fastest first.",
        (),
        validator=_different_kinds,
    )
    answer_tokens: PositiveInt = setting(
        "Tokens after which an answer ends by itself, unless the request sets `ignore_eos`.", 512
    )
    answers: tuple[ScriptedAnswer, ...] = setting(
        "Scripted answers, for tests of what reads them: the first one whose `when` the prompt "
        "holds. Without one, the answer is the prompt again.",
        (),
    )
    burst_tokens: PositiveInt = setting(
        "At unlimited speed: engine steps made before their tokens are sent. A request's tokens "
        "come in bursts of at most this number.",
        16,
    )

    @property
    def time_factor(self) -> float:
        """Virtual seconds in a real one; 0 means unlimited."""
        return 0.0 if self.speedup == "unlimited" else float(self.speedup)

    def parameters(self) -> SimParameters:
        """The parameters of the model: the same in nanoseconds and blocks."""
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
                    admission=tier.admission,
                    tenant_share=tier.tenant_share,
                    tenant_shares=tier.tenant_shares,
                )
                for tier in self.tiers
            ),
        )


def _time_ns(size_bytes: int, bytes_per_s: float) -> int:
    return max(1, round(size_bytes / bytes_per_s * 1e9))
