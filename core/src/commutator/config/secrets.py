"""Where a configuration holds secrets, which process needs which, and what must not be shown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from commutator.config.model import Config, parts_of
from commutator.contract.engine import EngineConfig
from commutator.contract.settings import Secret

HIDDEN = "<hidden>"
"""Shown instead of a secret."""

CLIENT_KEY = "COMMUTATOR_API_KEY"
"""The variable with a client's key, for commands; no process of a deployment needs it."""

_SECRET_WORDS = {
    "auth", "authorization", "credential", "credentials", "key", "keys", "passphrase", "passwd",
    "password", "pat", "pwd", "secret", "secrets", "token",
}  # fmt: skip
_SECRET_ENDINGS = ("apikey", "accesskey", "secretkey", "password", "secret", "credential")
_PRINTED_KEY = re.compile(r"""(api[_-]key['"]?\s*[:=]\s*['"]?)[0-9a-f]{64}""")
"""A key of ``api_key_at`` in the arguments that a server prints at its start."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+")


def is_secret_name(name: str) -> bool:
    """Whether a variable or argument of this name holds a secret, such as HF_TOKEN, --api-key.

    Names that only speak about tokens, such as --max-num-batched-tokens, do not.
    """
    words = [word.lower() for word in _WORD.findall(name)]
    return any(word in _SECRET_WORDS or word.endswith(_SECRET_ENDINGS) for word in words)


def hidden_arguments(arguments: Sequence[str]) -> list[str]:
    """``arguments`` with secrets hidden, in both forms: `--api-key=x` and `--api-key x`."""
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        is_option = argument.startswith("-")
        if hide_next and not is_option:
            shown.append(HIDDEN)
            continue  # an option may take several values
        hide_next = is_option and not equals and is_secret_name(name)
        if is_option and equals:
            shown.append(f"{name}={HIDDEN if is_secret_name(name) else _hidden_json(value)}")
        else:
            shown.append(_hidden_json(argument))
    return shown


def hidden_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """``values`` with the text under names of secrets hidden, also further down."""
    return {
        name: HIDDEN if isinstance(value, str) and is_secret_name(name) else _hidden_below(value)
        for name, value in values.items()
    }


def _hidden_below(value: Any) -> Any:
    if isinstance(value, Mapping):
        return hidden_values(value)
    if isinstance(value, list | tuple):
        return [_hidden_below(item) for item in value]
    return _hidden_json(value) if isinstance(value, str) else value


def _hidden_json(text: str) -> str:
    """``text``, with secrets hidden if it is a JSON object; engines take such arguments."""
    if not text.startswith("{"):
        return text
    try:
        values = json.loads(text)
    except ValueError:
        return text
    hidden = hidden_values(values)
    return text if hidden == values else json.dumps(hidden, separators=(",", ":"))


def hidden_line(line: str) -> str:
    """A line that a process printed, with the API keys of launched servers hidden."""
    return _PRINTED_KEY.sub(rf"\1{HIDDEN}", line) if "api" in line else line


def secrets_in(value: Any) -> Iterator[tuple[str, Secret]]:
    """Every secret below ``value``, also in plugins' options, with its path."""
    return parts_of(value, Secret)


def _variables(*values: Any) -> set[str]:
    return {secret.env for value in values for _, secret in secrets_in(value) if secret.env}


def foreign_variables(config: Config) -> set[str]:
    """The variables that hold secrets: each process gets back only those that it needs."""
    return {CLIENT_KEY, *_variables(config)}


def variables_of_frontends(config: Config) -> set[str]:
    """The variables with the secrets that a front-door process reads.

    Those of tiers are for workers alone, and `env` of an engine entry is read by the supervisor;
    the entry's other secrets are keys for its server, which front doors send.
    """
    engines = [value for engine in config.engines for value in _without_environment(engine)]
    others = [
        getattr(config, field.name)
        for field in attrs.fields(Config)
        if field.name not in ("engines", "tiers", "runtime", "launcher", "registry")
    ]
    return _variables(engines, others)


def variables_of_worker(config: Config, engine: EngineConfig) -> set[str]:
    """The variables with the secrets that a worker of ``engine`` reads: its own, and the tiers'."""
    return _variables(_without_environment(engine), config.tiers)


def _without_environment(engine: EngineConfig) -> list[Any]:
    return [
        getattr(engine, field.name) for field in attrs.fields(type(engine)) if field.name != "env"
    ]
