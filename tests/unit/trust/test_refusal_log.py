"""Refused connections are counted one by one, and logged at a bounded rate."""

from __future__ import annotations

from commutator.trust.refusals import RefusalLog


def test_a_flood_of_refusals_is_one_line_an_interval() -> None:
    now_s = 0.0
    refusals = RefusalLog(every_s=10.0, clock=lambda: now_s)
    lines = [refusals.note("registry", "127.0.0.1:9", "no proof") for _ in range(1000)]
    assert [line for line in lines if line] == [
        "registry: refused a connection from 127.0.0.1:9: no proof"
    ]
    assert refusals.note("token API", "127.0.0.1:9", "no proof"), "another service has its own"
    now_s = 10.0
    line = refusals.note("registry", "127.0.0.1:9", "no proof")
    assert line is not None
    assert line.endswith("999 more were refused since the last such line")
    assert refusals.counts == {"registry": 1001, "token API": 1}
