"""The front door of kind `openai` as core sees it. It imports no server library."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING

from commutator import Frontend, FrontendAddress, OpenFrontend
from commutator.errors import ConfigError
from commutator_openai.config import OpenAiConfig, tls_context

if TYPE_CHECKING:
    from commutator.frontend import FrontendServices

__all__ = ["OpenAiFrontend"]


class OpenAiFrontend(Frontend[OpenAiConfig, "FrontendServices"]):
    """OpenAI's HTTP API."""

    def problems(self, config: OpenAiConfig) -> Iterable[str]:
        if config.tls is None:
            return []
        try:
            tls_context(config.tls)
        except ConfigError as error:
            return [f"tls: {problem}" for problem in error.problems]
        return []

    def address(self, config: OpenAiConfig, netloc: str, model: str) -> FrontendAddress:
        url = f"{'https' if config.tls else 'http'}://{netloc}"
        question = {"role": "user", "content": "What is the capital of France?"}
        body = {"model": model, "messages": [question], "max_tokens": 64}
        parts = [f"curl -s {url}/v1/chat/completions", "-H 'Content-Type: application/json'"]
        if config.api_keys:
            key = config.api_keys[0]
            value = f"${key.env}" if key.env else f"$(cat {shlex.quote(str(key.file))})"
            parts.append(f'-H "Authorization: Bearer {value}"')
        if config.tls:
            parts.append(f"--cacert {shlex.quote(config.tls.cert_file)}")
        parts += ["-d", shlex.quote(json.dumps(body))]
        return FrontendAddress(url=url, api_url=f"{url}/v1", example=" ".join(parts))

    async def open(
        self, config: OpenAiConfig, services: FrontendServices, *, local_socket: str | None = None
    ) -> OpenFrontend:
        from commutator_openai.server import open_server

        return await open_server(config, services, local_socket)
