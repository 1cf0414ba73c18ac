"""The workers' counters of their tiers, as Prometheus reads them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from commutator.contract.tier import UNBOUNDED
from commutator.contract.worker import EdgeStatistics, KvStatistics, TierState
from commutator.metrics.frontend import FrontendMetrics
from commutator.metrics.readings import Readings


def tier(name: str, **changes: object) -> TierState:
    values: dict[str, object] = {
        "name": name,
        "medium": "CPU",
        "up": True,
        "capacity": 100,
        "published": 7,
        "staged": 1,
        "leaving": 0,
        "waiting": 2,
        "loading": 3,
        "retained": 0,
        "pins_refused": 0,
        "loads": {"loaded": 40, "corrupt": 2},
        "not_loaded": {"slower than recompute": 5},
        "removed": {"evicted": 9, "found corrupt by verify": 1},
        "latency_s": None,
        "block_s": None,
    }
    return TierState(**(values | changes))  # type: ignore[arg-type]


STATISTICS = KvStatistics(
    tiers=(tier("dram"), tier("s3", up=False, capacity=UNBOUNDED, latency_s=0.01, block_s=0.001)),
    edges=(
        EdgeStatistics(
            source="dram",
            target="s3",
            stored=11,
            not_admitted={"too few hits": 4},
            failed={"corrupt at its source": 3, "write failed": 1},
        ),
    ),
    blocks=7,
    held_on_device=0,
    loads_running=0,
    stores_running=0,
    sequence_bytes={"full": (128.0, 0), "sliding 64": (640.0, 61440), "recurrent": (0.0, 4096)},
)


def scraped(metrics: FrontendMetrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = metrics.render().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_reason_has_its_counter() -> None:
    metrics = FrontendMetrics(Readings(kv=lambda: {"w-0": STATISTICS}))
    found = scraped(metrics)

    def value(name: str, **labels: str) -> float | None:
        return found.get((f"commutator_kv_{name}", frozenset({"worker": "w-0", **labels}.items())))

    assert value("tier_up", tier="dram") == 1
    assert value("tier_up", tier="s3") == 0
    assert value("blocks", tier="dram", state="published") == 7
    assert value("blocks", tier="dram", state="waiting") == 2
    assert value("capacity_blocks", tier="dram") == 100
    assert value("capacity_blocks", tier="s3") is None
    assert value("loads_total", tier="dram", outcome="corrupt") == 2
    assert value("not_loaded_total", tier="dram", reason="slower than recompute") == 5
    assert value("not_loaded_total", tier="dram", reason="tier is down") == 0, "before the first"
    assert value("prefetched_total", tier="dram", outcome="unused") == 0
    assert value("removed_total", tier="dram", reason="evicted") == 9
    assert value("stored_total", source="dram", tier="s3") == 11
    assert value("not_admitted_total", source="dram", tier="s3", reason="too few hits") == 4
    assert value("store_failed_total", source="dram", tier="s3", reason="write failed") == 1
    assert value("load_latency_seconds", tier="s3") == 0.01
    assert value("load_latency_seconds", tier="dram") is None


def test_a_sequence_is_told_by_kinds_of_layers() -> None:
    found = scraped(FrontendMetrics(Readings(kv=lambda: {"w-0": STATISTICS})))
    told = {
        (name.removeprefix("commutator_kv_"), dict(labels)["layers"]): value
        for (name, labels), value in found.items()
        if "layers" in dict(labels)
    }
    assert told == {
        ("token_bytes", "full"): 128,
        ("token_bytes", "sliding 64"): 640,
        ("token_bytes", "recurrent"): 0,
        ("sequence_most_bytes", "sliding 64"): 61440,
        ("sequence_most_bytes", "recurrent"): 4096,
    }


def test_failed_verifications_tell_when() -> None:
    metrics = FrontendMetrics(Readings(kv=lambda: {"w-0": STATISTICS}))
    found = {
        dict(labels)["when"]: value
        for (name, labels), value in scraped(metrics).items()
        if name == "commutator_kv_failed_verification_total" and ("tier", "dram") in labels
    }
    assert found == {"load": 2, "verify": 1, "move": 3}


def test_without_tiers_there_is_nothing() -> None:
    assert not [
        name for name, _ in scraped(FrontendMetrics()) if name.startswith("commutator_kv_router")
    ]
