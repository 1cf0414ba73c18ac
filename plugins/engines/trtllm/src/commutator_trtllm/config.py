"""The options of a `trtllm` engine entry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import Attribute, frozen

from commutator import EngineConfig, setting
from commutator.engine.server_options import a_url, only_to_attach, only_to_launch, shared_evenly
from commutator.schema import NonNegativeInt

__all__ = ["TrtllmConfig"]


def _not_empty(config: TrtllmConfig, field: Attribute[Any], value: tuple[str, ...]) -> None:
    only_to_launch(config, field, value)
    if not value:
        raise ValueError(f"{field.name}: expected the program and its first arguments")


@frozen(kw_only=True)
class TrtllmConfig(EngineConfig):
    """TensorRT-LLM servers: with `url` one that runs already, otherwise launched ones."""

    url: str | None = setting(
        "Attach to the server there, http://HOST:PORT.", None, validator=a_url
    )
    kv_events: bool = setting(
        "Read the server's KV events, which only one reader may. Without them, what a server holds "
        "is guessed from what it was sent.",
        True,
    )
    hands_over: bool = setting(
        "The server at `url` runs with a cache transceiver, so that its prefill and decode can be "
        "apart. A launched one does when its `role` is prefill or decode.",
        False,
        validator=only_to_attach,
    )
    command: tuple[str, ...] = setting(
        "The program that serves, and arguments that come before all others.",
        ("trtllm-serve",),
        validator=_not_empty,
    )
    checkpoint: str | None = setting(
        "What the server loads: a Hugging Face directory or name, or an engine's directory. By "
        "default the model's `source`, which must then be such a directory.",
        None,
        validator=only_to_launch,
    )
    args: tuple[str, ...] = setting(
        "Arguments of the server, as on the command line of `trtllm-serve`.",
        (),
        validator=only_to_launch,
    )
    options: Mapping[str, Any] = setting(
        "Options of the server's YAML file, laid over those that are generated for its `role`; "
        "see `python -m commutator_trtllm.options`.",
        {},
        validator=only_to_launch,
    )
    env: Mapping[str, str] = setting(
        "Environment variables of the server.", {}, validator=only_to_launch
    )
    gpus: tuple[NonNegativeInt, ...] = setting(
        "GPUs by number, shared evenly among the replicas in this order; by default the server "
        "takes what it sees.",
        (),
        validator=shared_evenly,
    )

    @property
    def takes_part_in_handovers(self) -> bool:
        """Whether the server has a cache transceiver for them."""
        given = "cache_transceiver_config" in self.options
        return self.hands_over or given or (self.url is None and self.role != "both")
