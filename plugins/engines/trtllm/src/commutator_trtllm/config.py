"""The options of a `trtllm` engine entry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import Attribute, frozen

from commutator import setting
from commutator_engine_kit.launching import ServerConfig, only_to_attach, only_to_launch


def _not_empty(config: TrtllmConfig, field: Attribute[Any], value: tuple[str, ...]) -> None:
    only_to_launch(config, field, value)
    if not value:
        raise ValueError(f"{field.name}: expected the program and its first arguments")


@frozen(kw_only=True)
class TrtllmConfig(ServerConfig):
    """A running TensorRT-LLM server at `url`, or servers to launch when there is no `url`."""

    kv_events: bool = setting(
        "Read the server's KV events; they can have only one reader. Without them, routing "
        "estimates a server's cached blocks from the requests that it was sent.",
        True,
    )
    hands_over: bool = setting(
        "The server at `url` runs with a cache transceiver, which disaggregation needs. A launched "
        "server does when its `role` is prefill or decode.",
        False,
        validator=only_to_attach,
    )
    command: tuple[str, ...] = setting(
        "The server program, and arguments that come before all others.",
        ("trtllm-serve",),
        validator=_not_empty,
    )
    checkpoint: str | None = setting(
        "The model that the server loads: a Hugging Face directory or name, or an engine's "
        "directory. By default the model's `source`, which must then be such a directory.",
        None,
        validator=only_to_launch,
    )
    args: tuple[str, ...] = setting(
        "Command-line arguments of the server, as for `trtllm-serve`.",
        (),
        validator=only_to_launch,
    )
    options: Mapping[str, Any] = setting(
        "Options of the server's YAML file; they override those generated for its `role`, "
        "see `python -m commutator_trtllm.options`.",
        {},
        validator=only_to_launch,
    )

    @property
    def takes_part_in_handovers(self) -> bool:
        """Whether the server has a cache transceiver, which hands KV over."""
        given = "cache_transceiver_config" in self.options
        return self.hands_over or given or (self.url is None and self.role != "both")
