"""What principals use, in metrics of bounded size."""

from __future__ import annotations

import pytest

from commutator.metrics.frontend import FrontendMetrics


@pytest.mark.security
def test_many_principals_make_few_time_series() -> None:
    metrics = FrontendMetrics()
    for number in range(10_000):
        metrics.principal_usage.add((f"p-{number}",), 1, 3, 2, 1)
        metrics.principal_refused(f"p-{number}", "requests_per_minute")
    page = metrics.render().decode()
    requests = [
        line for line in page.splitlines() if line.startswith("commutator_principal_requests_total")
    ]
    assert len(requests) == 501
    assert 'commutator_principal_requests_total{principal="other"} 9500.0' in requests
    assert 'commutator_principal_prompt_tokens_total{principal="other"} 28500.0' in page
    refused = 'commutator_principal_refusals_total{principal="other",reason="requests_per_minute"}'
    assert f"{refused} 9500.0" in page
