"""``commutator certs``: the certificates of a cluster's hosts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import click

from commutator.errors import CommutatorError
from commutator.trust.identity import Identity, Kind
from commutator_certs.authority import Authority, read_certificates

_VALID_DAYS = 90
_RENEW_DAYS = 30


def _address(_context: click.Context, option: click.Parameter, value: tuple[str, ...]) -> list[str]:
    for one in value:
        try:
            ip_address(one)
        except ValueError as error:
            raise click.BadParameter(f"{one}: not an IP address", param=option) from error
    return list(value)


folder_option = click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("certs"),
    show_default=True,
    help="Where the authority and the certificates are.",
)
days_option = click.option(
    "--days",
    type=click.IntRange(1, 3650),
    default=_VALID_DAYS,
    show_default=True,
    help="Valid for this long.",
)


@click.group(epilog="Example: commutator certs init --cluster prod")
def certs() -> None:
    """Make and renew the certificates by which a cluster's hosts know each other.

    The folder holds the authority's key: keep it on one machine, and copy to each host only ca.pem,
    NAME.pem and NAME.key of its own.
    """


@certs.command(
    short_help="Make the certificate authority of a cluster.",
    epilog="Example: commutator certs init --cluster prod",
)
@click.option("--cluster", required=True, metavar="NAME", help="`cluster.name` of its hosts.")
@folder_option
def init(cluster: str, folder: Path) -> None:
    """Make the certificate authority of a cluster: ca.pem and ca.key, valid for ten years."""
    _identity(cluster, Kind.HOST, "any")
    Authority.create(folder, cluster, datetime.now(UTC))
    click.echo(f"{folder / 'ca.pem'}: the authority of cluster {cluster}")
    click.echo(
        f"{folder / 'ca.key'}: its key; keep it secret, as it makes certificates for any host"
    )


@certs.command(
    epilog="Example: commutator certs issue --kind host --name h1 --ip 10.0.0.1 --dns h1.example"
)
@click.option(
    "--kind",
    type=click.Choice([kind.value for kind in Kind]),
    default=Kind.HOST.value,
    show_default=True,
    help="What the bearer may do: a host everything, a worker announce its own workers, a frontend "
    "use workers, an operator drain them and change roles.",
)
@click.option("--name", required=True, help="The host's or the operator's name, and etcd's user.")
@click.option("--ip", "ips", multiple=True, metavar="ADDRESS", callback=_address,
              help="An address of the host. May be repeated.")  # fmt: skip
@click.option("--dns", multiple=True, metavar="NAME", help="A name of it. May be repeated.")
@days_option
@folder_option
def issue(
    kind: str, name: str, ips: list[str], dns: tuple[str, ...], days: int, folder: Path
) -> None:
    """Make a certificate, NAME.pem, and its key, NAME.key.

    It is valid from an hour ago, for hosts whose clocks are behind. Addresses are needed for
    servers that are asked by name, such as etcd's members.
    """
    authority = Authority.load(folder)
    identity = _identity(authority.cluster, Kind(kind), name)
    file = authority.issue(identity, [*ips, *dns], datetime.now(UTC), timedelta(days=days))
    click.echo(f"{file}: {identity}, valid for {days} days")


@certs.command(
    short_help="Make new certificates and keys, where they expire.",
    epilog="Example: commutator certs renew h1",
)
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option(
    "--within",
    "within_days",
    type=click.IntRange(0, 3650),
    default=_RENEW_DAYS,
    show_default=True,
    metavar="DAYS",
    help="Without NAME: renew what expires within this many days.",
)
@days_option
@folder_option
def renew(names: tuple[str, ...], within_days: int, days: int, folder: Path) -> None:
    """Make new certificates and keys for NAMEs, or for all that expire soon.

    They keep their kind and their addresses. Copy them to their hosts: running processes use them
    from then on, and keep their connections.
    """
    authority, now = Authority.load(folder), datetime.now(UTC)
    due = list(names) or authority.expiring(timedelta(days=within_days), now)
    for name in due:
        file = authority.renew(name, now, timedelta(days=days))
        click.echo(f"{file}: renewed, valid for {days} days")
    if not due:
        click.echo(f"nothing expires within {within_days} days")


@certs.command(epilog="Example: commutator certs show certs/h1.pem")
@click.argument(
    "files",
    metavar="FILE...",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
def show(files: tuple[Path, ...]) -> None:
    """Print what the certificates in FILE say."""
    now = datetime.now(UTC)
    for file in files:
        for issued in read_certificates(file):
            days = issued.days_left(now)
            until = f"valid until {issued.ends:%Y-%m-%d %H:%M} UTC, {days} days"
            click.echo(f"{file}: {issued.identity or f'authority of {issued.subject}'}")
            click.echo(f"  issued by {issued.issuer}, {until if days >= 0 else 'expired'}")
            if issued.addresses:
                click.echo(f"  addresses: {', '.join(issued.addresses)}")
            click.echo(f"  SHA-256: {issued.fingerprint}")


def _identity(cluster: str, kind: Kind, name: str) -> Identity:
    try:
        return Identity(cluster, kind, name)
    except ValueError as error:
        raise CommutatorError(str(error)) from error
