"""Stands in for ``tests/utils.py`` of vLLM's source: a server that runs already, for each test.

It is copied over that file, and read by vLLM's Python: nothing of Commutator is imported.
"""

import os
from typing import Any, Never, Self
from urllib.parse import urlsplit

import anthropic
import openai

_URL = os.environ["SUITE_URL"]
_TIMEOUT_S = 120


class RemoteOpenAIServer:
    """The server at SUITE_URL, whatever model and arguments a test asks for."""

    DUMMY_API_KEY = "none"

    def __init__(self, *_: Any, **__: Any) -> None:
        self.host, self.port = urlsplit(_URL).hostname, urlsplit(_URL).port

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """It goes on."""

    @property
    def url_root(self) -> str:
        return _URL

    def url_for(self, *parts: str) -> str:
        return "/".join([_URL, *(part.lstrip("/") for part in parts)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._options(options, "/v1"))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._options(options, "/v1"))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(**self._options(options, ""))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**self._options(options, ""))

    def _options(self, options: dict[str, Any], path: str) -> dict[str, Any]:
        usual = {"base_url": _URL + path, "api_key": self.DUMMY_API_KEY}
        return {**usual, "max_retries": 0, "timeout": _TIMEOUT_S, **options}


def __getattr__(name: str) -> Any:
    """Other helpers, which no test asks of a server that runs already."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name.isupper():  # further arguments of servers, or their environment
        return {} if "ENV" in name else []

    def absent(*_: Any, **__: Any) -> Never:
        raise RuntimeError(f"{name} is not there: the server runs already")

    return absent
