"""What reading an answer costs a token, arguments included, for every family of the suite.

The answers are those of canitoolcall, which `make test-parsers` installs, in pieces as long as
tokens are.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from pathlib import Path

from bench.needs import needs
from bench.result import Figure

SUITE = Path(__file__).parents[1] / "build" / "judges" / "suite"
AIM_US = 5
ROUNDS = 5
_TOKEN = re.compile(r"\s?\w{1,5}|<[^<>\s]{1,30}>|\s+|.")


def run() -> list[Figure]:
    """The figures of every family. Raises NotInstalledError without the suite."""
    needs(SUITE, "make test-parsers")
    sys.path.insert(0, str(SUITE))
    from canitoolcall.adapters.base import ReplayInput
    from canitoolcall.fixtures import load_families, load_fixtures
    from tests.judges.parsers.adapter import parser_for

    families = load_families()
    found: dict[str, list[float]] = {}
    for fixture in load_fixtures():
        raw = ReplayInput.from_fixture(fixture, families[fixture.family])
        tokens = _TOKEN.findall(raw.text)
        best_s = float("inf")
        for _ in range(ROUNDS):
            parser = parser_for(raw, fixture.tools)
            began_s = time.process_time()
            if parser is not None:
                for token in tokens:
                    parser.feed(token)
                parser.finish("stop")
            best_s = min(best_s, time.process_time() - began_s)
        found.setdefault(fixture.family, []).append(best_s / max(1, len(tokens)) * 1e6)
    return [
        Figure(
            "parsers",
            f"{family}, median of {len(each)} answers",
            statistics.median(each),
            None,
            "us a token",
            aim=f"at most {AIM_US}",
            higher_is_better=False,
        )
        for family, each in found.items()
    ]
