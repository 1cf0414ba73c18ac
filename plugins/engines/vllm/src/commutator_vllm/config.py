"""The options of a `vllm` engine entry."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from commutator import EngineConfig, Secret, setting
from commutator.engine.server_options import a_url, only_to_attach, only_to_launch, shared_evenly
from commutator.schema import NonNegativeInt

__all__ = ["KV_TRANSFER", "VllmConfig"]

KV_TRANSFER = "--kv-transfer-config"


@frozen(kw_only=True)
class VllmConfig(EngineConfig):
    """vLLM servers: with `url` one that runs already, otherwise launched ones."""

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
        "(versions without /kv_event_sources) or tells an address that is of no use from here.",
        None,
        validator=only_to_attach,
    )
    kv_events_replay: str | None = setting(
        "Its replay endpoint, tcp://HOST:PORT, to go with `kv_events`.",
        None,
        validator=only_to_attach,
    )
    use_priority: bool = setting(
        "Send the requests' `priority` to the server at `url`, which answers 400 unless it runs "
        "with `--scheduling-policy priority`. A launched one does.",
        False,
        validator=only_to_attach,
    )
    hands_over: bool = setting(
        "The server at `url` runs with the NixlConnector, so that its prefill and decode can be "
        "apart. A launched one does when its `role` is prefill or decode.",
        False,
        validator=only_to_attach,
    )
    python: str = setting(
        "The Python of the environment that vLLM is installed in; `make vllm` makes this one.",
        ".venv-vllm/bin/python",
        validator=only_to_launch,
    )
    args: tuple[str, ...] = setting(
        "Arguments of the server, as on the command line of `vllm serve`.",
        (),
        validator=only_to_launch,
    )
    env: Mapping[str, str] = setting(
        "Environment variables of the server.", {}, validator=only_to_launch
    )
    gpus: tuple[NonNegativeInt, ...] = setting(
        "GPUs by number, shared evenly among the replicas in this order; by default vLLM takes "
        "what it sees.",
        (),
        validator=shared_evenly,
    )

    @property
    def has_own_connector(self) -> bool:
        """Whether the arguments of a launched server name its KV connector."""
        return any(arg.partition("=")[0] == KV_TRANSFER for arg in self.args)

    @property
    def takes_part_in_handovers(self) -> bool:
        """Whether the server has vLLM's connector for them."""
        launched = self.url is None and self.role != "both"
        return self.hands_over or self.has_own_connector or launched
