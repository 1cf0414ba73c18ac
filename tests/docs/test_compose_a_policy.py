"""docs/how-to/compose-a-policy.md does what it says."""

from __future__ import annotations

import random
import re
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pytest

from commutator.config.load import load_config
from commutator.contract.routing import Candidate, Overlap, RouteRequest
from commutator_testing.routers import make_candidate

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs" / "plugins" / "prefer_local"
PAGE = (ROOT / "docs" / "how-to" / "compose-a-policy.md").read_text()
REST = "models: [{name: m, source: package:m}]\nengines: [{kind: sim}]\n"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """The installed plugins, and the example's, as if it were installed."""
    monkeypatch.syspath_prepend(str(EXAMPLE / "src"))
    monkeypatch.delitem(sys.modules, "commutator_prefer_local", raising=False)
    mine = EntryPoint("prefer_local", "commutator_prefer_local", "commutator")
    others = [p for p in entry_points(group="commutator") if p.name != "prefer_local"]
    return [*others, mine]


def policy(block: str, found: list[EntryPoint], folder: Path) -> Any:
    file = folder / "cluster.yaml"
    file.write_text(REST + block)
    loaded = load_config([file], found=found)
    return loaded.host.routers.kinds["pipeline"].thing(loaded.config.router)


def test_what_it_quotes_is_what_there_is() -> None:
    source = (EXAMPLE / "src" / "commutator_prefer_local" / "__init__.py").read_text()
    (python,) = blocks("python")
    assert python in source
    (toml,) = blocks("toml")
    assert toml in (EXAMPLE / "pyproject.toml").read_text()
    assert blocks("yaml")[1] in (EXAMPLE / "cluster.yaml").read_text()


def test_every_stage_that_comes_along_is_described(found: list[EntryPoint], tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(REST)
    kinds = load_config([tmp_path / "c.yaml"], found=found).host.stages.kinds
    origin = "commutator-pipeline"
    ours = [name for name, kind in kinds.items() if kind.origin.distribution == origin]
    assert len(ours) == 6
    assert all(f"| `{name}` |" in PAGE for name in ours)


def test_the_first_pipeline(found: list[EntryPoint], tmp_path: Path) -> None:
    pipeline = policy(blocks("yaml")[0], found, tmp_path)
    warm = make_candidate("w-0", overlap=Overlap(device=5))
    decision = pipeline.pick(request(), [warm, make_candidate("w-1")], random.Random(1))
    assert decision.worker_id == "w-0"
    assert decision.scores["w-0"] == {"prefix": 1.0, "load": 1.0, "total": 2.0}


def test_the_third_party_scorer(found: list[EntryPoint], tmp_path: Path) -> None:
    """The two cases of the page, with its numbers."""
    pipeline = policy(blocks("yaml")[1], found, tmp_path)

    def totals(held_far: int) -> tuple[str, float, float]:
        far: Candidate = make_candidate("far-0", overlap=Overlap(device=held_far))
        made = pipeline.pick(request(), [far, make_candidate("near-0")], random.Random(1))
        return made.worker_id, made.scores["far-0"]["total"], made.scores["near-0"]["total"]

    assert totals(0) == ("near-0", 1.0, 1.5)
    assert totals(5) == ("far-0", 2.0, 1.5)


def request() -> RouteRequest:
    return RouteRequest(request_id="r", model="m", prompt_tokens=160, block_size=16)
