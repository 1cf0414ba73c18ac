"""KV-cache-aware routing: a request goes where its prefix is cached, unless too busy."""

from __future__ import annotations

from commutator import RouterRegister, hookimpl
from commutator_kv_router.policy import KvRouter, KvRouterConfig

__all__ = ["KvRouter", "KvRouterConfig"]


@hookimpl
def router_register(register: RouterRegister) -> None:
    register("kv", KvRouterConfig, KvRouter, stability="beta")
