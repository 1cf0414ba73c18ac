"""KV-cache-aware routing: send a request where its prefix lies, unless that worker is too busy."""

from __future__ import annotations

from commutator import RouterRegister, hookimpl
from commutator_kv.config import KvRouterConfig
from commutator_kv.policy import KvRouter

__all__ = ["KvRouter", "KvRouterConfig"]


@hookimpl
def router_register(register: RouterRegister) -> None:
    register("kv", KvRouterConfig, KvRouter, stability="beta")
