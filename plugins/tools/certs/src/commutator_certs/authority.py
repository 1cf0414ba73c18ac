"""A certificate authority in a folder, and the certificates that it issues.

FOLDER/ca.pem, ca.key      the authority, whose key belongs to nobody else (mode 0600)
FOLDER/NAME.pem, NAME.key  what was issued for NAME
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from attrs import frozen
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from commutator.errors import CommutatorError
from commutator.trust.identity import Identity, identity_in

_CA_VALID = timedelta(days=3650)
_EARLIER = timedelta(hours=1)
"""Certificates are valid from this long ago, for hosts whose clocks are behind."""
_PRIVATE = 0o600
_PUBLIC = 0o644
_CA = "ca"


class CertificateError(CommutatorError):
    """A certificate or its key is missing, damaged, or would be overwritten."""


@frozen
class Issued:
    """What a certificate says."""

    identity: Identity | None
    """None: it is not one of a cluster's process, such as that of the authority."""
    subject: str
    """Its common name, which is etcd's user."""
    addresses: tuple[str, ...]
    """The IP addresses and DNS names that it is valid for."""
    issuer: str
    begins: datetime
    ends: datetime
    fingerprint: str
    """SHA-256, as hexadecimal digits."""

    @classmethod
    def of(cls, certificate: x509.Certificate) -> Issued:
        names = _alternative_names(certificate)
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        addresses = [str(one) for one in names.get_values_for_type(x509.IPAddress)]
        return cls(
            identity=identity_in(uris),
            subject=_common_name(certificate.subject),
            addresses=(*addresses, *names.get_values_for_type(x509.DNSName)),
            issuer=_common_name(certificate.issuer),
            begins=certificate.not_valid_before_utc,
            ends=certificate.not_valid_after_utc,
            fingerprint=certificate.fingerprint(hashes.SHA256()).hex(),
        )

    def days_left(self, now: datetime) -> int:
        """Whole days until it expires; negative once it has."""
        return (self.ends - now).days


class Authority:
    """A cluster's certificate authority, with its key."""

    def __init__(
        self, folder: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
    ) -> None:
        self.folder = folder
        self._certificate = certificate
        self._key = key

    @property
    def cluster(self) -> str:
        """The cluster that it was made for."""
        return _common_name(self._certificate.subject)

    @classmethod
    def create(cls, folder: Path, cluster: str, now: datetime) -> Authority:
        """Make an authority, P-256, valid for ten years, in ``folder``.

        Raises CertificateError when there is one already, or nothing can be written there.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, cluster)])
        builder = (
            _signed_builder(name, name, key, now, _CA_VALID)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
        )
        certificate = builder.sign(key, hashes.SHA256())
        _write(folder, _CA, certificate, key, replace=False)
        return cls(folder, certificate, key)

    @classmethod
    def load(cls, folder: Path) -> Authority:
        """The authority in ``folder``. Raises CertificateError."""
        certificate_file, key_file = folder / f"{_CA}.pem", folder / f"{_CA}.key"
        (certificate,) = _read(certificate_file)[:1]
        try:
            key = serialization.load_pem_private_key(_bytes_of(key_file), None)
        except (ValueError, TypeError) as error:
            raise CertificateError(f"{key_file}: not a private key without a password") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or _public(key) != _public(certificate):
            raise CertificateError(f"{key_file}: not the key of {certificate_file}")
        return cls(folder, certificate, key)

    def issue(
        self,
        identity: Identity,
        addresses: Sequence[str],
        now: datetime,
        valid: timedelta,
        *,
        replace: bool = False,
    ) -> Path:
        """Make a certificate and a key for ``identity``; returns the certificate's file.

        ``addresses`` are IP addresses and DNS names. Raises CertificateError when there is one of
        that name and not ``replace``.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.name)])
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(str(identity))]
        names += [_general_name(address) for address in addresses]
        builder = (
            _signed_builder(name, self._certificate.subject, key, now, valid)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage(
                    [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
                ),
                critical=False,
            )
            .add_extension(signer, critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
        )
        certificate = builder.sign(self._key, hashes.SHA256())
        return _write(self.folder, identity.name, certificate, key, replace=replace)

    def renew(self, name: str, now: datetime, valid: timedelta) -> Path:
        """Make ``name`` a new certificate and key, for the identity and addresses that it has.

        Raises CertificateError.
        """
        file = self.folder / f"{name}.pem"
        issued = read_certificates(file)[0]
        if issued.identity is None:
            raise CertificateError(f"{file}: names no process of a cluster, so it is not renewed")
        return self.issue(issued.identity, issued.addresses, now, valid, replace=True)

    def expiring(self, within: timedelta, now: datetime) -> list[str]:
        """The names whose certificates expire within that time, or have; sorted."""
        return [
            file.stem
            for file in sorted(self.folder.glob("*.pem"))
            if file.with_suffix(".key").exists()
            and file.stem != _CA
            and (issued := read_certificates(file)[0]).identity is not None
            and issued.ends <= now + within
        ]


def read_certificates(file: Path) -> list[Issued]:
    """What the certificates in a PEM file say, at least one. Raises CertificateError."""
    return [Issued.of(certificate) for certificate in _read(file)]


def _read(file: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(_bytes_of(file))
    except ValueError as error:
        raise CertificateError(f"{file}: not a PEM file with a certificate") from error


def _bytes_of(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise CertificateError(f"{file}: {error.strerror or error}") from error


def _signed_builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime,
    valid: timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now.astimezone(UTC) - _EARLIER)
        .not_valid_after(now.astimezone(UTC) + valid)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(address))
    except ValueError:
        pass
    try:
        return x509.DNSName(address)
    except ValueError as error:
        raise CertificateError(f"{address!r}: not a DNS name: {error}") from error


def _alternative_names(certificate: x509.Certificate) -> x509.SubjectAlternativeName:
    try:
        extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        return x509.SubjectAlternativeName([])
    return extension.value


def _common_name(name: x509.Name) -> str:
    found = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if found else ""


def _public(owner: x509.Certificate | ec.EllipticCurvePrivateKey) -> bytes:
    return owner.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _write(
    folder: Path,
    name: str,
    certificate: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
    *,
    replace: bool,
) -> Path:
    """Write NAME.key, then NAME.pem, each at once; returns the path of the latter."""
    file, key_file = folder / f"{name}.pem", folder / f"{name}.key"
    for path in (file, key_file) if not replace else ():
        if path.exists():
            raise CertificateError(f"{path}: is there already; remove it, or choose another name")
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(key_file, secret, _PRIVATE)
        _replace(file, certificate.public_bytes(serialization.Encoding.PEM), _PUBLIC)
    except OSError as error:
        raise CertificateError(f"{folder}: {error.strerror or error}") from error
    return file


def _replace(path: Path, content: bytes, mode: int) -> None:
    """Write a file under another name first, so that no reader finds half of it."""
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    draft.chmod(mode)
    draft.replace(path)
