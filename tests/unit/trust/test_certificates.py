"""`commutator certs` and what it makes."""

from __future__ import annotations

import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

from commutator.cli.main import main
from commutator.trust.identity import Identity, Kind
from commutator_certs.authority import (
    Authority,
    CertificateError,
    read_certificates,
)

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
HOST = Identity("prod", Kind.HOST, "h1")
DAYS_90 = timedelta(days=90)


def context(folder: Path, name: str, ca: Path, side: int) -> ssl.SSLContext:
    made = ssl.SSLContext(side)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(ca)
    made.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    return made


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, object]:
    """What the server learns of the client. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    done = [False, False]
    while not all(done):
        for number, end in enumerate(ends):
            try:
                end.do_handshake()
                done[number] = True
            except ssl.SSLWantReadError:
                continue
    return dict(ends[1].getpeercert() or {})


def test_an_authority_and_its_certificates(tmp_path: Path) -> None:
    Authority.create(tmp_path, "prod", NOW)
    assert stat.S_IMODE((tmp_path / "ca.key").stat().st_mode) == 0o600
    authority = Authority.load(tmp_path)
    assert authority.cluster == "prod"
    file = authority.issue(HOST, ["10.0.0.1", "fd00::1", "h1.example"], NOW, DAYS_90)
    assert stat.S_IMODE(file.with_suffix(".key").stat().st_mode) == 0o600
    (issued,) = read_certificates(file)
    assert issued.identity == HOST
    assert (issued.subject, issued.issuer) == ("h1", "prod")
    assert issued.addresses == ("10.0.0.1", "fd00::1", "h1.example")
    assert issued.begins == NOW - timedelta(hours=1)
    assert issued.ends == NOW + DAYS_90
    assert authority.expiring(timedelta(days=365), NOW) == ["h1"]


def test_both_ends_of_a_connection_accept_each_other_and_no_other_authority(
    tmp_path: Path,
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    now = datetime.now(UTC)
    for folder in (ours, theirs):
        Authority.create(folder, "prod", now).issue(HOST, [], now, DAYS_90)
    server = context(ours, "h1", ours / "ca.pem", ssl.PROTOCOL_TLS_SERVER)
    client = context(ours, "h1", ours / "ca.pem", ssl.PROTOCOL_TLS_CLIENT)
    names = shake_hands(server, client)["subjectAltName"]
    assert names == (("URI", "commutator://prod/host/h1"),)
    foreign = context(theirs, "h1", ours / "ca.pem", ssl.PROTOCOL_TLS_CLIENT)
    with pytest.raises(ssl.SSLError):
        shake_hands(server, foreign)
    deceived = context(theirs, "h1", theirs / "ca.pem", ssl.PROTOCOL_TLS_CLIENT)
    with pytest.raises(ssl.SSLError):
        shake_hands(server, deceived)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path, "prod", NOW)
    authority.issue(HOST, [], NOW, DAYS_90)
    with pytest.raises(CertificateError, match="is there already"):
        authority.issue(HOST, [], NOW, DAYS_90)
    with pytest.raises(CertificateError, match="is there already"):
        Authority.create(tmp_path, "prod", NOW)
    with pytest.raises(CertificateError, match="is there already"):
        authority.issue(Identity("prod", Kind.HOST, "ca"), [], NOW, DAYS_90)


def test_renewing_keeps_the_identity_and_the_addresses_with_a_new_key(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path, "prod", NOW)
    file = authority.issue(HOST, ["10.0.0.1"], NOW, DAYS_90)
    authority.issue(Identity("prod", Kind.OPERATOR, "ada"), [], NOW, timedelta(days=300))
    key = file.with_suffix(".key").read_bytes()
    later = NOW + timedelta(days=70)
    assert authority.expiring(timedelta(days=30), later) == ["h1"]
    authority.renew("h1", later, DAYS_90)
    (issued,) = read_certificates(file)
    assert (issued.identity, issued.addresses) == (HOST, ("10.0.0.1",))
    assert issued.days_left(later) == 90
    assert file.with_suffix(".key").read_bytes() != key
    assert not authority.expiring(timedelta(days=30), later)


def test_what_is_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(CertificateError, match=r"ca\.pem: No such file"):
        Authority.load(tmp_path)
    Authority.create(tmp_path, "prod", NOW)
    Authority.create(tmp_path / "other", "prod", NOW)
    (tmp_path / "ca.key").write_bytes((tmp_path / "other" / "ca.key").read_bytes())
    with pytest.raises(CertificateError, match=r"ca\.key: not the key of"):
        Authority.load(tmp_path)
    (tmp_path / "ca.key").write_text("nothing")
    with pytest.raises(CertificateError, match="not a private key"):
        Authority.load(tmp_path)
    (tmp_path / "ca.pem").write_text("nothing")
    with pytest.raises(CertificateError, match="not a PEM file"):
        Authority.load(tmp_path)
    (tmp_path / "plain.pem").write_bytes((tmp_path / "other" / "ca.pem").read_bytes())
    with pytest.raises(CertificateError, match="names no process"):
        Authority.load(tmp_path / "other").renew("ca", NOW, DAYS_90)


def test_the_command(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        done = CliRunner().invoke(main, ["certs", *arguments])
        assert done.exit_code == 0, done.output
        return done.output

    folder = ("--folder", str(tmp_path))
    assert "the authority of cluster prod" in run("init", "--cluster", "prod", *folder)
    output = run("issue", "--name", "h1", "--ip", "10.0.0.1", "--dns", "h1.example", *folder)
    assert "commutator://prod/host/h1, valid for 90 days" in output
    shown = run("show", str(tmp_path / "h1.pem"), str(tmp_path / "ca.pem"))
    assert "commutator://prod/host/h1" in shown
    assert "addresses: 10.0.0.1, h1.example" in shown
    assert "authority of prod" in shown
    assert "nothing expires" in run("renew", *folder)
    assert "renewed" in run("renew", "--within", "100", *folder)
    assert "renewed" in run("renew", "h1", *folder)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("init", "--cluster", "a b"), "letters, digits"),
        (("issue", "--name", "h1"), "No such file"),
        (("issue", "--name", "h1", "--ip", "here"), "not an IP address"),
        (("renew", "h1"), "No such file"),
    ],
)
def test_mistakes(tmp_path: Path, arguments: tuple[str, ...], problem: str) -> None:
    done = CliRunner().invoke(main, ["certs", *arguments, "--folder", str(tmp_path)])
    assert done.exit_code
    assert problem in done.output
