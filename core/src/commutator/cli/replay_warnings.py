"""Options that a live system heeds and `commutator replay` does without."""

from __future__ import annotations

from collections.abc import Iterator

from commutator.config.load import Loaded
from commutator.config.tree import DEFAULT, find

__all__ = ["replay_warnings"]


def replay_warnings(loaded: Loaded) -> Iterator[str]:
    """A line for each option of the router that was set and has no effect in a replay."""
    router = loaded.config.router
    if router.busy.enabled:
        yield _told("busy", "there no worker is ever too busy, and no request waits for one")
    if not router.use_kv_events:
        yield _told("use_kv_events", "there what workers hold is known at once, and never guessed")
    if _was_set(loaded, "router_ttl_s"):
        yield _told("router_ttl_s", "there what workers hold is never guessed")
    sizes = {getattr(engine, "block_size", router.block_size) for engine in loaded.config.engines}
    if _was_set(loaded, "block_size") and sizes != {router.block_size}:
        found = ", ".join(map(str, sorted(sizes)))
        yield _told("block_size", f"there the index has the engines' blocks, of {found} tokens")


def _told(option: str, why: str) -> str:
    return f"router.{option}: a replay does without this option: {why}"


def _was_set(loaded: Loaded, option: str) -> bool:
    node = find(loaded.tree, ("router", option))
    return node is not None and node.origin != DEFAULT
