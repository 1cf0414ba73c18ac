"""What the scheduler's side of the KV connector says to the workers', and they to it.

TensorRT-LLM pickles ``Orders`` between its ranks; ``Stage`` and ``Staged`` travel by ``kv_ranks``.
All hold plain values only.
"""

from __future__ import annotations

from attrs import frozen

__all__ = ["Chain", "Keep", "Load", "Orders", "Stage", "Staged"]


@frozen
class Stage:
    """Bring a prompt's blocks into host memory, before the engine counts on them."""

    number: int
    token_ids: tuple[int, ...]
    """Of as many full blocks as are wanted."""
    cache_salt: str | None
    first: int
    """Position in the chain of the first block that is wanted."""
    wait_s: float
    """What is not there by then does not count."""


@frozen
class Staged:
    """So many blocks are in host memory, verified."""

    number: int
    blocks: int


@frozen
class Load:
    """Copy staged blocks into the engine's; those that are not named are not wanted any more."""

    number: int
    places: tuple[int, ...]
    """Which of the staged ones, counted from the first."""
    device_blocks: tuple[int, ...]


@frozen
class Chain:
    """The next full blocks of a request, of which more follow; the first time also its facts."""

    request_id: int
    token_ids: tuple[int, ...]
    prompt_blocks: int
    cache_salt: str | None


@frozen
class Keep:
    """These next blocks of a request are full once this step has been computed."""

    request_id: int
    first: int
    device_blocks: tuple[int, ...]


@frozen(kw_only=True)
class Orders:
    """From the scheduler to every worker, to be carried out in this order."""

    forget: tuple[int, ...] = ()
    """Requests that are over, or begin anew: their blocks may be another's in this very step."""
    drops: tuple[int, ...] = ()
    """Staged blocks that nobody wants any more."""
    loads: tuple[Load, ...] = ()
    chains: tuple[Chain, ...] = ()
    keeps: tuple[Keep, ...] = ()
