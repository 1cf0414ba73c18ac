"""The options of an `sglang` engine entry."""

from __future__ import annotations

from attrs import frozen

from commutator import setting
from commutator_engine_kit.launching import KeyedServerConfig, only_to_attach, only_to_launch

__all__ = ["SglangConfig"]


@frozen(kw_only=True)
class SglangConfig(KeyedServerConfig):
    """A running SGLang server at `url`, or servers to launch when there is no `url`."""

    kv_events: str | None = setting(
        "Where the server at `url` publishes KV events, tcp://HOST:PORT. Needed when the server "
        "does not report it (older versions), or reports an address that cannot be reached from "
        "here.",
        None,
        validator=only_to_attach,
    )
    kv_events_replay: str | None = setting(
        "The replay endpoint that belongs to `kv_events`, tcp://HOST:PORT.",
        None,
        validator=only_to_attach,
    )
    python: str = setting(
        "The Python of the environment that has SGLang; `make sglang` creates the default one.",
        ".venv-sglang/bin/python",
        validator=only_to_launch,
    )
    args: tuple[str, ...] = setting(
        "Command-line arguments of the server, as for `sglang.launch_server`.",
        (),
        validator=only_to_launch,
    )
