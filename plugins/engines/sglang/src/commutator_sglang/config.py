"""The options of an `sglang` engine entry."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from commutator import EngineConfig, Secret, setting
from commutator.engine.server_options import a_url, only_to_attach, only_to_launch, shared_evenly
from commutator.schema import NonNegativeInt

__all__ = ["SglangConfig"]


@frozen(kw_only=True)
class SglangConfig(EngineConfig):
    """SGLang servers: with `url` one that runs already, otherwise launched ones."""

    url: str | None = setting(
        "Attach to the server there, http://HOST:PORT; what it serves is asked of itself.",
        None,
        validator=a_url,
    )
    api_key: Secret | None = setting(
        "The `--api-key` of the server at `url`.", None, validator=only_to_attach
    )
    kv_events: str | None = setting(
        "Where the server at `url` publishes KV events, tcp://HOST:PORT, if it does not tell "
        "(older versions) or tells an address that is of no use from here.",
        None,
        validator=only_to_attach,
    )
    kv_events_replay: str | None = setting(
        "Its replay endpoint, tcp://HOST:PORT, to go with `kv_events`.",
        None,
        validator=only_to_attach,
    )
    python: str = setting(
        "The Python of the environment that SGLang is installed in; `make sglang` makes this one.",
        ".venv-sglang/bin/python",
        validator=only_to_launch,
    )
    args: tuple[str, ...] = setting(
        "Arguments of the server, as on the command line of `sglang.launch_server`.",
        (),
        validator=only_to_launch,
    )
    env: Mapping[str, str] = setting(
        "Environment variables of the server.", {}, validator=only_to_launch
    )
    gpus: tuple[NonNegativeInt, ...] = setting(
        "GPUs by number, shared evenly among the replicas in this order; by default SGLang takes "
        "what it sees.",
        (),
        validator=shared_evenly,
    )
