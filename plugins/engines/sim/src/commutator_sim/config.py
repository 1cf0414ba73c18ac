"""The options of a `sim` engine entry, which are the parameters of its model, too."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from attrs import Attribute, frozen

from commutator import (
    Bounds,
    EngineConfig,
    NonNegativeInt,
    PositiveInt,
    PositiveSeconds,
    Seconds,
    setting,
)
from commutator.contract.planner import EnginePerformance
from commutator.contract.tier import TierPolicyConfig

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


_Operation = Literal["generate", "embed", "token_embed", "score", "classify"]


@frozen(kw_only=True)
class ScriptedAnswer:
    """What the model says to some prompts."""

    say: str = setting("The answer; special tokens of the vocabulary are written as their text.")
    when: str = setting("What the prompt, as text, must hold; by default anything does.", "")


@frozen(kw_only=True)
class SimConfig(EngineConfig):
    """Workers that model an engine's time and memory, and compute nothing.

    Defaults are the published figures: 8000 prefill tokens/s, 6 ms + 0.35 ms x batch a step.
    """

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
        "holds, of constrained requests that also follows the constraint. Without one, the answer "
        "is the prompt again, or a made-up one that follows.",
        (),
    )
    operations: tuple[_Operation, ...] = setting(
        "What the workers can be asked; all but generate is answered by made-up numbers that are "
        "always the same for the same tokens.",
        ("generate",),
    )
    embedding_dimensions: PositiveInt = setting(
        "Numbers in a vector; requests may ask for fewer.", 384
    )
    labels: tuple[str, ...] = setting("The classes of workers that classify.", ("no", "yes"))
    burst_tokens: PositiveInt = setting(
        "At unlimited speed: engine steps made before their tokens are sent. A request's tokens "
        "come in bursts of at most this number.",
        16,
    )

    @property
    def time_factor(self) -> float:
        """Virtual seconds in a real one; 0 means unlimited."""
        return 0.0 if self.speedup == "unlimited" else float(self.speedup)

    @property
    def decode_base_ns(self) -> int:
        """``decode_base_s``, in nanoseconds as all times of the model."""
        return max(1, _ns(self.decode_base_s))

    @property
    def handover_block_ns(self) -> int:
        """Time that one pulled block occupies the worker's link."""
        return self.block_ns(self.handover_bandwidth_bytes_per_s)

    @property
    def handover_latency_ns(self) -> int:
        """Time of a hand-over in addition to that of its blocks."""
        return _ns(self.handover_latency_s)

    def block_ns(self, bytes_per_s: float) -> int:
        """Time that one block occupies a link."""
        return max(1, _ns(self.block_size * self.kv_bytes_per_token / bytes_per_s))

    def step_ns(self, decoding: int, prefill_tokens: int) -> int:
        """How long one engine step takes; decode and prefill work add up."""
        added_ns = _ns(self.decode_per_request_s) * decoding
        decode_ns = self.decode_base_ns + added_ns if decoding else 0
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
            step_s=self.decode_base_s / speedup,
            step_request_s=self.decode_per_request_s / speedup,
            max_running=self.max_running_requests,
            max_step_tokens=self.max_tokens_per_step,
            kv_tokens=self.kv_capacity_blocks * self.block_size,
        )


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
