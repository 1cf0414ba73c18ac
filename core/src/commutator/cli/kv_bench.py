"""``commutator kv bench``."""

from __future__ import annotations

import click

__all__ = ["bench"]


@click.command()
def bench() -> None:
    """Measure tiers."""
