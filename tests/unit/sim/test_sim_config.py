"""The options of a `sim` entry, and the parameters that the model gets of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from commutator.config.kinds import config_converter
from commutator.config.load import load_config
from commutator.contract.eviction import EvictionConfig
from commutator.contract.tier import AdmissionConfig
from commutator.plugins import installed_plugins
from commutator.schema import StructureError, structure
from commutator_sim.config import SimConfig, SimParameters, TierParameters

HOST = {"kind": "host", "capacity_blocks": 5, "bandwidth_bytes_per_s": 1e6}


def structured(settings: dict[str, Any]) -> SimConfig:
    """As in a worker's process."""
    return structure(config_converter(installed_plugins()), settings, SimConfig)


def build(**settings: Any) -> SimConfig:
    return structured({"kind": "sim", **settings})


def test_the_defaults_are_the_published_figures() -> None:
    assert build().parameters() == SimParameters()


def test_every_setting_reaches_the_model() -> None:
    config = build(
        prefill_tokens_per_s=1000,
        decode_base_s=0.01,
        decode_per_request_s=0.001,
        max_running_requests=3,
        max_tokens_per_step=30,
        block_size=8,
        kv_capacity_blocks=99,
        kv_bytes_per_token=1000,
        handover_bandwidth_bytes_per_s=1e6,
        handover_latency_s=0.5,
        tiers=[
            {
                "kind": "host",
                "capacity_blocks": 5,
                "bandwidth_bytes_per_s": 1e6,
                "latency_s": 0.001,
                "write": "on_evict",
                "eviction": {"kind": "s3fifo", "small": 0.2},
                "admission": {"min_hits": 2, "max_blocks": 4, "prompt_only": True},
                "tenant_share": 0.5,
                "tenant_shares": {"a": 1.0},
            }
        ],
    )
    assert config.parameters() == SimParameters(
        prefill_tokens_per_s=1000,
        decode_base_ns=10_000_000,
        decode_request_ns=1_000_000,
        max_running_requests=3,
        max_tokens_per_step=30,
        block_size=8,
        kv_capacity_blocks=99,
        handover_latency_ns=500_000_000,
        handover_block_ns=8_000_000,
        tiers=(
            TierParameters(
                name="host",
                capacity_blocks=5,
                load_block_ns=8_000_000,
                latency_ns=1_000_000,
                write="on_evict",
                eviction=config.tiers[0].eviction,
                admission=AdmissionConfig(prompt_only=True, max_blocks=4, min_hits=2),
                tenant_share=0.5,
                tenant_shares={"a": 1.0},
            ),
        ),
    )


@pytest.mark.parametrize(("speedup", "factor"), [("unlimited", 0), (0, 0), (1, 1), (2.5, 2.5)])
def test_speedup(speedup: float | str, factor: float) -> None:
    assert build(speedup=speedup).time_factor == factor


@pytest.mark.parametrize(
    ("settings", "path", "text"),
    [
        ({"speedup": "fast"}, "speedup", 'a number of at least 0 or one of "unlimited"'),
        ({"speedup": -1}, "speedup", "at least 0"),
        (
            {"max_tokens_per_step": 100},
            "max_tokens_per_step",
            "expected at least max_running_requests (256), got 100",
        ),
        (
            {"tiers": [{"kind": "host", "capacity_blocks": 1, "bandwidth_bytes_per_s": 1}] * 2},
            "tiers",
            "each kind may be listed once, got host, host",
        ),
        (
            {"tiers": [{"kind": "tape", "capacity_blocks": 1, "bandwidth_bytes_per_s": 1}]},
            "tiers[0].kind",
            'one of "host", "disk", "object"',
        ),
        ({"tiers": [HOST | {"prefetch": False}]}, "tiers[0].prefetch", "unknown key"),
        (
            {"tiers": [HOST | {"eviction": {"kind": "lfu"}}]},
            "tiers[0].eviction.kind",
            'no installed plugin offers the eviction "lfu"',
        ),
        (
            {"tiers": [HOST | {"eviction": {"kind": "arc", "small": 0.1}}]},
            "tiers[0].eviction.small",
            "unknown key",
        ),
    ],
)
def test_mistakes_are_reported(settings: dict[str, Any], path: str, text: str) -> None:
    with pytest.raises(StructureError) as caught:
        build(**settings)
    ((where, message),) = caught.value.problems
    assert where == path
    assert text in message


def test_the_example_is_right(root: Path) -> None:
    config = load_config([root / "examples" / "sim.yaml"], environ={}).config
    (engine,) = config.engines
    assert isinstance(engine, SimConfig)
    assert engine.time_factor == 0
    assert engine.replicas == 2


def test_it_travels_to_the_worker_process() -> None:
    config = build(
        speedup="unlimited",
        tiers=[HOST | {"eviction": {"kind": "s3fifo", "small": 0.2}}, HOST | {"kind": "disk"}],
    )
    again = structured(attrs.asdict(config))
    assert again == config
    assert type(again.tiers[0].eviction) is not EvictionConfig, "it has options of its own"
