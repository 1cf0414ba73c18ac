"""``commutator key``: makes an API key; the configuration gets only its hash."""

from __future__ import annotations

import time

import click

from commutator.auth.keys import expiry_unix_s, hash_of, new_key
from commutator.config.yaml_file import to_yaml
from commutator.contract.principal import check_principal_name


def _name(_context: click.Context, _option: click.Parameter, name: str) -> str:
    try:
        check_principal_name(name)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    return name


def _moment(_context: click.Context, _option: click.Parameter, text: str | None) -> str | None:
    if text is None:
        return None
    try:
        moment_unix_s = expiry_unix_s(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    if moment_unix_s <= time.time():
        raise click.BadParameter(f"{text} is past, so the key would be refused")
    return text


@click.command(epilog="Example: commutator key alice --expires 2027-01-31")
@click.argument("name", callback=_name)
@click.option("--expires", metavar="DATE", callback=_moment, help="Refuse the key from then on.")
def key(name: str, expires: str | None) -> None:
    """Make an API key for the principal NAME.

    Prints the key, which is kept nowhere and cannot be shown again, on standard error; and on
    standard output the entry for `principals` in the section `auth`, or in its file.
    """
    made = new_key()
    entry = {"sha256": hash_of(made)} | ({} if expires is None else {"expires": expires})
    click.echo(f"The key of {name}, which is shown only now:\n{made}\n", err=True)
    click.echo(to_yaml([{"name": name, "keys": [entry]}]), nl=False)
