"""LangChain's own suites for chat models, of OpenAI's API and of Anthropic's, run by pytest."""

from __future__ import annotations

import os
from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

URL, MODEL, OTHER = (os.environ[name] for name in ("SUITE_URL", "SUITE_MODEL", "SUITE_OTHER"))


class _Suite(ChatModelIntegrationTests):
    @property
    def supports_json_mode(self) -> bool:
        return "json_mode" in self.methods

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return OTHER

    methods: tuple[str, ...] = ()


class TestOpenAI(_Suite):
    methods = ("json_mode",)

    @property
    def chat_model_class(self) -> Any:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # With a base_url, usage of streams is not asked for otherwise.
        return {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "x", "stream_usage": True}


class TestAnthropic(_Suite):
    @property
    def chat_model_class(self) -> Any:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "base_url": URL, "api_key": "x"}
