"""The section `traffic` of the kind `table`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from attrs import Attribute, frozen

from commutator.contract.settings import setting
from commutator.contract.traffic import TrafficConfig

Reason = Literal["no_worker", "overload", "context_length", "error"]
"""Why a model could not serve a request: none of its workers is there; it was refused because too
many are being served, or wait; it is too long for the model; a worker failed it."""
REASONS: tuple[Reason, ...] = get_args(Reason)
_MOST_FALL_BACKS = 8


def _are_weights(_: object, _field: Attribute[Any], value: Mapping[str, float]) -> None:
    if not all(math.isfinite(weight) and weight >= 0 for weight in value.values()):
        raise ValueError("expected weights of at least 0")
    if not any(value.values()):
        raise ValueError("expected a model with a weight above 0, such as {v1: 1}")


def _are_few(_: object, _field: Attribute[Any], value: Sequence[object]) -> None:
    if len(value) > _MOST_FALL_BACKS:
        raise ValueError(f"expected at most {_MOST_FALL_BACKS}, got {len(value)}")


def _is_some(_: object, _field: Attribute[Any], value: Sequence[object]) -> None:
    if not value:
        raise ValueError(f"expected some of {', '.join(REASONS)}")


@frozen(kw_only=True)
class FallBackConfig:
    """A model that serves what those before it could not."""

    model: str = setting("The name of a model, not of an alias.")
    when: tuple[Reason, ...] = setting(
        "Why the one before could not: `no_worker`, none is ready; `overload`, too many requests "
        "are served or wait; `context_length`, it is too long; `error`, a worker failed it.",
        REASONS,
        validator=_is_some,
    )


@frozen(kw_only=True)
class AliasConfig:
    """What a name stands for."""

    models: Mapping[str, float] = setting(
        "The weight of each model: its share of the sessions is that of all weights. With 0 it "
        "serves none.",
        validator=_are_weights,
    )
    fall_back: tuple[FallBackConfig, ...] = setting(
        "What is tried when the model that was chosen cannot serve a request of which nothing was "
        "answered yet: the first that fits the reason and was not tried, each once; at most 8.",
        (),
        validator=_are_few,
    )


@frozen(kw_only=True)
class TableConfig(TrafficConfig):
    """Aliases."""

    aliases: Mapping[str, AliasConfig] = setting(
        "By name. A request that names no model asks for `default`. A name may be that of a model, "
        "too: then those who ask for that model get what the alias says.",
        {},
    )

    def problems(self, models: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Aliases of models that are not served."""
        known = ", ".join(sorted(models))
        for name, alias in self.aliases.items():
            named = [(f"models.{model}", model) for model in alias.models]
            named += [(f"fall_back[{n}].model", one.model) for n, one in enumerate(alias.fall_back)]
            for path, model in named:
                if model not in models:
                    text = f'no model is named "{model}"; known models: {known}'
                    yield f"aliases.{name}.{path}", text
