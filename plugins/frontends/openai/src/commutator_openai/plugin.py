"""Registers the front door of kind `openai`."""

from __future__ import annotations

from commutator import FrontendRegister, hookimpl
from commutator_openai.config import OpenAiConfig
from commutator_openai.frontend import OpenAiFrontend


@hookimpl
def frontend_register(register: FrontendRegister) -> None:
    register("openai", OpenAiConfig, OpenAiFrontend(), stability="beta")
