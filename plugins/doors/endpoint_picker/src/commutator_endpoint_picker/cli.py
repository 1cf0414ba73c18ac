"""``commutator epp``."""

from __future__ import annotations

import asyncio
import os
import sys

import click

from commutator_endpoint_picker.check import probe


@click.group()
def epp() -> None:
    """Check a gateway that asks an endpoint picker."""


@epp.command(epilog="Example: commutator epp check http://gateway.example --model m")
@click.argument("url")
@click.option("--model", required=True, help="A model that it serves.")
@click.option("--api-key-env", help="The environment variable with a key that may `explain`.")
@click.option(
    "--streams",
    type=click.IntRange(0, 10_000),
    default=0,
    help="Also send this many requests at the same time; more than 1,024 find the usual cap.",
)
def check(url: str, model: str, api_key_env: str | None, streams: int) -> None:
    """Say what of the gateway at URL is misconfigured; exit status 1 if anything is.

    It sends some twenty short requests, half of them twice to see which worker
    has them in its cache.
    """
    key = None
    if api_key_env is not None and (key := os.environ.get(api_key_env)) is None:
        raise click.UsageError(f"--api-key-env: there is no {api_key_env} in the environment")
    if not asyncio.run(_print(url, model, key, streams)):
        sys.exit(1)


async def _print(url: str, model: str, key: str | None, streams: int) -> bool:
    """Whether nothing was found."""
    fine = True
    async for finding in probe(url, model, key, streams):
        if finding.problem is None:
            click.echo(f"ok    {finding.what}")
        else:
            fine = False
            click.echo(f"WRONG {finding.what}: {finding.problem}")
    return fine
