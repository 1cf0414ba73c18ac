"""The options of an `sglang` engine entry."""

from __future__ import annotations

from attrs import frozen

from commutator import setting
from commutator_engine_kit.launching import PythonServerConfig, only_to_launch

TRANSFER = "--disaggregation-transfer-backend"


@frozen(kw_only=True)
class SglangConfig(PythonServerConfig):
    """A running SGLang server at `url`, or servers to launch when there is no `url`."""

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

    @property
    def on_cpu(self) -> bool:
        return "--device cpu" in " ".join(self.args).replace("=", " ")

    @property
    def needs_nixl(self) -> bool:
        has_own = any(arg.partition("=")[0] == TRANSFER for arg in self.args)
        return super().needs_nixl and not has_own
