"""The options of a configuration that `planner.tuning` may change, and the change itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import attrs
from attrs import evolve, frozen

from commutator.config.model import Config
from commutator.config.tree import path_text
from commutator.contract.settings import Tunable

Steps = tuple[str | int, ...]

_SECTIONS = ("router", "disaggregation")
"""Those whose policies front doors can have twice: with the present value and with another."""


@frozen(kw_only=True)
class TunableOption:
    """An option that its plugin declares as tunable."""

    path: str
    """As in error messages, such as disaggregation.max_local_prefill_length."""
    steps: Steps
    range: Tunable
    value: float
    """Of the configuration; not always within the range."""
    whole: bool
    """Whether it is an integer."""

    def accepts(self, value: float) -> bool:
        """Whether it may be set to ``value``."""
        return self.range.allows(value) and (not self.whole or value == int(value))


def tunable_options(config: Config) -> dict[str, TunableOption]:
    """The options that are declared as tunable and are numbers now, by path."""
    found = (
        option for section in _SECTIONS for option in _options(getattr(config, section), (section,))
    )
    return {option.path: option for option in found}


def with_values(config: Config, values: Mapping[str, float]) -> Config:
    """``config`` with other values of tunable options.

    Raises ValueError for an option that is not declared as tunable, a value outside the declared
    range, and one that the option's own checks refuse.
    """
    known = tunable_options(config)
    for path, value in values.items():
        option = known.get(path)
        if option is None:
            raise ValueError(f"{path}: not declared as tunable, so it stays as it is configured")
        if not option.accepts(value):
            limits = f"{option.range.minimum:g} to {option.range.maximum:g}"
            what = "an integer" if option.whole else "a value"
            raise ValueError(f"{path}: expected {what} from {limits}, got {value:g}")
        config = _put(config, option.steps, int(value) if option.whole else float(value))
    return config


def _options(value: Any, steps: Steps) -> Iterator[TunableOption]:
    if isinstance(value, tuple):
        for index, one in enumerate(value):
            yield from _options(one, (*steps, index))
        return
    if not attrs.has(type(value)):
        return
    attrs.resolve_types(type(value), include_extras=True)
    for field in attrs.fields(type(value)):
        inner, here = getattr(value, field.name), (*steps, field.name)
        declared = field.metadata.get("tunable")
        if declared is None:
            yield from _options(inner, here)
        elif isinstance(inner, int | float) and not isinstance(inner, bool):
            yield TunableOption(
                path=path_text(here),
                steps=here,
                range=declared,
                value=inner,
                whole=_is_whole(field.type),
            )


def _is_whole(annotation: Any) -> bool:
    """Whether it is an int, possibly with limits or None beside it."""
    return annotation is int or any(map(_is_whole, get_args(annotation)))


def _put(value: Any, steps: Sequence[str | int], new: float) -> Any:
    """``value`` with ``new`` at ``steps``, everything around it checked again."""
    if not steps:
        return new
    step, rest = steps[0], steps[1:]
    if isinstance(step, int):
        return (*value[:step], _put(value[step], rest, new), *value[step + 1 :])
    return evolve(value, **{step: _put(getattr(value, step), rest, new)})
