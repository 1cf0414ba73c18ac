"""How a model's answers are chosen where a request does not say it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from attrs import evolve, frozen

from commutator.contract.engine import GenerationConfig
from commutator.errors import ConfigError


@frozen(kw_only=True)
class AnswerDefaults:
    """What a request leaves out; as of ``SamplingParams``. Without a value, all of it is "off"."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    """The longest answer to a conversation; None: what is left of the context."""


def model_defaults(generation_config: Mapping[str, Any], file: str) -> AnswerDefaults:
    """Those of a model's ``generation_config.json``, of which null is nothing.

    Raises ConfigError, at ``file``, for values that no request could have.
    """
    given: dict[str, Any] = {name: generation_config.get(name) for name in _LEGAL}
    problems = [
        f"{name}: expected {expected}, got {given[name]!r}"
        for name, (expected, is_legal) in _LEGAL.items()
        if given[name] is not None and not (_is_number(given[name]) and is_legal(given[name]))
    ]
    if problems:
        raise ConfigError(
            [*problems, "correct the file, or get it anew from where the model is from"], file
        )
    known = {name: value for name, value in given.items() if value is not None}
    if "top_k" in known:
        known["top_k"] = max(0, int(known["top_k"]))  # -1 is "all", too
    return AnswerDefaults(**known)


def configured(model: AnswerDefaults, config: GenerationConfig) -> AnswerDefaults:
    """``model`` with what the operator wants instead."""
    base = model if config.defaults == "model" else AnswerDefaults()
    own: dict[str, Any] = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "min_p": config.min_p,
        "repetition_penalty": config.repetition_penalty,
        "max_tokens": config.max_tokens,
    }
    return evolve(base, **{name: value for name, value in own.items() if value is not None})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_LEGAL: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("a number of at least 0", lambda value: 0 <= value < float("inf")),
    "top_p": ("a number above 0, at most 1", lambda value: 0 < value <= 1),
    "top_k": ("an integer", lambda value: value == int(value) if abs(value) < 2**31 else False),
    "min_p": ("a number from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": ("a number above 0", lambda value: 0 < value < float("inf")),
}
