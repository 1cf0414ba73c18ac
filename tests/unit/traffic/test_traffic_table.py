"""The table of aliases: what a name means, and what serves what a model could not."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.traffic_checks import deployment_of

from commutator.contract.traffic import FallBack
from commutator.errors import (
    CommutatorError,
    DeadlineError,
    EngineError,
    EngineOverloadedError,
    EngineUnavailableError,
    OverloadedError,
    RateLimitError,
    RegistryError,
    RequestError,
    RoutingError,
)
from commutator_traffic.config import AliasConfig, FallBackConfig, TableConfig
from commutator_traffic.table import Table, reason_of

MODELS = ("v1", "v2", "small")
TOO_LONG = RequestError("too long", "messages", "context_length_exceeded")


def table(models: dict[str, float], *fall_back: FallBackConfig) -> Table:
    return Table(TableConfig(aliases={"default": AliasConfig(models=models, fall_back=fall_back)}))


def test_an_alias_means_what_has_a_weight_and_may_be_used() -> None:
    found = table({"v1": 1, "v2": 99, "small": 0}, FallBackConfig(model="small"))
    assert found.aliases == {"default": ("v1", "v2")}
    chosen = {found.chosen("default", f"{number}", MODELS) for number in range(1000)}
    assert chosen == {"v1", "v2"}
    assert {found.chosen("default", f"{number}", ["v1"]) for number in range(99)} == {"v1"}
    assert found.chosen("default", "a", ["small"]) is None


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RoutingError("no worker"), "no_worker"),
        (OverloadedError("the queue is full"), "overload"),
        (OverloadedError("long prompts wait", reason="too_much_work"), None),
        (EngineOverloadedError("full"), "overload"),
        (TOO_LONG, "context_length"),
        (RequestError("temperature: wrong", "temperature"), None),
        (EngineUnavailableError("lost"), "error"),
        (EngineError("failed"), "error"),
        (RateLimitError("too many", "requests_per_minute", 1.0), None),
        (DeadlineError("too late"), None),
        (RegistryError("away"), None),
    ],
)
def test_why_a_model_could_not_serve(error: CommutatorError, reason: str | None) -> None:
    assert reason_of(error) == reason


def test_each_fall_back_is_tried_once_where_its_reason_fits() -> None:
    found = table(
        {"v1": 1},
        FallBackConfig(model="v2", when=("overload",)),
        FallBackConfig(model="small"),
        FallBackConfig(model="v1"),
    )

    def after(tried: list[str], error: CommutatorError, usable: Any = MODELS) -> FallBack | None:
        return found.after("default", tried, error, usable)

    full = OverloadedError("full")
    assert after(["v1"], full) == FallBack("v2", "overload")
    assert after(["v1", "v2"], full) == FallBack("small", "overload")
    assert after(["v1", "v2", "small"], full) is None
    assert after(["v1"], EngineError("failed")) == FallBack("small", "error")
    assert after(["v1"], full, ["v1", "small"]) == FallBack("small", "overload")
    assert after(["v1"], RequestError("wrong")) is None


def test_what_is_wrong_with_the_section_is_said() -> None:
    config = TableConfig(
        aliases={
            "default": AliasConfig(
                models={"v1": 1, "v3": 2}, fall_back=(FallBackConfig(model="default"),)
            )
        }
    )
    assert [path for path, _ in config.problems(deployment_of(*MODELS))] == [
        "aliases.default.models.v3",
        "aliases.default.fall_back[0].model",
    ]
    for models in ({}, {"v1": 0.0}, {"v1": -1.0}, {"v1": float("nan")}):
        with pytest.raises(ValueError, match="expected"):
            AliasConfig(models=models)
    with pytest.raises(ValueError, match="at most 8"):
        AliasConfig(models={"v1": 1}, fall_back=(FallBackConfig(model="v2"),) * 9)
    with pytest.raises(ValueError, match="some of"):
        FallBackConfig(model="v2", when=())
