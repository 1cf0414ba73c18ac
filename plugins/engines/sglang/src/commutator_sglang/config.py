"""The options of an `sglang` engine entry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import Attribute, frozen

from commutator import EngineConfig, Secret, setting
from commutator.schema import NonNegativeInt

__all__ = ["SglangConfig"]


def _a_url(_config: Any, _field: Attribute[Any], url: str | None) -> None:
    if url is not None and not url.startswith(("http://", "https://")):
        raise ValueError(f"url: expected http://HOST:PORT or https://HOST:PORT, got {url!r}")


def _only_to_launch(config: SglangConfig, field: Attribute[Any], value: Any) -> None:
    if config.url is not None and value != field.default:
        raise ValueError(f"{field.name}: without effect with `url`, whose server runs already")


def _only_to_attach(config: SglangConfig, field: Attribute[Any], value: Any) -> None:
    if config.url is None and value != field.default:
        raise ValueError(f"{field.name}: only with `url`; a server that is launched has its own")


def _shared_evenly(config: SglangConfig, field: Attribute[Any], gpus: tuple[int, ...]) -> None:
    _only_to_launch(config, field, gpus)
    if len(gpus) % config.replicas:
        raise ValueError(f"gpus: {len(gpus)} GPUs cannot be shared by {config.replicas} replicas")


@frozen(kw_only=True)
class SglangConfig(EngineConfig):
    """SGLang servers: with `url` one that runs already, otherwise launched ones."""

    url: str | None = setting(
        "Attach to the server there, http://HOST:PORT; what it serves is asked of itself.",
        None,
        validator=_a_url,
    )
    api_key: Secret | None = setting(
        "The `--api-key` of the server at `url`.", None, validator=_only_to_attach
    )
    kv_events: str | None = setting(
        "Where the server at `url` publishes KV events, tcp://HOST:PORT, if it does not tell "
        "(older versions) or tells an address that is of no use from here.",
        None,
        validator=_only_to_attach,
    )
    kv_events_replay: str | None = setting(
        "Its replay endpoint, tcp://HOST:PORT, to go with `kv_events`.",
        None,
        validator=_only_to_attach,
    )
    python: str = setting(
        "The Python of the environment that SGLang is installed in; `make sglang` makes this one.",
        ".venv-sglang/bin/python",
        validator=_only_to_launch,
    )
    args: tuple[str, ...] = setting(
        "Arguments of the server, as on the command line of `sglang.launch_server`.",
        (),
        validator=_only_to_launch,
    )
    env: Mapping[str, str] = setting(
        "Environment variables of the server.", {}, validator=_only_to_launch
    )
    gpus: tuple[NonNegativeInt, ...] = setting(
        "GPUs by number, shared evenly among the replicas in this order; by default SGLang takes "
        "what it sees.",
        (),
        validator=_shared_evenly,
    )
