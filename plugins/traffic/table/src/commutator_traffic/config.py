"""The section `traffic` of the kind `table`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Annotated, Any, Literal, get_args

from attrs import Attribute, evolve, frozen

from commutator.contract.settings import Bounds, PositiveInt, PositiveSeconds, setting
from commutator.contract.traffic import TrafficConfig
from commutator_traffic.adapters import missing_files

Reason = Literal["no_worker", "overload", "context_length", "error"]
"""Why a model could not serve a request: none of its workers is there; it was refused because too
many are being served, or wait; it is too long for the model; a worker failed it."""
REASONS: tuple[Reason, ...] = get_args(Reason)
_MOST_FALL_BACKS = 8
_Part = Annotated[float, Bounds(minimum=0)]


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
class CanaryConfig:
    """A new version that is judged beside the others of its alias."""

    model: str = setting("The new version: one of `models`, with a weight beside others'.")
    ready_within_s: PositiveSeconds = setting(
        "Seconds for its workers to become ready; until then it gets no requests. Later than that "
        "it is given up.",
        1800.0,
    )
    judge_for_s: PositiveSeconds = setting(
        "Seconds for which it serves its share. When it did no harm in that time, it is good.",
        600.0,
    )
    min_requests: PositiveInt = setting(
        "Requests that it must have ended by then; with fewer it is judged for longer.", 200
    )
    decide_within_s: PositiveSeconds = setting(
        "Seconds of serving its share after which it is given up if those requests have not come.",
        7200.0,
    )
    ttft_tolerance: _Part = setting(
        "The part by which times to first token may be longer than those of the others: a new "
        "version begins without KV.",
        0.5,
    )
    itl_tolerance: _Part = setting(
        "The part by which inter-token latencies may be longer than those of the others.", 0.25
    )
    when_good: Literal["promote", "keep"] = setting(
        "What follows when it is good: it gets the weight of all, or weights stay as they are.",
        "promote",
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
    canary: CanaryConfig | None = setting(
        "Which of `models` is new, and how it is judged: it gets weight 0 when it does harm. "
        "Needs `operations` of kind `rollout`, which changes the weights.",
        None,
    )

    @property
    def judged(self) -> CanaryConfig | None:
        """``canary`` while it has a share, and others have one, too."""
        one = self.canary
        if one is None or not self.models.get(one.model):
            return None
        return one if any(w for name, w in self.models.items() if name != one.model) else None


@frozen(kw_only=True)
class AdapterConfig:
    """A LoRA adapter, which clients ask for by its name, as for a model."""

    model: str = setting("The model that it adapts, one of `models`.")
    source: str = setting(
        "Its folder, as PEFT writes it. Front doors and workers read it at the same path, absolute "
        "or from the folder that they were started in; workers when they need it."
    )


@frozen(kw_only=True)
class TableConfig(TrafficConfig):
    """Aliases and adapters."""

    aliases: Mapping[str, AliasConfig] = setting(
        "By name. A request that names no model asks for `default`. A name may be that of a model, "
        "too: then those who ask for that model get what the alias says.",
        {},
    )

    adapters: Mapping[str, AdapterConfig | None] = setting(
        "By name, which is neither a model's nor an alias; null: it is served no more. Who may use "
        "the model may use its adapters.",
        {},
    )

    def problems(self, config: Any) -> Iterator[tuple[str, str]]:
        """Aliases and adapters of models that are not served; canaries that nobody judges."""
        models = [model.name for model in config.models]
        yield from self._adapter_problems(models)
        if config.operations is None:
            judged = find_spec("commutator_rollout") is not None
        else:
            judged = "rollout" in [one.kind for one in config.operations]
        known = ", ".join(sorted(models))
        for name, alias in self.aliases.items():
            named = [(f"models.{model}", model) for model in alias.models]
            if alias.canary is not None:
                if not judged:
                    text = "`rollout` judges canaries; add it to operations (commutator-rollout)"
                    yield f"aliases.{name}.canary", text
                named.append(("canary.model", alias.canary.model))
                if alias.canary.model in models and alias.canary.model not in alias.models:
                    text = f"{alias.canary.model} has no weight in models; give it one, such as 5"
                    yield f"aliases.{name}.canary.model", text
            named += [(f"fall_back[{n}].model", one.model) for n, one in enumerate(alias.fall_back)]
            for path, model in named:
                if model not in models:
                    text = f'no model is named "{model}"; known models: {known}'
                    yield f"aliases.{name}.{path}", text

    def _adapter_problems(self, models: Sequence[str]) -> Iterator[tuple[str, str]]:
        for name, adapter in self.adapters.items():
            if adapter is None:
                continue
            if name in models or name in self.aliases:
                taken = "a model" if name in models else "an alias"
                yield f"adapters.{name}", f"{taken} has this name already"
            if adapter.model not in models:
                known = ", ".join(sorted(models))
                text = f'no model is named "{adapter.model}"; known models: {known}'
                yield f"adapters.{name}.model", text

    def missing(self) -> Iterator[tuple[str, str]]:
        """(path, what is wrong) of adapters whose files are not on this machine."""
        for name, adapter in self.adapters.items():
            if adapter is not None and (text := missing_files(adapter.source)) is not None:
                yield f"adapters.{name}.source", text

    def held(self, names: Collection[str]) -> TableConfig:
        """The same with no requests yet for the canaries of the aliases ``names``."""
        aliases = {
            name: evolve(alias, models={**alias.models, one.model: 0.0})
            if name in names and (one := alias.judged) is not None
            else alias
            for name, alias in self.aliases.items()
        }
        return evolve(self, aliases=aliases)
