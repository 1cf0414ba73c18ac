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
from commutator_sim.config import SimConfig
from commutator_sim.tiers import OffloadTiers

HOST = {"kind": "host", "capacity_blocks": 5, "bandwidth_bytes_per_s": 1e6}


def structured(settings: dict[str, Any]) -> SimConfig:
    """As in a worker's process."""
    return structure(config_converter(installed_plugins()), settings, SimConfig)


def build(**settings: Any) -> SimConfig:
    return structured({"kind": "sim", **settings})


def test_the_defaults_are_the_published_figures() -> None:
    config = build()
    assert config.prefill_tokens_per_s == 8000
    assert config.step_ns(10, 0) == 6_000_000 + 10 * 350_000
    assert (config.handover_block_ns, config.handover_latency_ns) == (209_715, 2_000_000)


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
    assert (config.decode_base_ns, config.step_ns(3, 0)) == (10_000_000, 13_000_000)
    assert config.step_ns(0, 30) == 30_000_000
    assert (config.handover_block_ns, config.handover_latency_ns) == (8_000_000, 500_000_000)
    tiers = OffloadTiers(config)
    (link,), (spec,) = tiers._links, tiers.manager.tiers
    assert (link.block_ns, link.latency_ns) == (8_000_000, 1_000_000)
    assert (spec.name, spec.medium, spec.capacity_blocks) == ("host", "host", 5)
    assert (spec.write, spec.tenant_share, spec.tenant_shares) == ("on_evict", 0.5, {"a": 1.0})
    assert spec.admission == AdmissionConfig(prompt_only=True, max_blocks=4, min_hits=2)


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
