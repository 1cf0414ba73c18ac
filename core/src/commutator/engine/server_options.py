"""Rules for the options of an engine whose servers are attached to by ``url``, or launched.

Validators of attrs fields, for configuration classes that have ``url`` and ``replicas``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import Attribute

__all__ = ["a_url", "only_to_attach", "only_to_launch", "shared_evenly"]


def a_url(_config: Any, field: Attribute[Any], url: str | None) -> None:
    """An address over HTTP, or None."""
    if url is not None and not url.startswith(("http://", "https://")):
        raise ValueError(
            f"{field.name}: expected http://HOST:PORT or https://HOST:PORT, got {url!r}"
        )


def only_to_launch(config: Any, field: Attribute[Any], value: Any) -> None:
    """Not beside ``url``."""
    if config.url is not None and value != field.default:
        raise ValueError(f"{field.name}: without effect with `url`, whose server runs already")


def only_to_attach(config: Any, field: Attribute[Any], value: Any) -> None:
    """Not without ``url``."""
    if config.url is None and value != field.default:
        raise ValueError(f"{field.name}: only with `url`; a server that is launched has its own")


def shared_evenly(config: Any, field: Attribute[Any], gpus: Sequence[int]) -> None:
    """GPUs of launched servers: each replica has as many."""
    only_to_launch(config, field, gpus)
    if len(gpus) % config.replicas:
        raise ValueError(f"gpus: {len(gpus)} GPUs cannot be shared by {config.replicas} replicas")
