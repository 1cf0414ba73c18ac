"""469 answers of models, judged by canitoolcall's own checks: all are read as expected."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.long

STRATEGIES = ("one", "special", "token", *(f"rand:{seed}:8" for seed in range(1, 21)), "char:0")
FIXTURES = 469


def test_the_suite_passes(judges: Path) -> None:
    """As `canitoolcall run` does it, in this process."""
    from canitoolcall.adapters.worker import replay
    from canitoolcall.checks import run_checks
    from canitoolcall.chunking import ChunkStrategy
    from canitoolcall.fixtures import load_families, load_fixtures
    from canitoolcall.results import Observation, ParseResult, Status
    from tests.judges.parsers.adapter import Commutator

    adapter, families, fixtures = Commutator(), load_families(), load_fixtures()
    strategies = [ChunkStrategy.parse(one) for one in STRATEGIES]
    failed = {}
    for fixture in fixtures:
        family = families[fixture.family]
        told = replay(adapter, fixture, family, strategies)
        assert not told["skipped"]
        seen = Observation(
            nonstream=ParseResult.from_dict(told["nonstream"]),
            streams={name: ParseResult.from_dict(one) for name, one in told["streams"].items()},
        )
        rows = run_checks(fixture, family, seen)
        if wrong := [row for row in rows if row.status in (Status.FAIL, Status.ERROR)]:
            failed[fixture.id] = wrong[0]
    assert not failed
    assert len(fixtures) == FIXTURES


def test_every_cut_gives_the_same_events(judges: Path) -> None:
    from canitoolcall.adapters.base import ReplayInput
    from canitoolcall.fixtures import load_families, load_fixtures
    from tests.judges.parsers.adapter import events_of, merged

    families = load_families()
    for fixture in load_fixtures():
        raw = ReplayInput.from_fixture(fixture, families[fixture.family])
        whole = merged(events_of(raw, [raw.text], fixture.tools))
        assert merged(events_of(raw, raw.text, fixture.tools)) == whole, fixture.id
        for place in range(1, len(raw.text)):
            pieces = [raw.text[:place], raw.text[place:]]
            assert merged(events_of(raw, pieces, fixture.tools)) == whole, (fixture.id, place)
