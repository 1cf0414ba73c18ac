"""The workers' counters of their hand-overs: asked for, and read by Prometheus."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families
from tests.support.handover_rig import hand_over, request, tiny_worker

from commutator.contract.worker import ExportStatistics, PullStatistics, TransferStatistics
from commutator.metrics.frontend import FrontendMetrics
from commutator.metrics.readings import Readings


def test_every_counter_is_scraped_under_its_worker() -> None:
    counted = TransferStatistics(
        exports=ExportStatistics(active=1, held_blocks=2, released=3, failed=4, lapsed=5),
        pulls=PullStatistics(
            succeeded=6, failed=7, dropped=8, pulled_bytes=9, nixl_bytes=10, pull_s=0.5
        ),
    )
    metrics = FrontendMetrics(Readings(transfers=lambda: {"w0": counted}))
    found = {
        (sample.name.removeprefix("commutator_worker_handover_"), sample.labels.get("outcome")): (
            sample.value
        )
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if sample.labels.get("worker") == "w0"
    }
    assert found == {
        ("held_blocks", None): 2,
        ("exports_total", "released"): 3,
        ("exports_total", "failed"): 4,
        ("exports_total", "lapsed"): 5,
        ("pulls_total", "succeeded"): 6,
        ("pulls_total", "failed"): 7,
        ("pulls_total", "dropped"): 8,
        ("pulled_bytes_total", None): 9,
        ("nixl_bytes_total", None): 10,
        ("pull_seconds_total", None): 0.5,
    }


async def test_workers_count_what_they_did() -> None:
    async with tiny_worker() as prefill, tiny_worker() as decode:
        await hand_over(request(range(5, 70)), prefill, decode)
        await prefill.until_idle()
        theirs = await prefill.client.handover_statistics()
        ours = await decode.client.handover_statistics()
        assert theirs.exports == ExportStatistics(released=1)
        assert theirs.pulls == PullStatistics()
        assert decode.record.info.handover is not None
        assert ours.pulls.succeeded == 1
        assert ours.pulls.pulled_bytes == 64 * decode.record.info.handover.token_bytes
        assert ours.pulls.nixl_bytes == ours.pulls.pulled_bytes
        assert ours.pulls.pull_s > 0
