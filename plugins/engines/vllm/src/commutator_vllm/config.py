"""The options of a `vllm` engine entry."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Literal

from attrs import frozen

from commutator import setting
from commutator_engine_kit.launching import (
    PythonServerConfig,
    argument_value,
    only_to_attach,
    only_to_launch,
)

KV_TRANSFER = "--kv-transfer-config"
STRUCTURED_OUTPUTS = "--structured-outputs-config.backend"
_STRUCTURED_OUTPUTS = "--structured-outputs-config"
_GUIDANCE = "guidance"


@frozen(kw_only=True)
class VllmConfig(PythonServerConfig):
    """A running vLLM server at `url`, or servers to launch when there is no `url`."""

    use_priority: bool = setting(
        "Send the requests' `priority` to the server at `url`, which answers 400 unless it runs "
        "with `--scheduling-policy priority`. A launched server does.",
        False,
        validator=only_to_attach,
    )
    hands_over: bool = setting(
        "The server at `url` runs with the NixlConnector, which disaggregation needs. A launched "
        "server does when its `role` is prefill or decode.",
        False,
        validator=only_to_attach,
    )
    llguidance: bool = setting(
        "The server at `url` runs with `--structured-outputs-config.backend guidance`, which "
        "enforces more keywords of JSON schemas than vLLM's default; what that would ignore is "
        "refused. A launched server does, unless its `args` choose another.",
        False,
        validator=only_to_attach,
    )
    python: str = setting(
        "The Python of the environment that has vLLM; `make vllm` creates the default one.",
        ".venv-vllm/bin/python",
        validator=only_to_launch,
    )
    connection: Literal["http", "token_api"] = setting(
        "How front doors send requests to a launched server: by its HTTP API, or by Commutator's "
        "token API, which the server's process then serves, too: without JSON and server-sent "
        "events. Its environment needs `commutator-vllm`.",
        "http",
        validator=only_to_launch,
    )
    args: tuple[str, ...] = setting(
        "Command-line arguments of the server, as for `vllm serve`.",
        (),
        validator=only_to_launch,
    )

    @property
    def chooses_structured_outputs(self) -> bool:
        """Whether `args` may choose what a launched server enforces schemas with."""
        names = {arg.partition("=")[0].replace("_", "-") for arg in self.args}
        own = (one == "--config" or one.startswith(_STRUCTURED_OUTPUTS) for one in names)
        return any(own)

    @property
    def enforces_with_llguidance(self) -> bool:
        """Whether the server enforces what answers follow with this library."""
        if self.url is not None:
            return self.llguidance
        if not self.chooses_structured_outputs:
            return True
        given = argument_value(self.args, _STRUCTURED_OUTPUTS) or "{}"
        with suppress(ValueError):
            if json.loads(given).get("backend") == _GUIDANCE:
                return True
        return argument_value(self.args, STRUCTURED_OUTPUTS) == _GUIDANCE

    @property
    def has_own_connector(self) -> bool:
        """Whether `args` set the KV connector of a launched server."""
        return any(arg.partition("=")[0] == KV_TRANSFER for arg in self.args)

    @property
    def needs_nixl(self) -> bool:
        return super().needs_nixl and not self.has_own_connector

    @property
    def takes_part_in_handovers(self) -> bool:
        """Whether the server runs with a connector that hands KV over."""
        launched = self.url is None and self.role != "both"
        return self.hands_over or self.has_own_connector or launched
