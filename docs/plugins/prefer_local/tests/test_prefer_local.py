"""The scorer alone."""

from __future__ import annotations

from commutator import RouteRequest
from commutator_prefer_local import PreferLocal
from commutator_testing.routers import make_candidate


def test_prefers_its_own() -> None:
    scorer = PreferLocal(kind="prefer_local", prefix="near-")
    candidates = [make_candidate("far-0"), make_candidate("near-0")]
    scores = scorer.score(RouteRequest(request_id="r", model="m", prompt_tokens=10), candidates)
    assert scores == {"far-0": 0.0, "near-0": 1.0}
